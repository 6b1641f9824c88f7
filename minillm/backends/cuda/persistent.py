"""Turns the launches of a recorded decode step into one: the persistent kernel of `kernels/cuda/step.cu`.

    embed, [rms_norm, fused, attention_decode, gemv, rms_norm, fused, gemv] x L, rms_norm, gemv, argmax
    embed, step, argmax

Where queries and keys have norms `gemv, norm_rotate_store` stand in place of `fused`.

`persist` reads the launches that `fusing.fuse` has made, and packs what the kernel needs of them into a list on the
device: 5 operations a layer, since a norm becomes part of the product after it, or 6 with norms of heads, and the head.
What it does not recognise leaves the step as it is: more than four sequences, matrices of 8 or 4 bits with offsets or
other groups than of 32, norms after a sublayer, layers whose attention or rotation differs.

Off unless MINILLM_CUDA_PERSISTENT=1 asks for it: it has run on the emulator alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import DeviceError
from .attention import DECODE_THREADS, staged_bytes
from .device import Device
from .fusing import Ending, HeadsArguments, Reads
from .integers import ceil
from .kernels import NULL, Kernels, Launch, int32s
from .linear import ProductArguments, split_arguments
from .rows import WARP, NormArguments

ROWS = 1, 2, 4
LEAST_ARCHITECTURE, NEXT_ARCHITECTURE = 90, 120
"""From the first with bulk copies on, below the first whose blocks have 99 KiB of shared memory."""

SHARED = 227 * 1024
"""Bytes of shared memory of a block"""
WARPS = DECODE_THREADS // 32
CHUNK_BYTES, TILE_BYTES = 4096, 4 * (1024 + 128 + 64)
"""A slot of a warp's ring: a part of a row of 16 bits; the same of four rows of a tile of integers, with scales"""
TILE, MOST_SPLITS_OF_TILE = 16, 16
"""Rows of a block in a product with integers, and the warps of gemv_mma between which their sums may be divided"""
INTEGER_INPUTS, INTEGER_GROUP = 256, 32
"""Scales of a row of integers are copied 16 bytes at a time, which are those of so many numbers; numbers of a scale"""
LEAST_SLOTS, MOST_SLOTS = 2, 16
MOST_GROUP = 4
"""Query heads of one K/V head that a block computes together: eight need more registers than the rest of the kernel
leaves. A head has the same bits in each group."""
VECTOR = 8
"""Numbers of 16 bits in 16 bytes: rows are read and copied in such pieces"""

OPERATION = np.dtype([
    *((name, np.uint64) for name in ("weight", "scales", "x", "out", "bias", "residual", "gain", "normed")),
    *((name, np.uint64) for name in ("keys", "values")),
    *((name, np.int32) for name in ("kind", "units", "first", "inputs", "outputs", "x_stride", "out_stride")),
    *((name, np.int32) for name in ("residual_stride", "splits", "norm_threads")),
    ("activation", np.int16), ("bits", np.int16), ("epsilon", np.float32),
])  # fmt: skip
"""`Operation` of step_ring.cuh"""

ATTENTION, HEADS, PRODUCT, LOGITS, GATE, STORE = range(6)
"""`Kind` of step_ring.cuh"""

COMPUTING = (
    "rms_norm", "layer_norm", "norm_rotate_store", "rotary", "store_kv", "glu", "gemv", "gemm", "fused", "attention",
    "experts",
)  # fmt: skip
"""How the names of kernels begin that a step has only where the persistent kernel begins and ends"""


class AttentionArguments(NamedTuple):
    """The arguments of the kernel `attention_decode`."""

    out: Any
    partials: Any
    arrived: Any
    q: Any
    keys: Any
    values: Any
    context_lens: Any
    block_table: Any
    slopes: Any
    sinks: Any
    bias: Any
    H: np.int32
    K: np.int32
    pages: np.int32
    table_width: np.int32
    max_splits: np.int32
    q_stride: np.int32
    out_stride: np.int32
    window: np.int32
    most: np.int32
    scale: np.float32
    cap: np.float32


def check_architecture(architecture: str) -> None:
    """Refuse a GPU without what the kernel needs.

    Raises:
        DeviceError: its compute capability is not from 9.0 to below 12.0.
    """
    if not LEAST_ARCHITECTURE <= int(architecture) < NEXT_ARCHITECTURE:
        raise DeviceError(
            f"MINILLM_CUDA_PERSISTENT=1 needs a GPU of compute capability 9.0 to 11.0 (H100, H200, B200); this one has "
            f"{architecture[:-1]}.{architecture[-1]}: leave it unset"
        )


def persist(kernels: Kernels, device: Device, launches: Sequence[Launch], results: Iterable[Any]) -> list[Launch]:
    """The launches of a step with all layers and the head in one; the same ones where it cannot be.

    Args:
        kernels: where the persistent kernel is compiled
        device: on which its list lies
        launches: in order, as `fuse` returns them
        results: arrays that are read when the step has ended, or None
    """
    names = [launch.name for launch in launches]
    whole = list(launches)
    if "rms_norm" not in names or not LEAST_ARCHITECTURE <= kernels.architecture < NEXT_ARCHITECTURE:
        return whole
    reads = Reads(launches, [array for array in results if array is not None], device.address)
    first = i = names.index("rms_norm")
    operations: list[_Operation] = []
    while i < len(launches) and launches[i].name.startswith(COMPUTING):
        operation = _operation(launches, i, reads)
        if operation is None:
            return whole
        operations.append(operation)
        i += operation.launches
    if any(name.startswith(COMPUTING) for name in (*names[:first], *names[i:])):
        return whole
    step = _step(kernels, device, operations)
    return whole if step is None else [*launches[:first], step, *launches[i:]]


class _Operation(NamedTuple):
    """One entry of the kernel's list, and what of its launch must be the same in all layers."""

    launches: int
    """Number of launches that it stands for"""
    fields: dict[str, Any]
    """By name of `OPERATION`; arrays by their address"""
    constants: dict[str, int]
    rows: int
    common: dict[str, Any]
    """Arguments of the kernel, by name"""


def _operation(launches: Sequence[Launch], i: int, reads: Reads) -> _Operation | None:
    """The operation that begins with launch i."""
    launch = launches[i]
    if launch.name == "attention_decode":
        return _attention(launch, reads)
    if launch.name == "norm_rotate_store":
        return _heads(launch, reads)
    if launch.name != "rms_norm":
        return _product(launch, reads)
    norm = NormArguments(*launch.args)
    if i + 1 == len(launches) or norm.gain is NULL or norm.residual is not NULL:
        return None
    product = _product(launches[i + 1], reads)
    if product is None or product.fields["x"] != reads.address(norm.out):
        return None
    out = launches[i + 1].args[0]
    if product.fields["inputs"] != norm.E or not _in_pieces(reads.address(norm.x), norm.x_stride):
        return None
    if reads.overlap(out, norm.x) or reads.overlap(norm.out, norm.x):  # while other blocks still normalise
        return None
    residual = launches[i + 1].args[4]
    if residual is not NULL and reads.overlap(residual, norm.out):  # which may not be there yet
        return None
    normed = {"x": reads.address(norm.x), "x_stride": norm.x_stride, "gain": reads.address(norm.gain)}
    normed |= {"norm_threads": launch.block[0], "epsilon": norm.epsilon}
    if reads.after(i + 1, norm.out):
        normed["normed"] = reads.address(norm.out)
    return product._replace(launches=2, fields=product.fields | normed)


def _product(launch: Launch, reads: Reads) -> _Operation | None:
    """A product of few rows of x, of 16-bit numbers, with what is fused to it."""
    if launch.name not in ("gemv_fma", "fused_fma", "gemv_mma", "fused_mma"):
        return None
    product, more = split_arguments(launch.args)
    endings = len(Ending._fields) if launch.name.startswith("fused") else 0
    ending, more = Ending(*more[:endings]), more[endings:]
    constants, rows = launch.constants, int(product.rows)
    matrix = _integers(constants, product, more, reads) if "BITS" in constants else _numbers(product, more, reads)
    if matrix is None or rows not in ROWS or product.x.dtype.itemsize != 2:
        return None
    if not _in_pieces(reads.address(product.x), product.x_stride):
        return None
    kind = LOGITS if "FLOAT_OUT" in constants else PRODUCT
    kind = GATE if "GATED" in constants else STORE if "STORES" in constants else kind
    optional = {"bias": product.bias, "residual": product.residual, "keys": ending.keys, "values": ending.values}
    fields: dict[str, Any] = {name: 0 if array is NULL else reads.address(array) for name, array in optional.items()}
    fields |= {"x": reads.address(product.x), "out": reads.address(product.out), "kind": kind, **matrix}
    same = ("inputs", "outputs", "x_stride", "out_stride", "residual_stride")
    fields |= {name: getattr(product, name) for name in same}
    fields["activation"] = ending.gate_activation if kind == GATE else product.activation
    of_unit = WARPS if matrix["bits"] == 16 else TILE
    fields["units"] = ceil(int(product.outputs), of_unit * (2 if matrix["bits"] == 16 and kind in (GATE, STORE) else 1))
    common = {}
    if kind == STORE:
        common = {name: getattr(ending, name) for name in ("slots", "H", "K", "pages", *ROTATION)}
        common |= {"half": np.int32(constants.get("ROTATED", 0)), "rotary_scale": ending.scale}
    heads = {name: value for name, value in constants.items() if name in ("HEAD_DIM", "PAGE_SIZE")}
    return _Operation(1, fields, heads, rows, common)


ROTATION = ("positions", "frequencies", "text_lens", "query_starts", "N", "original", "factor")
"""Arguments of rotation that have one name in all kernels"""


def _heads(launch: Launch, reads: Reads) -> _Operation | None:
    """Norms of the heads of queries and of keys, their rotation, and the store, of one projection's result."""
    heads, sizes = HeadsArguments(*launch.args), dict(launch.constants)
    half, (rows, H, D) = sizes.pop("ROTATED", 0), heads.q_out.shape
    at, width = reads.address(heads.q), D * heads.q.dtype.itemsize
    recognised = (
        sizes.keys() == {"HEAD_DIM", "PAGE_SIZE"}  # and not norms of whole rows
        and not heads.norms_values
        and heads.q_gain is not NULL
        and heads.k_gain is not NULL
        and [reads.address(each) for each in (heads.k, heads.v)] == [at + H * width, at + int(H + heads.K) * width]
        and (rows == 1 or heads.q_stride == heads.k_stride == heads.v_stride)
        and _in_pieces(at, heads.q_stride)
        and width <= 16 * WARP  # 16 bytes of a head for each lane
    )
    if not recognised:
        return None
    fields = {"kind": HEADS, "x": at, "x_stride": heads.q_stride, "inputs": D, "epsilon": heads.epsilon}
    fields |= {"gain": reads.address(heads.q_gain), "bias": reads.address(heads.k_gain)}
    fields |= {"out": reads.address(heads.q_out), "out_stride": H * D}
    fields |= {"keys": reads.address(heads.keys), "values": reads.address(heads.values)}
    common = {name: getattr(heads, name) for name in ("slots", "H", "K", "pages", *ROTATION)}
    common |= {"half": np.int32(half), "rotary_scale": heads.scale}
    return _Operation(1, fields, sizes, rows, common)


def _numbers(product: ProductArguments, more: tuple[Any, ...], reads: Reads) -> dict[str, Any] | None:
    """The fields of a matrix of 16 bits, with the warps that gemv_fma had for a row."""
    weight = reads.address(product.weight)
    if len(more) != 1 or not _in_pieces(weight, product.inputs):
        return None
    return {"weight": weight, "bits": 16, "splits": more[0]}


def _integers(
    constants: dict[str, int], product: ProductArguments, more: tuple[Any, ...], reads: Reads
) -> dict[str, Any] | None:
    """The fields of a matrix of 8 or 4 bits, with the warps that gemv_mma had for a row."""
    splits, (scales, _) = constants["SPLITS"], more
    addresses = {"weight": reads.address(product.weight), "scales": reads.address(scales)}
    if constants["GROUP"] != INTEGER_GROUP or constants["OFFSETS"] or constants["ROWS"] != ROWS[-1]:
        return None
    if splits % WARPS or splits > MOST_SPLITS_OF_TILE or product.inputs % INTEGER_INPUTS:
        return None
    if any(address % 16 for address in addresses.values()):
        return None
    return {**addresses, "bits": constants["BITS"], "splits": splits}


def _attention(launch: Launch, reads: Reads) -> _Operation | None:
    """Attention without soft cap, slopes or sinks, of keys and values apart."""
    arguments, constants = AttentionArguments(*launch.args), launch.constants
    if not constants.keys() <= {"HEAD_DIM", "PAGE_SIZE", "GROUP", "SPLIT", "WINDOWED"}:
        return None
    arrays = {"x": arguments.q, "out": arguments.out, "keys": arguments.keys, "values": arguments.values}
    fields = {name: reads.address(array) for name, array in arrays.items()}
    strides = int(arguments.q_stride), int(arguments.out_stride)
    fields |= {"kind": ATTENTION, "x_stride": strides[0], "out_stride": strides[1]}
    same = ("partials", "arrived", "context_lens", "block_table", "H", "K", "pages", "table_width", "max_splits")
    common = {name: getattr(arguments, name) for name in (*same, "window")}
    blocks_x, _, rows = launch.grid
    group = max(heads for heads in range(1, MOST_GROUP + 1) if constants["GROUP"] % heads == 0)
    common |= {"blocks_x": np.int32(blocks_x), "blocks_y": np.int32(arguments.H // group)}
    common["attention_scale"] = arguments.scale
    return _Operation(1, fields, constants | {"GROUP": group}, rows, common)


def _in_pieces(address: int, stride: Any) -> bool:
    """Whether rows are whole numbers of 16-byte pieces, from an address that is such."""
    return bool(address % 16 == 0 and stride % VECTOR == 0)


ARGUMENTS = (
    *("slots", "positions", "frequencies", "text_lens", "query_starts", "partials", "arrived", "context_lens"),
    *("block_table", "rows", "N", "half", "original", "H", "K", "pages", "table_width", "max_splits", "window"),
    *("blocks_x", "blocks_y", "rotary_scale", "attention_scale", "factor"),
)
"""The kernel's arguments after its list, counter and sizes"""


def _step(kernels: Kernels, device: Device, operations: Sequence[_Operation]) -> Launch | None:
    """The launch of the persistent kernel; None if the layers differ in what they have to share, or are too wide."""
    constants: dict[str, int] = {}
    common: dict[str, Any] = {}
    for operation in operations:
        for values, shared in ((constants, operation.constants), (common, operation.common)):
            if any(not _same(device, values.setdefault(name, value), value) for name, value in shared.items()):
                return None
    kinds = {operation.fields["kind"] for operation in operations}
    rows = {operation.rows for operation in operations}
    windowed = {"WINDOWED" in operation.constants for operation in operations if not operation.fields["kind"]}
    if ATTENTION not in kinds or not kinds & {STORE, HEADS} or len(rows) != 1 or len(windowed) != 1:
        return None
    (tokens,) = rows
    inputs = max(int(each.fields.get("inputs", 0)) for each in operations)
    integers = any(operation.fields.get("bits", 16) < 16 for operation in operations)
    size = Sizes.of(inputs, tokens, len(operations), constants, integers=integers)
    if size is None:
        return None
    constants |= {"INTEGERS": 1} if integers else {}
    constants |= {"HEAD_NORMS": 1} if HEADS in kinds else {}
    kernel = kernels.get("step", "step", shared_mem=size.shared, TOKENS=tokens, **constants)
    common |= {"rows": np.int32(tokens)}
    blocks = kernels.processors
    table = device.xp.asarray(_table(operations, blocks).view(np.uint8))
    counter = device.xp.asarray(np.zeros(1, np.uint64))
    sizes = int32s(len(operations), size.slots, size.slot_bytes, size.room)
    arguments = (table, counter, *sizes, *(common[name] for name in ARGUMENTS))
    return Launch("step", constants, kernel, (blocks,), (DECODE_THREADS,), arguments, size.shared)


def _same(device: Device, one: Any, other: Any) -> bool:
    """Whether two arguments of kernels are the same array, or the same number."""
    arrays = [hasattr(argument, "nbytes") and bool(argument.shape) for argument in (one, other)]
    return device.address(one) == device.address(other) if all(arrays) else not any(arrays) and bool(one == other)


class Sizes(NamedTuple):
    """Shared memory of the persistent kernel."""

    slots: int
    """Number in a warp's ring"""
    slot_bytes: int
    """Bytes of one"""
    room: int
    """Bytes of x, or of attention's keys and values"""
    shared: int
    """All that is dynamic"""

    @classmethod
    def of(
        cls, inputs: int, rows: int, operations: int, constants: dict[str, int], *, integers: bool = False
    ) -> "Sizes | None":
        """Sizes for the widest x, so many rows and operations, and the constants of attention; None if there are none.

        The rings get what is left. `integers`: whether a matrix has 8 or 4 bits.
        """
        room = max(rows * (2 * inputs + 16), staged_bytes(constants["HEAD_DIM"], 2))
        scores = 4 * constants["GROUP"] * (constants["SPLIT"] + 1)
        static = scores + 4 * 16 * rows + 256  # those of attention, a norm's sums, and gaps between them
        fixed = room + operations * OPERATION.itemsize + integers * 2 * 4 * MOST_SPLITS_OF_TILE * rows * TILE
        slot_bytes = TILE_BYTES if integers else CHUNK_BYTES
        slots = min(MOST_SLOTS, (SHARED - static - fixed) // (WARPS * (slot_bytes + 8)))
        if slots < LEAST_SLOTS:
            return None
        return cls(slots, slot_bytes, room, WARPS * slots * (slot_bytes + 8) + fixed)


def _table(operations: Sequence[_Operation], blocks: int) -> Any:
    """The kernel's list. Units of matrices are dealt to blocks in turn, on from one operation to the next."""
    table, dealt = np.zeros(len(operations), OPERATION), 0
    for row, operation in zip(table, operations, strict=True):
        for name, value in operation.fields.items():
            row[name] = value
        row["first"] = dealt % blocks
        dealt += int(row["units"])
    return table
