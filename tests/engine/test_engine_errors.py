"""Errors of the engine: each has a clear message and leaves the engine usable."""

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.decoding.prompts import encode_prompt
from minillm.errors import (
    CacheFullError,
    DeviceError,
    EngineStateError,
    ModelNotFoundError,
    NumericalError,
    ParameterError,
    PromptError,
)
from minillm.models import published

from ..tiny import tiny_config, tiny_model, write_checkpoint


def assert_untouched(engine: Engine) -> None:
    assert not engine.busy
    assert engine.stats.steps == 0
    assert engine.runner.cache.free_pages == engine.runner.cache.num_pages


# --- prompts ----------------------------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "too long": ([5] * 64, "the prompt has 64 tokens; the context holds 64, which must leave room for 1 more"),
    "outside": ([5, 512], "token id 512 is outside the vocabulary of 512"),
    "negative": ([5, -1], "token id -1 is outside the vocabulary of 512"),
    "no number": ([5, 1.5], "a prompt should be text or a list of token ids, found 1.5"),
    "true": ([5, True], "a prompt should be text or a list of token ids, found True"),
    "bytes": (b"red,", "found b'red,'; decode it first"),
    "bytes in it": ([5, b"red,"], "found b'red,' in it; decode it first"),
    "a message": ([5, {"role": "user", "content": "Hi"}], "in it; messages are for `chat`"),
    "broken text": ("a\udcffb", "not valid UTF-8"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_named_and_nothing_has_run(engine: Engine, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(PromptError, match=message):
        engine.generate(prompt)
    with pytest.raises(PromptError, match=message):
        engine.generate(["fine", prompt, "fine"])
    with pytest.raises(PromptError, match=message):
        engine.stream(prompt)  # at once, not with the first step
    with pytest.raises(PromptError, match=message):
        engine.add(prompt)
    assert_untouched(engine)


def test_an_empty_prompt_needs_a_token_to_begin_with() -> None:
    with pytest.raises(PromptError, match="the prompt is empty, and the model has no BOS token"):
        encode_prompt([], None, replace(tiny_model().config, bos_token_id=None))


def test_forward_and_score_take_the_whole_context(engine: Engine) -> None:
    assert engine.forward([5] * 64).shape == (64, 512)
    assert len(engine.score([5] * 64).logprobs) == 64
    with pytest.raises(PromptError, match="65 tokens; the context holds 64"):
        engine.forward([5] * 65)


def test_a_model_without_a_tokenizer_takes_ids_only(monkeypatch) -> None:
    monkeypatch.setitem(published(), "opt-tiny", tiny_config())
    with Engine.random("opt-tiny") as engine:
        with pytest.raises(PromptError, match="this model has no tokenizer: give the prompt as token ids"):
            engine.generate("text")
        with pytest.raises(ParameterError, match="stop_strings needs a tokenizer"):
            engine.generate([5], stop_strings=["x"])


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperatur": 1.0}, "unknown generation field 'temperatur': did you mean 'temperature'"),
        ({"temperature": 0.5}, "temperature=0.5 has no effect without do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "for greedy decoding set do_sample=False"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5: expected a number above 0 and at most 1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: expected a whole number of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 generates nothing: raise it, or set echo=True for the prompt alone"),
        ({"eos_token_id": 512}, "eos_token_id: 512 is not in the vocabulary of 512"),
        (
            {"num_beams": 17},
            "the request needs 17 sequences at once, and max_batch_size is 16: raise max_batch_size to at least 17",
        ),
        ({"num_beams": 2, "top_logprobs": 1}, "top_logprobs is not supported with num_beams > 1"),
        ({"max_length": 3}, "max_length=3 leaves no room for new tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_field_is_named_before_anything_runs(engine: Engine, fields: dict[str, Any], message: str) -> None:
    for call in (engine.generate, engine.stream, engine.add):
        with pytest.raises(ParameterError, match=message.replace("(", r"\(")):
            call([5, 6, 7, 8], **fields)
    with pytest.raises(ParameterError):
        engine.generate([[5, 6, 7, 8], [6, 7, 8, 9]], **fields)
    assert_untouched(engine)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "cuda", "backend": "numpy"}, DeviceError, "backend 'numpy' computes on a CPU: leave it out"),
        ({"device": "cuda", "cache_dtype": "int8"}, DeviceError, "cache_dtype 'int8' is for a CPU"),
        ({"device": "cuda", "cache_dtype": "int4"}, DeviceError, "cache_dtype 'int4' is for a CPU"),
        ({"device": "tpu"}, DeviceError, "device 'tpu' is not known: expected 'cpu', 'cuda'"),
        ({"dtype": "float99"}, DeviceError, "dtype 'float99' is not known: expected 'auto', 'float32'"),
        ({"backend": "abacus"}, DeviceError, "backend 'abacus' is not known: expected 'auto', 'cpu', 'numpy'"),
        ({"backend": "numpy", "cache_dtype": "int8"}, DeviceError, "cache_dtype 'int8' needs backend 'cpu'"),
        ({"backend": "numpy", "deterministic": True}, DeviceError, "deterministic=True needs backend 'cpu'"),
        ({"device": "cuda", "deterministic": True}, DeviceError, "deterministic=True is for a CPU"),
        ({"backend": "numpy", "compute_dtype": "bfloat16"}, DeviceError, "compute_dtype 'bfloat16' needs backend"),
        ({"device": "cuda", "compute_dtype": "bfloat16"}, DeviceError, "compute_dtype 'bfloat16' is for a CPU"),
        ({"compute_dtype": "float16"}, DeviceError, "compute_dtype 'float16' is not known: expected 'float32', 'bfl"),
        ({"cache_dtype": "int3"}, DeviceError, "cache_dtype 'int3' is not known"),
        ({"threads": 0}, ParameterError, "threads should be a whole number of at least 1, found 0"),
        ({"max_batch_size": 0}, ParameterError, "max_batch_size should be a whole number of at least 1, found 0"),
        ({"cache_bytes": 1000}, ParameterError, "cache_bytes should be at least"),
    ],
    ids=str,
)
def test_a_bad_argument_of_the_engine_is_named(checkpoint: Path, arguments, error, message: str) -> None:
    with pytest.raises(error, match=message):
        Engine(checkpoint, **arguments)


def test_no_folder_and_no_shape() -> None:
    with pytest.raises(ModelNotFoundError):
        Engine("/there/is/no/such/folder")
    with pytest.raises(
        ParameterError, match=r"shape 'opt-1b' is not known: expected one of opt-125m, opt-350m, opt-1\.3b"
    ):
        Engine.random("opt-1b")


def test_a_request_larger_than_the_cache_is_refused(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr("minillm.backends.memory.Memory.page_size", 4)
    engine = Engine(checkpoint, cache_bytes=3 * 4 * 2 * 32 * 2 * 4)
    with pytest.raises(CacheFullError, match="may need 4 pages of the K/V cache, which has 3: raise cache_bytes"):
        engine.generate([5] * 5, max_new_tokens=8)
    assert len(engine.generate([5] * 5, max_new_tokens=7, eos_token_id=[]).token_ids) == 7


# --- the context's end ------------------------------------------------------------------------------------------------


def test_new_tokens_past_the_context_are_cut_with_a_warning(engine: Engine, caplog) -> None:
    out = engine.generate([5] * 60, max_new_tokens=10, eos_token_id=[])
    assert (len(out.token_ids), out.completions[0].finish_reason) == (4, "length")
    assert "10 new tokens exceed the context of 64: 4 fit after the prompt" in caplog.text


def test_a_prompt_that_fills_the_context_gets_one_token(engine: Engine, caplog) -> None:
    for fields in ({}, {"use_cache": False}, {"num_beams": 3}, {"do_sample": True}):
        out = engine.generate(list(range(5, 68)), eos_token_id=[], **fields)
        assert (len(out.token_ids), out.completions[0].finish_reason) == (1, "length")
    assert len(engine.generate([5] * 62, max_new_tokens=2, eos_token_id=[]).token_ids) == 2
    assert "62" not in caplog.text.replace("context of 64", "")


# --- aborting, closing, threads ---------------------------------------------------------------------------------------


def test_an_aborted_request_frees_its_memory_and_reports_its_end(engine: Engine) -> None:
    running, other = engine.add([5, 6], max_new_tokens=30, eos_token_id=[]), engine.add([7], max_new_tokens=3)
    engine.step()
    engine.abort(running)
    engine.abort(running)
    engine.abort(12345)
    events = []
    while engine.busy:
        events += engine.step()
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends[running] == "abort"
    assert set(ends) == {running, other}


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_stream_drops_its_request(engine: Engine, taken: int) -> None:
    stream = engine.stream([5, 6], max_new_tokens=30, eos_token_id=[])
    for _ in range(taken):
        next(stream)
    assert engine.busy
    stream.close()
    assert not engine.busy
    assert list(stream) == []


def test_a_stream_that_is_forgotten_drops_its_request(engine: Engine) -> None:
    engine.stream([5, 6], max_new_tokens=30)
    for event in engine.stream([5, 6], max_new_tokens=30, eos_token_id=[]):
        assert event.token_ids
        break
    del event
    gc.collect()
    assert not engine.busy


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    engine = Engine(checkpoint)
    stream = engine.stream([5, 6], max_new_tokens=30, eos_token_id=[])
    next(stream)
    engine.close()
    engine.close()
    calls = [
        lambda: engine.generate("a"), lambda: engine.stream("a"), lambda: engine.add("a"), engine.step,
        lambda: engine.abort(1), lambda: engine.forward([5]), lambda: engine.score([5]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineStateError, match="the engine is closed"):
            call()
    assert not engine.busy
    stream.close()


def test_one_thread_after_another_may_use_an_engine(engine: Engine) -> None:
    outs = []
    thread = threading.Thread(target=lambda: outs.append(engine.generate([5, 6])))
    thread.start()
    thread.join()
    assert outs == [engine.generate([5, 6])]


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(tmp_path: Path) -> Engine:
    """A model whose position 10 is not a number: short sequences never see it."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed_positions.weight"][10 + 2] = np.nan

    return Engine(write_checkpoint(tmp_path, seed=2, change=spoil))


@pytest.mark.parametrize("fields", [{}, {"do_sample": True}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_nan_is_named_and_the_engine_goes_on(poisoned: Engine, checkpoint: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(
        NumericalError, match="before the first layer, made by embed with embed_tokens and embed_positions"
    ):
        poisoned.generate([5] * 8, max_new_tokens=9, eos_token_id=[], **fields)
    assert not poisoned.busy
    assert poisoned.runner.cache.free_pages == poisoned.runner.cache.num_pages
    short = poisoned.generate([5, 6], max_new_tokens=6)
    assert short == Engine(checkpoint).generate([5, 6], max_new_tokens=6)


def test_forward_and_score_name_nan_too(poisoned: Engine) -> None:
    for call in (poisoned.forward, poisoned.score):
        with pytest.raises(NumericalError, match="embed_positions"):
            call([5] * 12)
    assert poisoned.forward([5] * 10).shape == (10, 512)


@pytest.mark.slow
def test_more_threads_than_cores_is_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    from threadpoolctl import threadpool_info, threadpool_limits

    with threadpool_limits():  # puts back what was set
        Engine(checkpoint, threads=4096).close()
        assert "threads=4096 is more than the" in caplog.text
        Engine(checkpoint, threads=1).close()
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}
