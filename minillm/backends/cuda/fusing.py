"""Fuses the launches of a decode step before it is recorded: what follows a product, into the product.

    gemv, store_kv                          -> fused                an OPT layer: 8 launches -> 7
    gemv, rotary, store_kv                  -> fused                a Llama layer: 10 -> 7
    gemv, glu                               -> fused
    rms_norm, rms_norm, rotary, store_kv    -> norm_rotate_store    a Qwen3 layer: 12 -> 8, a Gemma 3 layer: 14 -> 10

The layers launch one kernel for each operation, as the specification has it. `fuse` looks for neighbours of which one
reads what the other writes, and for nobody else who reads it, by the addresses of their arguments. What it does not
recognise stays as it is. The results are the same bits (`kernels/cuda/gemv_fused.cu`, `norm_rotate_store.cu`).

The last, of norms of query and key heads or of all of them as one row (OLMo 2), needs no rotation (EXAONE 4's layers
without a window), or has it before (Hunyuan), and may have norms of values (Gemma 4).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from .attention import StoreArguments
from .kernels import ALL_REDUCE, NULL, Kernels, Launch
from .linear import ProductArguments, split_arguments
from .rows import WARP, GluArguments, NormArguments, RotaryArguments

PRODUCTS = {"gemv_fma": "fused_fma", "gemv_mma": "fused_mma"}
MOST_ROWS = 32
"""Rows of a product up to which what follows is fused; beyond 16 it is not yet measured"""
SPILLING_ROWS, SPILLING = 16, 120
"""Beyond so many rows, fused kernels of this architecture and later keep numbers in memory: there they are left out"""
OUTPUTS = {"rotary": 2, "scale_logits": 0, ALL_REDUCE: 0, "route": 2, "sort_rows": 4}
"""Number of leading arguments that a kernel writes without reading them; 1 where it is not named."""

HEADS_ROWS = MOST_ROWS
"""Tokens up to which norms of heads, rotation and stores are one launch"""
HEADS_WARPS = 4
"""WARPS of norm_rotate_store.cu"""

LAYOUT = ("q_out", "k_out", "q", "k", "H", "K", "D", "key_dim", "half", "q_stride", "k_stride")
"""Arguments of `rotary` that say where queries and keys lie"""

Address = Callable[[Any], int]


class Ending(NamedTuple):
    """The arguments of gemv_fused.cu after those of gemv.cu: the operations that follow. Absent ones are null or 0."""

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


class HeadsArguments(NamedTuple):
    """The arguments of the kernel `norm_rotate_store`; those of a rotation are null or 0 where nothing turns."""

    q_out: Any
    keys: Any
    values: Any
    q: Any
    k: Any
    v: Any
    q_gain: Any
    k_gain: Any
    v_gain: Any
    slots: Any
    H: np.int32
    K: np.int32
    pages: np.int32
    q_stride: np.int32
    k_stride: np.int32
    v_stride: np.int32
    norms_values: np.int32
    q_threads: np.int32
    k_threads: np.int32
    epsilon: np.float32
    positions: Any = NULL
    frequencies: Any = NULL
    text_lens: Any = NULL
    query_starts: Any = NULL
    N: np.int32 = np.int32(0)
    scale: np.float32 = np.float32(0)
    factor: np.float64 = np.float64(0)
    original: np.int32 = np.int32(0)


def fuse(kernels: Kernels, launches: Sequence[Launch], results: Iterable[Any], address: Address) -> list[Launch]:
    """The launches of a step in as few as there are kernels for, in the same order.

    Args:
        kernels: where fused kernels are compiled
        launches: in order; each is complete when the next begins
        results: arrays that are read when the step has ended, or None
        address: of an array's first element, on the device
    """
    reads = Reads(launches, [array for array in results if array is not None], address)
    fused, i = [], 0
    while i < len(launches):
        launch, count = _heads(kernels, launches, i, reads) or _product(kernels, launches, i, reads)
        fused.append(launch)
        i += count
    return fused


def _product(kernels: Kernels, launches: Sequence[Launch], i: int, reads: "Reads") -> tuple[Launch, int]:
    """The launch number i, with as many after it as one kernel does; and how many these are."""
    launch = launches[i]
    most = MOST_ROWS if kernels.architecture < SPILLING else SPILLING_ROWS
    if launch.name not in PRODUCTS or launch.constants["ROWS"] > most:
        return launch, 1
    product, more = split_arguments(launch.args)
    ending, constants, out, count = _ending(product, launches, i, reads)
    if not count or any(reads.overlap(out, array) for array in (product.x, product.weight)):
        return launch, 1
    product = product._replace(out=out, out_stride=_stride(out))
    constants = launch.constants | constants
    grid = launch.grid
    if constants["OUTS"] == 1:  # a pair is one warp's
        (splits,) = more  # of gemv_fma
        constants["OUTS"] = 2
        grid = (-(-int(product.outputs) // (8 // int(splits))),)
    name = PRODUCTS[launch.name]
    kernel = kernels.get("gemv_fused", name, shared_mem=launch.shared_mem, **constants)
    args = (*product, *ending, *more)
    return Launch(name, constants, kernel, grid, launch.block, args, launch.shared_mem), count + 1


def _ending(
    product: ProductArguments, launches: Sequence[Launch], at: int, reads: "Reads"
) -> tuple[Ending, dict[str, int], Any, int]:
    """The launches after product `at` as its ending: arguments, constants, the array of the result, their number."""
    nothing: tuple[Ending, dict[str, int], Any, int] = Ending(), {}, product.out, 0
    if product.residual is not NULL or product.activation != 0 or product.out.dtype != product.x.dtype:
        return nothing
    first, second = [*(launch.args for launch in launches[at + 1 : at + 3]), (), ()][:2]
    if isinstance(first, GluArguments):
        (activation,) = _all_but(first, "out", "x", "F", "x_stride", "up_at").values()
        whole = reads.address(first.x) == reads.address(product.out) and _alike(product, first.x_stride)
        if whole and product.outputs == 2 * first.F == 2 * first.up_at and not reads.after(at + 1, product.out):
            return Ending(gate_activation=activation), {"GATED": 1}, first.out, 1
        return nothing
    rotary = first if isinstance(first, RotaryArguments) else None
    store, count = (first, 1) if rotary is None else (second, 2)
    if not isinstance(store, StoreArguments):
        return nothing
    D, P = (launches[at + count].constants[name] for name in ("HEAD_DIM", "PAGE_SIZE"))
    K = int(store.K)
    H = int(product.outputs) // D - 2 * K
    head = product.out.dtype.itemsize * D
    q_at = reads.address(product.out)
    k_at, v_at = q_at + H * head, q_at + (H + K) * head
    k = store.k if rotary is None else rotary.k
    if D % 2 or H <= 0 or reads.address(k) != k_at or reads.address(store.v) != v_at:
        return nothing
    if not _alike(product, store.v_stride):
        return nothing
    constants = {"STORES": 1, "HEAD_DIM": D, "PAGE_SIZE": P}
    ending = Ending(H=np.int32(H), **_all_but(store, "k", "v", "k_stride", "v_stride"))
    if rotary is None:
        return nothing if reads.after(at + 1, product.out, H * D) else (ending, constants, product.out, 1)
    if reads.address(rotary.q) != q_at or reads.address(rotary.k_out) != reads.address(store.k):
        return nothing
    if reads.after(at + 2, product.out) or reads.after(at + 2, rotary.k_out):
        return nothing
    ending = ending._replace(**_all_but(rotary, *LAYOUT))
    return ending, constants | {"ROTATED": int(rotary.half)}, rotary.q_out, 2


def _heads(kernels: Kernels, launches: Sequence[Launch], i: int, reads: "Reads") -> tuple[Launch, int] | None:
    """Norms of queries and keys from launch i on, with rotation and store, as one; and how many these are."""
    norms = [*takewhile(lambda launch: launch.name == "rms_norm", launches[i : i + 3])]
    count = len(norms)
    if count < 2:
        return None
    *_, last = launches[i : i + count + 1]
    rotary = last.args if isinstance(last.args, RotaryArguments) else None
    count += 1 if rotary is None else 2
    *_, last = launches[i : i + count]
    if not isinstance(last.args, StoreArguments) or last.constants.keys() != {"HEAD_DIM", "PAGE_SIZE"}:
        return None
    constants = dict(last.constants)
    D = constants["HEAD_DIM"]
    arguments = _heads_arguments(norms, rotary, last.args, D, i + count - 1, reads)
    if arguments is None:
        return None
    vector = 16 // arguments.q.dtype.itemsize
    sizes = D, arguments.q_stride, arguments.k_stride, arguments.v_stride
    arrays = [array for array in arguments[:9] if array is not NULL]
    if any(reads.address(array) % 16 for array in arrays) or any(int(size) % vector for size in sizes):
        return None
    if rotary is not None:
        constants["ROTATED"] = int(rotary.half)
    if arguments.q_threads:
        constants["ROWS_NORMED"] = 1
    grid = len(arguments.q_out), -(-int(arguments.H + 2 * arguments.K) // HEADS_WARPS)
    kernel = kernels.get("norm_rotate_store", "norm_rotate_store", **constants)
    return Launch("norm_rotate_store", constants, kernel, grid, (HEADS_WARPS * WARP,), arguments, 0), count


def _heads_arguments(
    launches: list[Launch], rotary: RotaryArguments | None, store: StoreArguments, D: int, at: int, reads: "Reads"
) -> HeadsArguments | None:
    """The arguments of such norms, rotation and store, which is launch `at`, as those of one; None if they do more."""
    norms = [NormArguments(*launch.args) for launch in launches]

    def norm_of(array: Any) -> int | None:
        return next((i for i, norm in enumerate(norms) if reads.same(norm.out, array)), None)

    at_k, at_v = norm_of(store.k if rotary is None else rotary.k), norm_of(store.v)
    others = {*range(len(norms))} - {at_k, at_v}
    if at_k is None or len(others) != 1:
        return None
    (at_q,) = others
    q, k, v = norms[at_q], norms[at_k], None if at_v is None else norms[at_v]
    if rotary is not None:
        widths = int(rotary.D), int(rotary.key_dim)
        if widths != (D, D) or not (reads.same(rotary.q, q.out) and reads.same(rotary.k_out, store.k)):
            return None
    T, of_rows = len(q.out), [len(launch.grid) == 1 for launch in launches]
    H = q.out.size // (T * D)
    if T > HEADS_ROWS or (any(of_rows) and (not all(of_rows) or v is not None)):
        return None
    for norm in norms:
        E = norm.out.size // T if all(of_rows) else D
        if (norm.E, norm.gain_stride, norm.epsilon) != (E, np.int32(0), q.epsilon) or norm.residual is not NULL:
            return None
    q_out = q.out.reshape(T, H, D) if rotary is None else rotary.q_out
    v_in, v_stride = (store.v, store.v_stride) if v is None else (v.x, v.x_stride)
    inputs = q.x, k.x, v_in
    written = [q_out, *(norm.out for norm in norms), *([] if rotary is None else [rotary.k_out])]
    if any(reads.overlap(one, other) for one in written for other in inputs):
        return None
    if any(reads.after(at, one) for one in written if not reads.same(one, q_out)):
        return None
    q_threads, k_threads = (np.int32(launches[i].block[0] if all(of_rows) else 0) for i in (at_q, at_k))
    turned = {} if rotary is None else _all_but(rotary, *LAYOUT)
    return HeadsArguments(
        q_out, store.keys, store.values, *inputs, q.gain, k.gain, NULL if v is None else v.gain, store.slots,
        np.int32(H), store.K, store.pages, q.x_stride, k.x_stride, v_stride, np.int32(v is not None), q_threads,
        k_threads, q.epsilon, **turned,
    )  # fmt: skip


def _all_but(arguments: NamedTuple, *names: str) -> dict[str, Any]:
    """The arguments of a kernel but those named, for an `Ending`, which raises for one that it does not have.

    So an argument that a kernel newly takes is not forgotten here.
    """
    return {name: value for name, value in arguments._asdict().items() if name not in names}


class Reads:
    """The arrays that each launch reads and writes, by address."""

    def __init__(self, launches: Sequence[Launch], results: list[Any], address: Address) -> None:
        self.address = address
        self._arrays = [[one for one in launch.args if hasattr(one, "nbytes") and one.shape] for launch in launches]
        self._written = [OUTPUTS.get(launch.name, 1) for launch in launches]
        self._results = results

    def after(self, i: int, array: Any, columns: int | None = None) -> bool:
        """Whether anyone reads an array after launch i, until it is written anew; what another result in its memory has
        is not read of it.

        `columns`: of each row, these may be read: by someone who reads a view from the same address on.
        """
        anew: list[Any] = []
        for arrays, written in zip(self._arrays[i + 1 :], self._written[i + 1 :], strict=True):
            for one in arrays[written:]:
                read = self.overlap(one, array) and not any(self._covers(other, one) for other in anew)
                if read and not (columns and self._is_left_part(one, array, columns)):
                    return True
            if any(self._covers(one, array) for one in arrays[:written]):
                return False
            anew += (one for one in arrays[:written] if one.flags.c_contiguous and self.overlap(one, array))
        return any(self.overlap(one, array) for one in self._results)

    def same(self, one: Any, other: Any) -> bool:
        """Whether two arrays are the same numbers in the same order, each array without gaps."""
        whole = one.flags.c_contiguous and other.flags.c_contiguous
        return bool(whole and self.address(one) == self.address(other) and one.size == other.size)

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


def _alike(product: ProductArguments, stride: Any) -> bool:
    """Whether rows of a view lie as far apart as those of the product; of one row the stride says nothing."""
    return bool(product.rows == 1 or stride == product.out_stride)


def _stride(array: Any) -> np.int32:
    return np.int32(array.strides[0] // array.dtype.itemsize)
