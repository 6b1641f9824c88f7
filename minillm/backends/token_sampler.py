"""The choice of tokens from logits, and their log-probabilities, on the device that computed them or on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..reference.philox import Keys
from ..reference.softmax import chosen_log_probs, log_softmax, top_indices


class LogProbs(NamedTuple):
    """Log-probabilities of tokens in R rows of logits, on the host."""

    chosen: NDArray[np.float32]
    """[R], of one given token of each row"""
    top_ids: NDArray[np.int64]
    """[R, n], the most likely tokens, best first, ties by ascending id"""
    top: NDArray[np.float32]
    """[R, n], their log-probabilities"""


class TokenSampler:
    """Checks logits and chooses tokens on an array module, by default on the host."""

    def __init__(self, xp: Any = np) -> None:
        self.xp = xp
        self._finite = True

    @property
    def host(self) -> "TokenSampler":
        """The sampler for decoding strategies that process logits on the host."""
        return self

    @property
    def on_host(self) -> bool:
        """True if the logits are in the host's memory, so that others may change them in place."""
        return True

    def to_host(self, array: Any) -> Any:
        """A result as a host array, for `host` and its users; valid as long as the result is."""
        return array

    def copied(self, logits: Any, rows: Sequence[int]) -> Any:
        """A copy of some rows, valid until the next one. [R, V] -> [rows, V]"""
        return self.xp.take(logits, self.xp.asarray(rows), axis=0)

    def watch(self, states: Any) -> None:
        """Let `states_finite` tell of hidden states of the pass that runs. [T, E]"""
        self._finite = bool(np.isfinite(self.to_host(states)).all())

    def states_finite(self) -> bool:
        """Whether the hidden states that the last pass has watched are finite."""
        finite, self._finite = self._finite, True
        return finite

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity. [R, V]"""
        with np.errstate(all="ignore"):
            return bool(self.xp.isfinite(logits.max(initial=0.0)))

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row, as an array or a list; the smallest id among equals. [R, V] -> [R]"""
        return logits.argmax(axis=-1)

    def sample(self, logits: Any, keys: Keys, *, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        """Sample one token per row from its filtered distribution, with the uniform number of its key. [R, V] -> [R]

        Each parameter is one number for all rows, or [R]. A temperature of 0 takes the row's most likely token.

        Raises:
            NumericalError: a row has NaN or +inf, or only -inf.
        """
        filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return reference.sample(logits, keys.uniforms(), **filters, xp=self.xp)

    def log_probs(self, logits: Any, tokens: Any, top: int = 0) -> LogProbs:
        """Log-probabilities of one token of each row, and of its `top` most likely ones. [R, V], [R] -> `LogProbs`"""
        ids = np.empty((len(logits), 1 + top), np.int64)
        ids[:, 0] = tokens
        for i, row in enumerate(logits if top else ()):
            ids[i, 1:] = top_indices(row, top, self.xp)
        values = chosen_log_probs(logits, ids, self.xp)
        return LogProbs(values[:, 0], ids[:, 1:], values[:, 1:])

    def log_softmax(self, logits: Any) -> Any:
        """The log-probabilities of all tokens, in memory of their own, valid until the next call. [R, V] -> [R, V]"""
        return log_softmax(logits, self.xp)

    def top(self, scores: Any, n: int) -> Any:
        """The `n` largest scores of each row without NaN, best first, ties by ascending id. [R, V] -> [R, n]"""
        return self.xp.stack([top_indices(row, n, self.xp) for row in scores])

    def keep_allowed(self, logits: Any, rows: Sequence[int], masks: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Set tokens whose bit is 0 to -inf, in place. Returns whether each row has any other token left.

        Args:
            logits: [R, V], on the host
            rows: [G], the row of each mask
            masks: [G, W], one bit for each token, the first in the lowest bit; 32 W >= V
        """
        left = np.zeros(len(masks), np.bool_)
        for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            bits = np.unpackbits(mask.view(np.uint8), count=logits.shape[-1], bitorder="little")  # [W] -> [V]
            logits[row][bits == 0] = -np.inf
            left[i] = logits[row].max() > -np.inf
        return left
