"""The memory of a K/V cache on the device."""

from typing import Any

from ..pages import Pages
from .attention import copy_positions
from .kernels import Kernels
from .memory import CACHE, Device


class CudaPages(Pages):
    """One model's keys and values, in the storage type."""

    def __init__(self, device: Device, kernels: Kernels, shape: tuple[int, int, int, int, int], dtype: Any) -> None:
        """Reserve keys and values, [L, pages, K, P, D] each.

        Raises:
            DeviceError: the device lacks the memory.
        """
        self.keys = device.empty(shape, dtype, CACHE)  # [L, pages, K, P, D]
        self.values = device.empty(shape, dtype, CACHE)  # [L, pages, K, P, D]
        self._device, self._kernels = device, kernels
        self._layers = [(self.keys[i], self.values[i]) for i in range(shape[0])]  # a view costs as much as a launch

    def layer(self, layer: int) -> tuple[Any, Any]:
        """One layer's keys and values. 2 x [pages, K, P, D]"""
        return self._layers[layer]

    def copy(self, source: int, target: int, part: slice) -> None:
        """Copy some positions of a page to the same places of another, in all layers, in one launch."""
        self._device.activate()
        copy_positions(self._kernels, self.keys, self.values, source, target, part.start, part.stop)
