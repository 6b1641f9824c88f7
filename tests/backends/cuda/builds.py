"""With which constants each module of kernels/*.cu is built, for the tests that compile all of them.

A module that needs no constants need not be listed. `"storage"` names the storage types where not all make sense.
"""

from typing import Any

STORAGES = ("float32", "float16", "bfloat16")

BUILDS: dict[str, list[dict[str, Any]]] = {
    "norm": [*({"VECTORS": n} for n in (1, 2, 4, 8)), {"VECTORS": 16, "storage": ("float32",)}],
}
"""Module -> list of constants, given to the compiler as macros."""

TENSOR_CORE: tuple[str, ...] = ()
"""Modules whose 16-bit builds must use the tensor cores."""
