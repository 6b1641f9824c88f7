"""The rules of Whisper's timestamps (Radford et al., arXiv 2212.04356, section 2.3; openai/whisper's decoding rules).

A transcript with timestamps is a row of segments, each a time, its text, and a time: tokens of times come in pairs, of
a segment's end and the next one's beginning, and never decrease.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .history import History


@dataclass(frozen=True)
class TimestampRules:
    """A logits processor that keeps to the rules.

    - The first token is a time, at most `latest_start`.
    - After a time that ends a segment comes a time, or the end of the text; after one that begins it, text.
    - Times do not decrease, and a segment has some length.
    - A time is said where all times together are likelier than any other token.
    """

    begin: int
    """Tokens of the prompt"""
    eos: int
    """The tokens before it are text"""
    no_timestamps: int
    """The token that asks for none; those after it are times"""
    latest_start: int | None = None
    """The last time that may be the first, counted from 0"""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        """The scores with -inf for what the rules forbid. [N, V] -> [N, V]"""
        first = self.no_timestamps + 1
        logits[:, self.no_timestamps] = -np.inf
        for row, line in zip(logits, history.lines, strict=True):
            said = line[self.begin :]
            if not len(said):
                row[:first] = -np.inf
                if self.latest_start is not None:
                    row[first + self.latest_start + 1 :] = -np.inf
            else:
                self._continue(row, said)
            self._prefer_times(row, xp)
        return logits

    def _continue(self, row: NDArray[Any], said: NDArray[np.int64]) -> None:
        """Forbid what cannot follow the tokens so far."""
        first = self.no_timestamps + 1
        times = said[said >= first]
        ended = said[-1] >= first
        begun = len(said) < 2 or said[-2] >= first
        if ended and begun:
            row[first:] = -np.inf
        elif ended:
            row[: self.eos] = -np.inf
        if len(times):
            row[first : int(times[-1]) + (0 if ended and not begun else 1)] = -np.inf

    def _prefer_times(self, row: NDArray[Any], xp: ModuleType) -> None:
        """Leave times alone where their probabilities sum to more than that of any other token."""
        first = self.no_timestamps + 1
        times, others = row[first:], row[:first]
        most = times.max()
        if most > -np.inf and most + xp.log(xp.exp(times - most).sum()) > others.max():
            others[...] = -np.inf
