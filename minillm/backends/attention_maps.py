"""Attention weights of a pass, computed again from its queries and the keys in the cache."""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from ..reference.attention import AttentionSpec, attention_scores, attention_weights
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
            keys, _ = arguments["cache"].layers[arguments["layer"]]
            host = self.sampler.to_host
            spec: AttentionSpec = arguments["spec"].with_arrays(lambda weight: host(weight.data))
            q, batch = host(arguments["q"]), arguments["batch"]
            [self.maps[self.layer]] = attention_map(q, host(keys), batch, spec, np)
            T, S = self.maps[self.layer].shape[1:]
            back = np.arange(S - T, S)[:, None] - np.arange(S)  # from query to key; [T, S]
            window = spec.window or S
            self.masked[self.layer] = (back < 0) & spec.causal | (np.abs(back) >= window)


def attention_map(q: Any, keys: Any, batch: Batch, spec: AttentionSpec, xp: Any) -> list[Any]:
    """Attention weights of each sequence [H, n, S], for inspection; arguments as of `reference.attend`."""
    maps = []
    for span in batch.spans:
        n, H, _ = q[span.start : span.stop].shape
        scores = attention_scores(q[span.start : span.stop], keys, span, span.stop, spec, xp)
        maps.append(attention_weights(scores, spec, xp).reshape(H, n, span.context_len))  # [K, G n, S] -> [H, n, S]
    return maps
