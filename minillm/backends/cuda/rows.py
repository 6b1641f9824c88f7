"""Launches the row-wise kernels: embedding, rows, norms, rotary, gates, convolutions, recurrences, logits' scale.

Their sources are `kernels/cuda/embed.cu`, `norm.cu`, `rotary.cu`, `glu.cu`, `convolution.cu`, `delta_rule.cu`,
`selective_scan.cu` and `logits.cu`.

Results are contiguous; inputs may have a larger row stride. Nothing is launched for zero rows.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from ...errors import DeviceError
from ...reference.rotary import Rotation
from .kernels import NULL, Kernels, int32s, or_null, row_stride
from .linear import ACTIVATIONS

WARP = 32
MOST_THREADS = 256
"""The most threads of a block in the kernels without a reduction over the row."""
MOST_BLOCKS = 65535
"""The most blocks of `scale_logits`, each of which then walks on."""
MOST_TAPS = 64
"""The most inputs of a convolution in `convolution.cu`"""
MOST_KEYS, COLUMNS, COLUMN_THREADS = 256, 32, 4
"""The largest dk in `delta_rule.cu`, the columns of a block, and the threads of each"""
MOST_STATE = 256
"""The largest N of `selective_scan.cu`, whose lanes have N / 32 numbers each"""
SCAN_THREADS = 128
NORM_THREADS = 512
ROTARY_THREADS = 256
NORM_VALUES = 64
"""The most numbers of a row that one thread keeps in registers."""


def embed(
    kernels: Kernels,
    table: Any,
    ids: Any,
    out: Any,
    *,
    position_table: Any | None = None,
    positions: Any | None = None,
    position_offset: int = 0,
    scale: float = 1.0,
    first: int | None = None,
) -> None:
    """out = scale * table[ids], plus position_table[positions + position_offset] where that is given.

    Args:
        kernels: for the storage type of the tables and of `out`.
        table: [V, E]
        ids: [T] int32
        out: [T, E]
        position_table: [positions, E], contiguous
        positions: [T] int32
        position_offset: added to each position.
        scale: factor of the tokens' vectors.
        first: where ranks share a table, the row of it that is this one's first; vectors of other ids are zero. None:
            the table is whole
    """
    T, E = out.shape
    if T == 0:
        return
    shared = {} if first is None else {"SHARED": 1}
    vectors = -(-E // _vector(out))
    threads = min(MOST_THREADS, _warps(vectors))
    kernels.get("embed", "embed", **shared)(
        (T, -(-vectors // threads)),
        (threads,),
        (
            out,
            table,
            ids,
            or_null(position_table),
            or_null(positions),
            *int32s(
                E,
                len(table),
                row_stride(table),
                0 if position_table is None else len(position_table),
                position_offset,
            ),
            np.float32(scale),
            *int32s(*(() if first is None else (first,))),
        ),
    )


def take_rows(kernels: Kernels, x: Any, rows: Any, out: Any) -> None:
    """out = x[rows], by the kernel of embedding. [T, E], [R] int32 -> [R, E]"""
    embed(kernels, x, rows, out)


class NormArguments(NamedTuple):
    """The arguments of the kernel `rms_norm`."""

    out: Any
    x: Any
    gain: Any
    residual: Any
    E: np.int32
    x_stride: np.int32
    gain_stride: np.int32
    epsilon: np.float32


def layer_norm(kernels: Kernels, x: Any, gain: Any | None, bias: Any | None, epsilon: float, out: Any) -> None:
    """out = layer norm of x.

    Args:
        kernels: for the storage type of x and out.
        x: [T, E]
        gain: [E] float32, or None
        bias: [E] float32, or None
        epsilon: added to the variance.
        out: [T, E]

    Raises:
        DeviceError: the row is wider than a block keeps in registers (32,768).
    """
    _norm(kernels, "layer_norm", x, (or_null(gain), or_null(bias)), epsilon, out)


def rms_norm(kernels: Kernels, x: Any, gain: Any | None, epsilon: float, out: Any, residual: Any | None = None) -> None:
    """out = RMS norm of x, plus residual [T, E], contiguous, where that is given.

    Other arguments as of `layer_norm`; or x and out are [T, heads, D], and gain is [D] or [heads D].
    """
    assert residual is None or residual.flags.c_contiguous
    apart = x.shape[-1] if gain is not None and gain.size > x.shape[-1] else 0
    _norm(kernels, "rms_norm", x, (or_null(gain), or_null(residual)), epsilon, out, int32s(apart))


GATES = ACTIVATIONS | {"swiglu_oai": 5}
"""Gates of a gated MLP -> their numbers in `kernels/cuda/activation.cuh`"""


class GluArguments(NamedTuple):
    """The arguments of the kernel `glu`."""

    out: Any
    x: Any
    F: np.int32
    x_stride: np.int32
    up_at: np.int32
    activation: np.int32


def glu(kernels: Kernels, x: Any, activation: str, out: Any) -> None:
    """out = activation(gate) * up.

    Args:
        kernels: for the storage type of x and out.
        x: [T, 2 F]: gate and up side by side; or [T, F], which is both
        activation: a name in `GATES`
        out: [T, F]
    """
    T, F = out.shape
    if T == 0:
        return
    vectors = -(-F // _vector(out))
    threads = min(MOST_THREADS, _warps(vectors))
    args = GluArguments(out, x, *int32s(F, row_stride(x), x.shape[1] - F, GATES[activation]))
    kernels.get("glu", "glu")((T, -(-vectors // threads)), (threads,), args)


def gate(kernels: Kernels, x: Any, logits: Any, out: Any, *, silu: bool = False) -> None:
    """out = x * sigmoid(logits), or x * silu(logits), each of n equal parts of a row by a logit of its own.

    Args:
        kernels: for the storage type of all three.
        x: [T, F]
        logits: [T, n]; or a view with a larger row stride
        out: [T, F]
        silu: whether the factor is silu(logits)
    """
    T, F = out.shape
    if T == 0:
        return
    vectors = -(-F // _vector(out))
    threads = min(MOST_THREADS, _warps(vectors))
    args = (out, x, logits, *int32s(F, logits.shape[1]), row_stride(x), row_stride(logits), np.int32(silu))
    kernels.get("glu", "gate")((T, -(-vectors // threads)), (threads,), args)


def multiply(kernels: Kernels, x: Any, others: Any | None, factor: Any | None, out: Any) -> None:
    """out = x * others * factor, of which one may be missing.

    Args:
        kernels: for the storage type of x, others and out
        x: [T, F]
        others: [T, F] or None
        factor: [1] or [F] float32, or None
        out: [T, F]
    """
    T, F = out.shape
    if T == 0:
        return
    vectors = -(-F // _vector(out))
    threads = min(MOST_THREADS, _warps(vectors))
    strides = row_stride(x), np.int32(0) if others is None else row_stride(others)
    by_column = np.int32(factor is not None and len(factor) > 1)
    args = (out, x, or_null(others), or_null(factor), np.int32(F), *strides, by_column)
    kernels.get("glu", "multiply")((T, -(-vectors // threads)), (threads,), args)


def move_heads(kernels: Kernels, x: Any, out: Any) -> None:
    """Copy heads [T, H, width], each contiguous, to others."""
    T, H, width = x.shape
    if not x.size:
        return
    strides = (stride // array.dtype.itemsize for array in (out, x) for stride in array.strides[:2])
    kernels.get("heads", "move_heads")((T, H), (min(MOST_THREADS, _warps(width)),), (out, x, *int32s(width, *strides)))


def convolve(
    kernels: Kernels,
    x: Any,
    taps: Any,
    bias: Any | None,
    states: Any,
    places: tuple[Any, Any],
    out: Any,
    *,
    gated: bool,
    activation: str | None,
) -> None:
    """A causal depthwise convolution (`reference.convolve`).

    Args:
        kernels: for the storage type of x and out
        x: [T, C], or gated [T, 3 C]; or a view with a larger row stride
        taps: [k C] float32, of the oldest input first; k at most `MOST_TAPS`
        bias: [C] float32, or None
        states: [slots, k - 1, C] float32
        places: where each token finds the state before it, and where the state after it goes; [T] int32 each
        out: [T, C], filled; contiguous
        gated: whether rows of x are two gates and the input
        activation: a name in `linear.ACTIVATIONS`, or None
    """
    T, C = out.shape
    if T == 0:
        return
    slots, k = states.shape[0], states.shape[1] + 1
    threads = min(MOST_THREADS, _warps(C))
    arrays = (out, x, taps, or_null(bias), states, *places)
    sizes = int32s(C, k, slots, row_stride(x), gated, ACTIVATIONS[activation])
    kernels.get("convolution", "convolve")((T, -(-C // threads)), (threads,), (*arrays, *sizes))


def delta_rule(
    kernels: Kernels,
    x: Any,
    gates: Any,
    weight: tuple[Any, Any],
    states: Any,
    places: tuple[Any, Any],
    out: Any,
    *,
    keys: tuple[int, int],
) -> None:
    """The gated delta rule (`reference.delta_rule`).

    Args:
        kernels: for the storage type of x, gates and out
        x: [T, 2 K dk + V dv]; or a view with a larger row stride
        gates: [T, 2 V]; the same
        weight: rates of decay and biases, [V] float32 each
        states: [slots, V, dk, dv] float32; dk at most `MOST_KEYS`
        places: where each token finds the state before it, and where the state after it goes; [T] int32 each
        out: [T, V dv], filled; contiguous
        keys: K and dk
    """
    (T, _), (slots, V, dk, dv) = out.shape, states.shape
    if T == 0:
        return
    arrays = (out, x, gates, *weight, states, *places)
    sizes = int32s(T, keys[0], V, dk, dv, slots, row_stride(x), row_stride(gates))
    grid = (T, V, -(-dv // COLUMNS))
    kernels.get("delta_rule", "delta_rule")(grid, (COLUMNS * COLUMN_THREADS,), (*arrays, *sizes))


def selective_scan(
    kernels: Kernels,
    x: Any,
    steps: Any,
    rates: Any,
    step_bias: Any,
    states: Any,
    places: tuple[Any, Any],
    out: Any,
    *,
    groups: int,
    limits: tuple[float, float],
) -> None:
    """Mamba-2's recurrence (`reference.selective_scan`).

    Args:
        kernels: for the storage type of x, steps and out
        x: [T, H P + 2 G N]; or a view with a larger row stride
        steps: [T, H]; or a view with a larger row stride
        rates: [2 H] float32, of decay, then the factors to skip
        step_bias: [H] float32
        states: [slots, H, P, N] float32; N at most `MOST_STATE`
        places: where each token finds the state before it, and where the state after it goes; [T] int32 each
        out: [T, H P], filled; contiguous
        groups: G
        limits: of the steps
    """
    if len(out) == 0:
        return
    slots, H, P, N = states.shape
    arrays = (out, x, steps, rates, step_bias, states, *places)
    sizes = int32s(len(out), H, P, groups, N, slots, row_stride(x), row_stride(steps))
    blocks = -(-H * P // (SCAN_THREADS // WARP))
    kernels.get("selective_scan", "selective_scan", VALUES=-(-N // WARP))(
        (blocks,), (SCAN_THREADS,), (*arrays, *sizes, *(np.float32(limit) for limit in limits))
    )


def scale_logits(kernels: Kernels, logits: Any, scale: float, cap: float | None) -> None:
    """logits = cap * tanh(scale * logits / cap), or scale * logits without a cap, in place. [R, V] float32"""
    if logits.size == 0:
        return
    blocks = min(MOST_BLOCKS, -(-logits.size // (4 * MOST_THREADS)))
    args = (logits, np.int64(logits.size), np.float32(scale), np.float32(cap or 0))
    kernels.get("logits", "scale_logits")((blocks,), (MOST_THREADS,), args)


class TokenPositions(Protocol):
    """The arrays of a batch that rotation reads, int32 on the device."""

    @property
    def positions(self) -> Any:
        """[T], from 0"""

    @property
    def text_lens(self) -> Any:
        """[N]: length of each sequence's whole text; read if the rotation has a `stretch`, or two rows"""

    @property
    def query_starts(self) -> Any:
        """[N + 1]: sequence i owns the rows query_starts[i] : query_starts[i + 1]"""


class RotaryArguments(NamedTuple):
    """The arguments of the kernel `rotary`."""

    q_out: Any
    k_out: Any
    q: Any
    k: Any
    positions: Any
    frequencies: Any
    text_lens: Any
    query_starts: Any
    N: np.int32
    H: np.int32
    K: np.int32
    D: np.int32
    key_dim: np.int32
    half: np.int32
    q_stride: np.int32
    k_stride: np.int32
    scale: np.float32
    factor: np.float64
    original: np.int32


def rotary(kernels: Kernels, q: Any, k: Any, batch: TokenPositions, rotation: Rotation, q_out: Any, k_out: Any) -> None:
    """Rotate queries and keys by their positions, in one launch (`reference.rotary`).

    Args:
        kernels: for the storage type of q and k
        q: [T, H, D], or a view with a larger row stride
        k: [T, K, D], likewise; it may be narrower
        batch: of T tokens
        rotation: with its frequencies on the device
        q_out: [T, H, D], filled; contiguous
        k_out: [T, K, D], likewise
    """
    T, H, D = q.shape
    if T == 0:
        return
    frequencies, stretch, short = rotation.frequencies.data, rotation.stretch, rotation.short
    half, N = rotation.pairs, len(batch.query_starts) - 1
    assert 2 * half <= D, "no more numbers turn than a head has"
    shared = 2 * half * 4
    texts = (NULL, NULL) if stretch is None and short is None else (batch.text_lens, batch.query_starts)
    arrays = (q_out, k_out, q, k, batch.positions, frequencies, *texts)
    sizes = int32s(N, H, k.shape[1], D, k.shape[2], half, row_stride(q), row_stride(k))
    factor, original = (0.0, short or 0) if stretch is None else (stretch.factor, stretch.original)
    numbers: Any = np.float32(rotation.scale), np.float64(factor), np.int32(original)
    kernel = kernels.get("rotary", "rotary", shared_mem=shared)
    kernel((T,), (ROTARY_THREADS,), RotaryArguments(*arrays, *sizes, *numbers), shared_mem=shared)


def norm_vectors(E: int, vector: int) -> int:
    """VECTORS of `norm.cu`: how many vectors of `vector` numbers a thread keeps of a row of E. A power of two."""
    vectors = 1
    while -(-E // (vector * vectors)) > NORM_THREADS:
        vectors *= 2
    if vectors * vector > NORM_VALUES:
        raise DeviceError(f"the norm kernels take rows of up to {NORM_THREADS * NORM_VALUES} numbers, not {E}")
    return vectors


def _norm(
    kernels: Kernels, name: str, x: Any, parameters: tuple[Any, ...], epsilon: float, out: Any, strides: Any = ()
) -> None:
    """Launch a norm; `parameters` are its gain, and its bias or residual; `strides` further ones."""
    T, *heads, E = x.shape
    if T == 0:
        return
    vector = _vector(x)
    vectors = norm_vectors(E, vector)
    threads = _warps(-(-E // (vector * vectors)))
    args = (out, x, *parameters, *int32s(E, row_stride(x)), *strides, np.float32(epsilon))
    kernels.get("norm", name, VECTORS=vectors)((T, *heads), (threads,), args)


def _vector(array: Any) -> int:
    """VECTOR of `common.cuh`: how many numbers there are in 16 bytes."""
    return 16 // int(array.dtype.itemsize)


def _warps(threads: int) -> int:
    """Threads rounded up to whole warps."""
    return -(-threads // WARP) * WARP
