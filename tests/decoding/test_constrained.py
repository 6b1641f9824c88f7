"""Constrained beam search: which phrases count, and whose constraints. transformers is in test_golden_searches.py."""

from typing import Any

import pytest

from minillm import DisjunctiveConstraint, Engine, MinillmError, PhrasalConstraint
from minillm.decoding.constraints import Progress

from ..tiny import write_checkpoint

PROMPT = [40, 41, 42, 43]
BEAMS: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 9, "eos_token_id": []}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("model"), seed=3), max_batch_size=8)


def holds(line: list[int], phrase: list[int]) -> bool:
    return any(line[i : i + len(phrase)] == phrase for i in range(len(line)))


def after(*tokens: int, constraints: list[Any]) -> Progress:
    progress = Progress.of(constraints)
    for token in tokens:
        progress = progress.after(token)
    return progress


def test_the_text_holds_every_phrase_and_one_of_each_choice(engine: Engine) -> None:
    plain = engine.generate(PROMPT, **BEAMS).token_ids
    line = engine.generate(PROMPT, force_words_ids=[[77, 78], [[50, 51], [52]]], **BEAMS).token_ids
    assert not holds(plain, [77, 78])
    assert holds(line, [77, 78])
    assert holds(line, [50, 51]) or holds(line, [52])


def test_a_phrase_of_the_prompt_is_written_again(engine: Engine) -> None:
    """In transformers 4.55 it counted."""
    assert holds(engine.generate([*PROMPT, 77, 78], force_words_ids=[[77, 78]], **BEAMS).token_ids, [77, 78])


def test_results_with_all_phrases_come_first(engine: Engine) -> None:
    fields = {"num_beams": 4, "max_new_tokens": 5, "num_return_sequences": 4, "eos_token_id": []}
    completions = engine.generate(PROMPT, force_words_ids=[[77, 78], [79, 80]], **fields).completions
    marks = [holds(c.token_ids, [77, 78]) and holds(c.token_ids, [79, 80]) for c in completions]
    assert len(marks) == 4
    assert marks == sorted(marks, reverse=True)
    scores = [completion.score for completion, mark in zip(completions, marks, strict=True) if mark]
    assert scores
    assert scores == sorted(scores, reverse=True)


def test_a_text_ends_only_with_all_phrases(engine: Engine) -> None:
    ends = {"eos_token_id": [*range(0, 60, 2)], "num_return_sequences": 4, "max_new_tokens": 12}
    for completion in engine.generate(PROMPT, force_words_ids=[[77, 79]], **BEAMS | ends).completions:
        assert holds(completion.token_ids, [77, 79]) or completion.finish_reason == "length"


def test_a_text_that_a_stop_string_ends_has_all_phrases_too(engine: Engine) -> None:
    tokens = engine.generate(PROMPT, **BEAMS).token_ids
    stop = engine.tokenizer.decode(tokens[2:3])
    fields: dict[str, Any] = BEAMS | {"max_new_tokens": 20}
    assert engine.generate(PROMPT, stop_strings=stop, **fields).completions[0].finish_reason == "stop"
    for completion in engine.generate(PROMPT, stop_strings=stop, force_words_ids=[[77, 79]], **fields).completions:
        assert holds(completion.token_ids, [77, 79])


@pytest.mark.longer
def test_a_word_follows_a_space() -> None:
    engine = Engine(backend="numpy")
    answer = engine.generate("A list of colors: red,", force_words=[["dog", "car"], "moon"], num_beams=3)
    assert " moon" in answer.text
    assert " dog" in answer.text or " car" in answer.text


def test_the_three_ways_to_say_it_are_one(engine: Engine) -> None:
    fields = BEAMS | {"num_return_sequences": 2}
    by_ids = engine.generate(PROMPT, force_words_ids=[[77, 78], [[50, 51], [52]]], **fields)
    objects = [PhrasalConstraint([77, 78]), DisjunctiveConstraint([[50, 51], [52]])]
    assert engine.generate(PROMPT, constraints=objects, **fields) == by_ids
    assert engine.generate(PROMPT, constraints=objects[:1], force_words_ids=[[[50, 51], [52]]], **fields) == by_ids
    text = engine.tokenizer.decode([10, 20])
    ids = engine.tokenizer.encode(f"a {text}", add_special_tokens=False)[1:]
    assert engine.generate(PROMPT, force_words=text, **fields) == engine.generate(
        PROMPT, force_words_ids=[ids], **fields
    )


class Twice:
    """A constraint of a user's own: a token, two times, with others between them or not."""

    seqlen = 2

    def __init__(self, token: int) -> None:
        self.token, self.seen = token, [0]

    def advance(self) -> int | None:
        return self.token if self.seen[0] < 2 else None

    def does_advance(self, token_id: int) -> bool:
        return token_id == self.token

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        self.seen[0] += token_id == self.token
        return token_id == self.token, self.seen[0] == 2, False

    def remaining(self) -> int:
        return 2 - self.seen[0]

    def copy(self, stateful: bool = False) -> "Twice":
        twin = Twice(self.token)
        twin.seen = self.seen if stateful else [0]  # shared, as transformers does
        return twin


def test_a_constraint_of_ones_own(engine: Engine) -> None:
    line = engine.generate(PROMPT, constraints=[Twice(77)], **BEAMS).token_ids
    assert line.count(77) >= 2


def test_objects_of_transformers_do_not_share_how_far_they_have_come() -> None:
    from minillm.decoding.field_values import constraint

    theirs: Any = type("DisjunctiveConstraint", (), {"__module__": "transformers.generation.beam_constraints"})()
    theirs.token_ids = [[5, 6], [5, 7]]
    ours = constraint(theirs).function
    begun = after(5, constraints=[ours])
    assert begun.next_tokens() == [6, 7]
    assert begun.after(6).done
    assert begun.after(7).done


def test_progress_in_banks() -> None:
    both = [PhrasalConstraint([1, 2, 3]), DisjunctiveConstraint([[4, 5], [6]])]
    assert [after(*line, constraints=both).bank for line in ([], [1], [1, 2], [9], [1, 9], [1, 2, 3], [6])] == [
        0, 1, 2, 0, 0, 3, 3,
    ]  # fmt: skip
    assert after(4, constraints=both).bank == 2
    assert after(1, constraints=both).next_tokens() == [2]
    assert after(1, 9, constraints=both).next_tokens() == [4, 6, 1]
    assert after(6, 1, 2, 3, 9, constraints=both).done


@pytest.mark.parametrize("ids", [5, [], [[]], ["a"], [-1], None])
def test_a_phrase_is_token_ids(ids: Any) -> None:
    with pytest.raises(MinillmError, match="a constraint takes phrases of token ids"):
        PhrasalConstraint(ids)
    with pytest.raises(MinillmError, match="a constraint takes phrases of token ids"):
        DisjunctiveConstraint([[5], ids])
    with pytest.raises(MinillmError, match=r"\[5, 6\] begins with \[5\]"):
        DisjunctiveConstraint([[5, 6], [5]])


@pytest.mark.longer
@pytest.mark.parametrize("fields", [{"length_penalty": 2.0}, {"early_stopping": True, "num_return_sequences": 3}])
def test_the_same_beside_others(engine: Engine, fields: dict[str, Any]) -> None:
    prompts = [PROMPT, PROMPT[:1], list(range(50, 60))]
    fields = {"num_beams": 3, "eos_token_id": [5, 9], "force_words_ids": [[77, 78], [[50], [52]]]} | fields
    alone = [engine.generate(prompt, **fields) for prompt in prompts]
    for together, one in zip(engine.generate(prompts, **fields), alone, strict=True):
        for ours, theirs in zip(together.completions, one.completions, strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
            assert ours.score == pytest.approx(theirs.score, abs=1e-4)
    plain = engine.generate(PROMPT)
    ids = [engine.add(PROMPT), *(engine.add(prompt, **fields) for prompt in prompts)]
    events: dict[Any, list[int]] = {request_id: [] for request_id in ids}
    while engine.busy:
        for event in engine.step():
            if event.index == 0:
                events[event.request_id] += event.token_ids
    assert [*events.values()] == [plain.token_ids, *(one.token_ids for one in alone)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"force_words_ids": [[5, 6, 7], [8]], "max_new_tokens": 3}, "has at least 4 tokens, and max_new_tokens=3"),
        ({"force_words_ids": [[5, 6]], "eos_token_id": 6}, "holds the end-of-sequence token 6"),
        ({"force_words_ids": [[5]], "do_sample": True}, "force_words_ids with do_sample=True"),
        ({"force_words_ids": [[[5], [5, 6]]]}, r"\[5, 6\] begins with \[5\]"),
        ({"force_words": "a b c d e", "max_new_tokens": 2}, "force_words: a text with all of them has at least"),
        ({"force_words": [["a", "a b"]]}, "force_words: 'a b' begins with the tokens of 'a'"),
        ({"constraints": [Twice(10**6)]}, "1000000 is not in the vocabulary"),
        ({"constraints": [Twice("a")]}, "should advance by token ids, found 'a'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_one_line(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MinillmError, match=message) as error:
        engine.generate(PROMPT, **{"num_beams": 2} | fields)
    assert "\n" not in str(error.value)
