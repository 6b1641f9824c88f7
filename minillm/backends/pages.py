"""The memory behind a K/V cache. Who owns which page is the business of `cache/`; how numbers lie in one is ours."""

from typing import Any


class Pages:
    """One model's keys and values, [L, pages, K, P, D] each, as the back end that made them stores them."""

    def __init__(self, xp: Any, shape: tuple[int, int, int, int, int], dtype: Any) -> None:
        """Reserve the memory; on a CPU the system provides it as pages are first used."""
        self.keys = xp.empty(shape, dtype)  # [L, pages, K, P, D]
        self.values = xp.empty(shape, dtype)  # [L, pages, K, P, D]

    @property
    def heads(self) -> int:
        """K"""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return int(self.keys.nbytes + self.values.nbytes)

    def layer(self, layer: int) -> tuple[Any, Any]:
        """One layer's keys and values as numbers that the reference computes with. 2 x [pages, K, P, D]"""
        return self.keys[layer], self.values[layer]

    def copy(self, source: int, target: int, part: slice) -> None:
        """Copy some positions of a page to the same places of another, in all layers."""
        self.keys[:, target, :, part] = self.keys[:, source, :, part]
        self.values[:, target, :, part] = self.values[:, source, :, part]
