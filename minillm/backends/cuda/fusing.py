"""Fuses the launches of a decode step before it is recorded: what follows a product, into the product.

    gemv, store_kv                 -> fused      an OPT layer: 8 launches -> 7
    gemv, rotary, store_kv         -> fused      a Llama layer: 10 -> 7
    gemv, glu                      -> fused

The layers launch one kernel for each operation, as the specification has it. `fuse` looks for neighbours of which one
reads what the other writes, and for nobody else who reads it, by the addresses of their arguments. What it does not
recognise stays as it is. The results are the same bits (`kernels/cuda/gemv_fused.cu`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .kernels import NULL, Kernels, Launch

PRODUCTS = {"gemv_fma": "fused_fma", "gemv_mma": "fused_mma"}
MOST_ROWS = 16
OUTPUTS = {"rotary": 2, "scale_logits": 0, "route": 2, "sort_rows": 4}
"""Number of leading arguments that a kernel writes without reading them; 1 where it is not named."""

Address = Callable[[Any], int]


class Product(NamedTuple):
    """The arguments of gemv.cu, by name."""

    out: Any
    x: Any
    weight: Any
    bias: Any
    residual: Any
    rows: Any
    inputs: Any
    outputs: Any
    x_stride: Any
    out_stride: Any
    residual_stride: Any
    activation: Any


class Ending(NamedTuple):
    """The operations after a product, in the order of gemv_fused.cu's arguments; those not there are null or 0."""

    gate_activation: Any = np.int32(0)
    keys: Any = NULL
    values: Any = NULL
    slots: Any = NULL
    H: Any = np.int32(0)
    K: Any = np.int32(0)
    pages: Any = np.int32(0)
    positions: Any = NULL
    frequencies: Any = NULL
    text_lens: Any = NULL
    query_starts: Any = NULL
    N: Any = np.int32(0)
    scale: Any = np.float32(0)
    factor: Any = np.float64(0)
    original: Any = np.int32(0)


def fuse(kernels: Kernels, launches: Sequence[Launch], results: Iterable[Any], address: Address) -> list[Launch]:
    """The launches of a step in as few as there are kernels for, in the same order.

    Args:
        kernels: where fused kernels are compiled
        launches: in order; each is complete when the next begins
        results: arrays that are read when the step has ended, or None
        address: of an array's first element, on the device
    """
    reads = _Reads(launches, [one for one in results if one is not None], address)
    fused, i = [], 0
    while i < len(launches):
        one, count = _product(kernels, launches, i, reads)
        fused.append(one)
        i += count
    return fused


def _product(kernels: Kernels, launches: Sequence[Launch], i: int, reads: "_Reads") -> tuple[Launch, int]:
    """The launch number i, with as many after it as one kernel does; and how many these are."""
    launch = launches[i]
    if launch.name not in PRODUCTS or launch.constants["ROWS"] > MOST_ROWS:
        return launch, 1
    product = Product(*launch.args[:12])
    ending, constants, out, count = _ending(product, launches, i, reads)
    product = product._replace(out=out, out_stride=_stride(out))
    if not count or any(reads.overlap(out, one) for one in (product.x, product.weight)):
        return launch, 1
    constants = launch.constants | constants
    grid = launch.grid
    more = launch.args[12:]  # splits of gemv_fma; scales and offsets of a matrix of 8 or 4 bits
    if constants["OUTS"] == 1:  # a pair is one warp's
        constants["OUTS"] = 2
        grid = (-(-int(product.outputs) // (8 // int(more[0]))),)
    name = PRODUCTS[launch.name]
    kernel = kernels.get("gemv_fused", name, **constants)
    return Launch(name, constants, kernel, grid, launch.block, (*product, *ending, *more), 0), count + 1


def _ending(
    product: Product, launches: Sequence[Launch], at: int, reads: "_Reads"
) -> tuple[Ending, dict[str, int], Any, int]:
    """The launches after product `at` as its ending: arguments, constants, the array of the result, their number."""
    nothing: tuple[Ending, dict[str, int], Any, int] = Ending(), {}, product.out, 0
    following = [launch.name for launch in launches[at + 1 : at + 3]]
    if product.residual is not NULL or product.activation != 0 or product.out.dtype != product.x.dtype:
        return nothing
    if following[:1] == ["glu"]:
        out, x, F, x_stride, activation = launches[at + 1].args
        whole = reads.address(x) == reads.address(product.out) and _alike(product, x_stride)
        if whole and product.outputs == 2 * F and not reads.after(at + 1, product.out):
            return Ending(gate_activation=activation), {"GATED": 1}, out, 1
        return nothing
    rotary = launches[at + 1].args if following[:1] == ["rotary"] else None
    count = 1 if rotary is None else 2
    if following[count - 1 : count] != ["store_kv"]:
        return nothing
    store = launches[at + count]
    keys, values, k, v, slots, K, pages, _, v_stride = store.args
    D, stored = store.constants["HEAD_DIM"], store.constants
    H = int(product.outputs) // D - 2 * int(K)
    part = product.out.dtype.itemsize * D
    begins = reads.address(product.out)
    parts = [begins, begins + H * part, begins + (H + int(K)) * part]
    read = [k if rotary is None else rotary[3], v]
    if D % 2 or H <= 0 or [reads.address(one) for one in read] != parts[1:] or not _alike(product, v_stride):
        return nothing
    constants = {"STORES": 1, "HEAD_DIM": D, "PAGE_SIZE": stored["PAGE_SIZE"]}
    ending = Ending(keys=keys, values=values, slots=slots, H=np.int32(H), K=K, pages=pages)
    if rotary is None:
        return nothing if reads.after(at + 1, product.out, H * D) else (ending, constants, product.out, 1)
    q_out, k_out, q, _, positions, frequencies, text_lens, query_starts, N = rotary[:9]
    half, scale, factor, original = rotary[12], *rotary[15:]
    if reads.address(q) != parts[0] or reads.address(k_out) != reads.address(k):
        return nothing
    if reads.after(at + 2, product.out) or reads.after(at + 2, k_out):
        return nothing
    ending = ending._replace(positions=positions, frequencies=frequencies, text_lens=text_lens)
    ending = ending._replace(query_starts=query_starts, N=N, scale=scale, factor=factor, original=original)
    return ending, constants | {"ROTATED": int(half)}, q_out, 2


class _Reads:
    """The arrays that each launch reads and writes, by address."""

    def __init__(self, launches: Sequence[Launch], results: list[Any], address: Address) -> None:
        self.address = address
        self._arrays = [[one for one in launch.args if hasattr(one, "nbytes") and one.shape] for launch in launches]
        self._written = [OUTPUTS.get(launch.name, 1) for launch in launches]
        self._results = results

    def after(self, i: int, array: Any, columns: int | None = None) -> bool:
        """Whether anyone reads an array after launch i, until it is written anew.

        `columns`: of each row, these may be read: by someone who reads a view from the same address on.
        """
        for arrays, written in zip(self._arrays[i + 1 :], self._written[i + 1 :], strict=True):
            for one in arrays[written:]:
                if self.overlap(one, array) and not (columns and self._is_left_part(one, array, columns)):
                    return True
            if any(self._covers(one, array) for one in arrays[:written]):
                return False
        return any(self.overlap(one, array) for one in self._results)

    def overlap(self, one: Any, other: Any) -> bool:
        (start, stop), (first, last) = self._extent(one), self._extent(other)
        return start < last and first < stop

    def _covers(self, one: Any, other: Any) -> bool:
        (start, stop), (first, last) = self._extent(one), self._extent(other)
        return start <= first and last <= stop

    def _is_left_part(self, one: Any, array: Any, columns: int) -> bool:
        same = self.address(one) == self.address(array) and len(one) == len(array)
        return same and (len(one) == 1 or one.strides[0] == array.strides[0]) and int(np.prod(one.shape[1:])) <= columns

    def _extent(self, array: Any) -> tuple[int, int]:
        """The first byte, and the one after the last; strides are not negative."""
        start = self.address(array)
        span = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
        return start, start + span + array.dtype.itemsize if array.size else start


def _alike(product: Product, stride: Any) -> bool:
    """Whether rows of a view lie as far apart as those of the product; of one row the stride says nothing."""
    return bool(product.rows == 1 or stride == product.out_stride)


def _stride(array: Any) -> np.int32:
    return np.int32(array.strides[0] // array.dtype.itemsize)
