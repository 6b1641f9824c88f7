"""Events and generations say more than tokens: their bytes, counts, times, what ended them, the end of the request."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.decoding.event import Event
from minillm.engine.results import Generation

from ..comparing import assert_same_results
from ..tiny import write_checkpoint

PROMPT = [40, 41, 42, 43, 44]

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several": {"do_sample": True, "seed": 1, "num_return_sequences": 7},  # in two parts
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "fewer": {"num_beams": 3, "num_return_sequences": 3, "guided_choice": ["a"]},  # than asked for
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 2},
    "constrained": {"num_beams": 3, "num_return_sequences": 2, "force_words_ids": [[7]]},
    "particles": {"do_sample": True, "seed": 1, "num_particles": 4, "num_return_sequences": 3, "potential": len},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 3},
    "lookup": {"prompt_lookup_num_tokens": 3, "do_sample": True, "seed": 1, "num_return_sequences": 2},
    "prompt": {"max_new_tokens": 0, "echo": True, "do_sample": True, "num_return_sequences": 2},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("events"), seed=2, max_position_embeddings=256)
    with Engine(folder, max_batch_size=4, prefix_cache=True) as engine:
        yield engine


def events_of(engine: Engine, request_id: int) -> list[Event]:
    events = []
    while engine.busy or not events:
        events += engine.step()
    assert {event.request_id for event in events} == {request_id}
    return events


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_last_event_of_a_request_says_so(engine: Engine, name: str) -> None:
    fields = {"max_new_tokens": 6} | STRATEGIES[name]
    events = events_of(engine, engine.add(PROMPT, **fields))
    assert [event.request_finished for event in events] == [False] * (len(events) - 1) + [True]
    assert_same_results(Generation.of(PROMPT, events), engine.generate(PROMPT, **fields))
    for index in {event.index for event in events}:
        own = [event for event in events if event.index == index]
        generated = 0
        for event in own:
            generated += len(event.token_ids)
            assert (event.prompt_tokens, event.generated_tokens) == (5, generated)
            assert (event.queued_seconds is not None) == (event.finish_reason is not None)
        assert [event.finish_reason is not None for event in own] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_so_does_that_of_an_aborted_or_failed_one(engine: Engine, steps: int) -> None:
    def fails(history: Any, logits: Any, xp: Any) -> Any:
        if len(history.sequence(0)) >= len(PROMPT) + steps:
            raise ZeroDivisionError
        return logits

    request_id = engine.add(PROMPT, do_sample=True, num_return_sequences=7, seed=1)
    events = [event for _ in range(steps) for event in engine.step()]
    engine.abort(request_id)
    events += engine.step()
    assert [event.request_finished for event in events] == [False] * (len(events) - 1) + [True]
    assert sorted(event.index for event in events if event.finish_reason == "abort") == list(range(7))
    events = events_of(engine, engine.add(PROMPT, logits_processor=[fails], num_beams=2, num_return_sequences=2))
    assert [event.request_finished for event in events] == [False] * (len(events) - 1) + [True]
    assert {type(event.error) for event in events} == {ZeroDivisionError}


def test_counts_and_times_add_up(engine: Engine) -> None:
    prompt = list(range(100, 180))
    began = time.monotonic()
    [first, second] = engine.generate([prompt, [*prompt[:-1], 7]], max_new_tokens=4, eos_token_id=[])
    elapsed = time.monotonic() - began
    for generation in (first, second):
        parts = generation.queued_seconds, generation.prefill_seconds, generation.decode_seconds
        assert min(parts) > 0
        assert sum(parts) <= elapsed
        assert (generation.prompt_tokens, generation.generated_tokens) == (80, 4)
    assert engine.generate(prompt, max_new_tokens=4).cached_tokens == 79
    assert engine.generate(prompt, max_new_tokens=4, use_cache=False).cached_tokens == 0


def test_one_that_never_ran_only_waited(engine: Engine) -> None:
    request_id = engine.add(PROMPT)
    engine.abort(request_id)
    [event] = engine.step()
    assert event.queued_seconds is not None and event.queued_seconds > 0
    assert (event.prefill_seconds, event.decode_seconds, event.prompt_tokens) == (0, 0, 5)


def test_what_ended_a_text(engine: Engine) -> None:
    plain = engine.generate("Hello", max_new_tokens=6, eos_token_id=[], temperature=1.0, do_sample=True, seed=5)
    common: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "do_sample": True, "seed": 5}
    third = plain.token_ids[2]
    ended = engine.generate("Hello", eos_token_id=[third], **common).completions[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", third)
    character = plain.text[2]
    ended = engine.generate("Hello", stop_strings=["never", character], eos_token_id=[], **common).completions[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", character)
    ended = plain.completions[0]
    assert (ended.finish_reason, ended.stop_reason) == ("length", None)
    assert engine.tokenizer is not None  # a stop string that spells a special token stands for it
    special = min(engine.tokenizer.special_ids)
    spelled = engine.tokenizer.token(special)
    ended = engine.generate(
        "Hello",
        stop_strings=[spelled],
        eos_token_id=[],
        logits_processor=[lambda history, logits, xp: only(logits, special)],
    ).completions[0]
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", spelled, "")


def only(scores: Any, token: int) -> Any:
    scores[:] = -float("inf")
    scores[:, token] = 0.0
    return scores


def test_the_bytes_of_the_tokens_are_those_of_the_text(engine: Engine) -> None:
    assert engine.tokenizer is not None
    for seed in range(5):
        generation = engine.generate("Hello", do_sample=True, seed=seed, max_new_tokens=30, eos_token_id=[])
        [completion] = generation.completions
        bytes_of = [b"" if i in engine.tokenizer.special_ids else piece for i, piece in pairs(completion)]
        assert b"".join(bytes_of).decode("utf-8", "replace") == completion.text
        for i, piece in pairs(completion):
            if i in engine.tokenizer.special_ids:
                assert piece.decode() == engine.tokenizer.token(i)


def pairs(completion: Any) -> Iterator[tuple[int, bytes]]:
    return zip(completion.token_ids, completion.token_bytes, strict=True)


def test_an_engine_without_a_tokenizer_has_no_bytes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).unlink()
    with Engine(folder) as engine:
        assert engine.generate(PROMPT, max_new_tokens=1).completions[0].token_bytes == []
