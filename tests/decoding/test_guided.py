"""Guided texts are always valid, and drawn from the model's own distribution over what is allowed."""

import ctypes
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine, GenerationConfig
from minillm.decoding import guided, resolving
from minillm.decoding.guided import Guide
from minillm.decoding.request import RequestMaker
from minillm.decoding.strategy import Strategy
from minillm.engine.results import Completion
from minillm.errors import ParameterError, install

from ..reference.chi_square import p_value
from ..tiny import tiny_model, write_checkpoint

pytest.importorskip("llguidance", reason="needs the extra `guided`")

PROMPTS = ["A list of colors:", "one two", "x"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["big", "small", None]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "flags"],
    "additionalProperties": False,
}


def fulfils_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "size", "kind", "flags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["size"] in range(10, 100)
        and value["kind"] in ("big", "small", None)
        and 1 <= len(value["flags"]) <= 3
        and all(isinstance(flag, bool) for flag in value["flags"])
    )


def is_nested(text: str) -> bool:
    depth = text.count("[")
    return depth <= 3 and text == "[" * depth + "x" + "]" * depth


GRAMMAR = """
start: "[" one "]" | "x"
one: "[" two "]" | "x"
two: "[x]" | "x"
"""
YEAR = r"[A-Z][a-z]{2,4} (19|20)[0-9][0-9]"
COLOURS = ["red", "reddish", "dark blue", 'a "quoted"\\one', "grün\n"]
GUIDES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"guided_json": SCHEMA}, fulfils_schema),
    "regex": ({"guided_regex": YEAR}, lambda text: re.fullmatch(YEAR, text) is not None),
    "grammar": ({"guided_grammar": GRAMMAR}, is_nested),
    "choice": ({"guided_choice": COLOURS}, lambda text: text in COLOURS),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 2.0, "seed": 5, "num_return_sequences": 6},
    "filters": {"do_sample": True, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "seed": 6},
    "beams": {"num_beams": 4, "num_return_sequences": 4},
    "processors": {"repetition_penalty": 1.8, "presence_penalty": 3.0, "min_new_tokens": 3},
    "beams and processors": {"num_beams": 3, "frequency_penalty": 2.0, "length_penalty": 0.0, "early_stopping": True},
    "naive": {"use_cache": False},
}


@pytest.fixture(scope="module", params=[512, 531, 509], ids=["exact vocabulary", "padded vocabulary", "cut vocabulary"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("model"), vocab_size=request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("model"), max_batch_size=500)


def make_engine(folder: Path, max_batch_size: int = 32, **fields: Any) -> Engine:
    checkpoint = write_checkpoint(folder, max_position_embeddings=128, eos_token_id=2, **fields)
    return Engine(checkpoint, max_batch_size=max_batch_size)


def assert_valid(completion: Completion, is_valid: Callable[[str], bool]) -> None:
    assert completion.finish_reason == "stop", completion
    assert completion.token_ids[-1] == 2
    assert is_valid(completion.text), completion


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.slow
def test_what_a_random_model_writes_is_valid(engine: Engine, guide: str, mode: str) -> None:
    fields, is_valid = GUIDES[guide]
    for generation in engine.generate(PROMPTS, max_new_tokens=90, **fields, **MODES[mode]):
        assert len(generation.completions) == MODES[mode].get("num_return_sequences", 1)
        for completion in generation.completions:
            assert_valid(completion, is_valid)


@pytest.mark.slow
def test_requests_with_different_guides_and_none_do_not_meet(plain: Engine) -> None:
    wanted = [{}, *(fields for fields, _ in GUIDES.values())] * 2
    modes = [MODES["greedy"]] * 5 + [MODES["sampling"]] * 5
    alone = [plain.generate(PROMPTS[i % 3], max_new_tokens=90, **wanted[i], **modes[i]) for i in range(10)]
    ids = [plain.add(PROMPTS[i % 3], max_new_tokens=90, **wanted[i], **modes[i]) for i in range(10)]
    tokens: dict[tuple[int, int], list[int]] = {}
    while plain.busy:
        for event in plain.step():
            tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    for request_id, generation in zip(ids, alone, strict=True):
        for index, completion in enumerate(generation.completions):
            assert tokens[request_id, index] == completion.token_ids


@pytest.mark.parametrize("guide", GUIDES)
def test_streaming_gives_the_same(plain: Engine, guide: str) -> None:
    fields, _ = GUIDES[guide]
    pieces = list(plain.stream("one two", max_new_tokens=90, **fields))
    whole = plain.generate("one two", max_new_tokens=90, **fields)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish_reason == "stop"
    assert len(pieces) > 1


# The distribution -----------------------------------------------------------------------------------------------------

CHOICES = [*"ano", *(a + b for a in "ano" for b in "ano")]
"""Wherever only one text can follow, llguidance allows only its usual tokens. Here there is always a choice."""


def allowed_after(engine: Engine, text: str, choices: list[str]) -> list[int]:
    """Tokens that may follow a text, found without llguidance."""
    assert engine.tokenizer is not None
    pieces = [engine.tokenizer.token(i) for i in range(engine.tokenizer.vocab_size)]
    ids = [
        i for i, piece in enumerate(pieces)
        if i not in (0, 1, 2, 3) and piece and any(choice.startswith(text + piece) for choice in choices)
    ]  # fmt: skip
    return [*ids, 2] if text in choices else ids


def every_result(
    engine: Engine, prompt: list[int], choices: list[str], text: str = ""
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Every token sequence that spells a choice, its guided probability, and its log-probability under the model."""
    assert engine.tokenizer is not None
    logits = engine.forward(prompt)[-1].astype(np.float64)
    allowed = allowed_after(engine, text, choices)
    weights = np.exp(logits - logits.max())
    for token in allowed:
        share, log_prob = weights[token] / weights[allowed].sum(), float(np.log(weights[token] / weights.sum()))
        if token == 2:
            yield (2,), share, log_prob
            continue
        following = text + engine.tokenizer.token(token)
        for rest, probability, rest_log_prob in every_result(engine, [*prompt, token], choices, following):
            yield (token, *rest), share * probability, log_prob + rest_log_prob


@pytest.mark.slow
def test_draws_follow_the_model_renormalised_over_what_is_allowed(plain: Engine) -> None:
    prompt = plain.request("one two").prompt_ids
    expected = {tokens: probability for tokens, probability, _ in every_result(plain, prompt, CHOICES)}
    assert sum(expected.values()) == pytest.approx(1)
    drawn: Counter[tuple[int, ...]] = Counter()
    for seed in range(6):
        generation = plain.generate(
            prompt, guided_choice=CHOICES, do_sample=True, top_k=0, seed=seed, num_return_sequences=500
        )
        drawn.update(tuple(completion.token_ids) for completion in generation.completions)
    assert set(drawn) <= set(expected)
    total = sum(drawn.values())
    usual = [tokens for tokens in expected if expected[tokens] * total >= 5]
    observed, mass = [drawn[tokens] for tokens in usual], [expected[tokens] * total for tokens in usual]
    rare = total - sum(mass)
    assert len(usual) > 4
    assert p_value([*observed, total - sum(observed)], [*mass, rare]) > 0.001


def test_beams_find_the_likeliest_of_all_that_is_allowed(plain: Engine) -> None:
    prompt = plain.request("one two").prompt_ids
    expected = sorted(every_result(plain, prompt, CHOICES), key=lambda result: -result[2])
    assert len(expected) > 12
    generation = plain.generate(
        prompt, guided_choice=CHOICES, num_beams=40, num_return_sequences=8, length_penalty=0.0, logprobs=True
    )
    assert [tuple(completion.token_ids) for completion in generation.completions] == [e[0] for e in expected[:8]]
    for completion, (_, _, log_prob) in zip(generation.completions, expected, strict=False):
        assert completion.score == pytest.approx(log_prob, abs=1e-4)
        assert completion.logprobs is not None
        assert sum(completion.logprobs) == pytest.approx(log_prob, abs=1e-4)


def test_beams_give_as_many_results_as_there_are(plain: Engine) -> None:
    prompt = plain.request("one two").prompt_ids
    expected = {result[0] for result in every_result(plain, prompt, ["no", "on"])}
    generation = plain.generate(prompt, guided_choice=["no", "on"], num_beams=30, num_return_sequences=30)
    assert 0 < len(expected) < 30
    assert sorted(tuple(completion.token_ids) for completion in generation.completions) == sorted(expected)


@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.3}])
def test_log_probabilities_are_the_models_own(plain: Engine, fields: dict[str, Any]) -> None:
    generation = plain.generate("one two", guided_regex=YEAR, top_logprobs=2, **fields)
    (completion,) = generation.completions
    scores = plain.score(generation.prompt_token_ids + completion.token_ids).logprobs
    assert completion.logprobs == pytest.approx(scores[len(generation.prompt_token_ids) :], abs=1e-4)
    assert completion.top_logprobs is not None
    assert any(top[0][0] != token for top, token in zip(completion.top_logprobs, completion.token_ids, strict=True))


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_a_complete_text_ends_whatever_min_new_tokens_says(plain: Engine, mode: str) -> None:
    for completion in plain.generate("x", guided_regex="ab", min_new_tokens=10, **MODES[mode]).completions:
        assert (completion.text, completion.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_a_text_that_may_go_on_goes_on_for_min_new_tokens(plain: Engine, mode: str) -> None:
    for completion in plain.generate("x", guided_regex="[ab]+", min_new_tokens=10, **MODES[mode]).completions:
        assert re.fullmatch("[ab]+", completion.text)
        assert len(completion.token_ids) > 10 or completion.finish_reason == "length"


def test_a_text_token_as_end_of_sequence_cannot_end_the_text_early(plain: Engine) -> None:
    assert plain.tokenizer is not None
    (line_break,) = plain.tokenizer.encode("\n", add_special_tokens=False)
    generation = plain.generate(
        "x", guided_regex="a[b\n]{4}c", eos_token_id=[line_break], do_sample=True, seed=1, num_return_sequences=50
    )
    for completion in generation.completions:
        assert completion.token_ids.index(line_break) == len(completion.token_ids) - 1
        assert re.fullmatch("a[b\n]{4}c\n", completion.text)


def test_the_limit_of_length_and_a_stop_string_still_cut(plain: Engine) -> None:
    (cut,) = plain.generate("x", guided_regex="[ab]{90}", max_new_tokens=5).completions
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    (stopped,) = plain.generate("x", guided_regex="[ab]{3}c[ab]{9}", stop_strings="c").completions
    assert stopped.finish_reason == "stop"
    assert re.fullmatch("[ab]{3}", stopped.text)


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "(a"}, ["guided_regex", "unclosed group"]),
        ({"guided_regex": "(?=a)b"}, ["guided_regex", "look-around"]),
        ({"guided_regex": r"[^\s\S]"}, ["guided_regex", "no token is allowed next"]),
        ({"guided_json": {"not": {"type": "null"}}}, ["guided_json", 'Unimplemented keys: ["not"]']),
        ({"guided_json": {"type": "colour"}}, ["guided_json", "Invalid type: colour"]),
        ({"guided_json": {"type": "string", "pattern": "["}}, ["guided_json", "unclosed character class"]),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}}, ["guided_json", "Unsatisfiable"]),
        ({"guided_grammar": "start: other"}, ["guided_grammar", 'unknown name: "other"']),
        ({"guided_grammar": "nothing"}, ["guided_grammar", "Expected token"]),
    ],
)
def test_what_llguidance_refuses_is_quoted_in_one_line(plain: Engine, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ParameterError) as error:
        plain.generate("x", **fields)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert not plain.busy


def test_without_llguidance_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tmp_path)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParameterError, match=f"^guided_regex needs llguidance: {re.escape(install('guided'))}$"):
        engine.generate("x", guided_regex="a")
    assert engine.generate("x", max_new_tokens=2).token_ids


@pytest.mark.parametrize("guide", GUIDES)
def test_without_a_tokenizer_there_is_no_guide(guide: str) -> None:
    fields, _ = GUIDES[guide]
    maker = RequestMaker(tiny_model(vocab_size=512).config, None, {"eos_token_id": 2})
    with pytest.raises(ParameterError, match=r"^guided_.* needs a tokenizer, and this model has none"):
        maker.make([5, 6], GenerationConfig(**fields))


def test_a_strategy_that_does_not_follow_guides_is_refused(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Strategy):
        begin = step = None  # type: ignore[assignment]

    monkeypatch.setattr(resolving, "strategy_class", lambda settings: Deaf)
    with pytest.raises(ParameterError, match=r"guided_choice goes with .* not with Deaf"):
        plain.generate("x", guided_choice="a")


@pytest.mark.slow
def test_llguidance_is_imported_only_for_a_guide() -> None:
    code = "import sys, minillm, minillm.engine.engine, minillm.cli.main; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_grammar_is_compiled_once(plain: Engine) -> None:
    make = [plain.request("x", GenerationConfig(guided_json=SCHEMA)).guide for _ in range(2)]
    assert make[0] is not None
    assert make[0] == make[1]
    assert make[0]() is not make[0]()


def test_there_may_be_ten_thousand_choices(plain: Engine) -> None:
    """They begin alike, so that each is possible for long."""
    choices = [f"choice{i:04}" for i in range(9_990)]
    for completion in plain.generate("x", guided_choice=choices, num_beams=3, num_return_sequences=3).completions:
        assert_valid(completion, lambda text: text in choices)


ANY_OF: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [{"type": "string", "maxLength": n} for n in range(1, 401)]},
}
"""llguidance takes it, and gives up when the first string begins."""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_json": nested(200)}, "^guided_json was refused by llguidance: recursion limit exceeded"),
        ({"guided_json": {"type": "integer", "minimum": 10**400}}, "^guided_json: minimum 10{9}.* cannot hold exactly"),
        ({"guided_regex": "(" * 5000 + "a" + ")" * 5000}, "^guided_regex was refused by llguidance: .*invalid regex"),
    ],
    ids=["deep", "huge number", "long expression"],
)
def test_what_llguidance_raises_is_an_error_of_ours(plain: Engine, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words) as error:
        plain.add("x", **fields)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert not plain.busy


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_a_guide_that_fails_in_a_step_is_an_error_of_ours(plain: Engine, mode: str) -> None:
    with pytest.raises(ParameterError, match=r"^guided_json .*too many expressions constructed"):
        plain.generate("x", guided_json=ANY_OF, max_new_tokens=20, **MODES[mode])
    assert not plain.busy


@pytest.mark.parametrize("raised", [ValueError("too much\n  of it"), type("PanicException", (BaseException,), {})("x")])
def test_whatever_llguidance_raises_in_a_step_is_an_error_of_ours(raised: BaseException) -> None:
    class Matcher:
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            raise raised

        def consume_token(self, token_id: int) -> bool:
            raise raised

    guide = Guide("guided_regex", Matcher(), (2,), 9)  # type: ignore[arg-type]
    for act in (lambda: guide.fill(np.zeros(1, np.uint32)), lambda: guide.push(3)):
        with pytest.raises(ParameterError, match=r"^guided_regex was refused by llguidance: (too much|x)$"):
            act()


class SlowMatcher:
    """A matcher of one word whose masks after the first wait for `gate`."""

    def __init__(self) -> None:
        self.gate, self.threads = threading.Event(), list[str]()
        self.consumed = 0

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self.threads.append(threading.current_thread().name)
        assert not self.consumed or self.gate.wait(30)
        ctypes.memset(pointer, 16 + self.consumed, size)

    def consume_token(self, token_id: int) -> bool:
        self.consumed += 1
        return True

    def is_accepting(self) -> bool:
        return False

    is_stopped = is_accepting

    def deep_copy(self) -> "SlowMatcher":
        return self


def test_a_mask_that_takes_long_is_begun_when_the_token_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """`push` does not wait for it, in another thread; who needs the mask, or forks, does."""
    monkeypatch.setattr(guided, "SLOW", -1.0)
    matcher, mask = SlowMatcher(), np.zeros(1, np.uint32)
    guide = Guide("guided_regex", matcher, (2,), 9)  # type: ignore[arg-type]
    guide.fill(mask)
    assert mask.tobytes() == bytes([16] * 4)
    guide.push(3)
    end = time.monotonic() + 30
    while len(matcher.threads) < 2:  # the helper has begun
        assert time.monotonic() < end, "nothing computes the mask"
        time.sleep(0.001)
    matcher.gate.set()
    twin = guide.fork()
    for one in (guide, twin):
        one.fill(mask)
        assert mask.tobytes() == bytes([17 & ~4] + [17] * 3)  # without the end-of-sequence token
    assert matcher.threads == [threading.current_thread().name, "minillm-masks"]


def test_masks_are_computed_where_they_are_needed_if_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(guided, "SLOW", -1.0)
    monkeypatch.setattr(guided, "_HELPERS", guided._Helpers())
    matcher, mask = SlowMatcher(), np.zeros(1, np.uint32)
    matcher.gate.set()
    guide = Guide("guided_regex", matcher, (2,), 9)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            guide.fill(mask)
            guide.push(3)
    guide.fill(mask)
    assert mask.tobytes() == bytes([19 & ~4] + [19] * 3)
    assert set(matcher.threads) == {threading.current_thread().name}
    guide.push(3)
    guide._next.wait()  # type: ignore[union-attr]
    assert guided._HELPERS._threads <= guided._HELPERS._most


@pytest.mark.longer
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_masks_computed_beside_the_forward_pass_are_the_same(
    plain: Engine, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    found = []
    for slow in (math.inf, -1.0):
        monkeypatch.setattr(guided, "SLOW", slow)
        found.append(plain.generate(PROMPTS, max_new_tokens=40, guided_regex="[a-z ]{3,30}", **MODES[mode]))
    for one, other in zip(*found, strict=True):
        assert [completion.token_ids for completion in one.completions] == [
            completion.token_ids for completion in other.completions
        ]
        assert all(re.match("[a-z ]{3,30}|$", completion.text) for completion in other.completions)


def test_a_mask_that_fails_beside_the_forward_pass_ends_its_request_alone(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guided, "SLOW", -1.0)
    bad = plain.add("x", guided_json=ANY_OF, max_new_tokens=20)
    good = plain.add("x", guided_regex="[a-z]{30}", max_new_tokens=8)
    events = []
    while plain.busy:
        events += plain.step()
    [failed] = [event for event in events if event.error is not None]
    assert failed.request_id == bad
    assert isinstance(failed.error, ParameterError)
    assert sum(len(event.token_ids) for event in events if event.request_id == good) == 8


ENDS_DURING_A_MASK = """
from minillm import Engine
from minillm.decoding import guided

guided.SLOW = -1.0
engine = Engine(backend="numpy")
engine.add("a", guided_regex="[a-z ]{1,400}", max_new_tokens=400)
for _ in range(3):
    engine.step()
"""


@pytest.mark.slow
def test_a_process_may_end_while_a_mask_is_computed() -> None:
    """A thread that the interpreter ended within llguidance took the process with it, about every other time."""
    children = [subprocess.Popen([sys.executable, "-c", ENDS_DURING_A_MASK]) for _ in range(6)]
    assert [child.wait() for child in children] == [0] * 6


def test_an_interrupt_goes_through() -> None:
    class Matcher:
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guide("guided_regex", Matcher(), (2,), 9).fill(np.zeros(1, np.uint32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /a*/ start",
        "start: /a*/ NOTHING\nNOTHING: /[^\\s\\S]/",
        'start: "a" | "aa" endless\nendless: /a*/ endless',
        '%llguidance {"no_forcing": false}\nstart: /a*/ start // without an end of line',
    ],
)
def test_a_grammar_that_cannot_end_is_cut_off(plain: Engine, grammar: str) -> None:
    """llguidance would look ahead for ever to where more than one byte is possible."""
    (completion,) = plain.generate("x", guided_grammar=grammar, max_new_tokens=6).completions
    assert set(completion.text) == {"a"}
    assert completion.finish_reason in ("length", "stop")
