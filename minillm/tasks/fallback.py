"""When a window of sound is decoded again, at a higher temperature, or left out as silence.

Greedy search may end in a loop, and silence may be heard as words. A text is doubtful where it compresses well, or
where the mean log-probability of its tokens is low (Radford et al., arXiv 2212.04356, section 4.5): then it is decoded
again at the next temperature. It is left out where the log-probability is low and silence is likely. Results are those
of transformers' `generate` of Whisper, which compresses the tokens' ids.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decoding.history import History
from ..errors import ParameterError, shown
from ..reference.softmax import log_softmax

THRESHOLDS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
"""As transformers names them"""


@dataclass(frozen=True)
class Fallback:
    """The temperatures that are tried, one after the other, and the thresholds of a doubtful text."""

    temperatures: tuple[float | None, ...] = (None,)
    """0: the likeliest text, None: as the generation fields say"""
    compression_ratio: float | None = None
    logprob: float | None = None
    no_speech: float | None = None

    @classmethod
    def of(
        cls,
        temperatures: Any = None,
        compression_ratio_threshold: object = None,
        logprob_threshold: object = None,
        no_speech_threshold: object = None,
    ) -> "Fallback":
        """Checked arguments; None leaves a threshold out.

        Raises:
            ParameterError: one is no number, or has no effect without another.
        """
        values = (compression_ratio_threshold, logprob_threshold, no_speech_threshold)
        thresholds = dict(zip(THRESHOLDS, values, strict=True))
        for name, value in thresholds.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ParameterError(f"{name} should be a number, found {shown(value)}")
        if no_speech_threshold is not None and logprob_threshold is None:
            raise ParameterError("no_speech_threshold has no effect without logprob_threshold: set both")
        tried: tuple[float | None, ...] = (None,)
        if temperatures is not None:
            listed = temperatures if isinstance(temperatures, list | tuple) else [temperatures]
            if not listed or any(isinstance(t, bool) or not isinstance(t, int | float) or not t >= 0 for t in listed):
                raise ParameterError(f"temperatures should be numbers from 0 on, found {shown(temperatures)}")
            tried = tuple(float(t) for t in listed)
        if len(tried) > 1 and compression_ratio_threshold is None and logprob_threshold is None:
            raise ParameterError(
                "temperatures after the first have no effect without compression_ratio_threshold or "
                "logprob_threshold: set one, such as 1.35 and -1.0"
            )
        return cls(tried, *thresholds.values())  # type: ignore[arg-type]

    def judge(self, ratio: float, logprob: float | None, no_speech: float | None) -> tuple[bool, bool]:
        """Whether a text is to be decoded again, and whether it is silence."""
        doubtful = self.compression_ratio is not None and ratio > self.compression_ratio
        unlikely = self.logprob is not None and logprob is not None and logprob < self.logprob
        if unlikely and self.no_speech is not None and no_speech is not None and no_speech > self.no_speech:
            return False, True
        return doubtful or unlikely, False


def compression_ratio(token_ids: Sequence[int], vocab_size: int) -> float:
    """The bytes of the tokens' ids for each byte that zlib compresses them to."""
    width = (vocab_size.bit_length() - 1) // 8 + 1
    content = b"".join(token.to_bytes(width, "little") for token in token_ids)
    return len(content) / len(zlib.compress(content))


class TextLogProbs:
    """A logits processor, the last, that changes nothing and sums the log-probabilities of texts as they grow.

    They are those after the other processors, before a temperature.
    """

    def __init__(self, begin: int, eos: int) -> None:
        self.begin, self.eos = begin, eos
        """Tokens of the prompt; the token that ends a text"""
        self.sums: dict[tuple[int, ...], float] = {(): 0.0}
        """The sum for every beginning of a text"""
        self.endings: dict[tuple[int, ...], float] = {}
        """The log-probability that a text ends there"""
        self.rows: dict[tuple[int, ...], NDArray[Any]] = {}
        """[V], of the last step"""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        """[N, V] -> [N, V]"""
        rows = {}
        for line, row in zip(history.lines, log_softmax(logits, xp), strict=True):
            text = tuple(int(token) for token in line[self.begin :])
            if text:
                self.sums[text] = self.sum_of(text)
            rows[text] = row
            self.endings[text] = float(row[self.eos])
        self.rows = rows
        return logits

    def sum_of(self, text: Sequence[int]) -> float:
        """The sum of a text's log-probabilities.

        Raises:
            ParameterError: the text has not grown token by token.
        """
        text = tuple(text)
        if text in self.sums:
            return self.sums[text]
        before, last = text[:-1], text[-1]
        if before not in self.sums or (last != self.eos and before not in self.rows):
            raise ParameterError("logprob_threshold is not offered where tokens are guessed ahead: leave it out")
        return self.sums[before] + (self.endings[before] if last == self.eos else float(self.rows[before][last]))

    def mean(self, text: Sequence[int]) -> float:
        """The mean log-probability of a text's tokens, 0 of none."""
        return float(np.float64(self.sum_of(text)) / len(text)) if text else 0.0
