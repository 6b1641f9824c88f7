"""The real model against transformers: tokens, beams, answers in a chat, log-probabilities, perplexity.

transformers reads the same file by itself, in float32. `expected.json` has its results; a test marked "reference" runs
it again.
"""

import math
from typing import Any

import numpy as np
import pytest

from minillm.measure.inside import next_log_probs
from minillm.reference.softmax import log_softmax

from .conftest import Engines

pytestmark = pytest.mark.real

both = pytest.mark.parametrize("backend", ["numpy", "cpu"])
often_in_c = pytest.mark.parametrize("backend", [pytest.param("numpy", marks=pytest.mark.exhaustive), "cpu"])


def test_prompts_have_the_same_tokens(engines: Engines, expected: dict[str, Any]) -> None:
    for case in expected["continuations"]:
        assert engines().tokenizer.encode(case["prompt"]) == case["prompt_tokens"]


@both
def test_greedy_tokens_and_text_of_a_ragged_batch(backend: str, engines: Engines, expected: dict[str, Any]) -> None:
    cases = expected["continuations"]
    results = engines(backend=backend).generate([case["prompt"] for case in cases], max_new_tokens=40)
    assert [result.token_ids for result in results] == [case["tokens"] for case in cases]
    assert [result.text for result in results] == [case["text"] for case in cases]


@both
def test_the_likeliest_tokens_have_the_same_probability(
    backend: str, engines: Engines, expected: dict[str, Any]
) -> None:
    for case in expected["continuations"]:
        logs = log_softmax(engines(backend=backend).forward(case["prompt"])[-1], np)
        best = np.argsort(-logs)[: len(case["likeliest"])]
        assert best.tolist() == [token for token, _ in case["likeliest"]]
        np.testing.assert_allclose(logs[best], [log for _, log in case["likeliest"]], atol=1e-4)


@both
def test_the_residual_stream_and_what_a_head_adds(backend: str, engines: Engines, expected: dict[str, Any]) -> None:
    engine, case = engines(backend=backend), expected["inside"]
    answer = engine.generate(case["prompt"], max_new_tokens=1, watch=["blocks.*.residual"])
    assert answer.token_ids == [case["token"]]
    for i, (numbers, length) in enumerate(zip(case["residual"], case["lengths"], strict=True)):
        row = answer.watched[f"blocks.{i}.residual"][-1]
        np.testing.assert_allclose(row[: len(numbers)], numbers, atol=1e-5 * length)
        assert np.linalg.norm(row) == pytest.approx(length, rel=1e-4)
    runs: list[tuple[list[int], dict[str, Any]]] = [(answer.prompt_token_ids, {})]
    for layer, head, _ in case["ablated"]:

        def without(z: Any, _: Any, head: int = head) -> Any:
            z[:, head] = 0
            return z

        runs.append((answer.prompt_token_ids, {f"blocks.{layer}.attention.z": without}))
    logs = next_log_probs(engine, runs, case["token"])
    np.testing.assert_allclose(logs, [case["log_prob"], *(log for _, _, log in case["ablated"])], atol=1e-4)


@often_in_c
def test_beams_and_their_scores(backend: str, engines: Engines, expected: dict[str, Any]) -> None:
    for case in expected["beams"]:
        results = engines(backend=backend).generate(case["prompts"], **case["fields"])
        assert [[c.token_ids for c in result.completions] for result in results] == case["sequences"]
        scores = [[c.score for c in result.completions] for result in results]
        np.testing.assert_allclose(scores, case["scores"], rtol=1e-4)


@often_in_c
def test_answers_of_a_chat(backend: str, engines: Engines, expected: dict[str, Any]) -> None:
    """The template is the file's own, and the answer ends with its end-of-turn token."""
    engine = engines(backend=backend)
    for case in expected["chats"]:
        assert engine.render_chat(case["messages"]) == case["rendered"]
        answer = engine.chat(case["messages"], max_new_tokens=60)
        assert answer.prompt_token_ids == case["prompt_tokens"]
        assert answer.token_ids == case["tokens"]
        assert answer.text == case["text"]


@often_in_c
def test_perplexity_of_a_text(backend: str, engines: Engines, expected: dict[str, Any], text: str) -> None:
    score = engines(backend=backend).score(text)
    assert len(score.token_ids) == expected["text"]["tokens"]
    assert math.log(score.perplexity) == pytest.approx(expected["text"]["mean_surprise"], abs=1e-4)


@pytest.mark.reference
@pytest.mark.exhaustive
def test_transformers_still_says_what_is_written_down(model_file: Any, expected: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="the comparison needs the reference extra")
    pytest.importorskip("transformers", reason="the comparison needs the reference extra")
    import make_real_golden

    now = make_real_golden.expected(model_file)
    assert_alike(now, {name: value for name, value in expected.items() if name != "made_by"})


def assert_alike(ours: Any, theirs: Any) -> None:
    """The same structure, with floats that may differ in rounding."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_alike(ours[name], theirs[name])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_alike(one, other)
    else:
        assert ours == (pytest.approx(theirs, rel=1e-4, abs=1e-4) if isinstance(ours, float) else theirs)
