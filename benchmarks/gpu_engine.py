"""The whole engine on random weights, for `gpu.py`: decode steps and prefill, through the public calls of `Engine`."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from gpu_figures import DECODE, DEVICE_TIME, OURS, PREFILL, Figure, Sizes, median_and_best
from harness import token_ids

from minillm import Engine
from minillm.backends.cuda import device as devices
from minillm.backends.cuda import fusing
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.device import CupyDevice
from minillm.backends.cuda.kernels import Kernels, Launch
from minillm.batch import TokenSequence
from minillm.config import ModelConfig
from minillm.measure.accounting import Part, Step, Storage, cache_bytes_per_token, looked_up, step_flops, weights_bytes
from minillm.models import published_config

HALF = Storage.all_in("float16")
WARM_UP = 4
"""Steps before the timing: the first compiles, the second is captured."""
CARVEOUTS = ("", "29", "44", "100")
"""Percentages of 228 KB: with 29 (64 KB) a block of attention fits, with 44 (100 KB) more of products"""
BIT_STEPS = 6
"""Steps whose logits are compared"""
SAME_BITS = "the same bits"
UNLIKE = "THE SAME BITS, as if nothing had been deferred", "other bits, as it should be"
FEW_ROWS = 4
"""Sequences of a step up to which it may be one kernel, and its products may take on norms"""
PERSISTENT = ("llama", "mistral", "qwen2", "qwen3")
"""Families for which they may"""
NORMS_HEADS = ("qwen3", "gemma3_text")
"""Families with norms of query and key heads, which are one launch with rotation and store"""


def engine(sizes: Sizes, shapes: list[str], dtype: str = "float16") -> Iterator[Figure]:
    """Measure every shape in 16 bits, then the decode steps of each with weights of 8 and 4 bits."""
    for form in (dtype, "int8", "int4"):
        for shape in shapes:
            try:
                yield from _shape(sizes, shape, dtype) if form == dtype else _fewer_bits(sizes, shape, form)
            except Exception as error:  # a shape that is too large must not end the others
                yield Figure(OURS, shape, form, note=f"failed: {type(error).__name__}: {error}")
            gc.collect()  # frees the weights before the next


def dependent(sizes: Sizes, shapes: list[str], dtype: str = "float16", *, emulated: bool) -> Iterator[Figure]:
    """Decode steps launched dependently, as one kernel, with norms of heads, rotation and store in four launches, and
    plainly before and after; whether logits are the same. With weights of 4 bits too, plainly and as one kernel.

    Last, of few sequences, with norms that products take on: their logits have other bits, and `verify` compares them.
    """
    if emulated:
        setattr(devices, "Driver", _PlainDriver)  # noqa: B010
        setattr(Kernels, "processors", 2)  # noqa: B010  so many blocks of one kernel run together there
    for shape in shapes:
        family, said = published_config(shape).model_type, dict[str, list[Any]]()
        more = ["persistently"] * (family in PERSISTENT) + ["norms of heads apart"] * (family in NORMS_HEADS)
        ways = [(dtype, how) for how in ("plainly", "dependently", *more, "plainly again")]
        if family in PERSISTENT:
            ways += [(dtype, "deferred, dependently"), ("int4", "plainly"), ("int4", "persistently")]
        for form, how in ways:
            setattr(fusing, "HEADS_ROWS", 0 if how == "norms of heads apart" else fusing.MOST_ROWS)  # noqa: B010
            os.environ["MINILLM_CUDA_DEPENDENT"] = str(int(how.endswith("dependently")))
            os.environ["MINILLM_CUDA_PERSISTENT"] = str(int(how == "persistently"))
            deferred, name = how.startswith("deferred"), how if form == dtype else f"{form}, {how}"
            os.environ["MINILLM_CUDA_DEFERRED"] = str(int(deferred))
            few = form == "int4" or how == "persistently" or deferred
            batches = [batch for batch in sizes.batches if batch <= FEW_ROWS or not few]
            try:
                for figure in _dependent_steps(sizes, shape, form, said.setdefault(form, []), batches):
                    if deferred and figure.note:
                        figure = figure._replace(note=UNLIKE[figure.note != SAME_BITS])
                    yield figure._replace(part="dependent", what=f"{figure.what}, {name}".lstrip(", "))
            except Exception as error:  # one way that fails must not end the others
                yield Figure("dependent", shape, name, note=f"failed: {type(error).__name__}: {error}")
            gc.collect()


def carveouts(sizes: Sizes, shapes: list[str], dtype: str = "float16") -> Iterator[Figure]:
    """Decode steps whose kernels all have one share of the L1 cache as shared memory, and each its own."""
    for shape in shapes:
        said: list[Any] = []
        for percent in CARVEOUTS:
            os.environ["MINILLM_CUDA_CARVEOUT"] = percent
            try:
                for figure in _dependent_steps(sizes, shape, dtype, said, sizes.batches):
                    how = f"carve-out of {percent} %" if percent else "the driver's carve-outs"
                    yield figure._replace(part="carve-out", what=f"{figure.what}, {how}".lstrip(", "))
            except Exception as error:  # one share that fails must not end the others
                yield Figure("carve-out", shape, percent, note=f"failed: {type(error).__name__}: {error}")
            gc.collect()
    os.environ.pop("MINILLM_CUDA_CARVEOUT", None)


def _dependent_steps(sizes: Sizes, shape: str, dtype: str, said: list[Any], batches: Sequence[int]) -> Iterator[Figure]:
    """Decode steps of the first batches of `sizes`; `said` gets the bits of the logits that follow some prompts.

    Tokens would say less: of random weights they repeat, whatever a fault does to the logits. Before each replay all
    memory for results becomes NaN: what a kernel reads too early is otherwise the step before's, which is nearly right.
    """
    config, batch, storage = published_config(shape), max(batches), _storage(dtype)
    room = batch * (sizes.prompt + sizes.new_tokens + 32) * cache_bytes_per_token(config, storage)
    with Engine.random(shape, device="cuda", dtype=dtype, max_batch_size=batch, cache_bytes=room) as engine:
        watch = Watch(engine)  # before the first step is recorded
        said.append([_bits(engine, sizes, each) for each in batches])
        same = said[-1] == said[0][: len(batches)]
        yield Figure("", shape, "", note=SAME_BITS if same else "OTHER BITS than at first")
        for each in batches:
            yield from _decode(engine, watch, sizes, config, shape, each, storage)


def _storage(form: str) -> Storage:
    """The storage of a model whose weights have this type: all else has 16 bits."""
    if form in ("int8", "int4"):
        return Storage(weights=form, cache="float16", activations="float16", checkpoint="float16")
    return HALF


def _fewer_bits(sizes: Sizes, shape: str, form: str) -> Iterator[Figure]:
    """Decode steps with weights of 8 or 4 bits, and all else in float16."""
    config, batch, storage = published_config(shape), max(sizes.batches), _storage(form)
    room = batch * (sizes.prompt + sizes.new_tokens + 32) * cache_bytes_per_token(config, storage)
    with Engine.random(shape, device="cuda", dtype=form, max_batch_size=batch, cache_bytes=room) as engine:
        watch = Watch(engine)
        for each in sizes.batches:
            for figure in _decode(engine, watch, sizes, config, shape, each, storage):
                yield figure._replace(what=f"{figure.what}, {form}")


def _bits(engine: Engine, sizes: Sizes, batch: int) -> list[str]:
    """A digest of the logits of each of several steps of some sequences; the third is the first to be replayed."""
    runner, config = engine.runner, engine.config
    backend: Any = runner.backend
    sequences = [TokenSequence(token_ids(i, sizes.prompt, config.vocab_size)) for i in range(batch)]
    digests = []
    try:
        runner.forward(sequences, [sizes.prompt] * batch)
        for step in range(BIT_STEPS):
            for i, sequence in enumerate(sequences):
                sequence.token_ids.append((7 * step + i) % config.vocab_size)
            for scratch in (part for parts in backend.memory._scratch.values() for part in parts):
                for buffer in scratch.arena._buffers.values():
                    buffer[...] = 0xFF
            logits = runner.forward(sequences, [1] * batch).logits
            digests.append(sha256(backend.device.copy_of(logits).tobytes()).hexdigest())
    finally:
        for sequence in sequences:
            runner.cache.free(sequence)
    return digests


class _PlainDriver:
    """In place of NVIDIA's driver, for --emulated."""

    def __init__(self, address: Callable[[Any], int]) -> None: ...

    def launch(self, launch: Launch, stream: int, attribute_id: int = 0) -> None:
        launch()


def _shape(sizes: Sizes, shape: str, dtype: str) -> Iterator[Figure]:
    config, batch = published_config(shape), max(sizes.batches)
    positions = max(batch * (sizes.prompt + sizes.new_tokens), sizes.prefills * sizes.prefill) + 32 * batch
    room = positions * cache_bytes_per_token(config, HALF)
    with Engine.random(shape, device="cuda", dtype=dtype, max_batch_size=batch, cache_bytes=room) as engine:
        weights = weights_bytes(config, HALF)
        note = f"{weights / 2**30:.2f} GiB, drawn on the device"
        yield Figure(OURS, shape, "weights", engine.load_seconds, engine.load_seconds, note=note)
        watch = Watch(engine)
        for batch in sizes.batches:
            yield from _decode(engine, watch, sizes, config, shape, batch)
        for length in (sizes.short_prefill, sizes.prefill):
            yield _prefill(shape, config, sizes, 1, length, lambda n=length: _generate(engine, n))  # type: ignore[misc]
        yield _prefill(shape, config, sizes, sizes.prefills, sizes.prefill, lambda: _one_pass(engine, sizes))
        for footprint in engine.device_memory:
            note = f"{footprint.taken / 2**20:.1f} MiB, predicted {footprint.predicted / 2**20:.1f}"
            yield Figure(OURS, shape, f"memory: {footprint.kind}", note=note)


def _decode(
    engine: Engine,
    watch: "Watch",
    sizes: Sizes,
    config: ModelConfig,
    shape: str,
    batch: int,
    storage: Storage = HALF,
) -> Iterator[Figure]:
    """Time steps of a batch by `Engine.step`, then some more on the device alone."""
    prompts = [token_ids(i, sizes.prompt, config.vocab_size) for i in range(batch)]
    requests = [engine.add(tokens, max_new_tokens=sizes.new_tokens, eos_token_id=()) for tokens in prompts]
    before = engine.stats.decode_tokens
    while engine.stats.decode_tokens == before:  # until a step has no prompt in it
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    seconds = [_timed(engine.step) for _ in range(sizes.steps)]
    with watch:
        for _ in range(min(16, sizes.steps)):
            engine.step()
    for request in requests:
        engine.abort(request)
    engine.step()
    read = weights_bytes(config, storage) - looked_up(config, storage).bytes
    cached = batch * (sizes.prompt + sizes.steps // 2) * cache_bytes_per_token(config, storage)
    amounts: dict[str, Any] = {
        "bytes": read + cached,
        "tokens": batch,
        "flops": step_flops(config, Step((Part(1, sizes.prompt),) * batch, batch)),
    }
    yield Figure(OURS, shape, DECODE.format(batch), **median_and_best(seconds), **amounts, launches=watch.launches)
    if watch.seconds:
        yield Figure(OURS, shape, DEVICE_TIME.format(batch), **median_and_best(watch.seconds), **amounts)


def _prefill(
    shape: str, config: ModelConfig, sizes: Sizes, prompts: int, length: int, run: Callable[[], object]
) -> Figure:
    """Time one prompt through the engine, or several in one pass. The first run compiles, and times the products."""
    run()
    seconds = [_timed(run) for _ in range(max(2, sizes.repeats // 2))]
    flops = step_flops(config, Step((Part(length, length),) * prompts, prompts))
    note = "in chunks, as the engine does it" if prompts == 1 else "in one pass"
    what = PREFILL.format(prompts, length)
    return Figure(OURS, shape, what, **median_and_best(seconds), tokens=prompts * length, flops=flops, note=note)


def _generate(engine: Engine, length: int) -> None:
    engine.generate(token_ids(1, length, engine.config.vocab_size), max_new_tokens=1, eos_token_id=())


def _one_pass(engine: Engine, sizes: Sizes) -> None:
    runner, vocab = engine.runner, engine.config.vocab_size
    sequences = [TokenSequence(token_ids(i, sizes.prefill, vocab)) for i in range(sizes.prefills)]
    try:
        runner.forward(sequences, [sizes.prefill] * len(sequences))
    finally:
        for sequence in sequences:
            runner.cache.free(sequence)


def _timed(run: Callable[[], object]) -> float:
    """Wall-clock seconds; `run` must wait for the device itself, as a step does for its tokens."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Watch:
    """Counts the launches of a captured step and, inside a `with` block, times its replays between two events."""

    def __init__(self, engine: Engine) -> None:
        backend = engine.runner.backend
        assert isinstance(backend, CudaBackend) and isinstance(backend.device, CupyDevice)
        self.launches = 0
        """Number of launches of the step captured last"""
        self.seconds: list[float] = []
        self._device, self._record = backend.device, backend.device.record
        self._on = False
        self._times: list[tuple[Any, Any]] = []
        launch_all = backend.device.launch_all

        def counted(launches: Sequence[Launch], *, dependent: bool = False) -> None:
            self.launches = len(launches)
            launch_all(launches, dependent=dependent)

        setattr(backend.device, "launch_all", counted)  # noqa: B010  mypy: a method
        setattr(backend.device, "record", self._watched_record)  # noqa: B010  mypy: a method

    def _watched_record(self, launch: Callable[[], object]) -> Callable[[], object]:
        replay = self._record(launch)

        def watched() -> None:
            if not self._on:
                replay()
                return
            events = tuple(self._device.xp.cuda.Event() for _ in range(2))
            events[0].record(self._device.stream)
            replay()
            events[1].record(self._device.stream)
            self._times.append((events[0], events[1]))

        return watched

    def __enter__(self) -> None:
        self._on = True
        self._times.clear()

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._device.wait()
        self.seconds = [1e-3 * self._device.xp.cuda.get_elapsed_time(*pair) for pair in self._times]
