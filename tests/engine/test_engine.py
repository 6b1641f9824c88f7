"""The public interface: results, streams, and their equality."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine, GenerationConfig
from minillm.decoding.event import Event
from minillm.engine.results import Completion
from minillm.models import published
from minillm.reference.philox import fold_in

from ..comparing import assert_same_results
from ..tiny import logits_of, runner_of, tiny_config, tiny_model, write_checkpoint

TEXTS = ["A list of colors: red,", "The quick brown", "日本語の", "He", "def add(a, b):\n    return a"]
CONFIGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "naive": {"use_cache": False, "max_new_tokens": 6},
    "sampling": {"do_sample": True, "seed": 3, "temperature": 1.3},
    "samples": {"do_sample": True, "seed": 3, "num_return_sequences": 3, "top_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "end": {"eos_token_id": list(range(100, 500, 3))},
    "stop strings": {"stop_strings": ["e", " t", "o"]},
    "stop strings kept": {"stop_strings": ["e", " t", "o"], "include_stop": True},
    "echo": {"echo": True, "do_sample": True, "seed": 1, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
}


def collected(events: list[Event], count: int = 1) -> list[Completion]:
    completions = [Completion() for _ in range(count)]
    for event in events:
        completions[event.index].add(event)
    return completions


# --- generate ---------------------------------------------------------------------------------------------------------


def test_text_is_that_of_the_tokens(engine: Engine) -> None:
    for text in TEXTS:
        out = engine.generate(text, max_new_tokens=15, eos_token_id=[])
        ids = engine.tokenizer.encode(text)
        assert out.prompt_token_ids == ids
        whole, before = engine.tokenizer.decode(ids + out.token_ids), engine.tokenizer.decode(ids)
        assert before + out.text == whole
        assert (out.completions[0].finish_reason, len(out.token_ids)) == ("length", 15)


def test_the_prompts_of_a_list_draw_differently_by_one_seed(engine: Engine) -> None:
    fields: dict[str, Any] = {"do_sample": True, "seed": 5, "top_k": 0, "max_new_tokens": 12, "temperature": 1.5}
    results = engine.generate(["Once upon a time"] * 4, **fields)
    assert_same_results(results, engine.generate(["Once upon a time"] * 4, **fields))
    assert len({one.text for one in results}) == 4
    assert_same_results(results[0], engine.generate("Once upon a time", **fields))
    assert_same_results(results[2], engine.generate("Once upon a time", **fields | {"seed": fold_in(5, 2)}))
    other = engine.generate(["A list", "Monday", "Once upon a time"], GenerationConfig(**fields))
    assert_same_results(results[2], other[2])
    beams = {"num_beams": 2, "max_new_tokens": 4}
    assert len({one.text for one in engine.generate(["Once upon a time"] * 3, **fields | beams)}) > 1


def test_text_and_its_token_ids_are_one_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode(TEXTS[0])
    expected = engine.generate(TEXTS[0])
    for prompt in (ids, np.array(ids), tuple(ids)):
        assert_same_results(engine.generate(prompt), expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_list_gives_what_each_prompt_gives_alone(engine: Engine, name: str) -> None:
    config = GenerationConfig(**CONFIGS[name])
    seeds = [None if config.seed is None else fold_in(config.seed, i) for i in range(len(TEXTS))]
    config = config.merged(max_new_tokens=config.max_new_tokens or 8)
    alone = [engine.generate(text, config, seed=seed) for text, seed in zip(TEXTS, seeds, strict=True)]
    together = engine.generate(TEXTS, config)
    for ours, expected in zip(together, alone, strict=True):
        assert [c.token_ids for c in ours.completions] == [c.token_ids for c in expected.completions]
        assert [c.text for c in ours.completions] == [c.text for c in expected.completions]
        assert [c.finish_reason for c in ours.completions] == [c.finish_reason for c in expected.completions]


def test_fields_win_over_the_config_and_leave_it_as_it_was(engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=3)
    assert len(engine.generate("He", config, max_new_tokens=5, eos_token_id=[]).token_ids) == 5
    assert len(engine.generate("He", config, eos_token_id=[]).token_ids) == 3


def test_no_prompts_give_no_generations(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_the_empty_prompt_is_the_token_to_begin_with(engine: Engine) -> None:
    assert engine.generate([[]])[0].prompt_token_ids == engine.generate("").prompt_token_ids == [2]


def test_the_checkpoints_own_defaults_are_used_and_give_way(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=2)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4, "eos_token_id": 1}))
    engine = Engine(folder)
    assert len(engine.generate("He").token_ids) == 4
    assert len(engine.generate("He", max_new_tokens=6).token_ids) == 6


@pytest.mark.parametrize("stop", ["e", "o", " "])
def test_beams_that_stop_strings_end_in_droves(engine: Engine, stop: str) -> None:
    out = engine.generate("The quick", num_beams=6, num_return_sequences=6, stop_strings=[stop], max_new_tokens=20)
    assert len(out.completions) == 6
    for completion in out.completions:
        assert stop not in completion.text
        assert completion.finish_reason == (
            "stop" if stop in engine.tokenizer.decode(completion.token_ids) else "length"
        )


@pytest.mark.slow
def test_a_thousand_prompts_in_little_memory(checkpoint: Path) -> None:
    engine = Engine(checkpoint, max_batch_size=4, cache_bytes=2 * 128 * 2 * 32 * 2 * 4)
    assert engine.runner.cache.num_pages == 2
    distinct = [[5 + i, 6 + i % 7] for i in range(40)]
    outs = engine.generate([distinct[i % 40] for i in range(1000)], max_new_tokens=2)
    assert [out.token_ids for out in outs] == [engine.generate(p, max_new_tokens=2).token_ids for p in distinct] * 25
    assert engine.runner.cache.free_pages == 2


def test_a_shape_by_name_with_random_weights(monkeypatch) -> None:
    monkeypatch.setitem(published(), "opt-tiny", tiny_config())
    engines = [Engine.random("opt-tiny", seed=seed, std=0.3) for seed in (1, 1, 2)]
    assert all(engine.tokenizer is None for engine in engines)
    first, same, other = (engine.generate([5, 6, 7], max_new_tokens=12) for engine in engines)
    assert first == same != other
    assert (first.completions[0].text, len(first.token_ids)) == ("", 12)


# --- log-probabilities, echo, forward, score --------------------------------------------------------------------------


def test_forward_and_score_agree_with_the_model(engine: Engine) -> None:
    ids = engine.tokenizer.encode(TEXTS[0])
    expected = logits_of(runner_of(engine.runner.model), ids)
    logits = engine.forward(ids)
    assert (logits.shape, logits.dtype) == ((len(ids), 512), np.float32)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    exact = expected.astype(np.float64) - np.log(np.exp(expected.astype(np.float64)).sum(-1, keepdims=True))
    chosen = exact[np.arange(len(ids) - 1), ids[1:]]
    score = engine.score(TEXTS[0])
    assert (score.token_ids, score.logprobs[0]) == (ids, None)
    np.testing.assert_allclose(score.logprobs[1:], chosen, rtol=0, atol=1e-4)
    assert score.total == pytest.approx(chosen.sum(), abs=1e-3)
    assert score.perplexity == pytest.approx(math.exp(-chosen.mean()), rel=1e-3)


def test_one_token_alone_has_no_score(engine: Engine) -> None:
    score = engine.score([5])
    assert (score.logprobs, score.total, score.perplexity) == ([None], 0.0, 1.0)


def test_echo_puts_the_prompt_and_its_log_probabilities_in_front(engine: Engine) -> None:
    out = engine.generate(TEXTS[0], echo=True, top_logprobs=3, max_new_tokens=8, eos_token_id=[])
    plain = engine.generate(TEXTS[0], max_new_tokens=8, eos_token_id=[])
    assert out.text == TEXTS[0] + plain.text
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    np.testing.assert_allclose(out.prompt_logprobs[1:], engine.score(TEXTS[0]).logprobs[1:], rtol=0, atol=1e-5)
    [completion] = out.completions
    whole = engine.score(out.prompt_token_ids + out.token_ids).logprobs
    np.testing.assert_allclose(completion.logprobs, whole[-8:], rtol=0, atol=1e-4)
    for token, logprob, top in zip(out.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
        assert top[0][0] == token  # greedy: the likeliest
        assert top[0][1] == pytest.approx(logprob, abs=1e-6)
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)


# --- stream, and the step loop ----------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(text, name, marks=() if text == TEXTS[2] or name == "stop strings" else pytest.mark.exhaustive)
        for text in TEXTS
        for name in CONFIGS
    ],
)
def test_what_is_streamed_is_what_is_returned(engine: Engine, text: str, name: str) -> None:
    fields = {"max_new_tokens": 14, **CONFIGS[name]}
    expected = engine.generate(text, **fields).completions
    events = list(engine.stream(text, **fields))
    assert_same_results(collected(events, len(expected)), expected)
    assert all(event.finish_reason is None for event in events[:-1] if len(expected) == 1)
    if "num_beams" not in fields and len(expected) == 1 and "echo" not in fields:
        assert all(len(event.token_ids) == 1 for event in events)


def test_the_stream_gives_each_token_when_it_is_there(engine: Engine) -> None:
    stream = engine.stream("He", max_new_tokens=10, eos_token_id=[])
    before = engine.stats.steps
    for i, _ in enumerate(stream, start=1):
        assert engine.stats.steps - before == i


def test_an_engine_serves_others_between_the_steps_of_a_stream(engine: Engine) -> None:
    alone = [engine.generate(text, max_new_tokens=6).completions for text in TEXTS[:2]]
    first, second = (engine.stream(text, max_new_tokens=6) for text in TEXTS[:2])
    events = [next(first), next(second)]
    assert (
        engine.generate(TEXTS[3], max_new_tokens=3).token_ids == engine.generate(TEXTS[3], max_new_tokens=3).token_ids
    )
    assert engine.forward([5, 6]).shape == (2, 512)
    assert collected([events[0], *first]) == alone[0]
    assert collected([events[1], *second]) == alone[1]


def test_requests_are_added_stepped_and_reported_by_their_ids(engine: Engine) -> None:
    expected = engine.generate(TEXTS, max_new_tokens=7)
    ids = [engine.add(text, max_new_tokens=7) for text in TEXTS[:3]]
    events = engine.step()
    ids += [engine.add(text, max_new_tokens=7) for text in TEXTS[3:]]
    while engine.busy:
        events += engine.step()
    for request_id, generation in zip(ids, expected, strict=True):
        assert collected([e for e in events if e.request_id == request_id]) == generation.completions
    assert engine.step() == []


def test_a_running_generate_keeps_the_events_of_others_for_them(engine: Engine) -> None:
    request_id = engine.add("He", max_new_tokens=3, eos_token_id=[])
    engine.generate("The quick", max_new_tokens=8)
    events = engine.step()
    assert [event.request_id for event in events] == [request_id] * 3
    assert events[-1].finish_reason == "length"


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_a_kept_prefix_saves_work_and_changes_nothing(checkpoint: Path) -> None:
    plain, kept = Engine(checkpoint, prefix_cache=False), Engine(checkpoint)
    for engine in (plain, kept):
        line = engine.tokenizer.encode("A list")
        for _ in range(3):
            line = line + engine.generate(line, max_new_tokens=6, eos_token_id=[]).token_ids + [40, 41]
        engine.line = line
    assert kept.line == plain.line
    assert kept.stats.prefill_tokens < plain.stats.prefill_tokens / 1.5


def test_one_page_is_enough_for_a_conversation(checkpoint: Path) -> None:
    engine = Engine(checkpoint, max_batch_size=1)
    assert engine.runner.cache.num_pages == 1
    line = engine.tokenizer.encode("A list")
    for _ in range(3):
        line = line + engine.generate(line, max_new_tokens=6).token_ids + [40]
    reference = runner_of(tiny_model(seed=2, vocab_size=512))
    assert line[-2] == int(logits_of(reference, line[:-2])[-1].argmax())
