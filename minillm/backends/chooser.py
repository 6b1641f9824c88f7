"""The choice of tokens from logits, on the device that computed them or on the host."""

from typing import Any

import numpy as np

from .. import reference
from ..reference.philox import Keys


class Chooser:
    """Checks logits and chooses tokens on an array module, by default on the host."""

    def __init__(self, xp: Any = np) -> None:
        self.xp = xp

    @property
    def host(self) -> "Chooser":
        """The chooser for decoding strategies that process logits on the host."""
        return self

    def to_host(self, array: Any) -> Any:
        """A result as a host array, for `host` and its users; valid as long as the result is."""
        return array

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity. [R, V]"""
        with np.errstate(all="ignore"):
            return bool(self.xp.isfinite(logits.max(initial=0.0)))

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row, as an array or a list; the smallest id among equals. [R, V] -> [R]"""
        return logits.argmax(axis=-1)

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row from its filtered distribution, with the uniform number of its key. [R, V] -> [R]"""
        filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return reference.sample(logits, keys.uniforms(), **filters, xp=self.xp)
