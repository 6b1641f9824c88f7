"""Functions of the user's own among the processors: what they are given, and what they may return."""

import numpy as np
import pytest

from minillm.decoding.processors import History
from minillm.errors import ParameterError

from ..tiny import generate, loop_of, random_prompts, request_for, run, tiny_runner

PROMPTS = random_prompts(5, seed=2)


@pytest.fixture
def runner():
    return tiny_runner(seed=2, pages=200, page_size=16)


def test_a_processor_sees_every_sequence_and_the_last_word_is_its_own(runner) -> None:
    lengths = []

    def only_length(history: History, logits: np.ndarray, xp) -> np.ndarray:
        lengths.append(history.lengths.tolist())
        result = xp.full_like(logits, -np.inf)
        result[xp.arange(len(logits)), history.lengths] = 1.0
        return result

    got = generate(runner, PROMPTS, logits_processor=[only_length], suppress_tokens=[0], max_new_tokens=4)
    assert got == [[len(prompt) + i for i in range(4)] for prompt in PROMPTS]
    assert lengths == [[len(prompt) + i for prompt in PROMPTS] for i in range(4)]


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


def test_different_functions_do_not_share_a_step(runner) -> None:
    seen: dict[str, set[int]] = {"a": set(), "b": set()}

    def watch(name: str):
        def processor(history: History, logits: np.ndarray, xp) -> np.ndarray:
            seen[name].add(len(logits))
            return logits

        return processor

    a = [request_for(p, logits_processor=[watch("a")]) for p in PROMPTS[:2]]
    function = watch("b")
    b = [request_for(p, logits_processor=[function]) for p in PROMPTS[2:]]
    run(loop_of(target=runner), a + b)
    assert seen == {"a": {1}, "b": {3}}


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

    with pytest.raises(ParameterError, match="leave no token"):
        generate(runner, PROMPTS, logits_processor=[nothing], **fields)
