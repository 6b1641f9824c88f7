"""Vectors given in the place of tokens' embeddings (transformers' `inputs_embeds`), of single texts in any batch.

Only the looked-up vectors are replaced: positions, norms and projections of the embedding follow as ever, and a family
multiplies given vectors as transformers does (`Embedding.given_scale`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.observe import WrappedBackend
from ..backends.operations import Backend
from ..backends.weights import Weight
from ..layers.embedding import Embedding

if TYPE_CHECKING:
    from .hooked_backend import View


class GivenEmbeddings(WrappedBackend):
    """Puts given vectors into the result of the token embedding."""

    def __init__(self, inner: Backend, embedding: Embedding, views: "Sequence[View]") -> None:
        super().__init__(inner)
        self._embedding, self._views = embedding, views

    def embed(self, ids: Any, table: Weight, *args: Any, **added: Any) -> Any:
        """[T] -> [T, E], or [T, W] of a table with a narrower W"""
        if table is not self._embedding.tokens:
            return self.inner.embed(ids, table, *args, **added)
        given = []
        for view in self._views:
            rows, vectors = view.given()
            if len(vectors):
                given.append((rows, self._with_positions(vectors, rows, added)))
        x = self.inner.embed(ids, table, *args, **added)  # [T] -> [T, E], last: its memory is the pass's
        for rows, vectors in given:
            x[rows] = vectors.astype(x.dtype, copy=False)
        return x

    def _with_positions(self, vectors: Any, rows: slice, added: dict[str, Any]) -> Any:
        """The factor times the vectors, plus the position embeddings that the operation adds. [n, E] -> [n, E]"""
        vectors = self.inner.xp.asarray(vectors * np.float32(self._embedding.given_scale))
        if added.get("position_table") is None:
            return vectors
        return vectors + self.inner.embed(added["positions"][rows], added["position_table"])


def needs_them(views: "Sequence[View]") -> bool:
    """Whether the rows of any text in a pass are given."""
    return any(len(view.given()[1]) for view in views)
