"""The persistent kernel of a decode step: the bits of the launches that it replaces, and faults in its waiting."""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from minillm.backends.cuda import persistent
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import Kernels, kernel_folder
from minillm.batch import TokenSequence
from minillm.errors import DeviceError, NumericalError
from tests.families import CONFIGS
from tests.tiny import model_of, runner_of

from .launchers import ON_GPU, exhaustive, launcher
from .planted import with_fault
from .recording import Recorder, RecordingDevice

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True}
LONG = LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 512}
WIDE = LLAMA | {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 8, "intermediate_size": 2104}
WINDOWED = LLAMA | {"model_type": "mistral", "sliding_window": 5}
FEW_BITS = LLAMA | {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "vocab_size": 266,
}
WIDE_OF_FEW_BITS = FEW_BITS | {"intermediate_size": 2304}
"""Rows of several slots, of which the last is not full"""
INT4 = {"raw": FEW_BITS, "weights": "int4"}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
QWEN3_OF_FEW_BITS = FEW_BITS | {"model_type": "qwen3"}

pytestmark = pytest.mark.skipif(ON_GPU, reason="on a GPU it is test_gpu.py's: a list has addresses")


@dataclass
class Decoded:
    """Results of some decode steps, and the cache after them."""

    logits: list[Any]
    pages: list[Any]
    launches: list[Any]
    """Launches of the last recorded step"""

    @property
    def names(self) -> list[str]:
        return [launch.name for launch in self.launches]


def decode(
    raw: dict[str, Any],
    *,
    persists: bool,
    batch: int = 1,
    steps: int = 4,
    prompt: int = 4,
    weights: str = "float16",
    schedule: str = "forward",
) -> Decoded:
    """Decode steps after prompts of so many tokens, recorded from the second on."""
    device = RecordingDevice(Recorder(launcher(schedule)))
    backend = CudaBackend(device, device.recorder, weights, max_batch_size=4, persistent=persists)
    runner = runner_of(model_of(raw, seed=2, backend=backend), backend=backend)
    sequences = [TokenSequence([(5 + 7 * i + 3 * j) % 96 for j in range(prompt + i)]) for i in range(batch)]
    for sequence in sequences:
        runner.prefill(sequence)
    logits = []
    for step in range(steps):
        for sequence in sequences:
            sequence.token_ids.append(7 + step)
        logits.append(runner.decode(sequences).logits.copy())
    assert device.records, "the steps are recorded"
    pages = [array.copy() for array in (runner.cache.storage.keys, runner.cache.storage.values)]
    return Decoded(logits, pages, device.records[-1])


def assert_same_bits(raw: dict[str, Any], **how: Any) -> None:
    """Logits, keys and values of the persistent kernel are those of the launches that it replaces."""
    plain = decode(raw, persists=False, **how | {"schedule": "forward"})
    ours = decode(raw, persists=True, **how)
    embedded = "expand" if how.get("weights", "").startswith("int") else "embed"
    assert ours.names == [embedded, "step", "best_of_chunks", "take_best"]
    np.testing.assert_array_equal(ours.logits, plain.logits)
    for result, expected in zip(ours.pages, plain.pages, strict=True):
        written = ~np.isnan(expected.astype(np.float32))
        assert written.any() or not expected.size, "layers with a window have pages of their own"
        np.testing.assert_array_equal(result[written], expected[written])
        assert np.isnan(result[~written].astype(np.float32)).all()


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated GPU has three multiprocessors, on each of which a block runs."""
    monkeypatch.setattr(Kernels, "processors", 3)


class Graphs(RecordingDevice):
    """Graphs as a GPU has them: addresses, which keep no array. Nothing runs when they are replayed."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.owners: list[tuple[str, Callable[[], Any]]] = []
        """Name of a launch, and the memory that one of its arguments has"""

    def record(self, launch: Callable[[], object]) -> Callable[[], object]:
        super().record(launch)
        for recorded in self.records.pop():
            for argument in recorded.args:
                if isinstance(argument, np.ndarray) and argument.shape:
                    owner = argument if argument.base is None else argument.base
                    self.owners.append((recorded.name, ref(owner)))
        return lambda: None


@pytest.mark.longer
def test_a_recorded_step_keeps_what_its_kernels_read() -> None:
    device = Graphs(Recorder(launcher()))
    backend = CudaBackend(device, device.recorder, "float16", max_batch_size=4, persistent=True)
    runner = runner_of(model_of(LLAMA, seed=2, backend=backend), backend=backend)
    for batch in (1, 2):
        sequences = [TokenSequence([5, 6, 7 + i]) for i in range(batch)]
        for sequence in sequences:
            runner.prefill(sequence)
        for _ in range(2):  # launched, then recorded
            for sequence in sequences:
                sequence.token_ids.append(7)
            runner.decode(sequences)
    gc.collect()
    assert [name for name, _ in device.owners].count("step") == 18, "two steps, each with nine arrays"
    assert not {name for name, owner in device.owners if owner() is None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "batch"),
    [(LLAMA, 1), (LLAMA, 4), (QWEN2, 2), (QWEN3, 2), exhaustive(QWEN2, 3), exhaustive(WINDOWED, 1)],
    ids=["llama-1", "llama-4", "qwen2-2", "qwen3-2", "qwen2-3", "mistral-1"],
)
def test_steps_have_the_bits_of_their_launches(raw: dict[str, Any], batch: int) -> None:
    assert_same_bits(raw, batch=batch)


@pytest.mark.slow
def test_many_steps_across_pages() -> None:
    """The counter goes on from one replay to the next."""
    assert_same_bits(LLAMA, steps=21, prompt=12)


@pytest.mark.slow
def test_a_context_of_several_splits() -> None:
    """Which blocks take in turn, and the last of them merges."""
    assert_same_bits(LONG, prompt=300, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, exhaustive(4)])
def test_rows_of_several_chunks_and_sums_of_several_warps(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks too; and rings that are as small as they may be."""
    monkeypatch.setattr(Kernels, "processors", 8)
    monkeypatch.setattr(persistent, "MOST_SLOTS", 2)
    assert_same_bits(WIDE, batch=batch, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "weights", "batch"),
    [
        (FEW_BITS, "int4", 1),
        (FEW_BITS, "int8", 4),
        exhaustive(FEW_BITS, "int4", 2),
        exhaustive(WIDE_OF_FEW_BITS, "int4", 4),
        exhaustive(WIDE_OF_FEW_BITS, "int8", 1),
        exhaustive(QWEN3_OF_FEW_BITS, "int4", 1),
    ],
    ids=["int4-1", "int8-4", "int4-2", "int4-wide", "int8-wide", "qwen3"],
)
def test_matrices_of_few_bits(raw: dict[str, Any], weights: str, batch: int) -> None:
    """The head of int4 has 8 bits: both in one step."""
    assert_same_bits(raw, weights=weights, batch=batch, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["reverse", "random", "warps", "warps-reversed"])
def test_in_any_order_of_threads_and_blocks(schedule: str) -> None:
    assert_same_bits(LLAMA, steps=3, schedule=schedule)


def run_checked(how: dict[str, Any], **constants: int) -> None:
    """The last launch of some steps once more, with all accesses checked."""
    decoded = decode(**how, persists=True, steps=3)
    (step,) = (launch for launch in decoded.launches if launch.name == "step")
    constants = {"TOKENS": how.get("batch", 1), "PAGE_SIZE": 16, "GROUP": 1, "SPLIT": 256, **constants}
    kernel = Kernels(Emulator(checks=True), "float16").get("step", "step", shared_mem=step.shared_mem, **constants)
    kernel(step.grid, step.block, step.args, shared_mem=step.shared_mem)
    again = decode(**how, persists=True, steps=3)
    np.testing.assert_array_equal(again.logits, decoded.logits)


@pytest.mark.slow
def test_no_thread_reads_shared_memory_that_another_still_writes() -> None:
    run_checked({"raw": LLAMA}, HEAD_DIM=8)


@pytest.mark.slow
def test_no_warp_writes_sums_of_a_tile_that_another_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of few bits; the planted fault writes sums of each tile where those of the one before are read."""
    four = INT4 | {"batch": 4}
    run_checked(four, HEAD_DIM=64, INTEGERS=1)
    with_fault("step.cu", "turn ^= 1;", ";", tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match="race"):
        run_checked(four, HEAD_DIM=64, INTEGERS=1)


FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no wait for the operation before": ("while (counted(counter) < target) watchdog.look();", ";", {}),
    "no wait for a chunk": ("while (!mbarrier_completed(full + of * size + slot, parity)) watchdog.look();", ";", {}),
    "no wait for the slots of other warps": (
        "of < WARPS; ++of) ring.wait(of);",
        "of < 1; ++of) ring.wait(warp);",
        INT4,
    ),
    "a slot filled before all lanes have read it": ("else\n            __syncwarp();\n        fill", "fill", {}),
    "a slot filled before all warps have read it": (
        "if (shared)\n            __syncthreads();\n        else\n            __syncwarp();",
        "__syncwarp();",
        INT4 | {"raw": WIDE_OF_FEW_BITS},
    ),
    "rows of `up` one too early": ("item + side * (op.outputs / 2)", "item + side * (op.outputs / 2 - 1)", {}),
    "the norm by a block's own threads": (
        "int threads = op.norm_threads,",
        "int threads = THREADS,",
        {"raw": LLAMA | {"hidden_size": 2048}},
    ),
    "keys with the queries' gain": ("number < common.H ? op.gain : op.bias", "op.gain", {"raw": QWEN3}),
    "a head that is read before all lanes have written it": (
        "bits;\n        __syncwarp();",
        "bits;",
        {"raw": QWEN3, "schedule": "reverse"},
    ),
    "scales of a row's beginning": (
        "(row * row_bytes + at) / of",
        "row * row_bytes / of",
        INT4 | {"raw": WIDE_OF_FEW_BITS},
    ),
}
"""Lines of step.cu and its headers, what stands there instead, and the steps that show it"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name if i < 3 else exhaustive(name) for i, name in enumerate(FAULTS)])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, how = FAULTS[fault]
    with_fault("step.cu", old, new, tmp_path, monkeypatch)
    with pytest.raises((AssertionError, LaunchError, NumericalError)):
        assert_same_bits(**{"raw": LLAMA, "steps": 3} | how)


@pytest.mark.slow
def test_a_block_that_is_not_counted_in_is_an_error_and_no_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault("step.cu", "if (threadIdx.x == 0) count_in(counter);", ";", tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match=r"^step: cooperative\.cuh:\d+: the kernel stopped itself by __trap"):
        decode(LLAMA, persists=True, steps=2)


class TestNotPersistent:
    """Steps that stay as they are."""

    @pytest.mark.parametrize(
        ("family", "storage"),
        [("llama", "float32"), ("gemma3_text", "float16"), ("olmo2", "float16"), exhaustive("gpt2", "float16")],
    )
    @pytest.mark.slow
    def test_other_types_and_layers(self, family: str, storage: str) -> None:
        raw = next(iter(CONFIGS[family].values())) | {"head_dim": 8}
        assert "step" not in decode(raw, persists=True, steps=2, weights=storage).names

    @pytest.mark.slow
    def test_layers_that_differ(self) -> None:
        """One of two layers has a window."""
        window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
        assert "step" not in decode(QWEN2 | window, persists=True, steps=2).names

    @pytest.mark.slow
    def test_unless_asked_for(self) -> None:
        assert "step" not in decode(LLAMA, persists=False, steps=2).names


def test_sizes_of_known_models_fit_shared_memory() -> None:
    """Llama-3.2-1B and 3.1-8B at one and four rows."""
    small = {"HEAD_DIM": 64, "PAGE_SIZE": 16, "GROUP": 4, "SPLIT": 256}
    large = {"HEAD_DIM": 128, "PAGE_SIZE": 16, "GROUP": 4, "SPLIT": 128}
    cases = {(8192, 81, 1): small, (8192, 81, 4): small, (14336, 161, 1): large, (14336, 161, 4): large}
    slots = []
    for (inputs, operations, rows), constants in cases.items():
        sizes = persistent.Sizes.of(inputs, rows, operations, constants)
        assert sizes is not None
        assert sizes.shared < persistent.SHARED
        slots.append(sizes.slots)
    assert slots == [9, 9, 8, 5]
    of_integers = persistent.Sizes.of(14336, 4, 161, large, integers=True)
    assert of_integers is not None and of_integers.slots == 4
    assert of_integers.shared < persistent.SHARED
    assert persistent.Sizes.of(28672, 4, 161, large) is None


def test_rows_are_dealt_to_blocks_in_turn_from_one_operation_to_the_next() -> None:
    fields: dict[str, Any] = {"kind": persistent.PRODUCT}
    operations = [persistent._Operation(1, fields | {"units": units}, {}, 1, {}) for units in (7, 0, 10, 3)]
    assert persistent._table(operations, 8)["first"].tolist() == [0, 7, 7, 1]


def test_the_list_is_packed_as_the_kernel_reads_it() -> None:
    source = (kernel_folder() / "step_ring.cuh").read_text()
    (body,) = re.findall(r"struct Operation \{(.*?)\};", source, re.DOTALL)
    names = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", body))
    assert tuple(names) == persistent.OPERATION.names
    (size,) = re.findall(r"sizeof\(Operation\) == (\d+)", source)
    assert persistent.OPERATION.itemsize == int(size)


@pytest.mark.parametrize(
    ("file", "kernel", "names"),
    [
        ("attention_decode", "attention_decode", persistent.AttentionArguments._fields),
        ("norm", "rms_norm", persistent.NormArguments._fields),
        ("step", "step", ("list", "counter", "count", "ring_size", "slot_bytes", "room", *persistent.ARGUMENTS)),
    ],
)
def test_names_of_arguments_stand_in_the_order_of_the_sources(file: str, kernel: str, names: tuple[str, ...]) -> None:
    source = (kernel_folder() / f"{file}.cu").read_text()
    (parameters,) = re.findall(rf"void[^;{{}}]*\b{kernel}\(([^()]*)\) {{", source)
    assert tuple(re.findall(r"(\w+)\s*(?:,|$)", parameters)) == names


def test_a_gpu_without_the_instructions_is_refused() -> None:
    for architecture in ("80", "89", "120"):
        with pytest.raises(DeviceError, match=r"^MINILLM_CUDA_PERSISTENT=1 needs a GPU of compute capability 9\.0"):
            persistent.check_architecture(architecture)
    persistent.check_architecture("90")
