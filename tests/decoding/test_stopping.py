"""Stop strings against a search of the whole text, and against the moment at which transformers stops."""

import copy
import random
from typing import Any

import pytest

from minillm import Engine, GenerationConfig
from minillm.decoding.continuation import StopStrings
from minillm.engine.results import Completion
from minillm.errors import ParameterError

from ..tiny import TOKENIZER, write_checkpoint


def expected(prompt: str, generated: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The released text and the stop string, by looking at every end and every stop string of the whole text."""
    text = prompt + generated
    for end in range(len(prompt) + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[len(prompt) : end if include_stop else max(len(prompt), end - len(stop))], stop
    return generated, None


def word(draw: random.Random, alphabet: str, shortest: int, longest: int) -> str:
    return "".join(draw.choices(alphabet, k=draw.randint(shortest, longest)))


def pieces(draw: random.Random, text: str) -> list[str]:
    """The text cut anywhere, some pieces empty, as tokens do."""
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(len(text) + 2)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def beginning_at_the_end(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that is a proper beginning of a stop string."""
    return max(
        n for n in range(len(text) + 1) if n == 0 or any(s != text[-n:] and s.startswith(text[-n:]) for s in stops)
    )


def run(matcher: StopStrings, parts: list[str]) -> str:
    released = ""
    for part in parts:
        released += matcher.push(part)
        if matcher.matched is not None:
            return released
    return released + matcher.flush()


@pytest.mark.longer
@pytest.mark.parametrize("include_stop", [False, True])
def test_equals_a_search_of_the_whole_text(include_stop):
    draw = random.Random(1)
    found = 0
    for _ in range(4000):
        alphabet = draw.choice(["ab", "abc", "é😀\n"])
        stops = [word(draw, alphabet, 1, 6) for _ in range(draw.randint(0, 4))]
        prompt, generated = word(draw, alphabet, 0, 8), word(draw, alphabet, 0, 20)
        matcher = StopStrings(stops, prompt, include_stop)
        released = run(matcher, pieces(draw, generated))
        assert (released, matcher.matched) == expected(prompt, generated, stops, include_stop)
        found += matcher.matched is not None
    assert 1000 < found < 3800  # both outcomes are common


@pytest.mark.longer
def test_holds_back_exactly_what_may_begin_a_stop_string():
    draw = random.Random(2)
    for _ in range(2000):
        stops = [word(draw, "ab", 1, 5) for _ in range(draw.randint(1, 3))]
        prompt, generated = word(draw, "abc", 0, 6), word(draw, "abc", 0, 12)
        matcher = StopStrings(stops, prompt)
        seen = released = ""
        for part in pieces(draw, generated):
            seen += part
            released += matcher.push(part)
            if matcher.matched is not None:
                break
            waiting = min(len(seen), beginning_at_the_end(prompt + seen, stops))
            assert released == seen[: len(seen) - waiting]
            assert waiting < max(map(len, stops))


@pytest.mark.parametrize(
    ("stops", "prompt", "parts", "released", "matched"),
    [
        (["\n\n"], "", ["one\n", "\n", "two"], "one", "\n\n"),
        (["\n\n"], "", ["one\n", "two\n"], "one\ntwo\n", None),
        (["STOP"], "", ["an ST", "O", "P here"], "an ", "STOP"),
        (["STOP"], "", ["a STOP b STOP"], "a ", "STOP"),
        (["b", "abc"], "", ["xabc"], "xa", "b"),  # the first to be complete, though the other begins earlier
        (["bc", "abc"], "", ["xabc"], "x", "abc"),  # complete at once: the longer
        (["aab"], "", ["aaab"], "a", "aab"),  # the match begins inside a failed one
        (["ing"], "sing", [" a song"], " a song", None),  # lies wholly in the prompt
        (["aa"], "aa", ["a", "b"], "", "aa"),  # begins in the prompt, ends in generated text
        (["Q:"], "A list Q", [": next"], "", "Q:"),
        (["é😀"], "", ["é", "é😀"], "é", "é😀"),
        ([], "", ["a", "b"], "ab", None),
    ],
)
def test_examples(stops, prompt, parts, released, matched):
    matcher = StopStrings(stops, prompt)
    assert run(matcher, parts) == released
    assert matcher.matched == matched
    assert matcher.flush() == ""


def test_only_the_end_of_a_long_prompt_matters():
    assert run(StopStrings(["xyz"], "xy" * 1000 + "xy"), ["z"]) == ""
    assert run(StopStrings(["z"], "z" * 1000), ["a"]) == "a"


def test_nothing_may_follow_a_match():
    matcher = StopStrings(["."])
    matcher.push("end.")
    with pytest.raises(AssertionError, match="the text has ended"):
        matcher.push("more")


def test_a_copy_goes_its_own_way():
    one = StopStrings(["abc"])
    assert one.push("xab") == "x"
    other = copy.deepcopy(one)
    assert one.push("c") == ""
    assert one.matched == "abc"
    assert other.matched is None
    assert other.push("d") == "abd"


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], "abc"])
def test_impossible_stop_strings_are_refused(stops):
    with pytest.raises(ParameterError, match=r"stop string"):
        StopStrings(stops)


@pytest.mark.reference
def test_stops_when_transformers_stops():
    torch = pytest.importorskip("torch", reason="the live comparison needs the reference extra")
    transformers = pytest.importorskip("transformers", reason="the live comparison needs the reference extra")
    from minillm.text.tokenizer import Tokenizer
    from tests.text.test_tokenizer import SMALL

    ours, theirs = Tokenizer.from_folder(SMALL), transformers.GPT2Tokenizer.from_pretrained(SMALL)
    draw = random.Random(3)
    ascii_ids = [i for i in range(4, ours.vocab_size) if ours.token(i).isascii() and "\\" not in ours.token(i)]
    likely = draw.sample(ascii_ids, 12)  # few tokens, so that stop strings do come up
    stopped = 0
    for _ in range(150):
        ids = draw.choices(likely, k=24)
        prompt, generated = ids[:8], ids[8:]
        text = ours.decode(draw.choices(likely, k=3))
        start = draw.randrange(len(text))
        stops = [text[start : start + draw.randint(1, 4)], ours.decode(ids[12:14])[-2:]]
        criterion = transformers.StopStringCriteria(theirs, stops)
        steps = (n for n in range(9, 25) if bool(criterion(torch.tensor([ids[:n]]), None)))
        their_step = next(steps, None)

        matcher, stream = StopStrings(stops, ours.decode(prompt)), ours.stream(prompt)
        our_step = None
        for n, token_id in enumerate(generated, start=9):
            matcher.push(stream.push(token_id))
            if matcher.matched is not None:
                our_step = n
                break
        assert our_step == their_step, (stops, ours.decode(prompt), ours.decode(generated))
        stopped += our_step is not None
    assert stopped > 30


# Special tokens -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=520))  # 512 with a token


def says(engine: Engine, ids: list[int], **fields: Any) -> Completion:
    """The completion of a model that is made to say these ids, and then the last of them for ever."""
    prompt = engine.request("x", GenerationConfig()).prompt_ids
    said = lambda batch_id, line: [ids[min(len(line) - len(prompt), len(ids) - 1)]]  # noqa: E731
    return engine.generate("x", prefix_allowed_tokens_fn=said, max_new_tokens=len(ids), **fields).completions[0]


def ids_of(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("between", [1, 2, 515], ids=["padding token", "special token", "id without a token"])
def test_a_stop_string_is_found_across_what_is_no_text(engine: Engine, between: int) -> None:
    (a,), (b,), (c,) = (ids_of(engine, letter) for letter in "abc")
    completion = says(engine, [c, a, between, b, c], stop_strings="ab", eos_token_id=[])
    assert (completion.text, completion.finish_reason) == ("c", "stop")
    assert completion.token_ids == [c, a, between, b]


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_a_stop_string_that_spells_a_special_token_is_that_token(engine: Engine, way: dict[str, Any]) -> None:
    (a,), (b,) = (ids_of(engine, letter) for letter in "ab")
    for stops in ("</s>", ["zz", "</s>"]):
        completion = says(engine, [a, b, 2, a, a], stop_strings=stops, eos_token_id=[], **way)
        assert (completion.text, completion.finish_reason, completion.token_ids) == ("ab", "stop", [a, b, 2])
    assert says(engine, [a, 2, b], stop_strings="a</s>", eos_token_id=[]).text == "ab"  # no text has that
    request = engine.request("x", GenerationConfig(stop_strings=["</s>", "<pad>", "</s>"], eos_token_id=[5, 2]))
    assert request.settings.eos_token_ids == (5, 2, 1)


def test_a_special_token_spelled_in_ordinary_tokens_stops_too(engine: Engine) -> None:
    letters = [ids_of(engine, letter)[0] for letter in "</s>"]
    completion = says(engine, [*letters, letters[0]], stop_strings="</s>", eos_token_id=[])
    assert (completion.text, completion.token_ids) == ("", letters)


def test_stop_strings_are_prepared_once_for_all_continuations(engine: Engine, monkeypatch) -> None:
    made: list[Any] = []
    grow = StopStrings._grow_trie
    monkeypatch.setattr(StopStrings, "_grow_trie", lambda self, stops: (made.append(stops), grow(self, stops))[1])
    generation = engine.generate("x", do_sample=True, seed=1, num_return_sequences=8, stop_strings=["zz", "yy"])
    assert len(generation.completions) == 8
    assert len(made) == 1


@pytest.mark.reference
def test_where_transformers_differs_about_special_tokens() -> None:
    """The text at the head of `continuation.py` says so."""
    torch = pytest.importorskip("torch", reason="the live comparison needs the reference extra")
    transformers = pytest.importorskip("transformers", reason="the live comparison needs the reference extra")

    theirs = transformers.GPT2Tokenizer.from_pretrained(TOKENIZER)
    (a,), (b,) = (theirs.encode(letter, add_special_tokens=False) for letter in "ab")

    def stops(stop: str, *ids: int) -> bool:
        return bool(transformers.StopStringCriteria(theirs, [stop])(torch.tensor([[5, *ids]]), None))

    assert stops("ab", a, b)
    assert not any(stops("ab", a, between, b) for between in (1, 2, 515))  # across them nothing matches
    assert stops("</s>", 2)
    assert stops("/s", 2)
    assert stops("a</s>b", a, 2, b)  # their spelling is text
