"""Numbers under a schema: none that the schema forbids, however large; and none without end."""

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.errors import ParameterError
from minillm.text.chat import FORMATS, call_grammar, read_calls
from minillm.text.schemas import exact

from ..tiny import write_checkpoint

pytest.importorskip("llguidance", reason="needs the extra `guided`")

HOT: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "top_k": 0, "num_return_sequences": 6}
EDGE = 2**53


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(write_checkpoint(tmp_path_factory.mktemp("numbers"), max_position_embeddings=512)) as engine:
        yield engine


def texts_of(engine: Engine, schema: Any, **fields: Any) -> list[str]:
    """Results of a random model that end by themselves."""
    generation = engine.generate([5, 6], guided_json=schema, **({"max_new_tokens": 400} | HOT | fields))
    assert all(completion.finish_reason == "stop" for completion in generation.completions), generation
    return [completion.text for completion in generation.completions]


def accepts(engine: Engine, schema: Any, text: str) -> bool:
    """Whether a guide admits a text and its end."""
    return follows(engine, text, guided_json=schema)


def follows(engine: Engine, text: str, **guide: Any) -> bool:
    assert engine.tokenizer is not None
    wanted = [*engine.tokenizer.encode(text, add_special_tokens=False), 2]
    answer = engine.generate(
        [5, 6],
        prefix_allowed_tokens_fn=lambda _, ids: [wanted[min(len(ids) - 2, len(wanted) - 1)]],
        max_new_tokens=len(wanted),
        **guide,
    )
    return answer.token_ids == wanted


# --- exact ------------------------------------------------------------------------------------------------------------

RANGES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": EDGE + 1, "maximum": EDGE + 9},
    {"type": "integer", "exclusiveMinimum": -EDGE - 6, "exclusiveMaximum": -EDGE},
    {"type": "integer", "minimum": EDGE, "exclusiveMinimum": True, "maximum": EDGE + 5},
    {"type": "integer", "minimum": 2**63 - 5000, "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 10**18 + 1, "maximum": 10**400},
    {"type": "integer", "allOf": [{"exclusiveMinimum": EDGE}], "maximum": EDGE + 9000},
    {"type": "number", "minimum": EDGE + 1, "maximum": EDGE + 90},
    {"type": "number", "exclusiveMinimum": 0.30000000000000004, "maximum": 0.30000000000000077},
]
MORE_RANGES: list[dict[str, Any]] = [
    {"type": "integer", "exclusiveMinimum": EDGE, "exclusiveMaximum": EDGE + 6},
    {"type": "integer", "minimum": 2**62 + 1},
    {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 5000},
    {"type": "integer", "maximum": -(2**60) - 1},
    {"type": "integer", "minimum": 10**17, "maximum": 2**64 - 1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
    {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.25},
    {"type": "number", "minimum": 1000000000000000.5, "maximum": 1000000000000003},
]
every_range = pytest.mark.parametrize(
    "schema", [*RANGES, *(pytest.param(schema, marks=pytest.mark.slow) for schema in MORE_RANGES)], ids=json.dumps
)


def bounds_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Its bounds, those in allOf among them."""
    bounds = {key: value for part in [schema, *schema.get("allOf", ())] for key, value in part.items()}
    if bounds.get("exclusiveMinimum") is True:
        bounds["exclusiveMinimum"] = bounds.pop("minimum")
    return bounds


def is_within(text: str, schema: dict[str, Any]) -> bool:
    """Whether a number, as it is written, fits a schema: by whole numbers and fractions of any size."""
    value, bounds = Fraction(text), bounds_of(schema)
    low, high = bounds.get("minimum"), bounds.get("maximum")
    above, below = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
    return (
        (schema["type"] == "number" or value.denominator == 1)
        and (low is None or value >= Fraction(str(low)))
        and (high is None or value <= Fraction(str(high)))
        and (above is None or value > Fraction(str(above)))
        and (below is None or value < Fraction(str(below)))
    )


@pytest.mark.longer
@pytest.mark.sampled(6)
@every_range
def test_what_a_random_model_writes_is_within_the_range(engine: Engine, schema: dict[str, Any]) -> None:
    texts = texts_of(engine, schema, num_return_sequences=20)
    assert [text for text in texts if not is_within(text, schema)] == []
    assert len(set(texts)) > 1


@pytest.mark.longer
@pytest.mark.sampled(6)
@every_range
def test_the_numbers_just_outside_a_range_are_not_admitted(engine: Engine, schema: dict[str, Any]) -> None:
    ends = [value for value in bounds_of(schema).values() if isinstance(value, int | float) and value < 2**70]
    near = {str(value + step) for value in ends for step in range(-3, 4)} | {str(value) for value in ends}
    near = {text for text in near if "e" not in text}
    assert [text for text in near if not is_within(text, schema) and accepts(engine, schema, text)] == []


INEXACT: list[tuple[dict[str, Any], str]] = [
    ({"const": EDGE + 1}, f"const {EDGE + 1}"),
    ({"enum": [1, EDGE + 1]}, f"enum {EDGE + 1}"),
    ({"enum": [{"a": [EDGE + 1]}]}, "enum"),
    ({"const": 2**63}, "const"),
    ({"const": 10**400}, "const"),
    ({"const": 1e300}, "const 1e"),
    ({"const": 0.30000000000000004}, "const 0.3"),
    ({"type": "integer", "minimum": EDGE + 1, "maximum": EDGE + 1}, "minimum"),
    ({"type": "integer", "minimum": 2**64}, "minimum"),
    ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf 1000003"),
    ({"type": "number", "exclusiveMinimum": 1e30}, "exclusiveMinimum"),
]


@pytest.mark.parametrize(("schema", "words"), INEXACT, ids=[words for _, words in INEXACT])
def test_a_number_that_cannot_be_held_is_refused_by_name_wherever_it_stands(
    engine: Engine, schema: dict[str, Any], words: str
) -> None:
    nested = {"type": "object", "properties": {"minimum": {"anyOf": [{"type": "null"}, schema]}}}
    for value in (schema, nested, {"type": "array", "items": schema}, {"$defs": {"n": schema}, "$ref": "#/$defs/n"}):
        with pytest.raises(ParameterError, match="^guided_json: " + words):
            engine.generate([5], guided_json=value)
    function = {"name": "f", "strict": True, "parameters": nested}
    with pytest.raises(ParameterError, match="^tools: f: " + words):
        call_grammar(FORMATS["json"], [{"type": "function", "function": function}], {})


@pytest.mark.longer
def test_numbers_that_can_be_held_are_written_exactly(engine: Engine) -> None:
    for value in (EDGE, EDGE + 2, -(2**62), 10**18, 0.1, 3.141592653589793, -1e-7, 1e20, 0, -5):
        [text] = texts_of(engine, {"const": value}, num_return_sequences=1)
        assert Fraction(text) == Fraction(str(value))
        assert json.loads(text) == value
    fine = {"type": "object", "properties": {"enum": {"const": 5}, "const": {"type": "integer", "minimum": 3}}}
    assert exact(fine, "x") == fine


# --- without end ------------------------------------------------------------------------------------------------------


def eager(engine: Engine) -> dict[str, Any]:
    """A model that prefers digits, then what begins a number or goes on with one, to all else."""
    assert engine.tokenizer is not None
    pieces = [engine.tokenizer.token(token_id) for token_id in range(engine.tokenizer.vocab_size)]
    bias = [[[i], 400.0] for i, piece in enumerate(pieces) if piece and piece.strip("0123456789") == ""]
    bias += [[[i], 200.0] for i, piece in enumerate(pieces) if piece in (".", "e", "E", "-")]
    return {"sequence_bias": bias, "do_sample": False, "max_new_tokens": 400}


def runs_in(text: str) -> list[int]:
    return [len(run) for run in re.findall("[0-9]+", text)]


NUMBERS: dict[str, Any] = {
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "anything": {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
    "untyped bound": {"minimum": 0},
    "above": {"type": "number", "minimum": 0.5},
    "below": {"type": "integer", "maximum": 5},
    "list": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    "optional": {"anyOf": [{"type": "number"}, {"type": "null"}]},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_model_that_never_stops_writing_digits_ends_its_numbers(engine: Engine, name: str) -> None:
    completion = engine.generate([5, 6], guided_json=NUMBERS[name], **eager(engine)).completions[0]
    assert completion.finish_reason == "stop"
    json.loads(completion.text)
    assert max(runs_in(completion.text)) == (16 if name != "below" else 1)
    assert all(len(exponent) <= 2 for exponent in re.findall("[eE][+-]?([0-9]+)", completion.text))


@pytest.mark.slow
def test_free_json_has_numbers_that_end_and_that_a_float64_holds(engine: Engine) -> None:
    for seed in range(4):
        fields = {"seed": seed, "max_new_tokens": 200, "sequence_bias": eager(engine)["sequence_bias"]}
        bias = [[ids, 6.0] for ids, _ in fields.pop("sequence_bias")]
        generation = engine.generate([5, 6], guided_json={"type": "object"}, **HOT, **fields, sequence_bias=bias)
        for completion in generation.completions:
            outside = re.sub(r'"(\\.|[^"\\])*"?', "", completion.text)  # of its strings
            assert max(runs_in(outside), default=0) <= 16
            assert all(len(exponent) <= 2 for exponent in re.findall("[eE][+-]?([0-9]+)", outside))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("hermes", "qwen3-coder") else pytest.mark.slow)
        for name in FORMATS
        if FORMATS[name].guides
    ],
)
def test_numbers_of_required_calls_end(engine: Engine, name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    for strict in (True, False):
        parameters = schema | {"additionalProperties": False}
        tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}
        grammar = call_grammar(FORMATS[name], [tool], engine.tokenizer.added_ids)  # type: ignore[union-attr]
        completion = engine.generate([5, 6], guided_grammar=grammar, **eager(engine)).completions[0]
        assert completion.finish_reason == "stop"
        [call] = read_calls(completion.text, FORMATS[name], ["f"], schemas={"f": schema}).calls
        assert 1 < max(runs_in(call.arguments)) <= 16


NEEDED: list[tuple[dict[str, Any], str]] = [
    ({"const": 10**18}, str(10**18)),
    ({"enum": [1234567890123456, 10**18]}, str(10**18)),
    ({"type": "integer", "minimum": 10**17, "maximum": 10**17 + 64}, str(10**17)),
    ({"type": "integer", "minimum": 1, "maximum": 2**63 - 1}, "1234567890123456789"),
    ({"const": 1e-20}, "0.00000000000000000001"),
    ({"const": 1e20}, str(10**20)),
    ({"type": "number", "minimum": 1e-20, "maximum": 2e-20}, "0.00000000000000000001"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("schema", "text"), NEEDED, ids=[json.dumps(schema) for schema, _ in NEEDED])
def test_a_schema_that_needs_more_digits_gets_them(engine: Engine, schema: dict[str, Any], text: str) -> None:
    assert accepts(engine, schema, text)
    assert texts_of(engine, schema)


@pytest.mark.slow
def test_digits_of_texts_have_no_limit(engine: Engine) -> None:
    long = "1234567890" * 2
    for schema in ({"type": "string"}, {"type": "string", "pattern": "^[0-9]*$"}, {"type": "string", "minLength": 18}):
        assert accepts(engine, schema, json.dumps(long))
    assert not accepts(engine, {"type": "number"}, long)
    assert follows(engine, long, guided_regex="[0-9]+")
    assert follows(engine, long, guided_grammar="start: /[0-9]+/")
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}, "required": ["s"],
        "additionalProperties": False}}}  # fmt: skip
    for name in ("hermes", "qwen3-coder", "json"):
        grammar = call_grammar(FORMATS[name], [tool], engine.tokenizer.added_ids, required=False)  # type: ignore[union-attr]
        assert follows(engine, f"It is {long}.", guided_grammar=grammar)
    xml = f"<tool_call>\n<function=f>\n<parameter=s>\n{long}\n</parameter>\n</function>\n</tool_call>"
    grammar = call_grammar(FORMATS["qwen3-coder"], [tool], engine.tokenizer.added_ids)  # type: ignore[union-attr]
    assert follows(engine, xml, guided_grammar=grammar)


@pytest.mark.longer
def test_tokens_of_several_digits_and_exponents_keep_to_the_limit(tmp_path: Path) -> None:
    """A vocabulary with 123, 00000000 and e100 as tokens."""
    folder = write_checkpoint(tmp_path, max_position_embeddings=512, vocab_size=520)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = config.get("added_tokens_decoder", {})
    for token_id, content in enumerate(("123", "00000000", "e100", "E-999"), start=512):
        added[token_id] = {"content": content, "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    with Engine(folder) as engine:
        for token_id in range(512, 516):
            bias = [*eager(engine)["sequence_bias"], [[token_id], 900.0]]
            fields = eager(engine) | {"sequence_bias": bias}
            text = engine.generate([5, 6], guided_json={"type": "number"}, **fields).text
            assert max(runs_in(text)) <= 16, text
            assert all(len(exponent) <= 2 for exponent in re.findall("[eE][+-]?([0-9]+)", text)), text
