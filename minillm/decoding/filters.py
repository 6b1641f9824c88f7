"""Filters of sampling: what may be drawn from, as logits processors that run after all the others.

Their order is transformers': temperature, top-k, top-p, min-p. The mathematics is that of `ops/sampling.py`, where a
plain draw applies it without ever building the filtered row; these objects build it, for a strategy that needs the
distribution itself.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from ..ops.sampling import keep_min_p, keep_top_k, keep_top_p, scale
from .parameters import Settings
from .processors import History, LogitsProcessor


@dataclass(frozen=True)
class Temperature:
    """Divide the scores by `temperature`."""

    temperature: float

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return scale(logits, self.temperature)


@dataclass(frozen=True)
class TopK:
    """Keep the `k` best, and what equals the last of them."""

    k: int

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return keep_top_k(logits, self.k, xp)


@dataclass(frozen=True)
class TopP:
    """Keep the best tokens that together reach the probability `p` (nucleus sampling, Holtzman et al. 1904.09751)."""

    p: float
    least: int = 1
    """So many are kept in any case."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return keep_top_p(logits, self.p, xp, self.least)


@dataclass(frozen=True)
class MinP:
    """Keep what is at least `min_p` times as likely as the best (Nguyen et al. 2407.01082)."""

    min_p: float
    least: int = 1
    """So many are kept in any case."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return keep_min_p(logits, self.min_p, xp, self.least)


def build_filters(settings: Settings) -> tuple[LogitsProcessor, ...]:
    """The filters that have an effect, in transformers' order; none without sampling.

    Each leaves at least one token; in beam search one more than there are end-of-sequence tokens (2 where there are
    none), so that every beam can go on.
    """
    if not settings.do_sample:
        return ()
    least = 1 if settings.num_beams == 1 else max(2, 1 + len(settings.eos_token_ids))
    filters: list[LogitsProcessor] = []
    if settings.temperature != 1.0:
        filters.append(Temperature(settings.temperature))
    if settings.top_k > 0:
        filters.append(TopK(max(settings.top_k, least)))
    if settings.top_p < 1.0:
        filters.append(TopP(settings.top_p, least))
    if settings.min_p > 0.0:
        filters.append(MinP(settings.min_p, least))
    return tuple(filters)
