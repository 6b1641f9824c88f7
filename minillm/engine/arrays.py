"""Arrays of other libraries: results handed to them without a copy, by DLPack.

Source: https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from importlib import import_module
from typing import Any

import numpy as np

from ..errors import ParameterError, listed, shown

LIBRARIES = ("numpy", "torch", "cupy")
"""Values of `like`"""


def on_device(like: object, xp: Any) -> bool:
    """Whether results stay where the engine computes them for a library to take them without a copy.

    Args:
        like: "numpy", "torch" or "cupy"
        xp: the module of the engine's arrays

    Raises:
        ParameterError: `like` names another library, is "cupy" on a CPU, or its library is not installed.
    """
    if like not in LIBRARIES:
        raise ParameterError(f"like should be one of {listed(LIBRARIES)}, found {shown(like)}")
    if like == "torch":
        try:
            import_module("torch")
        except ImportError as error:
            raise ParameterError(f"like='torch' needs PyTorch ({error}): install torch, or leave like out") from None
    if like == "cupy" and xp is np:
        raise ParameterError("like='cupy' needs an engine on a GPU: Engine(device='cuda'), or leave like out")
    return like != "numpy" and xp is not np


def handed_over(array: Any, like: str) -> Any:
    """An array as the library has it, in the same memory."""
    return import_module("torch").from_dlpack(array) if like == "torch" else array
