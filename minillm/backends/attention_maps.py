"""Attention weights of a pass, computed again from its queries and the keys in the cache."""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from ..reference.attention import attention_scores
from ..reference.softmax import softmax
from .observe import WrappedBackend
from .operations import Backend
from .weights import Weight


class AttentionRecorder(WrappedBackend):
    """Backend wrapper that records the attention weights of some layers."""

    only_looks = True

    def __init__(self, inner: Backend, layers: Collection[int]) -> None:
        super().__init__(inner)
        self.wanted = layers
        self.maps: dict[int, NDArray[np.float32]] = {}
        """Layer -> [H, T, S]"""
        self.masked: dict[int, NDArray[np.bool_]] = {}
        """Layer -> the pairs that its mask hides: a key after its query, or outside its window. [T, S]"""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Recompute the map from the layer's queries and keys."""
        if operation == "attend" and self.layer is not None and self.layer in self.wanted:
            keys, _ = arguments["cache"].layer(self.layer)
            host = self.chooser.to_host
            slopes, bias = arguments["slopes"], arguments["bias"]
            variant = {name: arguments[name] for name in ("causal", "window", "softcap")}
            variant["slopes"] = None if slopes is None else host(slopes.data)
            variant["bias"] = None if bias is None else host(bias.data)
            q, batch, scale = host(arguments["q"]), arguments["batch"], arguments["scale"]
            [self.maps[self.layer]] = attention_map(q, host(keys), batch, scale, np, **variant)
            T, S = self.maps[self.layer].shape[1:]
            back = np.arange(S - T, S)[:, None] - np.arange(S)  # from query to key; [T, S]
            window = arguments["window"] or S
            self.masked[self.layer] = (back < 0) & arguments["causal"] | (np.abs(back) >= window)


def attention_map(q: Any, keys: Any, batch: Batch, scale: float, xp: Any, **variant: Any) -> list[Any]:
    """Attention weights of each sequence [H, n, S], for inspection; arguments as of `attend`."""
    maps = []
    for span in batch.spans:
        n, H, _ = q[span.start : span.stop].shape
        scores = attention_scores(q[span.start : span.stop], keys, span, span.stop, scale, xp, **variant)
        maps.append(softmax(scores, xp).reshape(H, n, span.context_len))  # [K, G n, S] -> [H, n, S]
    return maps
