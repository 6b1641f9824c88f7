"""Invalid values for every argument of the engine: one clear line, or a documented meaning."""

import array
import collections
import decimal
import fractions
import numbers
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine, GenerationConfig, MinillmError
from minillm.decoding.fields import FIELDS
from minillm.engine.loading import DEMO_MODEL
from minillm.errors import ParameterError, PromptError, listed, shown
from minillm.models import published
from minillm.text.chat import ChatTemplate

from ..comparing import assert_same_results
from ..tiny import tiny_config


class Text(str):
    """A kind of text."""

    __slots__ = ()


class Rude:
    """Nothing about it can be asked."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Wordy:
    def __repr__(self) -> str:
        return "line one\nline two " * 1000


def itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


NONSENSE: list[Any] = [
    None, True, False, 0, 1, -1, 10**30, 10**5000, 0.0, 1.5, -1.0, float("nan"), float("inf"), 1j,
    "", "no such thing", "a\nb" * 500, "\0", "\ud800", "../..", Text("kind"), np.str_("text"),
    b"", b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), collections.UserString("text"),
    (), [], [None], [[]], [[[5]]], [b"a"], [{}], [True], [1.5], [5, "a"], ["a", 5], itself(), [[5], "a", None],
    [float("nan")], [10**5000], ["\ud800"], {}, {"a": 1}, {5: 5}, set(), {1, 2}, frozenset(), iter([5]),
    range(3), range(10**20), slice(3), collections.deque([5]), collections.UserList([5]), array.array("d", [5.0]),
    object(), object, len, lambda: 5, Ellipsis, NotImplemented, Rude(), Wordy(), Exception("x"), GenerationConfig,
    fractions.Fraction(1, 2), decimal.Decimal(1), Path("no/such/path"), Path("\0"),
    np.array(5), np.array(True), np.array([1.5]), np.array([True]), np.array([[[5]]]), np.array([]), np.array(["a"]),
    np.array(["a", None], object), np.array([1], "datetime64[ns]"), np.zeros((2, 0), int), np.zeros(10**6),
    np.float32(1), np.int64(-1), np.bool_(True),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The demo model with a chat template that reads all that it may."""
    with Engine(max_batch_size=2, backend="numpy") as engine:
        engine.chat_template = ChatTemplate(
            "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}{{ a }}"
        )
        yield engine


def accepted(call: Callable[[Any], Any], values: Sequence[Any] = NONSENSE) -> list[Any]:
    """What is taken; anything else has to be refused in one short line."""
    taken = []
    for value in values:
        try:
            call(value)
            taken.append(value)
        except MinillmError as error:
            message = str(error)
            assert 0 < len(message) < 300, (shown(value), message)
            assert message.isprintable(), (shown(value), message)
        except Exception as error:
            raise AssertionError(f"{shown(value)} raised {error!r:.200}") from error
    return taken


def is_text(value: Any) -> bool:
    return isinstance(value, str) and "\ud800" not in value and len(value) < 500


def is_ids(value: Any) -> bool:
    """Token ids that the demo model takes, at least one."""
    return type(value) in (range, collections.deque, collections.UserList) and value != range(10**20)


def is_nothing(value: Any) -> bool:
    return value.shape == (0,) if isinstance(value, np.ndarray) else isinstance(value, tuple | list) and not value


MEANING: dict[str, Callable[[Any], bool]] = {
    "generate": lambda v: is_text(v) or is_ids(v) or is_nothing(v) or shown(v) in BATCHES,
    "stream": lambda v: is_text(v) or is_ids(v) or is_nothing(v),
    "forward": lambda v: (is_text(v) and v != "") or is_ids(v),
    "abort": lambda v: type(v) is int and 0 <= v < 2,
    "chat": lambda v: False,
    "encode": lambda v: isinstance(v, str) and "\ud800" not in v,
    "decode": lambda v: is_ids(v) or (is_nothing(v) and not isinstance(v, np.ndarray)),
    "token": lambda v: type(v) is int and 0 <= v < 2,
    "config": lambda v: v is None,
    "from_dict": lambda v: isinstance(v, dict) and not v,
    "variables": lambda v: v is None or (isinstance(v, dict) and v.keys() <= {"a"}),
    "flag or None": lambda v: v is None or isinstance(v, bool),
    "flag": lambda v: isinstance(v, bool),
    "count": lambda v: type(v) is int and v == 1,
    "count or None": lambda v: v is None or (type(v) is int and v == 1),
    "nothing": lambda v: False,
    "text": lambda v: isinstance(v, str),
    "a part's type": lambda v: isinstance(v, str) and v == "text",
    "None": lambda v: v is None,
    "seed": lambda v: type(v) is int and 0 <= v < 2,
    "std": lambda v: isinstance(v, numbers.Real) and not isinstance(v, bool) and 0 <= v <= 1e30 and shown(v) != "<int>",
}
"""Which of the nonsense has a meaning that is documented"""

BATCHES = {"[[]]", shown(np.array(["a"])), shown(np.zeros((2, 0), int))}
"""Lists of prompts: an empty one begins with BOS."""

FEW: dict[str, Any] = {"max_new_tokens": 1}
TALK = [{"role": "user", "content": "a"}]

CALLS: dict[str, tuple[str, Callable[[Engine, Any], Any]]] = {
    "generate": ("generate", lambda engine, v: engine.generate(v, **FEW)),
    "generate one of several": ("stream", lambda engine, v: engine.generate(["fine", v], **FEW)),
    "an id": ("token", lambda engine, v: engine.generate([5, v], **FEW)),
    "stream": ("stream", lambda engine, v: list(engine.stream(v, **FEW))),
    "add": ("stream", lambda engine, v: engine.abort(engine.add(v))),
    "request": ("stream", lambda engine, v: engine.request(v)),
    "forward": ("forward", lambda engine, v: engine.forward(v)),
    "score": ("forward", lambda engine, v: engine.score(v)),
    "abort": ("abort", lambda engine, v: engine.abort(v)),
    "chat": ("chat", lambda engine, v: engine.chat(v, **FEW)),
    "stream_chat": ("chat", lambda engine, v: list(engine.stream_chat(v, **FEW))),
    "render_chat": ("chat", lambda engine, v: engine.render_chat(v)),
    "a message": ("chat", lambda engine, v: engine.render_chat([v])),
    "a role": ("text", lambda engine, v: engine.render_chat([{"role": v, "content": "a"}])),
    "content": ("text", lambda engine, v: engine.render_chat([{"role": "user", "content": v}])),
    "a part": ("chat", lambda engine, v: engine.render_chat([{"role": "user", "content": [v]}])),
    "a part's type": (
        "a part's type",
        lambda engine, v: engine.render_chat([{"role": "user", "content": [{"type": v, "text": "a"}]}]),
    ),
    "chat_template_kwargs": ("variables", lambda engine, v: engine.render_chat(TALK, chat_template_kwargs=v)),
    "add_generation_prompt": ("flag or None", lambda engine, v: engine.render_chat(TALK, add_generation_prompt=v)),
    "continue_final_message": ("flag", lambda engine, v: engine.render_chat(TALK, continue_final_message=v)),
    "config": ("config", lambda engine, v: engine.generate("a", v, **FEW)),
    "from_dict": ("from_dict", lambda engine, v: GenerationConfig.from_dict(v)),
    "GenerationConfig": ("nothing", lambda engine, v: GenerationConfig(v)),
    "tokenizer.encode": ("encode", lambda engine, v: engine.tokenizer.encode(v)),
    "tokenizer.decode": ("decode", lambda engine, v: engine.tokenizer.decode(v)),
    "tokenizer.stream": ("decode", lambda engine, v: engine.tokenizer.stream(v)),
    "tokenizer.token": ("token", lambda engine, v: engine.tokenizer.token(v)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CALLS)
def test_each_call_means_something_or_says_what_it_expects(engine: Engine, name: str) -> None:
    meaning, call = CALLS[name]
    taken = accepted(lambda value: call(engine, value))
    expected = MEANING[meaning]
    assert [shown(value) for value in taken] == [shown(value) for value in NONSENSE if expected(value)]
    assert not engine.busy


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_accepted_or_refused_in_one_line(engine: Engine, name: str) -> None:
    accepted(lambda value: engine.request([5, 6], **{name: value}))
    accepted(lambda value: GenerationConfig().merged(**{name: value}))


ENGINE = {
    **dict.fromkeys(("model", "revision", "draft", "amateur", "tokenizer", "cache_bytes"), "None"),
    **dict.fromkeys(("dtype", "device", "backend", "cache_dtype", "compute_dtype"), "nothing"),
    "threads": "count or None",
    "max_batch_size": "count",
    "prefix_cache": "flag",
}
RANDOM = {
    **{name: meaning for name, meaning in ENGINE.items() if meaning in ("nothing", "count", "count or None")},
    "shape": "nothing",
    "seed": "seed",
    "std": "std",
    "no_such_argument": "nothing",
    "cache_bytes": "None",
}


@pytest.mark.longer
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name == "amateur" else ()) for name in ENGINE]
)
def test_each_argument_of_an_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.formats.hub._find_on_hub", lambda name, revision: Path("no/such/folder"))
    fields = {"backend": "numpy"} | ({"model": str(DEMO_MODEL)} if name == "revision" else {})
    taken = accepted(lambda value: Engine(**fields | {name: value}).close())
    assert taken == [value for value in NONSENSE if MEANING[ENGINE[name]](value)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RANDOM)
def test_each_argument_of_a_random_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(published(), "opt-tiny", tiny_config())
    fields = {"shape": "opt-tiny", "backend": "numpy"}
    taken = accepted(lambda value: Engine.random(**fields | {name: value}).close())
    assert taken == [value for value in NONSENSE if MEANING[RANDOM[name]](value)]


def test_the_words_of_a_refusal() -> None:
    for arguments, message in (
        ({"cache_bytes": "1GB"}, "cache_bytes should be a whole number of at least 1, found '1GB'"),
        ({"prefix_cache": "no"}, "prefix_cache should be True or False, found 'no'"),
        ({"revision": 5}, "revision should be a branch, tag or commit as text, found 5"),
        ({"draft": b"x"}, "draft should be the path of a folder or a hub id, found b'x'"),
        ({"threads": "2"}, "threads should be a whole number of at least 1, found '2'"),
    ):
        with pytest.raises(ParameterError) as caught:
            Engine(**arguments)  # type: ignore[arg-type]
        assert str(caught.value) == message
    with pytest.raises(
        ParameterError, match="there is no argument 'thread': expected one of shape, seed, std, dtype, device, backend"
    ):
        Engine.random("opt-125m", thread=2)
    with pytest.raises(ParameterError, match=r"config should be a GenerationConfig .*from_dict.*, found {'top_k': 5}"):
        Engine().generate("a", {"top_k": 5})  # type: ignore[call-overload]


def test_values_in_messages_are_short_and_in_one_line() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown(Rude()).startswith("<Rude instance at ")
    assert shown(10**5000).startswith("<int")  # since Python 3.14 with the number of digits
    assert len(shown([["x" * 100] * 6] * 6)) <= 100
    assert listed(["one", "two", "three"], 9) == "one, two and 1 more"
    assert listed(["one"]) == "one"


# --- what is taken for a prompt ---------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "ids",
    [
        (5, 6, 7), range(5, 8), np.arange(5, 8), np.arange(5, 8, dtype=np.uint8), [np.int64(5), np.int32(6), 7],
        array.array("i", [5, 6, 7]), collections.UserList([5, 6, 7]), np.array([5, 6, 7], object),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_token_ids_in_any_sequence_of_whole_numbers(engine: Engine, ids: Any) -> None:
    assert_same_results(engine.generate(ids, **FEW), engine.generate([5, 6, 7], **FEW))
    assert_same_results(engine.generate([ids, ids], **FEW), engine.generate([[5, 6, 7]] * 2, **FEW))
    np.testing.assert_allclose(engine.forward(ids), engine.forward([5, 6, 7]), rtol=1e-4, atol=1e-4)
    assert_same_results(engine.score(ids), engine.score([5, 6, 7]))


def test_lists_of_prompts(engine: Engine) -> None:
    rows = np.array([[5, 6], [7, 8]])
    assert_same_results(engine.generate(rows, **FEW), engine.generate(rows.tolist(), **FEW))
    texts = engine.generate(["a", "b"], **FEW)
    assert_same_results(engine.generate(("a", Text("b")), **FEW), texts)
    assert_same_results(engine.generate(np.array(["a", "b"]), **FEW), texts)
    assert engine.generate([], **FEW) == engine.generate((), **FEW) == []
    with pytest.raises(PromptError, match=r"a prompt should be text or a list of token ids, found 5$"):
        engine.generate(["a", 5], **FEW)  # type: ignore[list-item]


def test_text_without_a_token_has_no_logits(engine: Engine) -> None:
    assert engine.generate("", **FEW).prompt_token_ids == [2]  # begins with BOS
    for empty in ("", [], (), np.array([], int)):
        for call in (engine.forward, engine.score):
            with pytest.raises(PromptError, match="the prompt is empty: give at least one token"):
                call(empty)


def test_logits_of_text_are_those_of_its_tokens(engine: Engine) -> None:
    ids = engine.tokenizer.encode("A list of colors:")
    np.testing.assert_allclose(engine.forward("A list of colors:"), engine.forward(ids), rtol=1e-4, atol=1e-4)
    assert engine.score("A list of colors:").token_ids == ids


# --- prompts that are far too long ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("hello " * 4_000_000, "the prompt has more than 512 tokens (24000000 characters); the context holds 512"),
        ([5] * 3_000_000, "the prompt has 3000000 tokens; the context holds 512"),
        (range(10**12), "the prompt has 1000000000000 tokens; the context holds 512"),
        (np.zeros(10**7, int), "the prompt has 10000000 tokens; the context holds 512"),
    ],
    ids=["text", "list", "range", "array"],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    engine: Engine, monkeypatch, prompt: Any, message: str
) -> None:
    monkeypatch.setattr("minillm.text.tokenizer.Tokenizer.encode", lambda *_, **__: pytest.fail("tokenized"))
    monkeypatch.setattr("minillm.decoding.prompts.Integral", ())  # no token id is looked at
    for call in (engine.generate, engine.forward, engine.score, engine.add):
        with pytest.raises(PromptError) as caught:
            call(prompt)
        assert message in str(caught.value)
    if isinstance(prompt, str):
        with pytest.raises(PromptError, match="more than 512 tokens"):
            engine.chat([{"role": "user", "content": prompt}])


@pytest.mark.parametrize("word", ["hello ", "x", "9", " ", "\n", "Größe ", "日本", "\U0001f600", "</s>", "e\u0301"])
@pytest.mark.parametrize("limit", [64, pytest.param(5_000, marks=pytest.mark.slow)])
def test_a_text_that_fits_is_never_called_too_long(engine: Engine, word: str, limit: int) -> None:
    """For texts around the limit, and up to many times as long: what is called too long is so by the real count."""
    tokenizer = engine.tokenizer
    for factor in (1, 7, 20):
        text = word * (limit * factor // len(word))
        if tokenizer.exceeds(text, limit):
            assert len(tokenizer.encode(text)) > limit


def test_a_long_text_is_counted_piece_by_piece(engine: Engine, monkeypatch) -> None:
    """Of a text within the bound by characters no more is tokenized than shows that it is too long."""
    tokenizer, seen = engine.tokenizer, []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def encode(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return backend.encode(text, **options)

    backend = tokenizer._backend
    monkeypatch.setattr(tokenizer, "_backend", Watched())
    assert tokenizer.exceeds("hello " * 100_000, 20_000)
    assert sum(seen) < 200_000
    assert max(seen) <= 2**15
    with pytest.raises(PromptError, match=r"lone surrogate U\+D800 at character 600000"):
        tokenizer.exceeds("hello " * 100_000 + "\ud800", 20_000)
