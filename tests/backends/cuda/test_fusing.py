"""Fused launches: the same bits as the plain kernels, and only where nobody else reads what is between."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda import memory
from minillm.backends.cuda.attention import StoreArguments, store_kv
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.fusing import Ending, fuse
from minillm.backends.cuda.kernels import NULL, Kernels, Launch, kernel_folder
from minillm.backends.cuda.linear import Product, ProductArguments, linear
from minillm.backends.cuda.rows import GluArguments, RotaryArguments, glu, layer_norm, rms_norm, rotary
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.reference.quantize import quantize
from minillm.reference.rotary import Rotation, Stretch
from tests.families import CONFIGS

from .interleaving import on_device
from .launchers import exhaustive, launcher
from .recording import RecordingDevice
from .test_engine import runner_on as opt_on
from .test_families import runner_on

pytestmark = pytest.mark.slow  # whole decode steps on the emulator
DTYPES = {"float32": np.float32, "float16": np.float16}
UNTOUCHED = 77.0
P = 16


class Step:
    """The arrays that a layer's operations read and write."""

    def __init__(
        self,
        storage: str,
        rows: int,
        E: int = 40,
        *,
        H: int = 4,
        K: int = 2,
        D: int = 8,
        F: int = 21,
        bits: int | None = None,
    ) -> None:
        """`bits`: of the matrices, where these are integers."""
        rng = np.random.default_rng((rows, E, D))
        self.storage, self.dtype, self.rows, self.E, self.H, self.K, self.D = storage, DTYPES[storage], rows, E, H, K, D

        def random(*shape: int, dtype: Any = self.dtype) -> Any:
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)

        def empty(*shape: int) -> Any:
            return np.full(shape, UNTOUCHED, self.dtype)

        self.x = 3 + 10 * random(rows, E)
        self.gain, self.shift = random(E, dtype=np.float32), random(E, dtype=np.float32)
        self.qkv, self.bias = random((H + 2 * K) * D, E), random((H + 2 * K) * D, dtype=np.float32)
        self.gate_up = random(2 * F, E)
        if bits is not None:
            self.qkv, self.gate_up = (
                on_device(quantize(each.astype(np.float32), bits)) for each in (self.qkv, self.gate_up)
            )
        self.positions = rng.integers(0, 5000, rows).astype(np.int32)
        self.slots = rng.permutation(5 * P)[:rows].astype(np.int32)
        self.slots[rows // 2 :: 3] = -1  # padding
        self.text_lens, self.query_starts = self.positions + 1, np.arange(rows + 1, dtype=np.int32)
        self.normed, self.y, self.hidden = empty(rows, E), empty(rows, (H + 2 * K) * D), empty(rows, F)
        self.wide, self.q_out, self.k_out = empty(rows, 2 * F), empty(rows, H, D), empty(rows, K, D)
        self.keys, self.values = empty(5, K, P, D), empty(5, K, P, D)

    @property
    def heads(self) -> tuple[Any, Any, Any]:
        """Queries, keys and values: views of the product. [T, heads, D]"""
        parts = np.split(self.y, [self.H * self.D, (self.H + self.K) * self.D], axis=1)
        q, k, v = (part.reshape(self.rows, -1, self.D) for part in parts)
        assert np.shares_memory(v, self.y)
        return q, k, v

    def store(self, kernels: Kernels, rotation: Rotation | None = None, norm: str = "rms") -> None:
        if norm == "rms":
            rms_norm(kernels, self.x, self.gain, 1e-5, self.normed)
        else:
            layer_norm(kernels, self.x, self.gain, self.shift, 1e-5, self.normed)
        linear(kernels, Product(self.normed, self.qkv, self.bias, self.y))
        q, k, v = self.heads
        if rotation is not None:
            rotary(kernels, q, k, self, rotation, self.q_out, self.k_out)
            k = self.k_out
        store_kv(kernels, k, v, self.keys, self.values, self.slots)

    def gate(self, kernels: Kernels) -> None:
        rms_norm(kernels, self.x, self.gain, 1e-5, self.normed)
        linear(kernels, Product(self.normed, self.gate_up, None, self.wide))
        glu(kernels, self.wide, "silu", self.hidden)

    def results(self) -> list[Any]:
        """The arrays that others read: of y only the queries, and these only if they are not rotated."""
        queries = [] if (self.q_out != UNTOUCHED).any() else [self.y[:, : self.H * self.D]]
        return [*queries, self.hidden, self.q_out, self.keys, self.values]


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def launches_of(step: Step, kernels: Kernels, run: Callable[..., None], *args: Any, read: Any = ()) -> list[Launch]:
    return fuse(kernels, kernels.collect(lambda: run(step, kernels, *args)), read, address)


def assert_same_bits(step: Step, emulator: Emulator, run: Callable[..., None], *args: Any, **more: Any) -> None:
    """Plain and fused launches of one operation."""
    kernels, other = Kernels(emulator, step.storage), Step(step.storage, step.rows, step.E, **more)
    run(step, Kernels(launcher(), step.storage), *args)
    fused = launches_of(other, kernels, run, *args)
    assert [launch.name.partition("_")[0] for launch in fused[1:]] == ["fused"]
    for launch in fused:
        launch()
    for found, expected in zip(other.results(), step.results(), strict=True):
        np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{found.itemsize}"))


def rotation(half: int, **fields: Any) -> Rotation:
    frequencies = (500.0 ** -(np.arange(half) / half)).astype(np.float32)
    return Rotation(frequencies=Weight("frequencies", frequencies), **fields)


ROTATIONS = [None, rotation(4), rotation(3, scale=1.2), rotation(2, stretch=Stretch(factor=4.0, original=32))]


@pytest.mark.parametrize(("storage", "rows"), [("float32", 3), ("float16", 9)])
def test_a_layers_launches_in_any_order_of_threads(storage: str, rows: int, any_emulator: Emulator) -> None:
    assert_same_bits(Step(storage, rows), any_emulator, Step.store, ROTATIONS[1])
    assert_same_bits(Step(storage, rows), any_emulator, Step.gate)


SHAPES = [
    ("float32", 7, 37, 4),
    ("float16", 1, 40, 4),
    ("float16", 4, 1100, 132),
    ("float16", 14, 37, 1),
    ("float16", 30, 37, 4),
]
"""Storage, rows, E, processors"""


@pytest.mark.parametrize(
    ("storage", "rows", "E", "processors"),
    [
        (pytest.param if shape in SHAPES else exhaustive)(*shape)
        for *kind, E, processors in itertools.product(
            [("float32", 1), ("float32", 7), ("float16", 1), ("float16", 4), ("float16", 14), ("float16", 30)],
            [40, 37, 1100],
            [1, 4, 132],
        )
        for shape in [(*kind[0], E, processors)]
    ],
)
def test_every_shape(storage: str, rows: int, E: int, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are aligned and not, of one warp's norm and of several; one output a warp and more."""
    monkeypatch.setattr(Kernels, "processors", processors)
    for turned in ROTATIONS:
        assert_same_bits(Step(storage, rows, E), launcher(), Step.store, turned)
    assert_same_bits(Step(storage, rows, E), launcher(), Step.store, None, "layer")
    assert_same_bits(Step(storage, rows, E), launcher(), Step.gate)


@pytest.mark.parametrize(
    ("rows", "E", "bits"),
    [
        (pytest.param if shape in ((1, 40, 8), (3, 1104, 4), (7, 37, 4), (20, 37, 8)) else exhaustive)(*shape)
        for shape in itertools.product([1, 3, 7, 20], [40, 37, 1104], [8, 4])
    ],
)
def test_matrices_of_integers(rows: int, E: int, bits: int) -> None:
    """By the kernel of few rows and that of more; aligned rows and not."""
    for turned in ROTATIONS[:2]:
        step = Step("float16", rows, E, bits=bits)
        assert_same_bits(step, launcher(), Step.store, turned, bits=bits)
    assert_same_bits(Step("float16", rows, E, bits=bits), launcher(), Step.gate, bits=bits)


class TestNotFused:
    """Each case but for one thing as above."""

    def names(self, step: Step, run: Callable[..., None], *args: Any, read: Any = ()) -> list[str]:
        kernels = Kernels(launcher(), step.storage)
        return [launch.name for launch in launches_of(step, kernels, run, *args, read=read)]

    def test_what_the_caller_reads(self, emulator: Emulator) -> None:
        step = Step("float32", 2)
        assert self.names(step, Step.gate, read=[step.normed]) == ["rms_norm", "fused_fma"]
        assert self.names(step, Step.gate, read=[step.wide[:1]]) == ["rms_norm", "gemv_fma", "glu"]
        assert self.names(step, Step.store, read=[step.heads[1]]) == ["rms_norm", "gemv_fma", "store_kv"]
        plain = ["rms_norm", "gemv_fma", "rotary", "store_kv"]
        assert self.names(step, Step.store, ROTATIONS[1], read=[step.y]) == plain
        assert self.names(step, Step.store, ROTATIONS[1], read=[step.k_out]) == plain
        read = [step.q_out, step.keys]
        assert self.names(step, Step.store, ROTATIONS[1], read=read) == ["rms_norm", "fused_fma"]

    def test_what_a_later_launch_reads(self, emulator: Emulator) -> None:
        def and_again(step: Step, kernels: Kernels, read: Any) -> None:
            step.gate(kernels)
            rms_norm(kernels, read, None, 1e-5, step.x)

        step = Step("float32", 2)
        assert self.names(step, and_again, step.wide) == ["rms_norm", "gemv_fma", "glu", "rms_norm"]
        assert self.names(step, and_again, step.hidden) == ["rms_norm", "fused_fma", "rms_norm"]

    def test_what_is_written_anew_before_it_is_read(self, emulator: Emulator) -> None:
        def twice(step: Step, kernels: Kernels) -> None:
            step.gate(kernels)
            step.gate(kernels)
            rms_norm(kernels, step.wide, None, 1e-5, step.wide.copy())

        first, second = ["rms_norm", "fused_fma"], ["rms_norm", "gemv_fma", "glu"]
        assert self.names(Step("float32", 2), twice) == [*first, *second, "rms_norm"]

    def test_what_later_launches_write_in_its_place_and_read(self, emulator: Emulator) -> None:
        """As layers that differ have their results: part of the memory is another array by then."""

        def and_others(step: Step, kernels: Kernels, other: Any, read: Any) -> None:
            step.gate(kernels)
            rms_norm(kernels, step.x, None, 1e-5, other)
            rms_norm(kernels, read, None, 1e-5, step.normed)

        step, norms = Step("float32", 2), ["rms_norm"] * 2
        other = step.wide.reshape(-1)[: 2 * step.E].reshape(2, step.E)
        assert self.names(step, and_others, other, other) == ["rms_norm", "fused_fma", *norms]
        assert self.names(step, and_others, other, step.wide) == ["rms_norm", "gemv_fma", "glu", *norms]
        with_gaps = step.wide[:, : step.E]
        assert self.names(step, and_others, with_gaps, with_gaps) == ["rms_norm", "gemv_fma", "glu", *norms]

    def test_more_rows_than_a_thread_finishes_pairs_of(self, emulator: Emulator) -> None:
        assert self.names(Step("float16", 32), Step.gate) == ["rms_norm", "fused_mma"]
        assert self.names(Step("float16", 33), Step.gate) == ["rms_norm", "gemv_mma", "glu"]

    def test_more_rows_than_a_blackwell_has_registers_for(
        self, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Kernels, "architecture", 120)
        assert self.names(Step("float16", 16), Step.gate) == ["rms_norm", "fused_mma"]
        assert self.names(Step("float16", 17), Step.gate) == ["rms_norm", "gemv_mma", "glu"]

    def test_a_residual_before_the_gate(self, emulator: Emulator) -> None:
        def with_residual(step: Step, kernels: Kernels) -> None:
            linear(kernels, Product(step.normed, step.gate_up, None, step.wide, residual=step.wide.copy()))
            glu(kernels, step.wide, "silu", step.hidden)

        assert self.names(Step("float32", 2), with_residual) == ["gemv_fma", "glu"]


class TestNames:
    """The names by which arguments are read are those of the kernels."""

    @pytest.mark.parametrize(
        ("file", "kernel", "names"),
        [
            ("gemv", "gemv_fma", (*ProductArguments._fields, "splits")),
            ("gemv", "gemv_mma", (*ProductArguments._fields, "scales", "offsets")),
            ("gemm", "gemm_tiled", ProductArguments._fields),
            ("gemv_fused", "fused_fma", (*ProductArguments._fields, *Ending._fields, "splits")),
            ("gemv_fused", "fused_mma", (*ProductArguments._fields, *Ending._fields, "scales", "offsets")),
            ("kv", "store_kv", StoreArguments._fields),
            ("rotary", "rotary", RotaryArguments._fields),
            ("glu", "glu", GluArguments._fields),
        ],
    )
    def test_they_stand_in_the_order_of_the_sources(self, file: str, kernel: str, names: tuple[str, ...]) -> None:
        source = (kernel_folder() / f"{file}.cu").read_text()
        (parameters,) = re.findall(rf"\b{kernel}\(([^()]*)\) {{", source)
        assert tuple(re.findall(r"(\w+)\s*(?:,|$)", parameters)) == names

    @pytest.mark.parametrize(("run", "kernel"), [(Step.store, "store_kv"), (Step.store, "rotary"), (Step.gate, "glu")])
    def test_an_argument_that_the_fused_kernel_lacks_is_an_error(
        self, run: Callable[..., None], kernel: str, emulator: Emulator
    ) -> None:
        step, kernels = Step("float32", 2), Kernels(emulator, "float32")
        args = ROTATIONS[1:2] if run is Step.store else ()
        launches = kernels.collect(lambda: run(step, kernels, *args))
        (at,) = (i for i, launch in enumerate(launches) if launch.name == kernel)
        base: Any = type(launches[at].args)
        longer = type("Longer", (base,), {"_fields": (*base._fields, "added")})
        launches[at] = launches[at]._replace(args=tuple.__new__(longer, (*launches[at].args, NULL)))
        with pytest.raises((TypeError, ValueError), match=r"added|too many values"):
            fuse(kernels, launches, (), address)


LAYERS = {
    "llama": (
        "rms_norm gemv_fma rotary store_kv attention_decode gemv_fma rms_norm gemv_fma glu gemv_fma",
        "rms_norm fused_fma attention_decode gemv_fma rms_norm fused_fma gemv_fma",
    ),
    "gpt2": (
        "layer_norm gemv_fma store_kv attention_decode gemv_fma layer_norm gemv_fma gemv_fma",
        "layer_norm fused_fma attention_decode gemv_fma layer_norm gemv_fma gemv_fma",
    ),
    "qwen3": (
        "rms_norm gemv_fma rms_norm rms_norm rotary store_kv attention_decode gemv_fma rms_norm gemv_fma glu gemv_fma",
        "rms_norm gemv_fma norm_rotate_store attention_decode gemv_fma rms_norm fused_fma gemv_fma",
    ),
}
LAYERS |= {"opt": LAYERS["gpt2"], "qwen2": LAYERS["llama"]}
"""Launches of a layer as operations are called, and as they are recorded."""


def names_of_steps(
    family: str, storage: str, batch: int, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> list[list[str]]:
    """The launches of a step as operations are called, and as they are recorded, whose results have the same bits."""
    found: dict[bool, tuple[list[Any], Any, list[str]]] = {}
    raw = next(iter(CONFIGS[family].values())) | ({"head_dim": 16} if family in ("qwen3", "gemma3_text") else {})
    for fused in False, True:
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(memory, "fuse", lambda _kernels, launches, *_: launches)
            runner = (
                opt_on(CudaBackend(device, device.recorder, storage, max_batch_size=4))
                if family == "opt"
                else runner_on(device, raw, storage)
            )
            sequences = [TokenSequence([5 + i, 9, 11, 30 + i]) for i in range(batch)]
            for sequence in sequences:
                runner.prefill(sequence)
            logits = []
            for _ in range(4):
                for sequence in sequences:
                    sequence.token_ids.append(7)
                logits.append(runner.decode(sequences).logits.copy())
            pages = runner.cache.storage
            found[fused] = logits, (pages.keys.copy(), pages.values.copy()), [one.name for one in device.records[-1]]
    np.testing.assert_array_equal(found[True][0], found[False][0])
    for fused, plain in zip(found[True][1], found[False][1], strict=True):
        written = ~np.isnan(plain.astype(np.float32))
        assert written.any()
        np.testing.assert_array_equal(fused[written], plain[written])
    return [found[fused][2] for fused in (False, True)]


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("storage", [exhaustive("float32"), "float16"])
@pytest.mark.parametrize("batch", [exhaustive(1), 3])
def test_whole_decode_steps_have_the_same_bits_in_fewer_launches(
    batch: int, family: str, storage: str, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"opt": "layer_norm", "gpt2": "layer_norm"}.get(family, "rms_norm")
    steps = names_of_steps(family, storage, batch, device, monkeypatch)
    for names, layer in zip(steps, LAYERS[family], strict=True):
        assert names == ["embed", *layer.split() * 2, first, "gemv_fma", "best_of_chunks", "take_best"]


@pytest.mark.parametrize(
    ("family", "heads", "fused", "plain", "recorded"),
    [
        ("exaone4", 2, 2, 28, 21),
        exhaustive("gemma3_text", 2, 2, 33, 25),
        exhaustive("hunyuan_v1_dense", 2, 2, 29, 23),
        exhaustive("gemma4_text", 2, 4, 83, 71),
        exhaustive("lfm2", 1, 3, 33, 27),
        exhaustive("qwen3_next", 1, 3, 70, 64),
        exhaustive("olmo2", 2, 2, 29, 21),
    ],
)
def test_layers_that_differ_or_have_norms_of_heads(
    family: str, heads: int, fused: int, plain: int, recorded: int, device: RecordingDevice, monkeypatch: Any
) -> None:
    """How many launches norms of heads, rotation and store are; products with what follows; all, before and after."""
    before, after = names_of_steps(family, "float16", 3, device, monkeypatch)
    assert (after.count("norm_rotate_store"), after.count("fused_fma")) == (heads, fused)
    assert (len(before), len(after)) == (plain, recorded)
