"""With which constants each module of kernels/cuda/*.cu is built, for the tests that compile all of them.

A module that needs no constants need not be listed. `"storage"` names the storage types where not all make sense.
"""

from typing import Any

from minillm.backends.cuda.attention import SPLIT, PrefillTile

STORAGES = ("float32", "float16", "bfloat16")

WINDOW, SLOPES = {"WINDOWED": 1}, {"BIASED": 1}

ATTENTION_DECODE = [
    {"HEAD_DIM": D, "PAGE_SIZE": 16, "GROUP": group, "SPLIT": SPLIT, **mask}
    for D, group, mask in (
        *((D, group, {}) for D, group in ((64, 1), (80, 1), (128, 1), (128, 4), (128, 8), (256, 8))),
        *((128, 4, mask) for mask in (WINDOW, WINDOW | SLOPES)),
        *((D, 1, SLOPES) for D in (64, 128)),
    )
]
ATTENTION_PREFILL = [
    {"HEAD_DIM": D, "PAGE_SIZE": 16, "QUERIES": tile.queries, "KEYS": tile.keys, "storage": (storage,), **mask}
    for D, mask in (
        *((D, {}) for D in (64, 80, 96, 128, 192, 256)),
        *((128, mask) for mask in (WINDOW, SLOPES, WINDOW | SLOPES)),
        (64, SLOPES),
        (256, WINDOW | SLOPES),
    )
    for storage in STORAGES
    for tile in [PrefillTile.of(storage, D)]
]

SIXTEEN_BITS = ("float16", "bfloat16")

BUILDS: dict[str, list[dict[str, Any]]] = {
    "attention_decode": ATTENTION_DECODE,
    "attention_prefill": ATTENTION_PREFILL,
    "gemm": [
        *({"TILE_ROWS": rows, "TILE_OUTS": outs} for rows, outs in ((128, 128), (64, 64), (32, 64))),
        {"TILE_ROWS": 128, "TILE_OUTS": 128, "FLOAT_OUT": 1, "storage": SIXTEEN_BITS},
    ],
    "gemv": [
        *({"ROWS": rows, "OUTS": outs} for rows in (1, 2, 4) for outs in (1, 2, 4)),
        *({"ROWS": rows, "OUTS": outs, "storage": ("float32",)} for rows in (8, 16) for outs in (1, 2)),
        *({"ROWS": rows, "OUTS": outs, "storage": SIXTEEN_BITS} for rows in (8, 16) for outs in (8, 16, 32)),
        *({"ROWS": rows, "OUTS": outs, "FLOAT_OUT": 1, "storage": SIXTEEN_BITS} for rows, outs in ((1, 4), (16, 32))),
    ],
    "kv": [{"HEAD_DIM": 64, "PAGE_SIZE": 16}],
    "norm": [*({"VECTORS": n} for n in (1, 2, 4, 8)), {"VECTORS": 16, "storage": ("float32",)}],
}
"""Module -> list of constants, given to the compiler as macros."""

TENSOR_CORE: dict[str, tuple[str, ...]] = {"attention_prefill": (), "gemm": (), "gemv": ("ROWS=8", "ROWS=16")}
"""Modules whose 16-bit builds must use the tensor cores; of gemv those for more than four rows."""
