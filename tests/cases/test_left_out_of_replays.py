"""A recorded pass holds all that ran in it, or is not replayed: operations and layers that compute without kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from minillm.backends import observe
from minillm.backends.cpu import memory as cpu_memory
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import WrappedBackend
from minillm.backends.operations import Backend
from minillm.backends.recording import composed, recorded
from minillm.backends.timing import TimingBackend
from minillm.batch import TokenSequence
from minillm.layers.block import PreNorm
from minillm.reference.cost import Cost
from minillm.runner.runner import Runner

from ..backends.cuda.launchers import launcher, missing
from ..backends.cuda.recording import Recorder, RecordingDevice
from ..tiny import generate, model_of, runner_of, tiny_config

LINE = np.random.default_rng(5).integers(3, 96, 20).tolist()
LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


def softplus_gate(self: Backend, x: Any) -> Any:
    """x * log(1 + exp(x)) / 2, as the how-to has it: on the array module. [T, E] -> [T, E]"""
    return self.xp.multiply(self.xp.logaddexp(x, 0), x / 2, out=self.memory.arena.take(x.shape))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An entry for each pass that was replayed on a CPU."""
    seen: list[int] = []
    run = cpu_memory.Program.run

    def counted(program: Any, **options: bool) -> None:
        seen.append(len(program))
        run(program, **options)

    monkeypatch.setattr(cpu_memory.Program, "run", counted)
    return seen


def blocks_that(change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what the MLP of each layer reads: `change(backend, normed x, cache, batch)`."""

    def call(self: PreNorm, backend: Backend, x: Any, cache: Any, batch: Any) -> Any:
        x = self.attention(backend, self.attention_norm(backend, x), cache, batch, residual=x)
        return self.mlp(backend, change(backend, self.mlp_norm(backend, x), cache, batch), residual=x)

    monkeypatch.setattr(PreNorm, "__call__", call)


def decoded(runner: Runner) -> list[np.ndarray]:
    """Logits of a prompt and of decode steps, token by token."""
    sequence = TokenSequence(LINE[:4])
    logits = [runner.prefill(sequence).logits.copy()]
    for token in LINE[4:]:
        sequence.token_ids.append(token)
        logits.append(runner.decode([sequence]).logits.copy())
    return logits


def runners(raw: dict[str, Any], backend: Backend) -> tuple[Runner, Runner]:
    """A runner that may replay, and one that sees every operation called."""
    model = model_of(raw, backend=backend)
    mine, calling = (runner_of(model, backend=backend) for _ in range(2))
    calling.backend = WrappedBackend(backend)
    return mine, calling


def assert_same_bits(mine: Runner, calling: Runner) -> None:
    for got, expected in zip(decoded(mine), decoded(calling), strict=True):
        assert np.array_equal(got, expected)


# --- a new operation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "backend_of",
    [
        pytest.param(CpuBackend, id="cpu"),
        pytest.param(lambda: emulated_gpu()[0], id="cuda", marks=pytest.mark.slow),
    ],
)
def test_an_operation_added_by_the_how_to_computes_on_every_backend(
    backend_of: Callable[[], Backend], use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernels, "processors", 1)
    plain = generate(runner_of(model_of(LLAMA, seed=2)), [LINE[:5]], max_new_tokens=12)
    monkeypatch.setattr(Backend, "softplus_gate", softplus_gate, raising=False)
    blocks_that(lambda backend, x, *_: backend.softplus_gate(x), monkeypatch)
    backend = backend_of()
    ours, expected = (
        generate(runner_of(model_of(LLAMA, seed=2, backend=each), backend=each), [LINE[:5]], max_new_tokens=12,
                 use_cache=use_cache)
        for each in (backend, NumpyBackend())
    )  # fmt: skip
    assert ours == expected
    assert ours != plain, "the operation matters"


@pytest.mark.slow
def test_an_operation_without_a_kernel_keeps_a_step_out_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "processors", 1)
    blocks_that(lambda backend, x, *_: x * 1.5, monkeypatch)
    backend, device = emulated_gpu()
    mine, calling = runners(LLAMA, backend)
    for got, expected in zip(decoded(mine), decoded(calling), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)  # padded to a bucket, or not
    assert not device.replays
    monkeypatch.undo()
    monkeypatch.setattr(Kernels, "processors", 1)
    decoded(runner_of(model_of(LLAMA, backend=backend), backend=backend))
    assert device.replays, "a step of kernels alone is replayed"


@pytest.mark.slow
def test_what_runs_only_when_a_cuda_graph_is_recorded_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "processors", 1)
    steps: list[int] = []
    blocks_that(lambda backend, x, *_: x * 1.5 if len(steps) > 1 else x, monkeypatch)  # not in the first, plain one
    backend, device = emulated_gpu()
    runner, sequence = runner_of(model_of(LLAMA, backend=backend), backend=backend), TokenSequence(LINE[:4])
    runner.prefill(sequence)
    for token in LINE[4:9]:
        steps.append(token)
        sequence.token_ids.append(token)
        runner.decode([sequence])
    assert not device.replays


def emulated_gpu() -> tuple[CudaBackend, RecordingDevice]:
    if reason := missing():
        pytest.skip(reason)
    device = RecordingDevice(Recorder(launcher()))
    return CudaBackend(device, device.recorder, "float32", max_batch_size=4), device


def test_a_profile_times_an_operation_without_a_kernel_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "softplus_gate", softplus_gate, raising=False)
    monkeypatch.setitem(observe.COSTS, "softplus_gate", lambda call: Cost(4 * call.result.size))
    monkeypatch.setattr(WrappedBackend, "softplus_gate", observe._reported("softplus_gate"), raising=False)
    blocks_that(lambda backend, x, *_: backend.softplus_gate(x), monkeypatch)
    backend = CpuBackend()
    runner = runner_of(model_of(LLAMA, backend=backend), backend=backend)
    timing = runner.backend = TimingBackend(backend)
    sequence = TokenSequence(LINE[:4])
    for token in LINE[4:8]:
        start = timing.clock.mark()
        sequence.token_ids.append(token)
        runner.prefill(sequence)
        taken = timing.take(start)
        calls = [call for call in taken if call.operation == "softplus_gate"]
        assert len(calls) == 2, "one for each layer"
        assert sum(call.operation == "embed" for call in taken) == 1, "an attempt to record is not counted"
        assert all(call.seconds > 0 for call in calls)


# --- operations of a subclass -----------------------------------------------------------------------------------------


def test_an_operation_that_a_subclass_overrides_with_numpy_is_computed_in_every_pass(replays: list[int]) -> None:
    class Clipped(CpuBackend):
        def glu(self, x: Any, activation: str) -> Any:
            return np.clip(super().glu(x, activation), -0.05, 0.05)

    assert_same_bits(*runners(LLAMA, Clipped()))
    assert not replays


def test_an_operation_that_a_subclass_only_watches_is_seen_in_every_pass(replays: list[int]) -> None:
    class Watching(CpuBackend):
        seen = 0

        def attend(self, *arguments: Any, **options: Any) -> Any:
            self.seen += 1
            return super().attend(*arguments, **options)

    backend = Watching()
    decoded(runner_of(model_of(LLAMA, backend=backend), backend=backend))
    assert backend.seen == 2 * (1 + len(LINE) - 4)
    assert not replays


def test_an_operation_of_a_subclass_that_is_declared_recorded_or_composed_is_replayed(replays: list[int]) -> None:
    class Twice(CpuBackend):
        @recorded
        def glu(self, x: Any, activation: str) -> Any:
            return super().glu(x, activation)

        @composed
        def glu_linear(self, x: Any, weight: Any) -> Any:
            return self.glu(self.linear(x, weight), "silu")

    assert_same_bits(*runners(LLAMA, Twice()))
    assert len(replays) == len(LINE) - 4 - 1


def test_an_operation_that_is_replaced_on_one_backend_is_computed_in_every_pass(replays: list[int]) -> None:
    backend = CpuBackend()
    plain = backend.glu
    backend.glu = lambda x, activation: plain(x, activation) * np.float32(0.5)  # type: ignore[method-assign]
    assert_same_bits(*runners(LLAMA, backend))
    assert not replays


# --- NumPy inside a layer ---------------------------------------------------------------------------------------------


def in_place(backend: Backend, x: Any, *_: Any) -> Any:
    x *= 1.5
    return x


def by_item(backend: Backend, x: Any, *_: Any) -> Any:
    x[:, 3] = 0
    return x


def into_the_same(backend: Backend, x: Any, *_: Any) -> Any:
    return np.tanh(x, out=x)


def of_a_copy(backend: Backend, x: Any, *_: Any) -> Any:
    y = np.array(x)
    y[:, ::2] += 1
    return y


def chosen(backend: Backend, x: Any, *_: Any) -> Any:
    return x[:, np.arange(x.shape[1])[::-1]]


def by_memory(backend: Backend, x: Any, *_: Any) -> Any:
    np.frombuffer(memoryview(x), np.float32)[::2] *= 2  # what other libraries do with an array
    return x


def by_value(backend: Backend, x: Any, *_: Any) -> Any:
    return x if x[0, 0] > 0 else backend.glu(backend.xp.concatenate([x, x], axis=1), "silu")


def of_positions(backend: Backend, x: Any, _: Any, batch: Any) -> Any:
    return backend.add_low_rank(
        x, x, [], residual=np.sin(batch.positions[:, None] + np.zeros(x.shape)).astype(np.float32)
    )


def of_lengths(backend: Backend, x: Any, _: Any, batch: Any) -> Any:
    return backend.take_rows(x, np.full(x.shape[0], batch.spans[0].context_len % x.shape[0]))


def of_another_array(backend: Backend, x: Any, *_: Any) -> Any:
    noise = np.random.default_rng(len(x)).normal(size=x.shape).astype(np.float32)
    return backend.add_low_rank(x, x, [], residual=noise)


def of_the_cache(backend: Backend, x: Any, cache: Any, _: Any) -> Any:
    keys, _ = cache.layers[0]
    keys *= 1.01
    return x


INSIDE = [in_place, by_item, into_the_same, of_a_copy, chosen, by_memory, by_value]
INSIDE += [of_positions, of_lengths, of_another_array, of_the_cache]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", INSIDE)
def test_numpy_inside_a_layer_is_computed_in_every_pass(
    change: Callable[..., Any], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks_that(change, monkeypatch)
    assert_same_bits(*runners(LLAMA, CpuBackend()))
    assert not replays


@pytest.mark.sampled(2)
@pytest.mark.parametrize("look", [np.array, repr, list, lambda x: float(x[0, 0]), np.ndarray.sum])
def test_what_a_layer_looks_at_is_there_in_every_pass(
    look: Callable[[Any], Any], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def looking(backend: Backend, x: Any, *_: Any) -> Any:
        seen.append(look(x))
        return x

    blocks_that(looking, monkeypatch)
    backend = CpuBackend()
    decoded(runner_of(model_of(LLAMA, backend=backend), backend=backend))
    assert len(seen) == 2 * (1 + len(LINE) - 4)
    assert "Sealed" not in str(seen)
    assert not replays


def test_views_and_shapes_inside_a_layer_are_no_computation(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reshaped(backend: Backend, x: Any, *_: Any) -> Any:
        half = x.shape[1] // 2
        assert x[:, :half].reshape(len(x), 2, -1).ndim == 3
        assert x.dtype == np.float32
        return x.reshape(x.shape[0], 2, half).reshape(x.shape)

    blocks_that(reshaped, monkeypatch)
    assert_same_bits(*runners(LLAMA, CpuBackend()))
    assert len(replays) == len(LINE) - 4 - 1


def test_an_error_inside_a_layer_is_that_of_the_ordinary_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_that(lambda backend, x, *_: x.no_such_method(), monkeypatch)
    with pytest.raises(AttributeError, match=r"'numpy\.ndarray' object has no attribute 'no_such_method'"):
        decoded(runner_of(model_of(tiny_config(), backend=(backend := CpuBackend())), backend=backend))
