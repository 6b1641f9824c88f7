"""Kernels on rows, against the same in float64 and against the reference operations."""

import math
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cpu.selftest import random_blocks
from minillm.backends.storage import expand, narrow
from minillm.reference.activation import ACTIVATIONS
from minillm.reference.blocks import BLOCK_FORMATS, BlockFormat, BlockMatrix
from minillm.reference.gates import GATES
from minillm.reference.quantize import Quantized, quantize

from . import kernels
from .kernels import fill, run

RNG = np.random.default_rng
LAYER, RMS = "layer_norm", "rms_norm"


def assert_as_good(ours: np.ndarray, plain: np.ndarray, expected: np.ndarray, roundings: float = 8) -> None:
    """The largest error is at most twice the reference's, or what so many roundings to float32 can give."""
    error, plain_error = np.abs(ours - expected).max(initial=0), np.abs(plain - expected).max(initial=0)
    bound = max(2 * plain_error, roundings * 2.0**-24 * np.abs(expected).max(initial=0))
    assert error <= bound, f"error {error:.1e}, at most {bound:.1e} expected, the plain one's is {plain_error:.1e}"


def norm(name: str, x: Any, gain: Any = None, bias: Any = None, shares: int = 1, workers: int = 1) -> np.ndarray:
    T, heads, width = x.shape if x.ndim == 3 else (len(x), 1, x.shape[1])
    out = np.full(x.shape, np.nan, np.float32)
    arguments = fill(kernels.NormArguments, x=x, gain=gain, bias=bias, out=out, T=T, heads=heads, width=width,
                     stride=x.strides[0] // 4, epsilon=1e-5)  # fmt: skip
    run(name, arguments, shares, workers)
    return out


def plain_norm(name: str, x: Any, gain: Any, bias: Any, dtype: Any) -> np.ndarray:
    x, gain, bias = (None if part is None else part.astype(dtype) for part in (x, gain, bias))
    if name == LAYER:
        return reference.layer_norm(x, gain, bias, 1e-5, np, np.empty_like(x))
    return reference.rms_norm(x, gain, 1e-5, np, np.empty_like(x))


@pytest.mark.parametrize("name", [LAYER, RMS])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("T", "E"), [(1, 768), (7, 33), (40, 1030), (3, 1), (5, 4), (2, 20), (0, 16)])
def test_norms(name: str, T: int, E: int, affine: bool) -> None:
    rng = RNG(0)
    x = (rng.standard_normal((T, E)) * 3 + (50 * rng.standard_normal((T, 1)) if name == LAYER else 0)).astype(
        np.float32
    )
    gain, bias = rng.standard_normal((2, E)).astype(np.float32) if affine else (None, None)
    ours, bias = norm(name, x, gain, bias if name == LAYER else None), bias if name == LAYER else None
    roundings = min(E, 4 * math.sqrt(E)) / 2 + 8
    assert_as_good(ours, *(plain_norm(name, x, gain, bias, dtype) for dtype in (np.float32, np.float64)), roundings)


@pytest.mark.parametrize(("T", "E"), [(1, 768), (7, 33), (3, 1), (0, 16)])
def test_rms_norm_adds_the_residual(T: int, E: int) -> None:
    x, residual = RNG(0).standard_normal((2, T, E)).astype(np.float32)
    gain, out = RNG(1).standard_normal(E).astype(np.float32), np.full((T, E), np.nan, np.float32)
    sizes = {"T": T, "heads": 1, "width": E, "stride": E, "epsilon": 1e-5}
    run(RMS, fill(kernels.NormArguments, x=x, gain=gain, residual=residual, out=out, **sizes), 2)
    np.testing.assert_array_equal(out, norm(RMS, x, gain) + residual)


@pytest.mark.parametrize("mean", [1e3, 1e5])
def test_a_large_mean_costs_no_accuracy(mean: float) -> None:
    """The numbers are what float32 makes of them; from there on the error is that of numbers without a mean."""
    x = (RNG(0).standard_normal((4, 768)) + mean).astype(np.float32)
    expected = plain_norm(LAYER, x, None, None, np.float64)
    assert np.abs(norm(LAYER, x) - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("D", [64, 7, 20, 128])
def test_rms_norm_of_heads_whose_rows_lie_apart(D: int) -> None:
    rng, T, heads = RNG(0), 5, 3
    x = rng.standard_normal((T, (heads + 4) * D)).astype(np.float32)[:, D : (heads + 1) * D].reshape(T, heads, D)
    gain, kept = rng.standard_normal(D).astype(np.float32), x.copy()
    ours = norm(RMS, x, gain)
    assert_as_good(ours, *(plain_norm(RMS, x, gain, None, dtype) for dtype in (np.float32, np.float64)), 20)
    np.testing.assert_array_equal(x, kept)
    for h in range(heads):
        np.testing.assert_array_equal(norm(RMS, np.ascontiguousarray(x[:, h]), gain), ours[:, h])


@pytest.mark.parametrize("name", [LAYER, RMS])
def test_a_row_of_a_norm_has_the_same_bits_in_any_batch(name: str) -> None:
    x = RNG(0).standard_normal((9, 100)).astype(np.float32)
    together = norm(name, x, shares=4, workers=2)
    np.testing.assert_array_equal(norm(name, x), together)
    for i in range(9):
        np.testing.assert_array_equal(norm(name, x[i : i + 1])[0], together[i])


@pytest.mark.parametrize("name", [LAYER, RMS])
def test_a_norm_of_what_is_not_finite_is_not(name: str) -> None:
    x = np.array([[1.0, np.nan, 2.0], [1.0, np.inf, 2.0], [1.0, 0.0, 2.0]], np.float32)
    out = norm(name, x)
    assert np.isnan(out[:2]).any(axis=1).all() and np.isfinite(out[2]).all()


def test_parameters_may_lie_at_odd_addresses() -> None:
    memory = np.frombuffer(b"\0" + RNG(0).standard_normal(20).astype(np.float32).tobytes(), np.uint8)[1:]
    x = RNG(1).standard_normal((2, 20)).astype(np.float32)
    gain = memory.view(np.float32)
    np.testing.assert_array_equal(norm(LAYER, x, gain), norm(LAYER, x, gain.copy()))


# --- gates ------------------------------------------------------------------------------------------------------------


def glu(x: np.ndarray, activation: str | None, shares: int = 1) -> np.ndarray:
    T, F = len(x), x.shape[1] // 2
    out = np.full((T, F), np.nan, np.float32)
    run("glu", fill(kernels.GluArguments, x=x, out=out, T=T, F=F, activation=kernels.GATES[activation]), shares)
    return out


def exact(activation: str, x: np.ndarray) -> np.ndarray:
    """In float64, without cancellation for negative x."""
    x = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "gelu":
            return x * np.vectorize(math.erfc, otypes=[float])(-x / np.sqrt(2)) / 2
        if activation == "gelu_new":
            return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
        if activation in ("relu", "relu2"):
            return np.maximum(x, 0) ** (1 + (activation == "relu2"))
        return x / (1 + np.exp(-x))


def exact_gate(activation: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if activation != "swiglu_oai":
        return exact(activation, gate) * up
    gate = np.minimum(gate.astype(np.float64), 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up.astype(np.float64), -7, 7) + 1)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("T", "F"), [(1, 1536), (5, 3), (0, 8), (65, 1001), (2, 4)])
def test_gates(T: int, F: int, activation: str) -> None:
    x = (RNG(0).standard_normal((T, 2 * F)) * 4).astype(np.float32)
    kept = x.copy()
    plain = reference.glu(x, activation, np, np.empty((T, F), np.float32))
    ours = glu(x, activation)
    assert_as_good(ours, plain, exact_gate(activation, x[:, :F], x[:, F:]))
    np.testing.assert_array_equal(x, kept)
    np.testing.assert_array_equal(glu(x, activation, 3), ours)


@pytest.mark.parametrize("F", [3, 40])
def test_relu_gates_a_row_by_itself_to_its_square(F: int) -> None:
    x = RNG(0).standard_normal((5, F), np.float32)
    out, relu = np.full_like(x, np.nan), kernels.GATES["relu"]
    run("glu", fill(kernels.GluArguments, x=x, out=out, T=5, F=F, activation=relu, alone=True), 2)
    np.testing.assert_array_equal(out, np.maximum(x, 0) ** 2)


@pytest.mark.parametrize(("activation", "ulps"), [("relu", 0), ("silu", 3), ("gelu", 10), ("gelu_new", 20)])
def test_activations_are_accurate_where_results_are_small_too(activation: str, ulps: float) -> None:
    """To some ulps of the result from -3 on (gelu_new's argument is rounded), and to 3 ulps of x anywhere."""
    x = np.linspace(-120, 120, 200_001).astype(np.float32)
    x = np.concatenate([x, x / 40, 10.0 ** np.arange(-30, 38, 2), -(10.0 ** np.arange(-30, 38, 2))]).astype(np.float32)
    expected = exact(activation, x)
    error = np.abs(glu(np.stack([x, np.ones_like(x)]).reshape(1, -1), activation)[0] - expected)
    near = np.abs(x) < 3
    assert (error[near] <= ulps * np.spacing(np.abs(expected[near]).astype(np.float32))).all()
    assert (error <= 3 * np.spacing(np.abs(x))).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("F", [3, 40])
def test_nan_and_infinity_stay(activation: str, F: int) -> None:
    x = np.ones((1, 2 * F), np.float32)
    x[0, :3] = np.nan, np.inf, 5
    out = glu(x, activation)
    assert np.isnan(out[0, 0]) and out[0, 1] == np.inf and np.isfinite(out[0, 2:]).all()


def test_the_clamped_gate_bounds_infinity_and_no_nan() -> None:
    gates, ups = [np.nan, 1, np.inf, 1], [1, np.nan, np.inf, -np.inf]
    out = glu(np.array([gates + ups], np.float32), "swiglu_oai")[0]
    assert np.isnan(out[:2]).all()
    np.testing.assert_allclose(out[2:], [56, -6 / (1 + np.exp(-1.702))], rtol=1e-5)


def test_every_activation_of_the_reference_has_its_code() -> None:
    assert kernels.ACTIVATIONS.keys() == {None, *ACTIVATIONS}
    assert kernels.GATES.keys() == {None, *GATES}


# --- embedding --------------------------------------------------------------------------------------------------------


def table(form: str, V: int, E: int, seed: int) -> Any:
    x = RNG(seed).standard_normal((V, E)).astype(np.float32)
    if form == "float32":
        return x
    if form in ("float16", "bfloat16"):
        return narrow(x, form)
    form, _, offsets = form.partition(" with ")
    bits, group = form.split("x")
    return kernels.with_offsets(quantize(x, int(bits), int(group)), offsets)


def as_table(data: Any, kept: list[Any]) -> Any:
    if data is None:
        return kernels.Table()
    if isinstance(data, BlockMatrix):
        made = fill(kernels.Table, values=data.blocks, format=kernels.FORMATS[data.form.name], group=32)
    elif isinstance(data, Quantized):
        arrays = {"values": data.values, "scales": data.scales, "offsets": data.offsets}
        form = f"int{data.bits}"
        made = fill(kernels.Table, **arrays, format=kernels.FORMATS[form], group=data.group, zeros=data.has_zeros)
    else:
        form = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}[data.dtype.name]
        made = fill(kernels.Table, values=data, format=kernels.FORMATS[form], group=1)
    kept += made.kept
    return made


def embed(
    ids: Any,
    words: Any,
    E: int,
    positions: Any = None,
    places: Any = None,
    shares: int = 1,
    scale: float = 1.0,
    types: Any = None,
    kinds: Any = None,
    first: int = 0,
    stop: int = 11,
) -> np.ndarray:
    out, kept = np.full((len(ids), E), np.nan, np.float32), []
    arguments = fill(kernels.EmbedArguments, ids=ids, words=as_table(words, kept), positions=positions,
                     places=as_table(places, kept), types=types, kinds=as_table(kinds, kept), out=out, T=len(ids), E=E,
                     first=first, stop=stop, scale=scale)  # fmt: skip
    arguments.kept += kept
    run("embed", arguments, shares)
    return out


FORMS = ["float32", "float16", "bfloat16", "8x32", "8x64", "4x32", "4x64", "4x32 with offsets", "4x64 with zero points"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("E", [64, 100, 7, 4, 80])
def test_embeddings_are_looked_up_in_every_format(form: str, E: int) -> None:
    tokens, places = table(form, 11, E, 0), table("float16", 5, E, 1)
    ids, positions = np.array([3, 10, 0, 3]), np.array([4, 0, 1, 1])
    np.testing.assert_array_equal(embed(ids, tokens, E), expand(tokens, ids))
    both = embed(ids, tokens, E, positions, places, shares=2)
    np.testing.assert_allclose(both, expand(tokens, ids) + expand(places, positions), rtol=1e-6, atol=1e-6)
    kinds, types = table("bfloat16", 2, E, 2), np.array([0, 1, 1, 0])
    np.testing.assert_allclose(
        embed(ids, tokens, E, positions, places, types=types, kinds=kinds),
        expand(tokens, ids) + expand(places, positions) + expand(kinds, types),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    assert embed(ids[:0], tokens, E).shape == (0, E)
    scaled = embed(ids, tokens, E, positions, places, scale=2.5)
    np.testing.assert_allclose(
        scaled, np.float32(2.5) * expand(tokens, ids) + expand(places, positions), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("form", FORMS)
def test_of_a_shared_table_the_tokens_of_other_ranks_are_zeros(form: str) -> None:
    tokens, places = table(form, 11, 64, 0), table("float16", 5, 64, 1)
    ids, positions = np.array([7, 10, 6, 17, 18, 0]), np.array([4, 0, 1, 1, 2, 3])
    whole = np.zeros((20, 64), np.float32)
    whole[7:18] = expand(tokens)
    ours = embed(ids, tokens, 64, positions, places, shares=2, scale=2.5, first=7, stop=18)
    np.testing.assert_allclose(ours, 2.5 * whole[ids] + expand(places, positions), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_embeddings_in_blocks_are_looked_up_to_the_last_bit(form: BlockFormat) -> None:
    tokens, places = random_blocks(RNG(0), form, 11, 512), table("float16", 5, 512, 1)
    ids, positions = np.array([3, 10, 0, 3]), np.array([4, 0, 1, 1])
    np.testing.assert_array_equal(embed(ids, tokens, 512), expand(tokens, ids))
    both = embed(ids, tokens, 512, positions, places, shares=2)
    np.testing.assert_allclose(both, expand(tokens, ids) + expand(places, positions), rtol=1e-6, atol=1e-6)


# --- rotary embedding and selection -----------------------------------------------------------------------------------


def angles(positions: Any, frequencies: Any, growth: Any, scale: float, shares: int = 1) -> Any:
    T, half = len(positions), frequencies.shape[-1]
    cosines, sines = np.full((2, T, half), np.nan, np.float32)
    arguments = fill(kernels.RotaryAnglesArguments, positions=positions, frequencies=frequencies, growth=growth,
                     cosines=cosines, sines=sines, T=T, half=half, rows=frequencies.ndim, scale=scale)  # fmt: skip
    run("rotary_angles", arguments, shares)
    return cosines, sines


def rotated(q: Any, k: Any, cosines: Any, sines: Any, shares: int = 1, *, in_place: bool = False) -> Any:
    outs = (q, k) if in_place else (np.full(x.shape, np.nan, np.float32) for x in (q, k))
    parts, results = [], []
    for x, out in zip((q, k), outs, strict=True):
        results.append(out)
        parts.append(kernels.HeadsToRotate(x.ctypes.data, out.ctypes.data, x.shape[1], x.shape[2],
                                           x.strides[0] // 4, out.strides[0] // 4))  # fmt: skip
    arguments = fill(kernels.RotaryArguments, q=parts[0], k=parts[1], cosines=cosines, sines=sines, T=len(q),
                     half=cosines.shape[1])  # fmt: skip
    arguments.kept += [q, k, *results]
    run("rotary", arguments, shares)
    return results


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("half", [1, 10, 64])
def test_cosines_and_sines_of_far_positions(half: int, grown: bool) -> None:
    rng, positions = RNG(0), np.array([0, 1, 77, 131_071, 5])
    frequencies = (10_000.0 ** -np.linspace(0, 0.9, half)).astype(np.float32)
    growth = rng.uniform(1, 3, 5).astype(np.float32) if grown else None
    ours = angles(positions, frequencies, growth, 1.25, shares=3)
    plain = reference.cosines_and_sines(positions, frequencies, growth, 1.25, np)
    # the power may differ by an ulp, which the position multiplies
    for mine, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=0.05 if grown else 4e-7)
        np.testing.assert_allclose(mine[:3], other[:3], rtol=0, atol=3e-5 if grown else 4e-7)


def test_a_token_takes_one_of_two_rows_of_frequencies() -> None:
    positions, rows = np.array([3, 70, 5, 900]), np.array([0, 1, 1, 0], np.float32)
    frequencies = RNG(0).uniform(0, 1, (2, 6)).astype(np.float32)
    ours = angles(positions, frequencies, rows, 1.25, shares=2)
    for i, row in enumerate(rows.astype(int)):
        plain = reference.cosines_and_sines(positions[i : i + 1], frequencies[row], None, 1.25, np)
        for mine, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(mine[i], other[0], rtol=0, atol=4e-7)


@pytest.mark.parametrize(("D", "half"), [(64, 32), (20, 10), (20, 5), (80, 16), (7, 3), (128, 64), (2, 1)])
@pytest.mark.parametrize("T", [0, 1, 6])
def test_rotary(T: int, D: int, half: int) -> None:
    rng, H, K = RNG(0), 4, 2
    qkv = rng.standard_normal((T, (H + 2 * K) * D)).astype(np.float32)
    q, k = qkv[:, : H * D].reshape(T, H, D), qkv[:, H * D : (H + K) * D].reshape(T, K, D)
    cosines, sines = (
        np.ascontiguousarray(f(rng.uniform(0, 9, (T, half)))).astype(np.float32) for f in (np.cos, np.sin)
    )
    ours = rotated(q, k, cosines, sines, shares=2)
    for x, out in zip((q, k), ours, strict=True):
        expected = reference.rotary(x.astype(np.float64), cosines, sines, np, np.empty(x.shape))
        np.testing.assert_allclose(out, expected, rtol=0, atol=5e-7)
        np.testing.assert_array_equal(out[..., 2 * half :], x[..., 2 * half :])
    for x, out in zip(rotated(q, k, cosines, sines, in_place=True), ours, strict=True):
        np.testing.assert_array_equal(x, out)


def test_take_rows() -> None:
    x, rows = RNG(0).standard_normal((6, 7)).astype(np.float32), np.array([5, 0, 0, 3])
    out = np.full((4, 7), np.nan, np.float32)
    run("take_rows", fill(kernels.TakeRowsArguments, x=x, rows=rows, out=out, R=4, E=7), 2)
    np.testing.assert_array_equal(out, x[rows])


# --- changes of some rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("width", [1, 19, 64])
def test_some_rows_change_by_what_lies_elsewhere(width: int, activation: str | None) -> None:
    y, residual, change = RNG(0).standard_normal((3, 5, width)).astype(np.float32)
    changed, out = [1, 4, 2], np.full((5, width), np.nan, np.float32)
    for added in (None, residual):
        changes = np.zeros(5, np.uint64)
        changes[changed] = change.ctypes.data + 4 * width * np.arange(3)
        arguments = fill(kernels.AddChangesArguments, y=y, changes=changes, residual=added, out=out, T=5, width=width,
                         activation=kernels.ACTIVATIONS[activation])  # fmt: skip
        arguments.kept.append(change)
        run("add_changes", arguments, 3, 2)
        expected = y.astype(np.float64)
        expected[changed] += change[:3]
        expected = expected if activation is None else exact(activation, expected)
        np.testing.assert_allclose(out, expected if added is None else expected + added, rtol=0, atol=3e-6)


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 19, 4096])
@pytest.mark.parametrize("cap", [None, 0.5, 30.0])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_logits_are_scaled_and_capped(scale: float, cap: float | None, count: int) -> None:
    """Also next to 0, where tanh x is x, and far beyond the cap."""
    x = (RNG(0).standard_normal(count) * 10.0 ** RNG(1).uniform(-6, 3, count)).astype(np.float32)
    expected = scale * x.astype(np.float64)
    expected = expected if cap is None else cap * np.tanh(expected / cap)
    run("scale_logits", fill(kernels.ScaleLogitsArguments, logits=x, count=count, scale=scale, cap=cap or 0.0), 3)
    np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_a_logit_that_is_not_a_number_stays_so() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    run("scale_logits", fill(kernels.ScaleLogitsArguments, logits=x, count=4, scale=1.0, cap=2.0))
    np.testing.assert_allclose(x, [np.nan, 2, -2, 2 * np.tanh(0.5)], rtol=1e-6)
