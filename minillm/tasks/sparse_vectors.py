"""Sparse vectors of texts (SPLADE): a weight for each token of the vocabulary, most of them 0.

    w_v = max_t log(1 + relu(logits[t, v]))        or the sum over the tokens t

The logits are a masked language model's.

Sources: Formal et al., "SPLADE v2", arXiv 2109.10086; sentence-transformers 6.2, `SparseEncoder`, `SpladePooling`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A sparse vector: the tokens with a weight above 0, the heaviest first."""

    token_ids: NDArray[np.int64]
    """[k]"""
    weights: NDArray[np.float32]
    """[k]"""
    tokens: tuple[str, ...]
    """Their names in the vocabulary; empty without a tokenizer"""

    def dot(self, other: "SparseVector") -> float:
        """The dot product, by which sparse vectors are compared."""
        _, own, others = np.intersect1d(self.token_ids, other.token_ids, assume_unique=True, return_indices=True)
        return float(self.weights[own] @ other.weights[others])


@dataclass(frozen=True)
class SparsePooling:
    """How the logits of a text's tokens become one weight for each token of the vocabulary."""

    summed: bool = False
    """Their sum over the text in place of the maximum"""
    twice: bool = False
    """The logarithm is taken twice, log(1 + log(1 + relu(x)))"""
    most: int | None = None
    """Only so many weights, the largest, are not 0"""

    def __call__(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """[T, V] -> [V]"""
        if not self.summed:
            logits = logits.max(axis=0, keepdims=True)  # it comes first, since the rest is monotonic [T, V] -> [1, V]
        weights = np.log1p(np.maximum(logits, 0))
        if self.twice:
            weights = np.log1p(weights)
        return self.cut(weights.sum(axis=0), self.most)  # [T, V] -> [V]

    @staticmethod
    def cut(weights: NDArray[np.float32], most: int | None) -> NDArray[np.float32]:
        """The `most` largest weights; the others are 0. [V] -> [V]"""
        if most is not None and most < len(weights):
            weights[np.argsort(-weights, kind="stable")[most:]] = 0
        return weights
