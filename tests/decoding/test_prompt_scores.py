"""A prompt's log-probabilities, taken from the batch, against the logits of a pass over the prompt alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.decoding.event import Event
from minillm.decoding.prompt_scores import PromptScores
from minillm.engine.results import Generation
from minillm.errors import ParameterError

from ..tiny import loop_of, random_prompts, request_for, tiny_runner, write_checkpoint

PROMPT = np.random.default_rng(3).integers(3, 500, 70).tolist()
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 1, "num_return_sequences": 6},  # in two parts
    "processors": {"repetition_penalty": 1.5},
    "mirostat": {"do_sample": True, "mirostat": 2, "seed": 2},
    "contrastive search": {"penalty_alpha": 0.4, "top_k": 3},  # asks for all rows itself
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookahead": {"lookahead_window": 3},
    "naive": {"use_cache": False},
    "guided": {"guided_regex": "[a-z]{1,4}"},
    "none": {"max_new_tokens": 0},
    "draft": {"num_assistant_tokens": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("scored"), seed=2, max_position_embeddings=128)


@pytest.fixture(scope="module", params=["chunks", pytest.param("whole", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    """One that computes a prompt at once, and one in small chunks."""
    with pytest.MonkeyPatch.context() as patch, Engine(folder, max_batch_size=4, prefix_cache=True, draft=folder) as it:
        if request.param == "chunks":
            patch.setattr("minillm.engine.scheduler.MAX_ROWS", 9)
        yield it


def assert_scores(engine: Engine, generation: Generation, top: int) -> None:
    """Log-softmax of the logits of a pass of its own."""
    ids = generation.prompt_token_ids
    logits = engine.forward(ids).astype(np.float64)[:-1]
    log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_probs -= logits.max(-1, keepdims=True)
    assert generation.prompt_logprobs is not None
    first, *found = generation.prompt_logprobs
    assert first is None
    np.testing.assert_allclose(found, log_probs[np.arange(len(ids) - 1), ids[1:]], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found, engine.score(ids).logprobs[1:], rtol=0, atol=1e-5)
    if not top:
        assert generation.prompt_top_logprobs is None
        return
    assert generation.prompt_top_logprobs is not None
    first_top, *tops = generation.prompt_top_logprobs
    assert first_top is None
    assert [len(each) for each in tops] == [top] * len(tops)
    for row, each in zip(log_probs, tops, strict=True):
        tokens, values = zip(*each, strict=True)
        np.testing.assert_allclose(values, np.sort(row)[::-1][:top], rtol=0, atol=1e-5)
        np.testing.assert_allclose(row[list(tokens)], values, rtol=0, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_with_every_strategy(engine: Engine, name: str) -> None:
    """Twice: what is in the prefix cache has no logits, so it is computed again."""
    fields = {"max_new_tokens": 3, "num_assistant_tokens": 0, "echo": True} | STRATEGIES[name]
    top = 0 if "num_beams" in fields else 4
    plain = engine.generate(PROMPT, **fields | {"echo": fields["max_new_tokens"] == 0})
    for _ in range(2):
        generation = engine.generate(PROMPT, **fields, logprobs=True, top_logprobs=top)
        assert_scores(engine, generation, top)
        assert generation.cached_tokens == 0
        assert [c.token_ids for c in generation.completions] == [c.token_ids for c in plain.completions]


def test_streams_report_them_once_and_first(engine: Engine) -> None:
    fields: dict[str, Any] = {"echo": True, "top_logprobs": 2, "max_new_tokens": 3}
    events = list(engine.stream(PROMPT, **fields))
    assert [event.prompt_logprobs is not None for event in events] == [True] + [False] * (len(events) - 1)
    assert_scores(engine, Generation.of(PROMPT, events), 2)


@pytest.mark.longer
def test_beside_others(engine: Engine) -> None:
    prompts = random_prompts(6, seed=1, longest=60)
    expected = engine.generate(prompts, max_new_tokens=8)
    scored = [engine.add(prompt, echo=True, logprobs=True, max_new_tokens=8) for prompt in prompts[::2]]
    others = [engine.add(prompt, max_new_tokens=8) for prompt in prompts]
    events: dict[Any, list[Any]] = {}
    while engine.busy:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    for request_id, whole in zip(others, expected, strict=True):
        assert Generation.of(whole.prompt_token_ids, events[request_id]).token_ids == whole.token_ids
    for request_id, whole in zip(scored, expected[::2], strict=True):
        generation = Generation.of(whole.prompt_token_ids, events[request_id])
        assert generation.token_ids == whole.token_ids
        assert_scores(engine, generation, 0)


def test_a_pass_computes_no_more_rows_than_the_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.engine.scheduler.MAX_ROWS", 10)
    engine, passes = Engine(folder), []
    forward = engine.runner.forward

    def counted(sequences: Any, counts: Any, rows: Any, draws: Any) -> Any:
        passes.append(len(rows))
        return forward(sequences, counts, rows, draws)

    monkeypatch.setattr(engine.runner, "forward", counted)
    engine.generate([PROMPT, PROMPT[:40], PROMPT[:7]], echo=True, logprobs=True, max_new_tokens=1)
    assert max(passes) <= 10 + 3  # the last row of each prompt
    assert sum(passes) == 69 + 39 + 6 + 3


def test_a_preempted_prompt_scores_each_token_once() -> None:
    runner = tiny_runner(seed=2, pages=12, page_size=4)
    expected = loop_of(target=tiny_runner(seed=2))
    loop = loop_of(target=runner, chunk=5)
    fields: dict[str, Any] = {"echo": True, "top_logprobs": 2, "max_new_tokens": 4}

    def scores(loop: Any, *, preempting: bool) -> dict[int, Event]:
        found: dict[int, Event] = {}
        requests = [request_for(prompt, **fields) for prompt in random_prompts(3, seed=5, longest=30)]
        ids = [loop.add(request) for request in requests]
        steps = 0
        while loop.busy:
            for event in loop.step():
                assert event.error is None
                if event.prompt_logprobs is not None:
                    assert event.request_id not in found
                    found[event.request_id] = event
            steps += 1
            if preempting and steps % 2 == 0 and loop.scheduler.running[1:]:  # the first never is
                loop.scheduler.preempt(loop.scheduler.running[-1])
        assert sorted(found) == ids
        return found

    alone, together = scores(expected, preempting=False), scores(loop, preempting=True)
    assert loop.stats.preemptions > 3
    for request_id, one in alone.items():
        other = together[request_id]
        np.testing.assert_allclose(one.prompt_logprobs[1:], other.prompt_logprobs[1:], rtol=0, atol=1e-5)
        assert [top and [token for token, _ in top] for top in one.prompt_top_logprobs] == [
            top and [token for token, _ in top] for top in other.prompt_top_logprobs
        ]


def test_positions_that_are_computed_again_are_not_scored_again() -> None:
    scores = PromptScores([5, 6, 7, 8, 9], top=1)
    assert scores.wanted(0, 2) == range(2)
    scores.add(tiny_runner().backend.sampler, np.zeros((2, 96), np.float32))
    assert scores.wanted(0, 3) == scores.wanted(2, 1) == range(2, 3)
    assert scores.wanted(2, 3) == range(2, 4)  # nothing follows the last one
    assert not scores.wanted(0, 2)
    assert not scores.complete


def test_a_prompt_alone(engine: Engine) -> None:
    """Nothing is generated, so it may fill the context; without echo there is nothing to ask for."""
    whole = np.random.default_rng(4).integers(3, 500, 128).tolist()
    [completion] = engine.generate(whole, max_new_tokens=0, echo=True, logprobs=True).completions
    assert (completion.token_ids, completion.finish_reason, completion.logprobs) == ([], "length", None)
    assert engine.tokenizer is not None
    assert completion.text == engine.tokenizer.decode(whole)
    assert (
        len(engine.generate("Hello", max_new_tokens=0, echo=True, do_sample=True, num_return_sequences=3).completions)
        == 3
    )
    with pytest.raises(ParameterError, match="max_new_tokens=0 generates nothing: raise it, or set echo=True"):
        engine.generate(whole, max_new_tokens=0)
    with pytest.raises(ParameterError, match="max_length=1 leaves no room"):
        engine.generate("Hello", max_length=1, echo=True)


def test_one_token_has_none(engine: Engine) -> None:
    generation = engine.generate([5], echo=True, top_logprobs=2, max_new_tokens=1)
    assert (generation.prompt_logprobs, generation.prompt_top_logprobs) == ([None], [None])
