"""Functions of the user's own among the processors: what they are given, and what they may return."""

import numpy as np
import pytest

from minillm.decoding.history import History
from minillm.errors import ParameterError

from ..tiny import generate, loop_of, random_prompts, request_for, run, tiny_runner

PROMPTS = random_prompts(5, seed=2)


@pytest.fixture
def runner():
    return tiny_runner(seed=2, pages=200, page_size=16)


def test_a_processor_sees_its_request_and_the_last_word_is_its_own(runner) -> None:
    lengths: dict[int, list[int]] = {}

    def only_length(history: History, logits: np.ndarray, xp) -> np.ndarray:
        lengths.setdefault(int(history.prompt_lengths[0]), []).extend(history.lengths.tolist())
        result = xp.full_like(logits, -np.inf)
        result[xp.arange(len(logits)), history.lengths] = 1.0
        return result

    got = generate(runner, PROMPTS, logits_processor=[only_length], suppress_tokens=[0], max_new_tokens=4)
    assert got == [[len(prompt) + i for i in range(4)] for prompt in PROMPTS]
    assert lengths == {len(prompt): [len(prompt) + i for i in range(4)] for prompt in PROMPTS}


def test_processors_run_in_the_order_given(runner) -> None:
    def to(token: int):
        return lambda history, logits, xp: 0 * logits + (xp.arange(logits.shape[1]) == token)

    assert generate(runner, PROMPTS[:1], logits_processor=[to(3), to(4)], max_new_tokens=1) == [[4]]
    assert generate(runner, PROMPTS[:1], logits_processor=[to(4), to(3)], max_new_tokens=1) == [[3]]


def test_in_beam_search_they_see_log_probabilities(runner) -> None:
    sums = []

    def look(history: History, logits: np.ndarray, xp) -> np.ndarray:
        sums.append(np.exp(logits).sum(axis=-1))
        return logits

    plain = generate(runner, PROMPTS[:1], num_beams=3)
    assert generate(runner, PROMPTS[:1], num_beams=3, logits_processor=[look]) == plain
    np.testing.assert_allclose(np.concatenate(sums), 1, atol=1e-5)
    assert [len(s) for s in sums[:3]] == [1, 3, 3]


def test_each_request_has_its_processors_to_itself(runner) -> None:
    """A function that several requests share is called for one at a time: where it raises, one of them ends."""
    seen: list[int] = []

    def processor(history: History, logits: np.ndarray, xp) -> np.ndarray:
        seen.append(len(logits))
        return logits

    twins = [request_for(PROMPTS[0], logits_processor=[processor]) for _ in range(2)]
    two = request_for(PROMPTS[1], logits_processor=[processor], do_sample=True, num_return_sequences=2)
    run(loop_of(target=runner), [*twins, two])
    assert sorted(seen) == [1] * 40 + [2] * 20


def test_allowed_tokens_may_depend_on_all_that_was_said(runner) -> None:
    got = generate(runner, PROMPTS, prefix_allowed_tokens_fn=lambda batch_id, ids: [len(ids)], max_new_tokens=3)
    assert got == [[len(prompt) + i for i in range(3)] for prompt in PROMPTS]


@pytest.mark.parametrize("answer", [[], [96], [-1], ["a"], None, 5, [2.0], [[1]]], ids=repr)
def test_allowed_tokens_that_are_none_are_refused(answer, runner) -> None:
    with pytest.raises(
        ParameterError, match="prefix_allowed_tokens_fn should return at least one token id from 0 to 95"
    ):
        generate(runner, PROMPTS, prefix_allowed_tokens_fn=lambda batch_id, ids: answer)


@pytest.mark.parametrize(
    "answer",
    [lambda x: None, lambda x: x[0], lambda x: x > 0, lambda x: x.tolist()],
    ids=["None", "row", "bool", "list"],
)
def test_scores_of_the_wrong_kind_are_refused(answer, runner) -> None:
    with pytest.raises(ParameterError, match=r"logits_processor .* should return scores, float32 \[1, 96\], found"):
        generate(runner, PROMPTS[:1], logits_processor=[lambda history, logits, xp: answer(logits)])


@pytest.mark.parametrize("fields", [{}, {"do_sample": True}, {"do_sample": True, "mirostat": 2}], ids=str)
def test_leaving_no_token_is_refused(fields, runner) -> None:
    def nothing(history: History, logits: np.ndarray, xp) -> np.ndarray:
        return xp.full_like(logits, -np.inf)

    with pytest.raises(ParameterError, match="forbid every token"):
        generate(runner, PROMPTS, logits_processor=[nothing], **fields)
