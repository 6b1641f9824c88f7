"""The products of every projection on a GPU: y = activation(x W^T + b) + residual.

Few rows (a decode step) go to `kernels/cuda/gemv.cu`, which reads each weight once; many (a prefill) to `gemm_wgmma.cu`
on Hopper, and to `gemm.cu` elsewhere, whose blocks share tiles where these do not fill the processors (up to SPLIT_ROWS
rows: a decode step of many sequences). `gemm_tma.cu` is for many rows on Hopper too, where the user asks for it. Each
finishes in one launch. The constants they are compiled for are chosen here, from the shapes alone.

A matrix of 8 or 4 bits (`Quantized`, its arrays on the device) goes to `gemv.cu` too, up to INTEGER_ROWS rows; for more
it is expanded to 16 bits first, some rows of it at a time (`kernels/cuda/expand.cu`), or read as it is by
`gemm_wgmma_integers.cu` where MINILLM_CUDA_INTEGER_WGMMA=1 asks for it.

For many rows `Products` takes the library's product (cuBLAS), by the number of rows alone: so the same prompt has the
same bits in every process.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...errors import DeviceError
from ...reference.quantize import Quantized
from .integers import CHUNK_BYTES, IntegerShape, expand, integer_constants, integer_shape
from .integers import ceil as _ceil
from .integers import power_of_two as _power_of_two
from .kernels import ARCHITECTURES, NULL, STORAGE, Kernels, int32s, or_null, row_stride, type_name
from .tensor_maps import TensorMaps

Room = Callable[[int, int], tuple[Any, Any]]
"""Gives scratch memory: so many float32 numbers, and so many int32 zeros, which are zeros again after each launch."""

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_new": 3, "silu": 4}
"""Name of an activation in config.json -> its number in `kernels/cuda/activation.cuh`. The square of ReLU
is ReLU's gate of a row with itself (`CudaBackend.linear`)."""

MOST_ROWS = {"float32": 16, "float16": 64, "bfloat16": 64}
"""Storage type -> the most rows that gemv.cu takes; of 16 bits with tensor cores."""

INTEGER_ROWS = 64
"""Up to so many rows a matrix of 8 or 4 bits is read as it is. On an H100 a step of OPT-1.3B in 8 bits took 4.7 ms at
64 rows either way, and at 128 8.8 as it is, 5.4 expanded."""

EXPANDED = 16 << 20
"""Numbers of such a matrix that are expanded at a time: 32 MiB, which is still in the L2 cache of an H100 mostly."""

SPLIT_ROWS = 128
"""Up to so many rows blocks of gemm_mma or gemm_wgmma may share tiles, each with a part of `in`."""

LIBRARY_ROWS = {"float32": 17, "float16": SPLIT_ROWS + 1, "bfloat16": SPLIT_ROWS + 1}
"""Storage type -> from so many rows on a product is the library's. On an H100 2,000 rows took it 0.5 to 0.8 of the time
of ours in all shapes but the smallest (768 x 768: 17.8 and 16.5 us), and left 4 to 60 us to `finish_product`."""

SPLITS = 3, 128
"""The most blocks of gemm_mma that this may make for each processor, and the least part of `in` that one takes."""

TILES = ((128, 128), (64, 64))
"""Rows and outputs of one block of gemm.cu, the most economical first."""

WGMMA_TILES = ((128, 128), (128, 64))
"""The same of gemm_wgmma.cu."""

TMA_STEP = {256: 0.7, 128: 0.38}
"""Outputs of a tile of gemm_tma.cu -> us of a step of WGMMA_DEPTH, expected: at 256 the library's rate, at 128 what the
copies of a cluster of two need where they are a fifth faster than gemm_wgmma's."""

TMA_SHARED = 192 * 1024 + 96
"""Bytes of shared memory of one of its blocks, with the barriers of six stages."""

CLUSTER = 2
"""Blocks of one of its clusters"""

WGMMA_SHARED = 192 * 1024
"""Bytes of shared memory of one of its blocks."""

WGMMA_DEPTH = 64
"""Numbers of `in` in one of its steps"""

WGMMA_STEP = {64: 0.44, 128: 0.58}
"""Outputs of a tile -> us of a step, as measured on an H100; the head of gemm_wgmma.cu says what limits it."""

WGMMA_PART = {64: 0.6, 128: 1.2, 256: 2.4}
"""Outputs of a tile -> us in which a block writes its sums for another, or reads those of one: what two shapes of four
blocks a tile took beyond their steps, 2.5 and 3 us for five such parts, and the rate of the copies say the same."""

INTEGER_STEP = {8: {128: 0.45, 256: 0.65}, 4: {128: 0.75, 256: 1.25}}
"""Bits -> the same as WGMMA_STEP of gemm_wgmma_integers.cu, whose steps are CHUNK_BYTES of a row of W. By counting, not
measured: the longer of the tensor cores' time and that of the copies, and a tenth of it"""

INTEGER_SHARED = 200 * 1024
"""Bytes of shared memory of one of its blocks"""


class Product(NamedTuple):
    """The product y = activation(x W^T + b) + residual, with the array for its result."""

    x: Any
    """[T, in]; the row stride may be larger than `in`"""
    weight: Any
    """[out, in], contiguous: an array of x's type, or `Quantized`"""
    bias: Any | None
    """[out] float32"""
    out: Any
    """[T, out], of x's type or float32, to be filled; the row stride may be larger than `out`"""
    activation: str | None = None
    """A name in `ACTIVATIONS`"""
    residual: Any | None = None
    """[T, out] of x's type; not changed, so it must not be `out`"""
    room: Room | None = None
    """Gives scratch memory, with which several blocks may share a tile of up to SPLIT_ROWS rows"""

    @property
    def macros(self) -> dict[str, int]:
        """The macros that the types of the arrays take, in every product kernel."""
        macros = integer_constants(self.weight) if isinstance(self.weight, Quantized) else {}
        return macros if self.out.dtype == self.x.dtype else {**macros, "FLOAT_OUT": 1}


def linear(kernels: Kernels, product: Product) -> None:
    """Compute a product by our kernels, which are those for the type of x."""
    if product.out.size == 0:
        return
    if isinstance(product.weight, Quantized):
        integer_gemv(kernels, product)
    elif len(product.x) <= MOST_ROWS[kernels.storage]:
        gemv(kernels, product)
    else:
        gemm(kernels, product)


def gemv(kernels: Kernels, product: Product) -> None:
    """Compute a product of at most MOST_ROWS rows."""
    rows, outputs = product.out.shape
    assert rows <= MOST_ROWS[kernels.storage], f"{rows} rows of {kernels.storage}, and gemv takes {MOST_ROWS}"
    args = _arguments(kernels, product)
    constants = {"ROWS": _power_of_two(rows), **product.macros}
    if kernels.storage == "float32" or rows <= 4:
        outs, splits = _fma_shape(constants["ROWS"], outputs, kernels.processors)
        kernel = kernels.get("gemv", "gemv_fma", OUTS=outs, **constants)
        kernel((_ceil(outputs, outs * 4 // splits),), (128,), (*args, np.int32(splits)))
    else:
        constants["ROWS"] = max(constants["ROWS"], 8)
        outs = _mma_outs(outputs, kernels.processors)
        kernel = kernels.get("gemv", "gemv_mma", OUTS=outs, **constants)
        kernel((_ceil(outputs, outs),), (256,), (*args, NULL, NULL))


def integer_gemv(kernels: Kernels, product: Product, shape: IntegerShape | None = None) -> None:
    """Compute a product with a matrix of 8 or 4 bits by tensor cores; the matrix is read once for each 64 rows.

    `shape`: that of `integer_shape` where it is None.
    """
    rows, outputs = product.out.shape
    shape = shape or integer_shape(kernels, product.weight, rows, outputs)
    constants, shared = {**shape._asdict(), **product.macros}, shape.shared(product.weight)
    kernel = kernels.get("gemv", "gemv_mma", shared_mem=shared, **constants)
    blocks = _ceil(outputs, shape.OUTS), _ceil(rows, shape.ROWS)
    kernel(blocks, (shape.threads,), _arguments(kernels, product), shared_mem=shared)


def expert_shape(kernels: Kernels, T: int, outputs: int) -> tuple[str, dict[str, int], int | None, int]:
    """The product of gemv.cu for the experts of T tokens: its name, constants, splits and blocks of an expert.

    An expert has T rows at most, and fewer than that if there are many of either.
    """
    processors = kernels.processors
    if kernels.storage != "float32" and T > 4:
        outs = min(_mma_outs(outputs, processors), 16)  # 16 x 32 spill on sm_120
        constants = {"ROWS": 8 if T <= 8 else 16, "OUTS": outs}
        return "experts_mma", constants, None, _ceil(outputs, constants["OUTS"])
    constants = {"ROWS": min(_power_of_two(T), 4)}
    constants["OUTS"], splits = _fma_shape(constants["ROWS"], outputs, processors)
    return "experts_fma", constants, splits, _ceil(outputs, constants["OUTS"] * 4 // splits)


def gemm(
    kernels: Kernels,
    product: Product,
    *,
    version: str | None = None,
    tile: tuple[int, int] | None = None,
    splits: int | None = None,
) -> None:
    """Compute a product of any number of rows.

    `version` ("tiled", "mma" or "wgmma"), `tile` (one of `TILES`) and `splits` (blocks of gemm_mma that share
    a tile, which takes `room`) are chosen by type, device and shape where they are None.
    """
    (rows, outputs), inputs, room = product.out.shape, product.x.shape[1], product.room
    if version is None:
        tensor_cores = "wgmma" if kernels.has("gemm_wgmma") else "mma"
        version = "tiled" if kernels.storage == "float32" else tensor_cores
    if version == "wgmma":
        gemm_wgmma(kernels, product)
        return
    few, processors = room is not None and rows <= SPLIT_ROWS and version == "mma", kernels.processors
    tile_rows, tile_outs = tile or _tile(rows, outputs, few, processors)
    tiles = _ceil(rows, tile_rows), _ceil(outputs, tile_outs)
    if splits is None:
        blocks, least = SPLITS
        splits = _splits(tiles[0] * tiles[1], inputs, blocks * processors, least) if few else 1
    scratch: tuple[Any, Any] = (NULL, NULL)
    if splits > 1:
        assert room is not None, "blocks that share a tile need room for their sums"
        scratch = room(tiles[0] * tiles[1] * splits * tile_rows * tile_outs, tiles[0] * tiles[1])
    args, constants = _arguments(kernels, product), {"TILE_OUTS": tile_outs, **product.macros}
    constants["TILE_ROWS"] = tile_rows
    shared = 4 * (tile_rows + tile_outs) * 64 if version == "mma" else 0
    kernel = kernels.get("gemm", f"gemm_{version}", shared_mem=shared, **constants)
    if version == "mma":
        kernel((*tiles, splits), (128,), (*args, *scratch), shared_mem=shared)
    else:
        kernel(tiles, (256,), args)


def gemm_wgmma(kernels: Kernels, product: Product, shape: tuple[int, int] | None = None) -> None:
    """Compute a product of any number of rows by warpgroups.

    `shape`: outputs of a tile, and blocks, each of which takes an equal share of the steps of all tiles; so it takes
    `room` unless the shares are whole tiles. Chosen by device and shape where it is None.
    """
    (rows, outputs), inputs = product.out.shape, product.x.shape[1]
    if shape is None:
        few = product.room is not None and rows <= SPLIT_ROWS
        shape = (_shared_tiles if few else _whole_tiles)(rows, outputs, inputs, kernels.processors)
    tile_outs, blocks = shape
    tile_rows = WGMMA_TILES[0][0]
    tiles = _ceil(rows, tile_rows) * _ceil(outputs, tile_outs)
    scratch: tuple[Any, Any] = (NULL, NULL)
    if tiles % blocks:
        assert product.room is not None, "blocks that share a tile need room for their sums"
        scratch = product.room(2 * blocks * tile_rows * tile_outs, tiles)
    kernel = kernels.get("gemm_wgmma", "gemm_wgmma", shared_mem=WGMMA_SHARED, TILE_OUTS=tile_outs, **product.macros)
    kernel((blocks,), (256,), (*_arguments(kernels, product), *scratch), shared_mem=WGMMA_SHARED)


class TmaShape(NamedTuple):
    """How gemm_tma.cu computes a product."""

    TILE_OUTS: int
    SHARED_X: int
    """1: the blocks of a cluster lie side by side, and share x; 0: one below the other, and share W"""
    groups: int
    """Tiles, as many as a cluster has blocks at a time"""
    CLUSTER: int = CLUSTER
    """Blocks of a cluster; 1 shares nothing"""

    def box_rows(self) -> int:
        """Rows of x that a block copies at a time."""
        return WGMMA_TILES[0][0] // (self.CLUSTER if self.SHARED_X else 1)


def gemm_tma(kernels: Kernels, product: Product, maps: TensorMaps, shape: TmaShape | None = None) -> bool:
    """Compute a product of any number of rows by warpgroups and the tensor memory accelerator, if it can read x and W.

    `shape`: that of `tma_shape` where it is None. Returns False, with nothing done, where the accelerator cannot, or
    where for few rows gemm_wgmma, whose blocks share tiles, should take less time.
    """
    (rows, outputs), inputs, processors = product.out.shape, product.x.shape[1], kernels.processors
    if shape is None:
        shape = tma_shape(rows, outputs, inputs, processors)
        few = rows <= SPLIT_ROWS
        if few and tma_time(shape, inputs, processors) >= _shares(rows, outputs, inputs, processors)[0]:
            return False
    x_map = maps.of_rows(product.x, shape.box_rows())
    w_map = maps.of_outputs(product.weight, shape.TILE_OUTS)
    if x_map is None or w_map is None:
        return False
    constants = {name: value for name, value in shape._asdict().items() if name != "groups"} | product.macros
    kernel = kernels.get("gemm_tma", "gemm_tma", shared_mem=TMA_SHARED, **constants)
    blocks = shape.CLUSTER * min(shape.groups, max(1, processors // shape.CLUSTER))
    kernel((blocks,), (288,), (*_arguments(kernels, product), x_map, w_map), shared_mem=TMA_SHARED)
    return True


def gemm_wgmma_integers(kernels: Kernels, product: Product, shape: tuple[int, int] | None = None) -> None:
    """Compute a product with a matrix of 8 or 4 bits and any number of rows by warpgroups.

    `shape`: as of `gemm_wgmma`, with tiles of 128 or 256 outputs.
    """
    (rows, outputs), inputs, room = product.out.shape, product.x.shape[1], product.room
    tile_rows = WGMMA_TILES[0][0]
    if shape is None and room is not None:
        shape = _shared_tiles(rows, outputs, inputs, kernels.processors, product.weight.bits)
    tile_outs, blocks = shape or (128, _ceil(rows, tile_rows) * _ceil(outputs, 128))
    tiles = _ceil(rows, tile_rows) * _ceil(outputs, tile_outs)
    scratch: tuple[Any, Any] = (NULL, NULL)
    if tiles % blocks:
        assert room is not None, "blocks that share a tile need room for their sums"
        scratch = room(2 * blocks * tile_rows * tile_outs, tiles)
    constants = {"TILE_OUTS": tile_outs, **product.macros}
    kernel = kernels.get("gemm_wgmma_integers", "gemm_wgmma_integers", shared_mem=INTEGER_SHARED, **constants)
    kernel((blocks,), (256,), (*_arguments(kernels, product), *scratch), shared_mem=INTEGER_SHARED)


def check_integer_warpgroups(architecture: str) -> None:
    """Refuse a GPU without the instructions of gemm_wgmma_integers.cu.

    Raises:
        DeviceError: its compute capability is not 9.0.
    """
    if architecture != ARCHITECTURES["gemm_wgmma_integers"].removesuffix("a"):
        raise DeviceError(
            "MINILLM_CUDA_INTEGER_WGMMA=1 needs a GPU of compute capability 9.0 (H100, H200); this one has "
            f"{architecture[:-1]}.{architecture[-1]}: leave it unset"
        )


def finish_product(kernels: Kernels, product: Product) -> None:
    """out = activation(out + b) + residual, in place: the epilogue of a library's product, of x's type."""
    out, residual = product.out, product.residual
    if out.size == 0 or (product.bias is None and product.activation is None and residual is None):
        return
    rows, outputs = out.shape
    stride = 0 if residual is None else row_stride(residual)
    numbers = int32s(outputs, row_stride(out), stride, ACTIVATIONS[product.activation])
    kernel = kernels.get("finish_product", "finish_product")
    vector = 16 // out.dtype.itemsize
    kernel((rows, _ceil(outputs, vector * 128)), (128,), (out, or_null(product.bias), or_null(residual), *numbers))


Multiply = Callable[[Any, Any, Any], None]
"""out = x W^T by a library, of x [T, in], W [out, in] and out [T, out]."""

LIBRARY_PRODUCT = "library_product"
"""Its name among a recorded pass's launches"""


class Products:
    """The matrix products of a backend: of many rows by the library, else by our kernels."""

    def __init__(
        self,
        kernels: Kernels,
        multiply: Multiply | None,
        empty: Callable[[int], Any] | None = None,
        maps: TensorMaps | None = None,
        *,
        integer_warpgroups: bool = False,
    ) -> None:
        """Set the kernels and the library.

        Args:
            kernels: ours
            multiply: the library's product; without one only our kernels run
            empty: allocates so many numbers of the kernels' type, for matrices to be expanded
            maps: by which gemm_tma.cu reads matrices, in the library's place and for 65 to 128 rows; None: it does not
            integer_warpgroups: `gemm_wgmma_integers`, where the device has it, in place of expanding
        """
        self._kernels = kernels
        self._maps = maps
        self._multiply = multiply
        self._only_ours = False
        self._empty = empty
        self._integer_warpgroups = integer_warpgroups
        self._expanded: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes in which matrices are expanded."""
        return 0 if self._expanded is None else int(self._expanded.nbytes)

    @contextmanager
    def only_ours(self) -> Iterator[None]:
        """Within the block, do not call the library.

        For the capture of a CUDA graph: CuPy raises NotImplementedError for every cuBLAS call in it.
        """
        before, self._only_ours = self._only_ours, True
        try:
            yield
        finally:
            self._only_ours = before

    def linear(self, product: Product) -> None:
        """Compute a product."""
        x, weight = product.x, product.weight
        many = isinstance(weight, Quantized) and len(x) > INTEGER_ROWS and product.out.size > 0
        if many and self._integer_warpgroups and self._kernels.has("gemm_wgmma_integers"):
            gemm_wgmma_integers(self._kernels, product)
        elif many and self._empty is not None:
            self._by_parts(product, self._empty)
        elif self._by_tma(product):
            return
        elif (
            isinstance(weight, Quantized)
            or self._multiply is None
            or self._only_ours
            or len(x) < LIBRARY_ROWS[self._kernels.storage]
            or product.out.dtype != x.dtype  # the library has no product of 16-bit inputs with float outputs
        ):
            linear(self._kernels, product)
        else:
            self._kernels.call(LIBRARY_PRODUCT, self._by_library, product.out, x, weight)
            finish_product(self._kernels, product)

    def _by_tma(self, product: Product) -> bool:
        """Compute a product by gemm_tma.cu, where it is asked for and can."""
        rows, outputs = product.out.shape
        if self._maps is None or isinstance(product.weight, Quantized) or not self._kernels.has("gemm_tma"):
            return False
        if rows <= MOST_ROWS[self._kernels.storage] or outputs == 0 or self._kernels.storage == "float32":
            return False
        return gemm_tma(self._kernels, product, self._maps)

    def _by_library(self, out: Any, x: Any, weight: Any) -> None:
        assert self._multiply is not None
        self._multiply(x, weight, out)

    def _by_parts(self, product: Product, empty: Callable[[int], Any]) -> None:
        """Compute a product with as many rows of a matrix of 8 or 4 bits at a time as there is room to expand."""
        if self._expanded is None:
            self._expanded = empty(EXPANDED)  # and never another: recorded steps hold its address
        matrix, bias, residual = product.weight, product.bias, product.residual
        outputs, inputs = matrix.shape
        most = EXPANDED // inputs
        assert most, f"a row of {inputs} numbers is longer than {EXPANDED}"
        most -= most % 8 if most > 8 else 0  # so that each part's results begin at a multiple of 16 bytes
        for first in range(0, outputs, most):
            rows = slice(first, min(first + most, outputs))
            expanded = self._expanded[: (rows.stop - first) * inputs].reshape(-1, inputs)  # [n] -> [rows, in]
            expand(self._kernels, matrix.each(lambda array, rows=rows: array[rows]), expanded)
            columns = product._replace(
                weight=expanded,
                bias=None if bias is None else bias[rows],
                out=product.out[:, rows],
                residual=None if residual is None else residual[:, rows],
            )
            self.linear(columns)


class ProductArguments(NamedTuple):
    """The arguments that the kernels of gemv.cu and gemm.cu have in common; they come first."""

    out: Any
    x: Any
    weight: Any
    bias: Any
    residual: Any
    rows: np.int32
    inputs: np.int32
    outputs: np.int32
    x_stride: np.int32
    out_stride: np.int32
    residual_stride: np.int32
    activation: np.int32


def split_arguments(args: tuple[Any, ...]) -> tuple[ProductArguments, tuple[Any, ...]]:
    """The arguments of a product kernel: the common ones, and its own."""
    common = len(ProductArguments._fields)
    return ProductArguments(*args[:common]), args[common:]


def _arguments(kernels: Kernels, product: Product) -> tuple[Any, ...]:
    """`ProductArguments`, for a matrix of 8 or 4 bits with its scales and offsets.

    Asserts the shapes and types that the kernels expect.
    """
    x, weight, out, residual = product.x, product.weight, product.out, product.residual
    (rows, inputs), outputs = x.shape, weight.shape[0]
    assert weight.shape == (outputs, inputs) and out.shape == (rows, outputs), (x.shape, weight.shape, out.shape)
    more: tuple[Any, ...] = ()
    if isinstance(weight, Quantized):
        more = weight.scales, or_null(weight.offsets)
        weight = weight.values.view(np.uint8)
        assert weight.flags.c_contiguous, "weight is not contiguous"
    else:
        assert weight.strides == (inputs * weight.dtype.itemsize, weight.dtype.itemsize), "weight is not contiguous"
        assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    assert type_name(x.dtype) == kernels.storage and (residual is None or residual.dtype == x.dtype), x.dtype
    assert kernels.storage in STORAGE and type_name(out.dtype) in (kernels.storage, "float32"), out.dtype
    pointers = (out, x, weight, or_null(product.bias), or_null(residual))
    strides = (row_stride(x), row_stride(out), 0 if residual is None else row_stride(residual))
    numbers = int32s(rows, inputs, outputs, *strides, ACTIVATIONS[product.activation])
    return (*ProductArguments(*pointers, *numbers), *more)


def _mma_outs(outputs: int, processors: int) -> int:
    """OUTS of gemv_mma: the most that still occupies two thirds of the processors."""
    return next((outs for outs in (32, 16) if outputs >= outs * processors * 2 // 3), 8)


def _fma_shape(rows: int, outputs: int, processors: int) -> tuple[int, int]:
    """OUTS and splits of gemv_fma: as many outputs a warp as registers hold, fewer where that leaves too few blocks."""
    outs, splits = (4 if rows <= 4 else 2), 1
    while _ceil(outputs, outs * 4 // splits) < 2 * processors and (outs > 1 or splits < 4):
        if outs > 1:
            outs //= 2
        else:
            splits *= 2
    return outs, splits


def _splits(tiles: int, inputs: int, blocks: int, least: int) -> int:
    """Blocks that share a tile: the largest power of two that makes up to `blocks`, each with `least` of `in`."""
    splits = 1
    while 2 * tiles * splits <= blocks and inputs >= 2 * splits * least:
        splits *= 2
    return splits


@lru_cache(maxsize=4096)
def _tile(rows: int, outputs: int, few: bool, processors: int) -> tuple[int, int]:
    """The larger tile of gemm.cu where it still occupies two thirds of the processors, else the smaller; of few rows,
    whose blocks may share a tile, always that.
    """
    large, small = TILES
    return large if not few and _ceil(rows, large[0]) * _ceil(outputs, large[1]) >= processors * 2 // 3 else small


@lru_cache(maxsize=4096)
def _whole_tiles(rows: int, outputs: int, inputs: int, processors: int) -> tuple[int, int]:
    """The larger tile of gemm_wgmma.cu with one and a half for each processor, else the smaller; a block for each."""
    for tile_rows, tile_outs in WGMMA_TILES:
        tiles = _ceil(rows, tile_rows) * _ceil(outputs, tile_outs)
        if tiles >= processors * 3 // 2:
            break
    return tile_outs, tiles


def _shared_tiles(rows: int, outputs: int, inputs: int, processors: int, bits: int = 16) -> tuple[int, int]:
    """The outputs of a tile and the blocks of gemm_wgmma.cu that take the least time by the model of `shared_time`.

    With fewer `bits` those of gemm_wgmma_integers.cu. The blocks may be one or several for each tile, or as many as
    processors whatever the tiles.
    """
    tile = WGMMA_TILES[0][0]
    return _shares(_ceil(rows, tile) * tile, outputs, inputs, processors, bits)[1:]  # which is kept for all such rows


@lru_cache(maxsize=4096)
def _shares(rows: int, outputs: int, inputs: int, processors: int, bits: int = 16) -> tuple[float, int, int]:
    """The us that they should take, and the same."""
    steps = _ceil(inputs, WGMMA_DEPTH if bits == 16 else CHUNK_BYTES * 8 // bits)
    choices: list[tuple[float, int, int]] = []
    for tile_outs, time in (WGMMA_STEP if bits == 16 else INTEGER_STEP[bits]).items():
        tiles = _ceil(rows, WGMMA_TILES[0][0]) * _ceil(outputs, tile_outs)
        numbers = {tiles, processors, *range(tiles, processors + 1, tiles)}
        choices += (
            (shared_time(tiles, steps, blocks, tile_outs, processors, time), tile_outs, blocks)
            for blocks in numbers
            if blocks <= tiles * steps
        )
    return min(choices)


@lru_cache(maxsize=4096)
def tma_shape(rows: int, outputs: int, inputs: int, processors: int) -> TmaShape:
    """The tile of gemm_tma.cu, and what its clusters share, that take the least time by the model of `tma_time`."""
    shapes = []
    for tile_outs in TMA_STEP:
        down, across = _ceil(rows, WGMMA_TILES[0][0]), _ceil(outputs, tile_outs)
        shapes.append(TmaShape(tile_outs, 0, _ceil(down, CLUSTER) * across))
        shapes.append(TmaShape(tile_outs, 1, down * _ceil(across, CLUSTER)))
    return min(shapes, key=lambda shape: tma_time(shape, inputs, processors))


def tma_time(shape: TmaShape, inputs: int, processors: int) -> float:
    """The us that gemm_tma.cu should take: 4, and of each wave of tiles its steps and 1 to write it."""
    waves = _ceil(shape.groups, max(1, processors // shape.CLUSTER))
    return 4 + waves * (_ceil(inputs, WGMMA_DEPTH) * TMA_STEP[shape.TILE_OUTS] + 1)


def powers_of_two(outputs: int, inputs: int, processors: int) -> tuple[int, int]:
    """The rule before `_shared_tiles`, which was measured: for each tile as many blocks, 1, 2, 4 ..., as run at once
    with 4 steps or more; tiles of 64 outputs if all run at once, else of 128.
    """
    tile_outs = 64 if _ceil(outputs, 64) <= processors else 128
    tiles = _ceil(outputs, tile_outs)
    return tile_outs, tiles * _splits(tiles, inputs, processors, 256)


def shared_time(
    tiles: int, steps: int, blocks: int, tile_outs: int, processors: int, step_time: float | None = None
) -> float:
    """The us that gemm_wgmma.cu should take for `tiles` of so many steps of k: those of the block that takes longest.

    `step_time`: us of a step; None: as in `WGMMA_STEP`.

    It has 4 us, its steps, and the sums that it writes or reads of tiles that it shares. An H100 took, with one or four
    blocks for each tile, 44 us for 128 rows of 12288 x 4096 (41 by this), 21 for 2048 x 8192 (21), 10 for 2048 x 2048.
    """
    step_time = WGMMA_STEP[tile_outs] if step_time is None else step_time
    waves, longest = _ceil(blocks, processors), 0.0
    firsts = [tiles * steps * block // blocks for block in range(blocks + 1)]
    for block, (first, stop) in enumerate(pairwise(firsts)):
        time = (stop - first) * step_time
        for tile in {first // steps, (stop - 1) // steps}:
            start, end = tile * steps, (tile + 1) * steps
            if start < first or end > stop:
                sharing = bisect_left(firsts, end) - bisect_right(firsts, start) + 1
                time += WGMMA_PART[tile_outs] * (1 + (sharing if end <= firsts[block + 1] else 0))
        longest = max(longest, time)
    return 4 + waves * longest
