"""Log-probabilities of a prompt's own tokens, taken from the logits of its chunks while these are computed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.token_sampler import TokenSampler

TopLogProbs = list[tuple[int, float]]
"""Most likely tokens at one position with their log-probabilities, best first."""

MAX_ROWS = 128
"""Number of rows of logits that prompts may ask for in one forward pass: [128, V] takes 26 MB for OPT."""


class PromptScores:
    """log p(token | those before it) of each token of a prompt, and the `top` most likely tokens at its place.

    Attributes:
        log_probs: natural logarithms of the tokens so far; None for the first
        top_log_probs: likewise, if `top` is above 0; else empty
    """

    def __init__(self, prompt_ids: Sequence[int], top: int) -> None:
        self._prompt_ids = prompt_ids
        self._top = top
        self.log_probs: list[float | None] = [None]
        self.top_log_probs: list[TopLogProbs | None] = [None] if top else []

    @property
    def complete(self) -> bool:
        """True once the last token has its log-probability."""
        return len(self.log_probs) == len(self._prompt_ids)

    def wanted(self, first: int, count: int) -> range:
        """The positions among first : first + count of the prompt whose logits are wanted.

        These are all that have a token after them, without those that are computed again after a preemption.
        """
        return range(max(first, len(self.log_probs) - 1), min(first + count, len(self._prompt_ids) - 1))

    def add(self, sampler: TokenSampler, logits: Any) -> None:
        """Read the next rows of logits, [R, V], in the order of the positions; they may be on a device."""
        place = len(self.log_probs)
        log_probs = sampler.log_probs(logits, np.asarray(self._prompt_ids[place : place + len(logits)]), self._top)
        self.log_probs += log_probs.chosen.tolist()
        if self._top:
            pairs = zip(log_probs.top_ids.tolist(), log_probs.top.tolist(), strict=True)
            self.top_log_probs += [list(zip(ids, values, strict=True)) for ids, values in pairs]
