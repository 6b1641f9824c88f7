"""Guided calls: whatever a model prefers, its answer parses, and its arguments fit the tools' schemas."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.errors import ParameterError
from minillm.text.chat import FORMATS, Answer, call_grammar, read_calls

from ...pages import block
from ...tiny import write_checkpoint
from .conversations import TIME, WEATHER, template

pytest.importorskip("llguidance", reason="needs the extra `guided`")

REFERRING: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "convert",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"from": {"$ref": "#/$defs/unit"}, "to": {"$ref": "#/$defs/unit"}},
            "required": ["from", "to"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["m", "km"]}},
        },
    },
}
TOOLS = [WEATHER, TIME, REFERRING]
OFFERED = {"get_weather", "get-time", "convert"}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 300}


CALL = '{"name": "convert", "arguments": {"from": "m", "to": "km"}}'
NOW = '{"name": "get-time", "arguments": {}}'
FREE = '{"name": "get_weather", "arguments": {"town": 3}}'  # of a tool that is not strict
WRONG = '{"name": "convert", "arguments": {"from": "mile", "to": "km"}}'
OTHER = '{"name": "other", "arguments": {}}'
TWO = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
    "llama3": f"{CALL}; {NOW}".replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS] [{CALL}, {NOW}]",
    "mistral-v11": '[TOOL_CALLS]convert[ARGS]{"from": "m", "to": "km"}[TOOL_CALLS]get-time[ARGS]{}',
    "granite": f"<|tool_call|>[{CALL}, {NOW}]",
    "phi4": f"<|tool_call|>[{CALL}, {NOW}]<|/tool_call|>",
    "json": f"{CALL}\n{NOW}",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "convert", "parameters": {"from": "m", "to": "km"}}'
    ', {"tool_call_id": "1", "tool_name": "get-time", "parameters": {}}]<|END_ACTION|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>convert<｜tool▁sep｜>"
    '{"from": "m", "to": "km"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>get-time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.convert:0<|tool_call_argument_begin|>"
    '{"from": "m", "to": "km"}<|tool_call_end|><|tool_call_begin|>functions.get-time:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "seed": "<seed:tool_call>\n<function=convert>\n<parameter=from>\nm\n</parameter>\n<parameter=to>\nkm\n"
    "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=get-time>\n</function>\n</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="convert">\n<parameter name="from">m</parameter>\n'
    '<parameter name="to">km</parameter>\n</invoke>\n<invoke name="get-time">\n</invoke>\n</minimax:tool_call>',
    "glm": "<tool_call>convert\n<arg_key>from</arg_key>\n<arg_value>m</arg_value>\n<arg_key>to</arg_key>\n<arg_value>km"
    "</arg_value>\n</tool_call>\n<tool_call>get-time\n</tool_call>",
    "lfm2": '<|tool_call_start|>[convert(from="m", to="km"), get-time()]<|tool_call_end|>',
    "llama4": '[convert(from="m", to="km"), get-time()]',
    "qwen3-coder": "<tool_call>\n<function=convert>\n<parameter=from>\nm\n</parameter>\n<parameter=to>\nkm\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get-time>\n</function>\n</tool_call>",
}
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of random weights, which writes nonsense wherever it may."""
    with Engine(write_checkpoint(tmp_path_factory.mktemp("calls"), max_position_embeddings=512)) as engine:
        yield engine


def fits(answer: Answer) -> bool:
    """Whether all arguments fit their schemas."""
    for call in answer.calls:
        arguments = json.loads(call.arguments)
        if call.name == "get_weather":
            right = arguments.keys() == {"city", "days"} and arguments["city"] in ("Paris", "Rome")
            right = right and arguments["days"] in range(1, 10)
        elif call.name == "get-time":
            right = arguments == {}
        else:
            right = call.name == "convert" and {*arguments.values()} <= {"m", "km"} and len(arguments) == 2
        if not right:
            return False
    return True


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "json")) for name in FORMATS if FORMATS[name].guides],
)
def test_a_required_call_parses_and_fits(name: str, engine: Engine) -> None:
    form = FORMATS[name]
    for single in (True, False):
        grammar = call_grammar(form, TOOLS, engine.tokenizer.added_ids, required=True, single=single)
        results = engine.generate([[5, 6, 7]] * 3, guided_grammar=grammar, seed=4, **SAMPLED)
        for generation in results:
            [completion] = generation.completions
            cut = completion.finish_reason != "stop"
            text = completion.text.rstrip("\ufffd")  # half of a character
            answer = read_calls(text, form, OFFERED, schemas=SCHEMAS, cut=cut)
            assert answer.content == ""
            assert len(answer.calls) == 1 if single else answer.calls
            assert completion.finish_reason == "stop" or not single
            if completion.finish_reason == "stop":
                assert fits(answer)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "mistral")) for name in TWO])
def test_several_calls_are_admitted_where_they_are_wanted(name: str, engine: Engine) -> None:
    form, text = FORMATS[name], TWO[name]
    assert [call.name for call in read_calls(text, form, OFFERED).calls] == ["convert", "get-time"]
    for required in (True, False):
        for single in (True, False):
            grammar = call_grammar(form, TOOLS, engine.tokenizer.added_ids, required=required, single=single)
            repeated = bool(form.begin) and not form.block and not required  # content may hold several of one each
            assert accepts(engine, grammar, text) == (not single or repeated), (required, single)


def accepts(engine: Engine, grammar: str, text: str) -> bool:
    """Whether a grammar admits a text and its end: where it forbids the token that is wanted next, another comes."""
    assert engine.tokenizer is not None
    wanted = [*engine.tokenizer.encode(text, add_special_tokens=False), 2]
    answer = engine.generate(
        [5, 6],
        guided_grammar=grammar,
        prefix_allowed_tokens_fn=lambda batch_id, ids: [wanted[min(len(ids) - 2, len(wanted) - 1)]],
        max_new_tokens=len(wanted),
    )
    return answer.token_ids == wanted


@pytest.mark.longer
def test_strict_tools_are_held_to_their_schema_and_nothing_else_is(engine: Engine) -> None:
    hermes = call_grammar(FORMATS["hermes"], TOOLS, engine.tokenizer.added_ids, required=False, single=False)
    for text, admitted in {
        "No call.": True,
        "": True,
        "a < b <tool": True,
        f"I look.\n<tool_call>\n{CALL}\n</tool_call>": True,
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{FREE}\n</tool_call> Done.": True,
        f"<tool_call>\n{WRONG}\n</tool_call>": False,
        f"<tool_call>\n{OTHER}\n</tool_call>": False,
        "I look. <tool_call>nonsense": False,
    }.items():
        assert accepts(engine, hermes, text) == admitted, text
    plain = call_grammar(FORMATS["json"], TOOLS, engine.tokenizer.added_ids, required=False, single=True)
    for text, admitted in {"No call.": True, "": True, CALL: True, WRONG: False, f"{CALL}\n{CALL}": False}.items():
        assert accepts(engine, plain, text) == admitted, text


@pytest.mark.longer
def test_content_can_have_a_schema_of_its_own(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    grammar = call_grammar(
        FORMATS["hermes"], TOOLS, engine.tokenizer.added_ids, required=False, single=True, content=schema
    )
    for text, admitted in {
        '{"ok": true}': True,
        f"<tool_call>\n{CALL}\n</tool_call>": True,
        "No.": False,
        f"<tool_call>\n{WRONG}\n</tool_call>": False,
    }.items():
        assert accepts(engine, grammar, text) == admitted, text


@pytest.mark.longer
def test_markers_that_are_special_tokens_are_written_as_such(tmp_path: Path) -> None:
    """A tokenizer like Mistral's: [TOOL_CALLS] is a special token, which decoded text leaves out."""
    folder = write_checkpoint(tmp_path, max_position_embeddings=512, vocab_size=520)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = config.get("added_tokens_decoder", {})
    added["512"] = {"content": "[TOOL_CALLS]", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    with Engine(folder) as engine:
        if "[TOOL_CALLS]" not in engine.tokenizer.added_ids:
            pytest.skip("this layout has no further special tokens")
        marker, form = engine.tokenizer.added_ids["[TOOL_CALLS]"], FORMATS["mistral"]
        grammar = call_grammar(form, TOOLS, engine.tokenizer.added_ids, required=True, single=True)
        answer = engine.generate([5, 6], guided_grammar=grammar, seed=1, skip_special_tokens=False, **SAMPLED)
        assert answer.token_ids[0] == marker
        read = read_calls(answer.text, form, OFFERED)
        assert read.content == ""
        assert len(read.calls) == 1
        assert fits(read)
        hidden = engine.generate([5, 6], guided_grammar=grammar, seed=1, **SAMPLED)
        assert hidden.token_ids == answer.token_ids
        assert answer.text == "[TOOL_CALLS]" + hidden.text


@pytest.mark.slow
def test_markers_that_are_tokens_but_not_special_are_one_token(tmp_path: Path) -> None:
    """A tokenizer like Qwen's, whose <tool_call> is an added token that decoded text shows."""
    folder = write_checkpoint(tmp_path, max_position_embeddings=512, vocab_size=520)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = config.get("added_tokens_decoder", {})
    for token_id, content in ((512, "<tool_call>"), (513, "</tool_call>"), (514, "<think>"), (515, "</think>")):
        added[token_id] = {"content": content, "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    text = f"<tool_call>\n{CALL}\n</tool_call>"
    with Engine(folder) as engine:
        assert engine.tokenizer is not None
        assert {512, 513} <= {*engine.tokenizer.encode(text)}
        for required in (True, False):
            grammar = call_grammar(FORMATS["hermes"], TOOLS, engine.tokenizer.added_ids, required=required)
            assert accepts(engine, grammar, text)
            assert not accepts(engine, grammar, text.replace('"km"', '"mile"'))
            thought = f"<think>\nHm.\n</think>\n\n{text} So."
            assert accepts(engine, grammar, thought) == (not required)
        plain = call_grammar(FORMATS["json"], TOOLS, engine.tokenizer.added_ids, required=False)
        for answer in ("<think>Hm.</think> No.", "No <think>", CALL):
            assert accepts(engine, plain, answer)


def test_a_strict_tools_schema_that_cannot_be_followed_is_refused(engine: Engine) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "minProperties": -1}}
    odd = {"type": "function", "function": function}
    grammar = call_grammar(FORMATS["json"], [odd], engine.tokenizer.added_ids, required=True, single=True)
    with pytest.raises(ParameterError, match="guided_grammar was refused by llguidance"):
        engine.generate([5], guided_grammar=grammar)


STRICT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": ["array", "null"], "items": {"type": "string"}},
                "mode": {"const": "new"},
                "size": {"$ref": "#/$defs/size"},
            },
            "required": ["path", "lines"],
            "additionalProperties": False,
            "$defs": {"size": {"type": "integer", "minimum": 1}},
        },
    },
}


def written(**values: str) -> str:
    """A call of `write` as XML."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("required", [True, False])
def test_calls_as_xml_are_held_to_the_types_of_a_strict_tool(engine: Engine, required: bool) -> None:
    grammar = call_grammar(FORMATS["qwen3-coder"], [STRICT], engine.tokenizer.added_ids, required=required)
    for text, admitted in {
        written(path="a <b>\nc", lines='["x"]', mode="new", size="3"): True,
        written(path="", lines="null"): True,
        written(path="a", lines="[1]"): False,
        written(path="a", lines="[]", mode="old"): False,
        written(path="a", lines="[]", size="0"): False,
        written(path="a"): False,
        written(path="a", lines="[]", more="x"): False,
    }.items():
        assert accepts(engine, grammar, text) == admitted, text


def test_what_calls_as_xml_cannot_hold_is_refused_of_a_strict_tool(engine: Engine) -> None:
    for parameters, words in (
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "cannot hold pattern of 'a'"),
        ({"properties": {"a": {"enum": ["a", None]}}}, "cannot hold enum of 'a'"),
        ({"properties": {"a>b": {}}}, "a parameter named 'a>b'"),
        ({}, "should name its parameters"),
    ):
        function = {"name": "g", "strict": True, "parameters": {"type": "object", **parameters}}
        with pytest.raises(ParameterError, match=words):
            call_grammar(FORMATS["qwen3-coder"], [{"type": "function", "function": function}], {})
        if "a>b" not in words:
            function["strict"] = False
            call_grammar(FORMATS["qwen3-coder"], [{"type": "function", "function": function}], {})


@pytest.mark.longer
def test_the_call_of_the_guide(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("minillm/engine/README.md", "python", "from minillm.text.chat import")
    engine.chat_template = template("hermes")
    exec(code, {"engine": engine})
    assert re.fullmatch(r'weather \{"city": "(Paris|Rome)".*\}\n', capsys.readouterr().out)
