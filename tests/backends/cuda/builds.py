"""With which constants each module of kernels/cuda/*.cu is built, for the tests that compile all of them.

A module that needs no constants need not be listed. `"storage"` names the storage types where not all make sense, and
`"arch"` the architectures where it is for these alone.
"""

from typing import Any

from minillm.backends.cuda.attention import WARPGROUP_KEYS, PrefillTile, split_of

STORAGES = ("float32", "float16", "bfloat16")

WINDOW, SLOPES, CAP, TREE = {"WINDOWED": 1}, {"BIASED": 1}, {"CAPPED": 1}, {"TREED": 1}
DISTANCES, BOTH_WAYS = {"BY_DISTANCE": 1}, {"BIDIRECTIONAL": 1}

ATTENTION_DECODE = [
    {"HEAD_DIM": D, "PAGE_SIZE": 16, "GROUP": group, "SPLIT": split_of(D, size), "storage": storages, **mask}
    for size, storages in ((4, ("float32",)), (2, ("float16", "bfloat16")))
    for D, group, mask in (
        *((D, group, {}) for D, group in ((64, 1), (80, 1), (128, 1), (128, 4), (128, 8), (256, 8), (512, 4))),
        *((128, 4, mask) for mask in (WINDOW, WINDOW | SLOPES)),
        *((D, 1, SLOPES) for D in (64, 128)),
        *((256, 2, mask) for mask in (CAP, CAP | WINDOW)),
        *((D, 1, DISTANCES) for D in (64, 128)),
    )
]
ATTENTION_PREFILL = [
    {"HEAD_DIM": D, "PAGE_SIZE": 16, "QUERIES": tile.queries, "KEYS": tile.keys, "storage": (storage,), **mask}
    for D, mask in (
        *((D, {}) for D in (64, 80, 96, 128, 192, 256)),
        *((128, mask) for mask in (WINDOW, SLOPES, WINDOW | SLOPES)),
        (64, SLOPES),
        (256, WINDOW | SLOPES),
        *((256, mask) for mask in (CAP, CAP | WINDOW)),
        *((D, TREE) for D in (64, 128, 256)),
        (128, TREE | WINDOW),
        *((64, BOTH_WAYS | mask) for mask in ({}, WINDOW, SLOPES, DISTANCES)),
        *((D, DISTANCES) for D in (64, 128)),
        *((128, BOTH_WAYS | mask) for mask in ({}, DISTANCES)),
    )
    for storage in STORAGES
    for tile in [PrefillTile.of(storage, D)]
]
for D, V in ((576, 512), (288, 256)):
    for storage in STORAGES:
        tile = PrefillTile.of(storage, D, V)
        latent = {"HEAD_DIM": D, "VALUE_DIM": V, "PAGE_SIZE": 16, "storage": (storage,)}
        split = split_of(D, 4 if storage == "float32" else 2)
        ATTENTION_DECODE.append(latent | {"GROUP": 2, "SPLIT": split})
        ATTENTION_PREFILL.append(latent | {"QUERIES": tile.queries, "KEYS": tile.keys, "COLUMNS": tile.columns})

SIXTEEN_BITS = ("float16", "bfloat16")
INTEGERS = {
    name: dict(zip(("BITS", "GROUP", "OFFSETS"), kind, strict=True))
    for name, kind in {"int8": (8, 32, 0), "int4": (4, 32, 0), "zeros": (4, 64, 8), "offsets": (4, 32, 16)}.items()
}
"""Kinds of matrices of 8 and 4 bits"""
OF_BLOCKS = {
    "sixteens": {"BITS": 8, "GROUP": 16, "OFFSETS": 0},
    "int8_offsets": {"BITS": 8, "GROUP": 32, "OFFSETS": 16},
}
"""The same, as GGUF's blocks become them"""

INTEGER_SHAPES = {
    (4, 16): (4, 4),
    (8, 32): (8, 2),
    (8, 128): (2, 3),
    (16, 64): (4, 2),
    (32, 128): (2, 2),
    (64, 128): (2, 2),
}
"""ROWS and OUTS -> SPLITS and STAGES, of products with such matrices"""


def integers(name: str, rows: int, outs: int) -> dict[str, Any]:
    """The constants of such a product."""
    splits, stages = INTEGER_SHAPES[rows, outs]
    return {"ROWS": rows, "OUTS": outs, "SPLITS": splits, "STAGES": stages, **(INTEGERS | OF_BLOCKS)[name]}


STEP = {"storage": SIXTEEN_BITS, "arch": ("90",)}
"""Builds of the persistent kernel, which needs bulk copies and 227 KiB of shared memory"""

BUILDS: dict[str, list[dict[str, Any]]] = {
    "attention_decode": ATTENTION_DECODE,
    "attention_prefill": ATTENTION_PREFILL,
    "attention_wgmma": [
        {"HEAD_DIM": D, "PAGE_SIZE": 16, "KEYS": WARPGROUP_KEYS[D], "storage": SIXTEEN_BITS, "arch": ("90a",), **mask}
        for D, mask in (
            *((D, {}) for D in WARPGROUP_KEYS),
            *((128, mask) for mask in (WINDOW, WINDOW | SLOPES, {"SUNK": 1})),
            (256, CAP | WINDOW),
        )
    ],
    "embed": [{}, {"SHARED": 1}],
    "gemm": [
        *({"TILE_ROWS": size, "TILE_OUTS": size} for size in (128, 64)),
        {"TILE_ROWS": 128, "TILE_OUTS": 128, "FLOAT_OUT": 1, "storage": SIXTEEN_BITS},
    ],
    "gemm_tma": [
        {"CLUSTER": cluster, "SHARED_X": shared, "TILE_OUTS": outs, "storage": SIXTEEN_BITS, "arch": ("90a",), **more}
        for outs in (128, 256)
        for cluster, shared, more in (
            (1, 0, {}),
            *((2, shared, more) for shared in (0, 1) for more in ({}, {"FLOAT_OUT": 1})),
        )
    ],
    "gemm_wgmma": [
        {"TILE_OUTS": outs, "storage": SIXTEEN_BITS, "arch": ("90a",), **more}
        for outs in (64, 128)
        for more in ({}, {"FLOAT_OUT": 1})
    ],
    "gemm_wgmma_integers": [
        *({"TILE_OUTS": 256, **kind, "storage": SIXTEEN_BITS, "arch": ("90a",)} for kind in INTEGERS.values()),
        *({"TILE_OUTS": 256, **kind, "storage": ("float16",), "arch": ("90a",)} for kind in OF_BLOCKS.values()),
        *({"TILE_OUTS": 128, **INTEGERS[name], "storage": SIXTEEN_BITS, "arch": ("90a",)} for name in ("int8", "int4")),
        {"TILE_OUTS": 256, **INTEGERS["int8"], "FLOAT_OUT": 1, "storage": ("float16",), "arch": ("90a",)},
    ],
    "gemv": [
        *({"ROWS": rows, "OUTS": outs} for rows in (1, 2, 4) for outs in (1, 2, 4)),
        *({"ROWS": rows, "OUTS": outs, "storage": ("float32",)} for rows in (8, 16) for outs in (1, 2)),
        *({"ROWS": rows, "OUTS": outs, "storage": SIXTEEN_BITS} for rows in (8, 16, 32, 64) for outs in (8, 16, 32)),
        *(
            {"ROWS": rows, "OUTS": outs, "FLOAT_OUT": 1, "storage": SIXTEEN_BITS}
            for rows, outs in ((1, 4), (16, 32), (64, 32))
        ),
        *(
            {**integers(name, rows, outs), "storage": SIXTEEN_BITS if INTEGERS[name]["OFFSETS"] == 0 else ("float16",)}
            for name in INTEGERS
            for rows, outs in INTEGER_SHAPES
            if rows < 64 or INTEGERS[name]["OFFSETS"] == 0
        ),
        *({**integers(name, *shape), "storage": ("float16",)} for name in OF_BLOCKS for shape in ((4, 16), (32, 128))),
        {**integers("int8", 4, 16), "SPLITS": 16, "STAGES": 2, "storage": ("float16",)},
        {**integers("int8", 4, 16), "FLOAT_OUT": 1, "storage": SIXTEEN_BITS},
    ],
    "low_rank": [{}, {"FLOAT_OUT": 1, "storage": SIXTEEN_BITS}],
    "experts": [{}, *({"VALUES": values, "storage": ("float32",)} for values in (1, 4))],
    "expand": [{"storage": SIXTEEN_BITS, **INTEGERS[name]} for name in ("int8", "offsets")],
    "gemv_experts": [
        *({"ROWS": rows, "OUTS": outs} for rows, outs in ((1, 2), (4, 4))),
        *({"ROWS": rows, "OUTS": outs, "storage": SIXTEEN_BITS} for rows, outs in ((8, 16), (16, 16))),
        *(
            {**integers(name, rows, outs), "storage": ("float16",)}
            for name in INTEGERS
            for rows, outs in ((4, 16), (8, 32), (16, 64))
        ),
    ],
    "gemv_deferred": [
        *({"ROWS": rows, "OUTS": outs} for rows, outs in ((1, 1), (4, 4))),
        *({"ROWS": rows, "OUTS": outs, "storage": SIXTEEN_BITS} for rows, outs in ((1, 2), (1, 4), (2, 4))),
        *(
            {"ROWS": rows, "OUTS": outs, "storage": SIXTEEN_BITS, **more}
            for rows, outs in ((1, 2), (1, 4), (2, 4), (4, 4))
            for more in ({"STORES": 1, "HEAD_DIM": 128, "PAGE_SIZE": 16, "ROTATED": 64}, {"GATED": 1})
        ),
    ],
    "gemv_fused": [
        {"ROWS": rows, "OUTS": outs, "storage": storages, **more}
        for rows, outs, storages in ((1, 2, STORAGES), (4, 4, STORAGES), (16, 32, SIXTEEN_BITS))
        for more in (
            {"STORES": 1, "HEAD_DIM": 64, "PAGE_SIZE": 16},
            {"STORES": 1, "HEAD_DIM": 128, "PAGE_SIZE": 16, "ROTATED": 64},
            {"GATED": 1},
        )
    ]
    + [
        {**integers(name, *shape), "storage": ("float16",), **more}
        for name in INTEGERS
        for shape in ((4, 16), (8, 128), (32, 128))
        for more in (
            {"STORES": 1, "HEAD_DIM": 128, "PAGE_SIZE": 16, "ROTATED": 64},
            {"GATED": 1},
        )
    ],
    "kv": [
        {"HEAD_DIM": 64, "PAGE_SIZE": 16},
        {"HEAD_DIM": 576, "KEY_DIM": 64, "VALUE_DIM": 512, "PAGE_SIZE": 16},
    ],
    "norm": [*({"VECTORS": n} for n in (1, 2, 4, 8)), {"VECTORS": 16, "storage": ("float32",)}],
    "norm_rotate_store": [
        {"HEAD_DIM": D, "PAGE_SIZE": 16, **rotated}
        for D, rotated in ((64, {"ROTATED": 32}), (128, {"ROTATED": 64}), (128, {}), (256, {"ROTATED": 128}))
    ]
    + [{"HEAD_DIM": 128, "PAGE_SIZE": 16, "ROTATED": 64, "ROWS_NORMED": 1}],
    "step": [
        {"TOKENS": tokens, "HEAD_DIM": D, "PAGE_SIZE": 16, "GROUP": group, "SPLIT": split_of(D, 2), **STEP, **mask}
        for tokens, D, group, mask in (
            (1, 64, 1, {}),
            (4, 64, 4, {}),
            (1, 128, 4, WINDOW),
            (2, 128, 1, {}),
            (4, 128, 4, {}),
            (1, 64, 1, {"INTEGERS": 1, "storage": ("float16",)}),
            (2, 128, 4, {"INTEGERS": 1, "storage": ("bfloat16",)}),
            (4, 128, 4, {"INTEGERS": 1, "storage": ("float16",)}),
            (1, 128, 1, {"INTEGERS": 1, "storage": ("float16",)}),
            (1, 128, 1, {"HEAD_NORMS": 1, "INTEGERS": 1, "storage": ("float16",)}),
            (1, 128, 1, {"HEAD_NORMS": 1, "storage": ("bfloat16",)}),
            (4, 128, 2, {"HEAD_NORMS": 1, "INTEGERS": 1, "storage": ("float16",)}),
        )
    ],
    "selective_scan": [{"VALUES": n} for n in (1, 4, 8)],
}
"""Module -> list of constants, given to the compiler as macros."""

TENSOR_CORE: dict[str, tuple[str, ...]] = {
    "attention_prefill": (),
    "gemm": (),
    "gemv": tuple(f"ROWS={rows}" for rows in (8, 16, 32, 64)),
    "gemv_experts": ("ROWS=8", "ROWS=16"),
}
"""Modules whose 16-bit builds must use the tensor cores; of gemv those for more than four rows."""
