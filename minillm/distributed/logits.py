"""Logits whose columns the ranks of the last stage share, and the choice of tokens from them.

With a pass each of these ranks sends the largest logits of every row: the most likely token needs one of each rank, and
a draw among the k best k + 1 of each. Where a strategy needs all logits, they are fetched.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..backends.token_sampler import LogProbs, TokenSampler
from ..reference.philox import Keys
from ..reference.sampling import Draw
from ..reference.softmax import top_indices

MOST_BEST = 64
"""The largest top_k whose candidates are sent instead of all logits"""


def wanted_of(draws: Sequence[Draw | None], rows: int) -> tuple[tuple[int, ...], bool]:
    """The number of each row's largest logits that rank 0 needs, and whether it needs all of them. [R]"""
    drawn = [draw if draw is not None and draw.temperature > 0 else None for draw in draws or [None] * rows]
    if any(draw is not None and not 0 < draw.top_k <= MOST_BEST for draw in drawn):
        return (0,) * rows, True
    return tuple(1 if draw is None else draw.top_k + 1 for draw in drawn), False


def largest(logits: Any, best: Sequence[int], first: int, sampler: TokenSampler) -> NDArray[np.float64]:
    """The largest logits of each row with their ids, best first, ties by ascending id. [R, V'] -> [sum of best, 2]

    Args:
        logits: this rank's logits
        best: how many of each row; a row with fewer columns ends with -inf. [R]
        first: id of the first column
        sampler: the logits' backend's sampler
    """
    out = np.full((sum(best), 2), -np.inf)
    out[:, 1] = 0
    host, place = sampler.to_host(logits), 0
    for row, count in zip(host, best, strict=True):
        ids = [row.argmax()] if count == 1 else top_indices(row, min(count, len(row)), np)
        out[place : place + len(ids), 0], out[place : place + len(ids), 1] = row[ids], np.add(ids, first)
        place += count
    return out


class Source(Protocol):
    """A pass whose results are on other ranks."""

    def fetch(self, what: str, rows: Sequence[int]) -> NDArray[np.float32]:
        """Rows of its logits [n, V] or hidden states [n, W]."""

    def best(self, row: int) -> NDArray[np.float64]:
        """The largest logits of a row on each rank, and their ids. [ranks, k, 2]"""


class RemoteRows:
    """Rows of a pass's results, which are fetched when they are looked at; valid until the next pass."""

    def __init__(self, source: Source, what: str, rows: NDArray[np.int64], width: int) -> None:
        """Set the rows, by their numbers in the pass. [n, width]"""
        self.source, self.what, self.rows = source, what, rows
        self.shape, self.dtype = (len(rows), width), np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> "RemoteRows":
        return RemoteRows(self.source, self.what, np.atleast_1d(self.rows[rows]), self.shape[1])

    def take(self, rows: Any, axis: int = 0, **_: Any) -> "RemoteRows":
        """Rows by number."""
        assert axis == 0
        return self[np.asarray(rows)]

    def fetch(self) -> NDArray[np.float32]:
        """The numbers."""
        return self.source.fetch(self.what, self.rows.tolist())

    copy = fetch

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return self.fetch() if dtype is None else self.fetch().astype(dtype)


class RankSampler(TokenSampler):
    """Chooses tokens on rank 0."""

    def __init__(self, inner: TokenSampler) -> None:
        """`inner` is the sampler of logits that are all on this rank."""
        super().__init__(inner.xp)
        self.inner = inner

    @property
    def host(self) -> TokenSampler:
        """The sampler for strategies that process logits on the host."""
        return self.inner.host

    @property
    def on_host(self) -> bool:
        """False: logits may be elsewhere."""
        return False

    def to_host(self, array: Any) -> Any:
        """All numbers, fetched if need be."""
        return array.fetch() if isinstance(array, RemoteRows) else self.inner.to_host(array)

    def watch(self, states: Any) -> None:
        """Let `states_finite` tell of this rank's hidden states. [T, E]"""
        self.inner.watch(states)

    def states_finite(self) -> bool:
        """Whether those of this rank are finite."""
        return self.inner.states_finite()

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity; each rank has checked its own."""
        return isinstance(logits, RemoteRows) or self.inner.finite(logits)

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row. [R, V] -> [R]"""
        if not isinstance(logits, RemoteRows):
            return self.inner.argmax(logits)
        tokens = []
        for row in logits.rows.tolist():
            best = logits.source.best(row)[:, 0]  # [ranks, k, 2] -> [ranks, 2]
            tokens.append(int(best[best[:, 0].argmax(), 1]))  # the first of equals: ids ascend with the ranks
        return tokens

    def sample(self, logits: Any, keys: Keys, *, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        """One token per row: from the candidates that the ranks have sent, else from all logits. [R, V] -> [R]"""
        filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        if not isinstance(logits, RemoteRows):
            return self.inner.sample(logits, keys, **filters)
        counts = np.broadcast_to(np.where(np.asarray(temperature) > 0, top_k, 1), len(logits)).tolist()
        candidates = [
            _candidates(logits.source.best(row), k) for row, k in zip(logits.rows.tolist(), counts, strict=True)
        ]
        complete = [candidate for candidate in candidates if candidate is not None]
        if len(complete) < len(candidates):
            return self.host.sample(logits.fetch(), keys, **filters)
        ids = np.unique(np.concatenate([candidate[:, 1] for candidate in complete])).astype(np.int64)
        scores = np.full((len(complete), len(ids)), -np.inf, np.float32)  # the columns of all candidates, by their ids
        for row, candidate in zip(scores, complete, strict=True):
            row[np.searchsorted(ids, candidate[:, 1])] = candidate[:, 0]
        return ids[np.asarray(self.host.sample(scores, keys, **filters))]

    def log_probs(self, logits: Any, tokens: Any, top: int = 0) -> LogProbs:
        """Log-probabilities of one token of each row, and of its `top` most likely ones."""
        if isinstance(logits, RemoteRows):
            return self.host.log_probs(logits.fetch(), tokens, top)
        return self.inner.log_probs(logits, tokens, top)


def _candidates(best: NDArray[np.float64], k: int) -> NDArray[np.float64] | None:
    """All tokens among a row's k best, with some others; None if what was sent does not tell. [ranks, n, 2] -> [m, 2]

    Nothing but the k best and their equals can be drawn. Each rank has sent one more than k: if that is as good as the
    k-th best of all, there may be more of its equals. The most likely token alone is the first of equals.
    """
    if not 0 < k <= best.shape[1]:
        return None
    flat = best.reshape(-1, 2)  # [ranks, n, 2] -> [ranks n, 2]
    kth = np.sort(flat[:, 0])[::-1][k - 1]
    if best.shape[1] > 1 and (best[:, -1, 0] >= kth).any():
        return None
    candidates: NDArray[np.float64] = flat[flat[:, 0] >= kth]
    return candidates
