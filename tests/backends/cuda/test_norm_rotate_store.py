"""Norms of heads, rotation and store in one launch: the bits of the plain kernels, and only where it does the same."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.attention import store_kv
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.fusing import HEADS_ROWS, HeadsArguments, fuse
from minillm.backends.cuda.kernels import Kernels, Launch, kernel_folder
from minillm.backends.cuda.rows import NormArguments, rms_norm, rotary
from minillm.backends.weights import Weight
from minillm.reference.rotary import Rotation, Stretch

from .launchers import ON_GPU, exhaustive, launcher

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNTOUCHED = 77.0
PAGES, P = 5, 16
EPSILON = 1e-5
HALF = 11
"""Pairs that turn, of which a piece of 16 bytes has some; and ten numbers of a head do not"""
PLAIN = ["rms_norm", "rms_norm", "rotary", "store_kv"]


def rotation(half: int, **fields: Any) -> Rotation:
    """Angles of `half` pairs."""
    frequencies = (500.0 ** -(np.arange(half) / half)).astype(np.float32)
    return Rotation(frequencies=Weight("frequencies", frequencies), **fields)


class Heads:
    """The queries, keys and values of some tokens, as one product leaves them, and what is made of them."""

    def __init__(self, storage: str = "float16", T: int = 3, *, H: int = 3, K: int = 1, D: int = 32, gap: int = 8):
        """`gap`: numbers between a token's values and the next one's queries."""
        rng = np.random.default_rng((T, H, D))
        self.storage, self.dtype, self.T, self.H, self.K, self.D = storage, DTYPES[storage], T, H, K, D
        self.qkv = np.full((T, (H + 2 * K) * D + gap), np.nan, self.dtype)
        self.qkv[:, : (H + 2 * K) * D] = 2 * rng.standard_normal((T, (H + 2 * K) * D))
        parts = np.split(self.qkv[:, : (H + 2 * K) * D], [H * D, (H + K) * D], axis=1)
        self.q, self.k, self.v = (part.reshape(T, -1, D) for part in parts)
        assert np.shares_memory(self.v, self.qkv)
        self.q_gain, self.k_gain = rng.standard_normal((2, D)).astype(np.float32)
        self.v_gain: Any = None
        self.row_gains = [rng.standard_normal(heads * D).astype(np.float32) for heads in (H, K)]
        self.epsilons = [EPSILON] * 3
        self.positions = rng.integers(0, 5000, T).astype(np.int32)
        self.text_lens, self.query_starts = self.positions + 1, np.arange(T + 1, dtype=np.int32)
        self.slots = rng.permutation(PAGES * P)[:T].astype(np.int32)
        self.slots[1::3] = -1  # padding
        self.q_normed, self.q_out = (self.empty(T, H, D) for _ in range(2))
        self.k_normed, self.k_out, self.v_normed = (self.empty(T, K, D) for _ in range(3))
        self.keys, self.values = (self.empty(PAGES, K, P, D) for _ in range(2))

    def empty(self, *shape: int) -> Any:
        return np.full(shape, UNTOUCHED, self.dtype)

    def run(self, kernels: Kernels, turned: Rotation | None, order: str) -> None:
        """Each operation by a launch, in an order of layers/attention.py or shared_attention.py."""
        q, k, v = self.q, self.k, self.k if "values are keys" in order else self.v
        if "values normed" in order:
            rms_norm(kernels, v, self.v_gain, self.epsilons[2], self.v_normed)
            v = self.v_normed
        if "rotated first" in order and turned is not None:
            rotary(kernels, q, k, self, turned, self.q_out, self.k_out)
            q, k, turned = self.q_out, self.k_out, None
        q_gain, k_gain = self.row_gains if "by rows" in order else (self.q_gain, self.k_gain)
        shapes = [(self.T, -1)] * 2 if "by rows" in order else [q.shape, k.shape]
        both = (q, self.q_normed, q_gain), (k, self.k_normed, k_gain)
        for (x, out, gain), epsilon, shape in zip(both, self.epsilons, shapes, strict=False):
            rms_norm(kernels, x.reshape(shape), gain, epsilon, out.reshape(shape))
        q, k = self.q_normed, self.k_normed
        if turned is not None:
            rotary(kernels, q, k, self, turned, self.q_out, self.k_out)
            k = self.k_out
        store_kv(kernels, k, v, self.keys, self.values, self.slots)

    def launches(self, kernels: Kernels, turned: Rotation | None, order: str = "", read: Any = ()) -> list[Launch]:
        """The launches of `run` as they are recorded; `read` are arrays that others read later."""
        return fuse(kernels, kernels.collect(lambda: self.run(kernels, turned, order)), read, address)

    def names(self, turned: Rotation | None, order: str = "", read: Any = ()) -> list[str]:
        launches = self.launches(Kernels(launcher(), self.storage), turned, order, read)
        return [launch.name for launch in launches]


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def assert_same_bits(
    emulator: Any, turned: Rotation | None, order: str = "", count: int = 1, *, dependent: bool = False, **sizes: Any
) -> None:
    """Plain and fused launches; `count` of the latter are left. `dependent`: a kernel before has written what is read,
    and perhaps has not ended.
    """
    plain, fused = Heads(**sizes), Heads(**sizes)
    plain.run(Kernels(launcher(), plain.storage), turned, order)
    launches = fused.launches(Kernels(emulator, fused.storage, debug=dependent, dependent=dependent), turned, order)
    if dependent:
        emulator.results = [(address(fused.qkv), address(fused.qkv) + fused.qkv.nbytes)]
    assert [launch.name for launch in launches][count - 1 :] == ["norm_rotate_store"]
    for launch in launches:
        launch()
    last = "q_normed" if turned is None or "rotated first" in order else "q_out"
    for name in (last, "keys", "values", "qkv"):
        ours, theirs = (getattr(heads, name).view(f"u{heads.qkv.itemsize}") for heads in (fused, plain))
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    written = plain.keys[plain.slots[0] // P, :, plain.slots[0] % P]
    assert (written != UNTOUCHED).all(), "and something is stored"


def test_the_bits_of_four_launches_in_any_order_of_threads(any_emulator: Emulator) -> None:
    """Blocks with a warp that has no head are among them."""
    assert_same_bits(any_emulator, rotation(HALF))


@pytest.mark.skipif(ON_GPU, reason="is checked by the emulator")
def test_it_waits_for_the_kernel_before_and_checks_pages(checking_emulator: Emulator) -> None:
    assert_same_bits(checking_emulator, rotation(HALF), dependent=True)


SHAPES = [
    ("float16", 5, 8, 2, 128, 64),
    ("bfloat16", 1, 4, 4, 64, 32),
    ("float32", 2, 2, 1, 256, 128),
    ("float16", 2, 1, 1, 512, 64),
    ("bfloat16", HEADS_ROWS, 2, 1, 8, 4),
    ("float32", 3, 5, 1, 20, 6),
]
"""Storage, T, H, K, D, pairs that turn: heads of some of a warp's pieces, of all, and of twice as many"""


@pytest.mark.parametrize(
    ("storage", "T", "H", "K", "D", "half"), [*SHAPES[:4], *(exhaustive(*shape) for shape in SHAPES[4:])]
)
def test_every_shape(emulator: Emulator, storage: str, T: int, H: int, K: int, D: int, half: int) -> None:
    assert_same_bits(emulator, rotation(half), storage=storage, T=T, H=H, K=K, D=D)


def test_rotations_of_every_kind(emulator: Emulator) -> None:
    assert_same_bits(emulator, rotation(HALF, scale=1.25, stretch=Stretch(factor=4.0, original=32)))
    assert_same_bits(emulator, None)
    frequencies = rotation(HALF).frequencies.data
    two = Rotation(frequencies=Weight("frequencies", np.stack([frequencies, frequencies / 3])), short=64)
    assert_same_bits(emulator, two)


@pytest.mark.parametrize(
    ("order", "count"),
    [("rotated first", 2), ("values normed", 1), ("values normed, values are keys", 1), ("values are keys", 1)],
)
def test_layers_of_other_families(emulator: Emulator, order: str, count: int) -> None:
    """Hunyuan, whose rotation stays a launch; Gemma 4, whose norm of values has no gain."""
    assert_same_bits(emulator, rotation(HALF), order, count)


@pytest.mark.parametrize(
    ("storage", "H", "K", "D"), [("float16", 5, 2, 32), ("float32", 5, 50, 32), exhaustive("bfloat16", 40, 3, 128)]
)
def test_norms_of_all_heads_as_one_row(emulator: Emulator, storage: str, H: int, K: int, D: int) -> None:
    """OLMo 2: blocks with queries and keys; rows of one and of many of rms_norm's warps, of two pieces a thread."""
    assert_same_bits(emulator, rotation(HALF), "by rows", storage=storage, H=H, K=K, D=D)


def test_norms_of_rows_in_any_order_of_threads(any_emulator: Emulator) -> None:
    assert_same_bits(any_emulator, rotation(HALF), "by rows", H=17, K=2)


class TestNotFused:
    """Each case but for one thing as above."""

    def test_what_others_read(self, emulator: Emulator) -> None:
        heads = Heads()
        assert heads.names(rotation(HALF), read=[heads.q_out, heads.keys]) == ["norm_rotate_store"]
        for array in (heads.q_normed, heads.k_normed, heads.k_out[:1]):
            assert heads.names(rotation(HALF), read=[array]) == PLAIN
        assert heads.names(None, read=[heads.q_normed]) == ["norm_rotate_store"]
        read = [heads.v_normed]
        assert heads.names(rotation(HALF), "values normed", read) == ["rms_norm", "norm_rotate_store"]

    def test_more_rows_than_a_decode_step_has_fused(self, emulator: Emulator) -> None:
        assert Heads(T=HEADS_ROWS).names(rotation(HALF)) == ["norm_rotate_store"]
        assert Heads(T=HEADS_ROWS + 1).names(rotation(HALF)) == PLAIN

    def test_rows_that_are_not_whole_pieces(self, emulator: Emulator) -> None:
        assert Heads(gap=4).names(rotation(HALF)) == PLAIN
        assert Heads(D=12).names(rotation(6)) == PLAIN
        heads = Heads()
        heads.k_gain = np.ones(heads.D + 1, np.float32)[1:]
        assert heads.names(rotation(HALF)) == PLAIN

    def test_other_norms(self, emulator: Emulator) -> None:
        heads = Heads()
        heads.epsilons[1] *= 2
        assert heads.names(rotation(HALF)) == PLAIN
        heads = Heads()
        heads.q_gain = np.ones(heads.H * heads.D, np.float32)  # a gain for each head
        assert heads.names(rotation(HALF)) == PLAIN

    def test_a_result_where_something_is_still_read(self, emulator: Emulator) -> None:
        heads = Heads(gap=0)
        heads.q_out = heads.qkv.reshape(-1)[: heads.q.size].reshape(heads.q.shape)
        assert heads.names(rotation(HALF)) == PLAIN

    def test_norms_without_a_store(self, emulator: Emulator) -> None:
        def run(heads: Heads, kernels: Kernels) -> None:
            rms_norm(kernels, heads.q, heads.q_gain, EPSILON, heads.q_normed)
            rotary(kernels, heads.q_normed, heads.q[:, :1], heads, rotation(HALF), heads.q_out, heads.k_out)

        kernels = Kernels(launcher(), "float16")
        for turned in range(2):
            launches = kernels.collect(lambda: run(Heads(), kernels))[: 1 + turned]
            assert fuse(kernels, launches, (), address) == launches


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
def test_a_debug_build_refuses_a_page_that_is_not_there(emulator: Emulator) -> None:
    heads = Heads()
    heads.slots[-1] = PAGES * P
    (launch,) = heads.launches(Kernels(emulator, heads.storage, debug=True), rotation(HALF))
    with pytest.raises(LaunchError, match=rf"norm_rotate_store\.cu:\d+: page is {PAGES}, should be from 0 to below"):
        launch()


@pytest.mark.parametrize(
    ("file", "kernel", "names"),
    [("norm", "rms_norm", NormArguments._fields), ("norm_rotate_store", "norm_rotate_store", HeadsArguments._fields)],
)
def test_names_of_arguments_stand_in_the_order_of_the_sources(file: str, kernel: str, names: tuple[str, ...]) -> None:
    source = (kernel_folder() / f"{file}.cu").read_text()
    (parameters,) = re.findall(rf"\b{kernel}\(([^()]*)\) {{", source)
    assert tuple(re.findall(r"(\w+)\s*(?:,|$)", parameters)) == names


FAULTS = {
    "no wait for the kernel before": ("follow();", "launch_dependents();"),
    "no wait for the sines": ("    __syncthreads();\n    if (!is_head)", "    __syncwarp();\n    if (!is_head)"),
    "no wait for what turned": ("        __syncwarp();\n    }\n    storage_t* to", "    }\n    storage_t* to"),
    "padding is stored": ("if (slot < 0) return;", "slot = max(slot, 0);"),
    "heads of values one too early": ("(number - H) % K", "(number - H) % max(K - 1, 1)"),
    "gains of queries for keys": ("is_value ? v_gain : k_gain", "is_value ? v_gain : q_gain"),
    "rows: no wait for sums": ("    __syncthreads();\n    return 1.0f", "    __syncwarp();\n    return 1.0f"),
    "rows: by a block's own threads": ("k_threads, epsilon", "WARPS * WARP, epsilon"),
}
"""Lines of norm_rotate_store.cu, and what stands there instead"""


@pytest.mark.skipif(ON_GPU, reason="is shown to the emulator")
@pytest.mark.parametrize("fault", [name if i in (0, 1, 6) else exhaustive(name) for i, name in enumerate(FAULTS)])
def test_a_planted_fault_is_found(
    fault: str, tmp_path: Path, checking_emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = FAULTS[fault]
    shutil.copytree(kernel_folder(), tmp_path / "cuda")
    faulty = tmp_path / "cuda" / "norm_rotate_store.cu"
    source = faulty.read_text()
    assert source.count(old) == 1
    faulty.write_text(source.replace(old, new))
    module = Emulator.module

    def module_with_fault(self: Emulator, path: Path, options: tuple[str, ...] = ()) -> Any:
        return module(self, faulty if path.name == faulty.name else path, options)

    monkeypatch.setattr(Emulator, "module", module_with_fault)
    with pytest.raises((AssertionError, LaunchError)):
        more: dict[str, Any] = {"K": 3}
        if fault.startswith("rows"):  # of more pieces than a block has threads, and no rounding to 16 bits
            more = {"order": "by rows", "K": 50, "storage": "float32"}
        assert_same_bits(checking_emulator, rotation(HALF), **more, dependent=True)
