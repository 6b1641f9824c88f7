"""Processors and stopping criteria written for transformers, its own and users', beside transformers.generate."""

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch
import transformers

from minillm import AsyncEngine, Engine
from minillm.errors import ParameterError

from .. import huggingface
from ..tiny import random_prompts

pytestmark = pytest.mark.reference

PROMPTS = random_prompts(5, seed=3)
LENGTH = 16
ENDLESS: dict[str, Any] = {"max_new_tokens": LENGTH, "eos_token_id": []}


class Odd(transformers.LogitsProcessor):
    """Only odd tokens."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        assert input_ids.dtype == torch.int64 and input_ids.shape[0] == scores.shape[0]
        return torch.where(torch.arange(scores.shape[1]) % 2 == 1, scores, -torch.inf)


def not_the_last(input_ids: Any, scores: Any) -> Any:
    """Never a token twice in a row; in place."""
    scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
    return scores


class Divisible(transformers.StoppingCriteria):
    """Stop at a token that a number divides."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        assert scores is None
        return input_ids[:, -1] % self.number == 0


PROCESSORS: dict[str, Any] = {
    "min-p": lambda: [transformers.MinPLogitsWarper(0.9)],
    "repetition": lambda: [transformers.RepetitionPenaltyLogitsProcessor(9.0)],
    "n-grams": lambda: [transformers.NoRepeatNGramLogitsProcessor(1)],
    "a list of them": lambda: transformers.LogitsProcessorList([Odd(), transformers.NoRepeatNGramLogitsProcessor(2)]),
    "a function": lambda: [not_the_last, Odd()],
}
CRITERIA: dict[str, Any] = {
    "length": lambda: [transformers.MaxLengthCriteria(12)],
    "time": lambda: [transformers.MaxTimeCriteria(0.0, initial_timestamp=0.0)],
    "end of text": lambda: [transformers.EosTokenCriteria(list(range(0, 96, 7)))],
    "a list of them": lambda: transformers.StoppingCriteriaList([Divisible(5), transformers.MaxLengthCriteria(14)]),
    "a function": lambda: [lambda input_ids, scores: input_ids.sum(-1) % 11 == 0],
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    theirs = huggingface.build(seed=4)
    folder = huggingface.save(theirs, tmp_path_factory.mktemp("callables"))
    return theirs, Engine(folder, backend="numpy", max_batch_size=8)


def expected(model: Any, prompt: list[int], fields: dict[str, Any], **functions: Any) -> list[int]:
    config = transformers.GenerationConfig(
        pad_token_id=0, eos_token_id=None, do_sample=False, max_new_tokens=LENGTH, **fields
    )
    out = model.generate(torch.tensor([prompt]), generation_config=config, **functions)
    return [int(token) for token in out[0, len(prompt) :]]


def without_padding(ours: list[int], theirs: list[int]) -> list[int]:
    return theirs[: len(ours)] if not any(theirs[len(ours) :]) else theirs


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_transformers_change_the_text_as_there(name: str, beams: int, both: Any) -> None:
    model, engine = both
    fields = {"num_beams": beams} | ({"renormalize_logits": True} if beams > 1 else {})
    make, changed = PROCESSORS[name], 0
    ours = engine.generate(PROMPTS, logits_processor=make(), **ENDLESS, **fields)
    plain = engine.generate(PROMPTS, **ENDLESS, **fields)
    for prompt, generation, other in zip(PROMPTS, ours, plain, strict=True):
        processors = transformers.LogitsProcessorList(make())
        assert generation.token_ids == expected(model, prompt, fields, logits_processor=processors)
        changed += generation.token_ids != other.token_ids
    assert changed or name == "min-p"  # which takes no best token away


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", CRITERIA)
def test_criteria_of_transformers_end_the_text_as_there(name: str, beams: int, both: Any) -> None:
    model, engine = both
    make, ended = CRITERIA[name], 0
    ours = engine.generate(PROMPTS, stopping_criteria=make(), num_beams=beams, **ENDLESS)
    for prompt, generation in zip(PROMPTS, ours, strict=True):
        criteria = transformers.StoppingCriteriaList(make())
        tokens = expected(model, prompt, {"num_beams": beams}, stopping_criteria=criteria)
        assert generation.token_ids == without_padding(generation.token_ids, tokens)
        ended += generation.completions[0].finish_reason == "stop"
    assert ended


def test_sampling_with_their_filter_draws_as_with_ours(both: Any) -> None:
    _, engine = both
    fields = {
        "do_sample": True,
        "seed": 3,
        "top_k": 0,
        "max_new_tokens": 40,
        "num_return_sequences": 3,
        "eos_token_id": [],
    }
    ours = engine.generate(PROMPTS, min_p=0.3, **fields)
    theirs = engine.generate(PROMPTS, logits_processor=[transformers.MinPLogitsWarper(0.3)], **fields)
    assert [c.token_ids for g in ours for c in g.completions] == [c.token_ids for g in theirs for c in g.completions]


def test_speculation_asks_functions_of_their_form_for_each_token(both: Any) -> None:
    _, engine = both
    fields: dict[str, Any] = {
        "logits_processor": [not_the_last], "stopping_criteria": [Divisible(31)],
        "max_new_tokens": 40, "eos_token_id": [],
    }  # fmt: skip
    plain = engine.generate(PROMPTS, **fields)
    guessed = engine.generate(PROMPTS, prompt_lookup_num_tokens=4, **fields)
    assert [g.token_ids for g in guessed] == [g.token_ids for g in plain]
    assert any(g.completions[0].finish_reason == "stop" for g in plain)


def test_criteria_end_streams_added_requests_and_those_of_the_async_engine(both: Any) -> None:
    _, engine = both
    criteria = [Divisible(5)]
    generation = engine.generate(PROMPTS[0], stopping_criteria=criteria, **ENDLESS)
    tokens = generation.token_ids
    assert tokens[-1] % 5 == 0 and not any(token % 5 == 0 for token in tokens[:-1])

    def gathered(events: list[Any]) -> tuple[list[int], Any, Any]:
        return [t for event in events for t in event.token_ids], events[-1].finish_reason, events[-1].stop_reason

    streamed = gathered([*engine.stream(PROMPTS[0], stopping_criteria=criteria, **ENDLESS)])
    assert streamed == (tokens, "stop", "Divisible")
    request, events = engine.add(PROMPTS[0], stopping_criteria=criteria, **ENDLESS), []
    while not (events and events[-1].request_finished):
        events += engine.step()
    assert gathered(events) == streamed and events[-1].request_id == request

    async def ask() -> list[Any]:
        async with AsyncEngine(Engine(engine.name, backend="numpy")) as asynchronous:
            stream = asynchronous.stream(PROMPTS[0], stopping_criteria=criteria, **ENDLESS)
            return [event async for event in stream]

    assert gathered(asyncio.run(ask())) == streamed


def test_without_torch_they_are_given_arrays(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = both
    monkeypatch.setitem(sys.modules, "torch", None)
    kinds = []

    def processor(input_ids: Any, scores: Any) -> Any:
        kinds.append((type(input_ids), input_ids.shape, scores.dtype))
        scores[:, ::2] = -np.inf
        return scores

    fields = {"logits_processor": [processor], "stopping_criteria": [lambda ids, scores: ids[:, -1] % 5 == 0]}
    tokens = engine.generate(PROMPTS[0], **ENDLESS, **fields).token_ids
    assert all(token % 2 for token in tokens) and kinds[0] == (np.ndarray, (1, len(PROMPTS[0])), np.float32)


@pytest.mark.parametrize("answer", [None, 1, "stop", [True, False], torch.ones(2, dtype=torch.bool), 0.0], ids=repr)
def test_a_criterion_that_returns_no_bool_is_refused(answer: Any, both: Any) -> None:
    with pytest.raises(ParameterError, match=r"stopping_criteria .* should return True or False"):
        both[1].generate(PROMPTS[0], stopping_criteria=[lambda ids, scores: answer], max_new_tokens=3)


def test_a_processor_of_their_form_that_returns_other_scores_is_refused(both: Any) -> None:
    with pytest.raises(ParameterError, match=r"should return scores, float32 \[1, 96\], found"):
        both[1].generate(PROMPTS[0], logits_processor=[lambda ids, scores: scores[0]], max_new_tokens=3)
