"""Arrays of other libraries as NumPy has them.

Source: https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Array(Protocol):
    """An array of another library, such as a tensor of PyTorch's on any device, by DLPack."""

    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


def as_numpy(value: Any) -> NDArray[Any]:
    """An array of another library as NumPy has it: the same memory if it is on the host, else a copy;
    numbers of bfloat16 as float32.

    Raises:
        ValueError: NumPy has no such numbers, or cannot take them.
    """
    try:
        return np.from_dlpack(value, device="cpu")
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):  # such as a tensor that needs gradients
        pass
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value  # of which NumPy has none
        return np.asarray(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from None
