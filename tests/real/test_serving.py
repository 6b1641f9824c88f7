"""Requests to an engine on the real model: batches, streams, the prefix cache, guides."""

import json
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.reference.philox import fold_in

from .conftest import Engines

pytestmark = pytest.mark.real

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "Emoji: 😀 😃 😄 😁 😆",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "Dear Sir or Madam,",
    "Q",
]
CAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "colours": {"type": "array", "items": {"enum": ["black", "white", "red"]}, "minItems": 1, "maxItems": 3},
        "indoor": {"type": "boolean"},
    },
    "required": ["name", "age", "colours", "indoor"],
    "additionalProperties": False,
}


def test_numpy_and_the_kernels_in_c_have_the_same_logits(engines: Engines, text: str) -> None:
    ids = engines().tokenizer.encode(text)[:200]
    ours, theirs = (engines(backend=backend).forward(ids) for backend in ("cpu", "numpy"))
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert np.abs(ours).max() > 10


@pytest.mark.parametrize("fields", [{}, {"do_sample": True, "seed": 7}], ids=["greedy", "sampled"])
def test_a_ragged_batch_of_eight_is_as_each_alone(fields: dict[str, Any], engine: Engine) -> None:
    together = engine.generate(PROMPTS, max_new_tokens=8, **fields)
    seeds = [fold_in(fields.get("seed", 0), i) if fields else None for i in range(len(PROMPTS))]
    alone = [
        engine.generate(prompt, max_new_tokens=8, **fields | {"seed": seed})
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in together}) == len(PROMPTS)


def test_different_strategies_in_one_batch_are_as_each_alone(engine: Engine) -> None:
    wanted: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 1},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 4},
        {"repetition_penalty": 1.3},
    ]
    found: dict[int, list[int]] = {}
    requests = []
    for fields, prompt in zip(wanted, PROMPTS, strict=False):  # one more is added after each step
        requests.append(engine.add(prompt, max_new_tokens=12, **fields))
        _collect(engine, found)
    while engine.busy:
        _collect(engine, found)
    for request, fields, prompt in zip(requests, wanted, PROMPTS, strict=False):
        assert found[request] == engine.generate(prompt, max_new_tokens=12, **fields).token_ids, fields


def _collect(engine: Engine, found: dict[int, list[int]]) -> None:
    for event in engine.step():
        found.setdefault(event.request_id, []).extend(event.token_ids)


def test_naive_generation_has_the_cached_tokens(engine: Engine) -> None:
    cached, naive = (engine.generate(PROMPTS[1], max_new_tokens=8, use_cache=use) for use in (True, False))
    assert cached.token_ids == naive.token_ids


@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[4]], ids=["words", "characters of several tokens"])
def test_a_stream_is_the_whole_text_in_whole_characters(prompt: str, engine: Engine) -> None:
    events = list(engine.stream(prompt, max_new_tokens=24))
    whole = engine.generate(prompt, max_new_tokens=24)
    assert "".join(event.text for event in events) == whole.text
    assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert len([event for event in events if event.text]) > 5
    assert not any("\ufffd" in event.text for event in events[:-1])


def test_the_next_turn_of_a_chat_computes_only_what_is_new(engines: Engines) -> None:
    """Tokens are those without the prefix cache."""
    keeping, plain = engines(prefix_cache=True), engines()
    messages = [{"role": "user", "content": "Name three fruits."}]
    first = keeping.chat(messages, max_new_tokens=40)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Which is the sweetest?"}]
    before = keeping.stats.prefill_tokens
    second = keeping.chat(messages, max_new_tokens=40)
    assert second.token_ids == plain.chat(messages, max_new_tokens=40).token_ids
    computed = keeping.stats.prefill_tokens - before
    assert 0 < computed < len(second.prompt_token_ids) - len(first.prompt_token_ids)


@pytest.mark.parametrize(
    "fields", [{}, {"do_sample": True, "seed": 3, "temperature": 1.5}, {"num_beams": 2}], ids=["greedy", "hot", "beams"]
)
def test_guided_json_fits_its_schema(fields: dict[str, Any], engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="guides need the extra guided")
    messages = [{"role": "user", "content": "Describe a cat, as JSON with name, age, colours and indoor."}]
    answer = engine.chat(messages, guided_json=CAT, max_new_tokens=120, **fields)
    cat = json.loads(answer.text)
    assert answer.completions[0].finish_reason == "stop"
    assert list(cat) == CAT["required"]
    assert isinstance(cat["name"], str) and len(cat["name"]) <= 20
    assert isinstance(cat["age"], int) and 0 <= cat["age"] <= 30
    assert 1 <= len(cat["colours"]) <= 3 and set(cat["colours"]) <= {"black", "white", "red"}
    assert isinstance(cat["indoor"], bool)
