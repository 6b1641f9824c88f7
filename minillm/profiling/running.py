"""Runs requests twice, profiled and plain, in alternating steps."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..backends.observe import TimingBackend
from ..backends.operations import Backend
from ..backends.weights import RandomTensor
from ..cache import PagedCache
from ..decoding.select import strategy_for
from ..decoding.strategy import Request
from ..engine import PREFILL_CHUNK, Engine
from ..errors import ParameterError
from ..hardware import CHIPS, Hardware, best_of, probe, read_bandwidth
from ..loop import Limits, StepLoop
from ..models.base import Model
from ..request import Prompt
from ..runner import Runner
from .phases import Ceilings, Profile, Step


def profile(
    engine: Engine, prompts: Sequence[Prompt], *, repeat: int = 1, hardware: Hardware | None = None, **fields: Any
) -> Profile:
    """Run prompts as one batch and time their operations.

    Args:
        engine: provides model and backend; its cache and requests are not touched
        prompts: the batch
        repeat: number of rounds, after one warm-up round
        hardware: source of the ceilings; by default this machine, which is probed
        **fields: fields of `GenerationConfig`

    Raises:
        As `Engine.add`.
    """
    requests = [engine.request(prompt, **fields) for prompt in prompts]
    backend, model = engine.runner.backend, engine.runner.model
    ceilings = Ceilings(hardware or probe_with(backend), _arithmetic(backend))
    watching = TimingBackend(backend)
    plain, watched = (_loop(model, backend, requests) for backend in (backend, watching))
    rounds = [list(_round(plain, watched, watching, requests)) for _ in range(repeat + 1)]
    return Profile([step for steps in rounds[1:] for step in steps], model.config.num_layers, ceilings)


def probe_with(backend: Backend, threads: int | None = None) -> Hardware:
    """Probe this machine; its rate is the better of BLAS's product and the backend's.

    Args:
        backend: the backend
        threads: threads that read memory; by default one per core

    Raises:
        ParameterError: the backend computes on a GPU, which cannot be probed.
    """
    if backend.name == "cuda":
        raise ParameterError(f"the probe is of the processor: name the GPU with --hardware, one of {', '.join(CHIPS)}")
    found, arithmetic = probe(), _arithmetic(backend)
    rate = max(found.rate(arithmetic), _product_rate(backend))
    bandwidth = found.bandwidth if threads is None else read_bandwidth(threads)
    return replace(found, rates={arithmetic: rate}, bandwidth=bandwidth)


def _arithmetic(backend: Backend) -> str:
    """The dtype in which a backend computes products."""
    return backend.memory.activations.name


def _product_rate(backend: Backend, rows: int = 512, width: int = 1536) -> float:
    """FLOP/s of the backend's product [rows, width] x [width, width], with weights in its own format."""
    weight = backend.loader.prepare("probe", [RandomTensor("probe", (width, width), 0, 1.0)])
    x = backend.xp.ones((rows, width), backend.xp.float32)

    def product() -> None:
        backend.enter_layer(0)  # so that every call reuses the same result buffer
        backend.linear(x, weight)

    return 2 * rows * width * width / best_of(product)


def _loop(model: Model, backend: Backend, requests: Sequence[Request]) -> StepLoop:
    """A step loop with its own cache, as large as the requests need."""
    width = pages = 0
    for request in requests:
        strategy = strategy_for(request.settings)
        longest = len(request.prompt_ids) + request.max_new_tokens + strategy.slack
        width += strategy.max_sequences
        pages += strategy.max_sequences * -(-longest // backend.memory.page_size)
    cache = PagedCache(model.config, backend, pages)
    return StepLoop({"target": Runner(model, backend, cache)}, Limits(width, PREFILL_CHUNK))


def _round(plain: StepLoop, watched: StepLoop, watching: TimingBackend, requests: Sequence[Request]) -> Iterator[Step]:
    """Run both loops to the end, alternating which one goes first in each step."""
    for loop in (plain, watched):
        for request in requests:
            loop.add(request, strategy_for(request.settings))
    plain_first = True
    while watched.busy:
        before = watched.stats.prefill_tokens, watched.stats.decode_tokens
        plain_seconds = _timed(plain) if plain_first else 0.0
        began, start = time.perf_counter(), watching.clock.mark()
        watched.step_or_raise()
        seconds = time.perf_counter() - began
        calls = watching.take(start)
        plain_seconds = plain_seconds or _timed(plain)
        plain_first = not plain_first
        prompt, new = watched.stats.prefill_tokens - before[0], watched.stats.decode_tokens - before[1]
        yield Step("prefill" if prompt else "decode", prompt or new, seconds, plain_seconds, calls)


def _timed(loop: StepLoop) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    loop.step_or_raise()
    return time.perf_counter() - began
