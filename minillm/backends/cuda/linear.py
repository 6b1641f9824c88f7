"""The products of every projection on a GPU: y = activation(x W^T + b) + residual.

Few rows (a decode step) go to `kernels/cuda/gemv.cu`, which reads each weight once; many (a prefill) to `gemm.cu`.
Both finish in one launch. The constants they are compiled for are chosen here, from the shapes alone.

`Products` replaces our GEMM by the library's (cuBLAS, through CuPy's matmul) for the shapes at which that is faster.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kernels import NULL, STORAGE, Kernels, row_stride

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_new": 3, "silu": 4}
"""Name of an activation in config.json -> its number in `kernels/cuda/activation.cuh`."""

FEW_ROWS = 16
"""The most rows that gemv.cu takes."""

PROCESSORS = 132
"""Multiprocessors of an H100 or H200: a launch should make about as many blocks, or more."""

TILES = ((128, 128), (64, 64), (32, 64))
"""Rows and outputs of one block of gemm.cu, the most economical first."""


def linear(
    kernels: Kernels,
    x: Any,
    weight: Any,
    bias: Any | None,
    out: Any,
    *,
    activation: str | None = None,
    residual: Any | None = None,
) -> Any:
    """y = activation(x W^T + b) + residual, by our kernels.

    Args:
        kernels: compiled for the type of x and weight
        x: [T, in]; the row stride may be larger than `in`
        weight: [out, in], contiguous
        bias: [out] float32, or None
        out: [T, out], of x's type or float32, filled and returned; the row stride may be larger
        activation: a name in `ACTIVATIONS`, or None
        residual: [T, out] of x's type, or None; not changed, so it must not be `out`
    """
    product = gemv if len(x) <= FEW_ROWS else gemm
    return product(kernels, x, weight, bias, out, activation=activation, residual=residual)


def gemv(
    kernels: Kernels,
    x: Any,
    weight: Any,
    bias: Any | None,
    out: Any,
    *,
    activation: str | None = None,
    residual: Any | None = None,
) -> Any:
    """`linear` for at most FEW_ROWS rows."""
    rows, outputs = out.shape
    assert rows <= FEW_ROWS, f"{rows} rows, and gemv takes {FEW_ROWS}"
    if not (rows and outputs):
        return out
    args = _arguments(kernels, x, weight, bias, out, activation, residual)
    constants = {"ROWS": _power_of_two(rows), **_float_out(x, out)}
    if kernels.storage == "float32" or rows <= 4:
        outs, splits = _fma_shape(constants["ROWS"], outputs)
        kernel = kernels.get("gemv", "gemv_fma", OUTS=outs, **constants)
        kernel((_ceil(outputs, outs * 4 // splits),), (128,), (*args, np.int32(splits)))
    else:
        constants["ROWS"] = max(constants["ROWS"], 8)
        outs = next((outs for outs in (32, 16) if outputs >= outs * PROCESSORS * 2 // 3), 8)
        kernel = kernels.get("gemv", "gemv_mma", OUTS=outs, **constants)
        kernel((_ceil(outputs, outs),), (256,), args)
    return out


def gemm(
    kernels: Kernels,
    x: Any,
    weight: Any,
    bias: Any | None,
    out: Any,
    *,
    activation: str | None = None,
    residual: Any | None = None,
    version: str | None = None,
    tile: tuple[int, int] | None = None,
) -> Any:
    """`linear` for any number of rows.

    `version` ("naive", "tiled" or "mma") and `tile` (one of `TILES`) are chosen by type and shape where they are None.
    """
    rows, outputs = out.shape
    if not (rows and outputs):
        return out
    tile_rows, tile_outs = tile or _tile(rows, outputs)
    version = version or ("tiled" if kernels.storage == "float32" else "mma")
    constants = {"TILE_ROWS": tile_rows, "TILE_OUTS": tile_outs, **_float_out(x, out)}
    args = _arguments(kernels, x, weight, bias, out, activation, residual)
    shared = 4 * (tile_rows + tile_outs) * 64 if version == "mma" else 0
    kernel = kernels.get("gemm", f"gemm_{version}", shared_mem=shared, **constants)
    if version == "naive":
        kernel((_ceil(rows, 8), _ceil(outputs, 32)), (256,), args)
    else:
        block = 128 if version == "mma" else 256
        kernel((_ceil(rows, tile_rows), _ceil(outputs, tile_outs)), (block,), args, shared_mem=shared)
    return out


def finish_product(
    kernels: Kernels, bias: Any | None, out: Any, *, activation: str | None = None, residual: Any | None = None
) -> Any:
    """out = activation(out + b) + residual, in place: the epilogue of a library's product.

    Args: as for `linear`, but `out` [T, out] holds x W^T, in the type of the kernels.
    """
    rows, outputs = out.shape
    if not (rows and outputs) or (bias is None and activation is None and residual is None):
        return out
    pointers = (out, *(NULL if array is None else array for array in (bias, residual)))
    numbers = (outputs, row_stride(out), 0 if residual is None else row_stride(residual), ACTIVATIONS[activation])
    kernel = kernels.get("gemm", "finish_product", TILE_ROWS=TILES[0][0], TILE_OUTS=TILES[0][1])
    vector = 16 // out.dtype.itemsize
    kernel((rows, _ceil(outputs, vector * 128)), (128,), (*pointers, *map(np.int32, numbers)))
    return out


Timer = Callable[[Callable[[], object]], float]
"""Calls a function several times, and returns the seconds that one call takes on the device."""


@dataclass(frozen=True)
class Timing:
    """Seconds for one product of `rows` rows, epilogue included."""

    rows: int
    ours: float
    theirs: float

    @property
    def chosen(self) -> str:
        """The faster one: "ours" or "library"."""
        return "ours" if self.ours <= self.theirs else "library"


class Products:
    """The matrix products of a backend, each by the faster implementation.

    Both are timed once, on the first call of a shape with more rows than gemv takes; the result is kept for all row
    counts up to the next power of two.
    """

    def __init__(self, kernels: Kernels, xp: Any, timer: Timer | None) -> None:
        """`xp` is the array module whose matmul is the library's; without a `timer` only our kernels run."""
        self.timings: dict[tuple[int, int, int], Timing] = {}
        """Measured times, by (rows rounded up to a power of two, out, in)."""
        self._kernels = kernels
        self._xp = xp
        self._timer = timer
        self._only_ours = False

    @contextmanager
    def only_ours(self) -> Iterator[None]:
        """Within the block, time nothing and do not call the library.

        For the capture of a CUDA graph: CuPy raises NotImplementedError for every cuBLAS call in it.
        """
        before, self._only_ours = self._only_ours, True
        try:
            yield
        finally:
            self._only_ours = before

    def linear(
        self,
        x: Any,
        weight: Any,
        bias: Any | None,
        out: Any,
        *,
        activation: str | None = None,
        residual: Any | None = None,
    ) -> Any:
        """y = activation(x W^T + b) + residual; arguments and result as those of the function `linear`."""

        def ours() -> Any:
            return linear(self._kernels, x, weight, bias, out, activation=activation, residual=residual)

        def library() -> Any:
            self._xp.matmul(x, weight.T, out=out)  # [T, in] x [in, out] -> [T, out]
            return finish_product(self._kernels, bias, out, activation=activation, residual=residual)

        # The library has no product of 16-bit inputs with float outputs.
        if self._timer is None or self._only_ours or len(x) <= FEW_ROWS or out.dtype != x.dtype:
            return ours()
        shape = (1 << (len(x) - 1).bit_length(), *weight.shape)
        if shape not in self.timings:
            self.timings[shape] = Timing(len(x), self._timer(ours), self._timer(library))
        return ours() if self.timings[shape].chosen == "ours" else library()

    def table(self) -> str:
        """The measured times as text: a line for each shape, with both times and the rate of the faster one."""
        lines = [f"{'rows':>6} {'out':>6} {'in':>6} {'ours us':>9} {'library us':>10} {'TFLOP/s':>8}  chosen"]
        for (_, outputs, inputs), timing in sorted(self.timings.items()):
            rate = 2e-12 * timing.rows * outputs * inputs / min(timing.ours, timing.theirs)
            times = f"{timing.ours * 1e6:9.1f} {timing.theirs * 1e6:10.1f} {rate:8.1f}"
            lines.append(f"{timing.rows:6} {outputs:6} {inputs:6} {times}  {timing.chosen}")
        return "\n".join(lines)


def _arguments(
    kernels: Kernels, x: Any, weight: Any, bias: Any | None, out: Any, activation: str | None, residual: Any | None
) -> tuple[Any, ...]:
    """The arguments of every product kernel, in order; asserts the shapes and types it expects."""
    (rows, inputs), outputs = x.shape, len(weight)
    assert weight.shape == (outputs, inputs) and out.shape == (rows, outputs), (x.shape, weight.shape, out.shape)
    assert weight.strides == (inputs * weight.dtype.itemsize, weight.dtype.itemsize), "weight is not contiguous"
    typed = [x, weight, *([] if residual is None else [residual])]
    assert all(array.dtype.name == kernels.storage for array in typed), [array.dtype for array in typed]
    assert kernels.storage in STORAGE and out.dtype.name in (kernels.storage, "float32"), out.dtype
    pointers = (out, x, weight, NULL if bias is None else bias, NULL if residual is None else residual)
    strides = (row_stride(x), row_stride(out), 0 if residual is None else row_stride(residual))
    return (*pointers, *map(np.int32, (rows, inputs, outputs, *strides, ACTIVATIONS[activation])))


def _float_out(x: Any, out: Any) -> dict[str, int]:
    return {} if out.dtype == x.dtype else {"FLOAT_OUT": 1}


def _fma_shape(rows: int, outputs: int) -> tuple[int, int]:
    """OUTS and splits of gemv_fma: as many outputs a warp as registers hold, fewer where that leaves too few blocks."""
    outs, splits = (4 if rows <= 4 else 2), 1
    while _ceil(outputs, outs * 4 // splits) < 2 * PROCESSORS and (outs > 1 or splits < 4):
        if outs > 1:
            outs //= 2
        else:
            splits *= 2
    return outs, splits


def _tile(rows: int, outputs: int) -> tuple[int, int]:
    """The largest tile that still occupies two thirds of the processors, else the smallest."""
    enough = (tile for tile in TILES if _ceil(rows, tile[0]) * _ceil(outputs, tile[1]) >= PROCESSORS * 2 // 3)
    return next(enough, TILES[-1])


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _ceil(n: int, size: int) -> int:
    return -(-n // size)
