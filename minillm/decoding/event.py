"""Events: what a step adds to a text."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from ..text.display import brief
from .hooks import Watched, join_watched
from .prompt_scores import TopLogProbs

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(slots=True)  # not frozen: to make one for each token would take five times as long
class Event:
    """New tokens and text of one continuation of a request after a step.

    Example:
        >>> for event in engine.stream("Count from 3 to 9:", max_new_tokens=3):
        ...     print(event.index, repr(event.text), event.finish_reason)
        0 ' 3' None
        0 ',' None
        0 ' 4' length
    """

    request_id: int | str
    """As `Engine.add` returned it, or the name that a call of an `AsyncEngine` was given"""
    index: int
    """Index among the request's returned sequences"""
    text: str
    """New final text: whole characters, no part of a stop string. The result is the concatenation over events. The
    first begins with the prompt's text if `echo` asked for it"""
    token_ids: tuple[int, ...]
    token_bytes: tuple[bytes, ...] = ()
    """UTF-8 bytes of each token (may split a character); for a special token, its name. Empty without a tokenizer"""
    logprobs: tuple[float, ...] = ()
    """Natural logarithm of each token's probability under the model; only if requested"""
    top_logprobs: tuple[TopLogProbs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in the last event of a sequence: "stop" (end-of-sequence token or stop string), "length", "abort", "timeout"
    or "error\""""
    stop_reason: int | str | None = None
    """If `finish_reason` is "stop", the end-of-sequence token or the stop string"""
    score: float | None = None
    """Score of a beam: summed log-probability / length ** length_penalty"""
    error: Exception | None = None
    """The cause if `finish_reason` is "error": an exception of your logits processor, a guide that no token satisfies,
    NaN in the logits"""
    request_finished: bool = False
    """True in the very last event of the request"""
    prompt_tokens: int = 0
    """Number of tokens of the prompt"""
    cached_tokens: int = 0
    """Number of them whose keys and values were in the prefix cache"""
    generated_tokens: int = 0
    """Number of tokens of this sequence so far"""
    queued_seconds: float | None = None
    """In the last event of a sequence: from the request's making to its first step"""
    prefill_seconds: float | None = None
    """Likewise: from there until the prompt was computed"""
    decode_seconds: float | None = None
    """Likewise: from there to the end"""
    prompt_logprobs: list[float | None] | None = None
    """In the first event of a request with `echo` and `logprobs`: as in `Generation`"""
    prompt_top_logprobs: list[TopLogProbs | None] | None = None
    watched: Watched | None = None
    """With `watch`: rows of each point that were computed since the last event; the first begin with the prompt's. The
    last token of a text is not computed, so it has none"""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return brief("Event", **{name: value for name, value in values.items() if value is not False and value != ()})

    @classmethod
    def joined(cls, events: Sequence["Event"]) -> "Event":
        """Successive events of one sequence as one: the last, which takes over what the others have."""
        first, last = events[0], events[-1]
        if first is last:
            return last
        last.text = "".join([event.text for event in events])
        last.token_ids = tuple([token for event in events for token in event.token_ids])
        last.token_bytes = tuple([part for event in events for part in event.token_bytes])
        last.logprobs = tuple([number for event in events for number in event.logprobs])
        last.top_logprobs = tuple([top for event in events for top in event.top_logprobs])
        last.prompt_logprobs = first.prompt_logprobs
        last.prompt_top_logprobs = first.prompt_top_logprobs
        if watched := [event.watched for event in events if event.watched is not None]:
            last.watched = join_watched(watched)
        return last
