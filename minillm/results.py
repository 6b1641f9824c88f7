"""What generation returns. Plain data."""

import math
from dataclasses import dataclass, field

from .decoding.continuation import FinishReason, Progress, TopLogProbs


@dataclass(frozen=True)
class Event:
    """What one step added to one continuation of one request."""

    request_id: int
    index: int
    """Which of the request's returned sequences"""
    text: str
    """Text that became certain: whole characters, no part of a stop string. Their concatenation is the result's"""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Natural logarithm of each token's probability under the model; only where asked for"""
    top_logprobs: tuple[TopLogProbs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in the last event: "stop" (end-of-sequence token or stop string), "length", "abort" or "error\""""
    score: float | None = None
    """Of a beam: summed log-probability over length to the power of length_penalty"""
    error: Exception | None = None
    """Why the request could not go on, where `finish_reason` is "error": what a logits processor of yours raised, a
    guide that no token satisfies, NaN in the logits"""

    @classmethod
    def of(cls, request_id: int, progress: Progress) -> "Event":
        """A continuation's progress, under its request's id."""
        return cls(
            request_id,
            progress.index,
            progress.text,
            progress.token_ids,
            progress.log_probs,
            progress.top_log_probs,
            progress.finish_reason,
            progress.score,
            progress.error,
        )


@dataclass
class Completion:
    """One returned sequence, without the prompt unless `echo` asked for it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogProbs] | None = None
    score: float | None = None
    finish_reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        """Append what a step gave."""
        self.text += event.text
        self.token_ids += event.token_ids
        if event.logprobs:
            self.logprobs = [*(self.logprobs or []), *event.logprobs]
        if event.top_logprobs:
            self.top_logprobs = [*(self.top_logprobs or []), *event.top_logprobs]
        self.score = event.score
        self.finish_reason = event.finish_reason


@dataclass
class Generation:
    """All that one prompt gave."""

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float | None] | None = None
    """With `echo` and `logprobs`: of each prompt token given those before it; the first has none"""

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's tokens."""
        return self.completions[0].token_ids


@dataclass(frozen=True)
class Score:
    """How likely a text is, token by token."""

    token_ids: list[int]
    logprobs: list[float | None]
    """Natural logarithms; the first token follows nothing and has none"""

    @property
    def total(self) -> float:
        """Summed log-probability of all tokens after the first."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp(-mean log-probability); 1 for fewer than two tokens."""
        return math.exp(-self.total / max(1, len(self.token_ids) - 1))
