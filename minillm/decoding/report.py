"""What is told about a chosen token beside its id: log-probabilities under the model."""

from typing import Any

import numpy as np

from ..backends.base import Backend
from ..reference.softmax import chosen_log_probs, top_log_probs
from .continuation import TopLogProbs
from .parameters import Settings


class Report:
    """Log-probabilities of the model's own distribution, before processors change it; computed only where asked."""

    def __init__(self, backend: Backend, logits: Any, settings: Settings, *, changing: bool) -> None:
        self._wanted = settings.logprobs
        self._top: tuple[Any, Any] | None = None
        if self._wanted:
            self._raw = logits.copy() if changing else logits
            if settings.top_logprobs:
                self._top = top_log_probs(logits, settings.top_logprobs, backend.xp)
        self._xp = backend.xp

    def of(self, row: int, token: int) -> tuple[float | None, TopLogProbs | None]:
        """The chosen token's log-probability and the top n, for `Continuation.push`."""
        if not self._wanted:
            return None, None
        log_prob = float(chosen_log_probs(self._raw[row : row + 1], np.asarray([token]), self._xp)[0])
        if self._top is None:
            return log_prob, None
        ids, values = self._top
        return log_prob, [(int(i), float(v)) for i, v in zip(ids[row], values[row], strict=True)]
