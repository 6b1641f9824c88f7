"""The kernels that work on whole rows, run by the emulator: look-ups bit for bit, norms against their formula."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda import rows
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import STORAGE, Kernels
from minillm.errors import DeviceError
from minillm.reference.activation import ACTIVATIONS
from minillm.reference.gates import GATES

from .activations import exact_gate
from .launchers import ON_GPU, exhaustive

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
assert list(DTYPES) == list(STORAGE)


@pytest.fixture(params=DTYPES)
def storage(request: pytest.FixtureRequest) -> str:
    """The name of a storage type."""
    return request.param


def random(*shape: int, storage: str = "float32", shift: float = 0.0, seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(shape) * 2 + shift
    return numbers.astype(np.float32).astype(DTYPES[storage])


class Guarded:
    """Arrays that lie between numbers which nobody may touch, `offset` numbers off where memory was allocated."""

    def __init__(self, offset: int = 32) -> None:
        self.offset = offset
        self.whole: list[np.ndarray] = []

    def empty(self, *shape: int, like: np.ndarray) -> np.ndarray:
        size = int(np.prod(shape))
        whole = np.full(size + 2 * self.offset, 77.0, like.dtype)
        self.whole.append(whole)
        return whole[self.offset : self.offset + size].reshape(shape)

    def copy(self, array: np.ndarray) -> np.ndarray:
        inside = self.empty(*array.shape, like=array)
        inside[...] = array
        return inside

    def check(self) -> None:
        for whole in self.whole:
            assert (whole[: self.offset] == 77).all() and (whole[-self.offset :] == 77).all()


# Embedding


@pytest.mark.parametrize("E", [1, 7, 24, 768, 4099])
@pytest.mark.parametrize("offset", [32, 3], ids=["aligned", "unaligned"])
def test_embedding_is_the_sum_of_two_rows(any_emulator: Emulator, storage: str, E: int, offset: int) -> None:
    guarded = Guarded(offset)
    table, places = (guarded.copy(random(n, E, storage=storage, seed=n)) for n in (11, 9))
    ids, positions = np.array([3, 10, 0, 3], np.int32), np.array([0, 6, 2, 5], np.int32)
    out = guarded.empty(4, E, like=table)
    rows.embed(
        Kernels(any_emulator, storage), table, ids, out,
        position_table=places, positions=positions, position_offset=2,
    )  # fmt: skip
    expected = table[ids].astype(np.float32) + places[positions + 2].astype(np.float32)
    np.testing.assert_array_equal(out, expected.astype(table.dtype))
    guarded.check()


@pytest.mark.parametrize("E", [1, 7, 24, 768])
def test_embedding_without_positions_is_the_row_itself(emulator: Emulator, storage: str, E: int) -> None:
    table = random(5, E, storage=storage)
    out = np.empty((3, E), table.dtype)
    rows.embed(Kernels(emulator, storage), table, np.array([4, 0, 4], np.int32), out)
    np.testing.assert_array_equal(out, table[[4, 0, 4]])


@pytest.mark.parametrize("E", [7, 768])
def test_the_tokens_vector_is_scaled(emulator: Emulator, storage: str, E: int) -> None:
    table = random(5, E, storage=storage)
    out = np.empty((3, E), table.dtype)
    rows.embed(Kernels(emulator, storage), table, np.array([4, 0, 4], np.int32), out, scale=2.5)
    np.testing.assert_array_equal(out, (table[[4, 0, 4]].astype(np.float32) * 2.5).astype(table.dtype))


@pytest.mark.parametrize("count", [0, 1, 1030])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_logits_are_scaled_and_capped(any_emulator: Emulator, cap: float | None, count: int) -> None:
    guarded = Guarded(3)
    logits = guarded.copy(20 * random(1, count))
    expected = 0.125 * logits.astype(np.float64)
    rows.scale_logits(Kernels(any_emulator), logits, 0.125, cap)
    np.testing.assert_allclose(logits, expected if cap is None else cap * np.tanh(expected / cap), rtol=1e-6)
    guarded.check()


def test_logits_beyond_the_largest_grid(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_BLOCKS", 2)
    logits = random(3, 2500)
    expected = 0.5 * logits
    rows.scale_logits(Kernels(emulator), logits, 0.5, None)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("wanted", [[], [2], [6, 0, 3]])
@pytest.mark.parametrize("columns", [24, 33])
def test_rows_are_taken_from_an_array_with_any_stride(
    emulator: Emulator, storage: str, wanted: list[int], columns: int
) -> None:
    x = random(7, columns, storage=storage)[:, :24]
    out = np.empty((len(wanted), 24), x.dtype)
    rows.take_rows(Kernels(emulator, storage), x, np.array(wanted, np.int32), out)
    np.testing.assert_array_equal(out, x[wanted])


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
@pytest.mark.parametrize(("token", "position"), [(5, 0), (-1, 0), (0, 2), (0, -3)])
def test_a_debug_build_refuses_what_is_in_no_table(emulator: Emulator, token: int, position: int) -> None:
    kernels = Kernels(emulator, "float32", debug=True)
    table, places, out = random(5, 8), random(4, 8), np.empty((1, 8), np.float32)

    def embed(token: int, position: int) -> None:
        rows.embed(
            kernels, table, np.array([token], np.int32), out,
            position_table=places, positions=np.array([position], np.int32), position_offset=2,
        )  # fmt: skip

    embed(4, 1)
    with pytest.raises(LaunchError, match=r"embed\.cu"):
        embed(token, position)


# Norms


def layer_norm_formula(x: np.ndarray, gain: Any, bias: Any, epsilon: float) -> np.ndarray:
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return y * (1.0 if gain is None else gain) + (0.0 if bias is None else bias)


def rms_norm_formula(x: np.ndarray, gain: Any, bias: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * (1.0 if gain is None else gain)


def plain_layer_norm(x: np.ndarray, gain: Any, bias: Any, epsilon: float) -> np.ndarray:
    return reference.layer_norm(x, gain, bias, epsilon, np, np.empty_like(x))


def plain_rms_norm(x: np.ndarray, gain: Any, bias: Any, epsilon: float) -> np.ndarray:
    return reference.rms_norm(x, gain, epsilon, np, np.empty_like(x))


def run_rms_norm(kernels: Kernels, x: Any, gain: Any, bias: Any, epsilon: float, out: Any) -> None:
    rows.rms_norm(kernels, x, gain, epsilon, out)


NORMS = {
    "layer_norm": (rows.layer_norm, plain_layer_norm, layer_norm_formula),
    "rms_norm": (run_rms_norm, plain_rms_norm, rms_norm_formula),
}
EPSILON = 1e-5


@pytest.fixture(params=NORMS)
def norm(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], ...]:
    """A kernel's launcher, the plain computation and the formula, with the same arguments."""
    return NORMS[request.param]


def assert_close(ours: np.ndarray, x: np.ndarray, norm: tuple[Callable[..., Any], ...], gain: Any, bias: Any) -> None:
    """At most twice the error of the plain computation, which is done in float32 and stored as `x` is."""
    _, plain, formula = norm
    exact = formula(x.astype(np.float64), gain, bias, EPSILON)
    stored = plain(x.astype(np.float32), gain, bias, EPSILON).astype(x.dtype)
    allowed = 2 * np.abs(stored.astype(np.float64) - exact).max(initial=0.0)
    rounding = np.finfo(np.float32).eps * np.abs(exact).max(initial=0.0)  # where the plain one is right by luck
    assert np.abs(ours.astype(np.float64) - exact).max(initial=0.0) <= allowed + rounding


def check_norm(kernels: Kernels, norm: Any, T: int, E: int, *, shift: float = 0.0, offset: int = 32) -> None:
    guarded = Guarded(offset)
    x = guarded.copy(random(T, E, storage=kernels.storage, shift=shift, seed=E))
    gain, bias = guarded.copy(random(E, seed=1)), guarded.copy(random(E, seed=2))
    out, before = guarded.empty(T, E, like=x), x.copy()
    norm[0](kernels, x, gain, bias, EPSILON, out)
    assert_close(out, x, norm, gain, bias)
    np.testing.assert_array_equal(x, before)
    guarded.check()


@pytest.mark.parametrize("E", [1, 7, 8, 33, 768])
@pytest.mark.parametrize("T", [0, 1, 3])
def test_norms_are_their_formula(any_emulator: Emulator, norm: Any, storage: str, T: int, E: int) -> None:
    check_norm(Kernels(any_emulator, storage), norm, T, E)


@pytest.mark.parametrize("E", [2560, 12288])
def test_norms_of_wide_rows_are_their_formula(emulator: Emulator, norm: Any, storage: str, E: int) -> None:
    check_norm(Kernels(emulator, storage), norm, 2, E)


@pytest.mark.slow
@pytest.mark.parametrize("E", [9216, 16383, 32768, *map(exhaustive, (4097, 5120, 16384))])
def test_norms_of_any_width_are_their_formula(emulator: Emulator, norm: Any, storage: str, E: int) -> None:
    check_norm(Kernels(emulator, storage), norm, 2, E)


@pytest.mark.parametrize("E", [8, 771])
def test_norms_of_unaligned_arrays_are_their_formula(emulator: Emulator, norm: Any, storage: str, E: int) -> None:
    check_norm(Kernels(emulator, storage), norm, 2, E, offset=3)


def test_a_mean_far_from_0_costs_no_digits(emulator: Emulator, norm: Any) -> None:
    check_norm(Kernels(emulator, "float32"), norm, 2, 768, shift=3000.0)


def test_epsilon_stands_beside_the_variance(emulator: Emulator, norm: Any) -> None:
    x, out = np.array([[-1.0, 1.0]], np.float32), np.empty((1, 2), np.float32)
    norm[0](Kernels(emulator, "float32"), x, None, None, 3.0, out)
    np.testing.assert_allclose(out, [[-0.5, 0.5]])


@pytest.mark.parametrize("given", ["gain", "bias", "neither"])
def test_gain_and_bias_may_be_missing(emulator: Emulator, norm: Any, storage: str, given: str) -> None:
    x, out = random(2, 40, storage=storage), random(2, 40, storage=storage)
    gain = random(40, seed=1) if given == "gain" else None
    bias = random(40, seed=2) if given == "bias" and norm is NORMS["layer_norm"] else None
    norm[0](Kernels(emulator, storage), x, gain, bias, EPSILON, out)
    assert_close(out, x, norm, gain, bias)


@pytest.mark.parametrize(("heads", "D"), [(3, 16), (2, 80), (4, 7), (1, 128)])
def test_each_head_of_a_fused_projection_is_normed_by_itself(
    any_emulator: Emulator, storage: str, heads: int, D: int
) -> None:
    """Keys, as they lie between queries and values; what lies around them is left out and left alone."""
    guarded = Guarded()
    fused = guarded.copy(random(3, (heads + 5) * D, storage=storage, seed=D))
    fused[:, : 4 * D] = np.nan
    x, gain = fused[:, 4 * D : (4 + heads) * D].reshape(3, heads, D), guarded.copy(random(D, seed=1))
    assert np.shares_memory(x, fused)
    out, before = guarded.empty(3, heads, D, like=fused), fused.copy()
    rows.rms_norm(Kernels(any_emulator, storage), x, gain, EPSILON, out)
    assert_close(out, x, NORMS["rms_norm"], gain, None)
    assert fused.tobytes() == before.tobytes()
    guarded.check()


def test_rows_wider_than_a_block_holds_are_refused(emulator: Emulator) -> None:
    x = np.zeros((1, 32769), np.float16)
    with pytest.raises(DeviceError, match=r"up to 32768 numbers, not 32769"):
        rows.layer_norm(Kernels(emulator, "float16"), x, None, None, EPSILON, np.empty_like(x))


# The gate of an MLP


@pytest.mark.parametrize("activation", [name for name in GATES if name != "relu2"])
@pytest.mark.parametrize("F", [1, 7, 24, 2200])
@pytest.mark.parametrize("offset", [32, 3], ids=["aligned", "unaligned"])
def test_the_gate_is_its_formula(emulator: Emulator, storage: str, activation: str, F: int, offset: int) -> None:
    check_gate(Kernels(emulator, storage), activation, F, offset)


@pytest.mark.parametrize("F", [1, 7, 24, 771])
@pytest.mark.parametrize("offset", [32, 3], ids=["aligned", "unaligned"])
def test_relu_gates_a_row_by_itself_to_its_square(emulator: Emulator, storage: str, F: int, offset: int) -> None:
    guarded = Guarded(offset)
    x = guarded.copy(random(3, F + 5, storage=storage, seed=F))[:, :F]
    out = guarded.empty(3, F, like=x)
    rows.glu(Kernels(emulator, storage), x, "relu", out)
    np.testing.assert_array_equal(out, (np.maximum(x.astype(np.float32), 0) ** 2).astype(x.dtype))
    guarded.check()


def test_the_gate_in_any_order_of_threads(any_emulator: Emulator, storage: str) -> None:
    for F in (7, 2200):
        check_gate(Kernels(any_emulator, storage), "silu", F)


def check_gate(kernels: Kernels, activation: str, F: int, offset: int = 32) -> None:
    """At most twice the error of the plain computation in float32. Rows begin on 16 bytes where `offset` lets them."""
    guarded = Guarded(offset)
    x = guarded.copy(random(3, 2 * F + 8 - 2 * F % 8, storage=kernels.storage, seed=F))[:, : 2 * F]
    out, before = guarded.empty(3, F, like=x), x.copy()
    rows.glu(kernels, x, activation, out)
    wide = x.astype(np.float64)
    exact = exact_gate(activation, wide[:, :F], wide[:, F:])
    plain = reference.glu(x.astype(np.float32), activation, np, np.empty((3, F), np.float32)).astype(x.dtype)
    allowed = 2 * np.abs(plain - exact).max() + np.finfo(np.float32).eps * np.abs(exact).max()
    assert np.abs(out - exact).max() <= allowed
    np.testing.assert_array_equal(x, before)
    guarded.check()


def test_a_gate_far_from_0_is_shut_or_open(emulator: Emulator) -> None:
    """Where an exponential overflows nothing becomes NaN; a NaN stays one."""
    gates = np.array([-3e38, -1e4, -90, 90, 1e4, np.nan], np.float32)
    for activation in ACTIVATIONS.keys() - {"relu2"}:
        x, out = np.stack([gates, np.full_like(gates, 0.5)], axis=1), np.empty((6, 1), np.float32)
        with np.errstate(over="ignore"):
            rows.glu(Kernels(emulator, "float32"), x, activation, out)
        np.testing.assert_array_equal(out[:, 0], [0, 0, 0, 45, 5e3, np.nan])


def test_the_clamped_gate_bounds_infinity_and_no_nan(emulator: Emulator) -> None:
    x, out = (
        np.array([[np.nan, 1], [1, np.nan], [np.inf, np.inf], [-3e38, 1]], np.float32),
        np.empty((4, 1), np.float32),
    )
    with np.errstate(over="ignore"):
        rows.glu(Kernels(emulator, "float32"), x, "swiglu_oai", out)
    np.testing.assert_allclose(out[:, 0], [np.nan, np.nan, 56, 0], rtol=1e-5)


def test_no_rows_have_no_gate(emulator: Emulator) -> None:
    rows.glu(Kernels(emulator, "float32"), np.empty((0, 8), np.float32), "silu", np.empty((0, 4), np.float32))


@pytest.mark.parametrize("E", [8, 33, 771])
@pytest.mark.parametrize("offset", [32, 3], ids=["aligned", "unaligned"])
def test_rms_norm_adds_the_residual(emulator: Emulator, storage: str, E: int, offset: int) -> None:
    kernels, guarded = Kernels(emulator, storage), Guarded(offset)
    x, residual = (guarded.copy(random(3, E, storage=storage, seed=seed)) for seed in (0, 1))
    gain, out = guarded.copy(random(E, seed=2)), guarded.empty(3, E, like=x)
    rows.rms_norm(kernels, x, gain, EPSILON, out, residual)
    exact = rms_norm_formula(x.astype(np.float64), gain, None, EPSILON) + residual.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=2 * float(ml_dtypes.finfo(x.dtype).eps), atol=1e-6)
    guarded.check()


@pytest.mark.parametrize("F", [1, 24, 771])
@pytest.mark.parametrize("offset", [32, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    ("by_others", "factors"), [(True, None), (False, "one"), (True, "one"), (False, "columns"), (True, "columns")]
)
def test_products_of_rows(
    emulator: Emulator, storage: str, F: int, offset: int, by_others: bool, factors: str | None
) -> None:
    """By rows that lie further apart, and by one number or one of each column."""
    kernels, guarded = Kernels(emulator, storage), Guarded(offset)
    x, wide = (guarded.copy(random(3, width, storage=storage, seed=width)) for width in (F, 2 * F))
    factor, out = guarded.copy(random(F if factors == "columns" else 1, seed=2)), guarded.empty(3, F, like=x)
    rows.multiply(kernels, x, wide[:, F:] if by_others else None, factor if factors else None, out)
    exact = x.astype(np.float64) * (wide[:, F:].astype(np.float64) if by_others else 1) * (factor if factors else 1)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=float(ml_dtypes.finfo(x.dtype).eps), atol=1e-7)
    guarded.check()
