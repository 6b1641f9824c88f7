"""Prompts recorded by buckets of tokens and launched call by call, for `gpu.py`: bits, logits, times."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu_engine import HALF, _timed
from gpu_figures import PREFILL, Figure, Sizes, median_and_best
from harness import token_ids

from minillm import Engine
from minillm.batch import TokenSequence
from minillm.config import ModelConfig
from minillm.measure.accounting import Part, Step, cache_bytes_per_token, step_flops
from minillm.models import published_config

SWITCH = "MINILLM_CUDA_PROMPTS"
WAYS = ("call by call", "recorded", "call by call again")
REPLAYS = 3
"""Passes whose logits are compared with those of the first one, which is launched call by call, and padded too"""


def prompts(sizes: Sizes, shapes: list[str], dtype: str = "float16") -> Iterator[Figure]:
    """Prompts of some lengths alone, and a chunk beside sequences that decode."""
    for shape in shapes:
        before: dict[str, Any] = {}
        for how in WAYS:
            os.environ[SWITCH] = str(int(how == "recorded"))
            try:
                for figure in _passes(sizes, shape, dtype, before):
                    yield figure._replace(part="prompts", shape=shape, what=f"{figure.what}, {how}")
            except Exception as error:  # one way that fails must not end the others
                yield Figure("prompts", shape, how, note=f"failed: {type(error).__name__}: {error}")
            gc.collect()
    os.environ.pop(SWITCH, None)


def _passes(sizes: Sizes, shape: str, dtype: str, before: dict[str, Any]) -> Iterator[Figure]:
    """Time passes; `before` gets the logits of each, with which those of the other ways are compared."""
    config, longest = published_config(shape), sizes.short_prefill
    decoding = min(sizes.batches[-1], 32)
    room = (decoding + 1) * (longest + 64) * cache_bytes_per_token(config, HALF)
    with Engine.random(shape, device="cuda", dtype=dtype, max_batch_size=decoding, cache_bytes=room) as engine:
        for length in (longest // 8, longest // 4, longest // 2, longest):
            yield _timed_pass(engine, sizes, config, before, PREFILL.format(1, length), 0, length)
        chunk = longest - decoding
        what = f"a chunk of {chunk} beside {decoding} that decode"
        yield _timed_pass(engine, sizes, config, before, what, decoding, chunk)


def _timed_pass(
    engine: Engine, sizes: Sizes, config: ModelConfig, before: dict[str, Any], what: str, decoding: int, length: int
) -> Figure:
    """Time one kind of pass. Before each pass that is compared, all memory for results becomes NaN."""
    runner, backend = engine.runner, engine.runner.backend
    memory: Any = backend.memory
    others = [TokenSequence(token_ids(i, 16, config.vocab_size)) for i in range(decoding)]
    if others:
        runner.forward(others, [16] * decoding)

    def run() -> Any:
        for i, other in enumerate(others):
            runner.cache.truncate(other, 16)
            other.token_ids.append(i)
        prompt = TokenSequence(token_ids(1, length, config.vocab_size))
        logits = runner.forward([*others, prompt], [1] * decoding + [length]).logits
        copy = np.array(backend.sampler.to_host(logits))
        runner.cache.free(prompt)
        return copy

    first, notes = run(), []
    for _ in range(REPLAYS):
        for scratch in (part for parts in memory._scratch.values() for part in parts):
            for buffer in scratch.arena._buffers.values():
                buffer[...] = 0xFF
        if not np.array_equal(run(), first):
            notes.append("OTHER BITS than at first")
    apart = float(np.abs(first - before.setdefault(what, first)).max() / first.std())
    notes.append(f"logits within {apart:.1e} standard deviations of those call by call")
    seconds = [_timed(run) for _ in range(max(2, sizes.repeats))]
    for other in others:
        runner.cache.free(other)
    flops = step_flops(config, Step((Part(length, length),) + (Part(1, 17),) * decoding, decoding + 1))
    return Figure("", "", what, **median_and_best(seconds), tokens=length, flops=flops,
                  note="; ".join(notes))  # fmt: skip
