"""Results of requests: events while a text grows, completions, generations, and scores of given texts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from ..decoding.continuation import FinishReason, Progress
from ..decoding.prompt_scores import TopLogProbs
from ..text.display import TokenView, brief, results_html, view_tokens
from ..text.tokenizer import Tokenizer


@dataclass(slots=True)  # not frozen: that would take five times as long to make, for each token
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
    """UTF-8 bytes of each token, maybe of a part of a character; of a special token, which is no text, those of its
    name. Empty without a tokenizer"""
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

    def __repr__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return brief("Event", **{name: value for name, value in values.items() if value is not False and value != ()})

    @classmethod
    def of(cls, request_id: int, progress: Progress, token_bytes: Callable[[int], bytes] | None) -> "Event":
        """The event for a continuation's progress; `token_bytes` is that of the tokenizer."""
        event = cls(
            request_id,
            progress.index,
            progress.text,
            progress.token_ids,
            tuple(map(token_bytes, progress.token_ids)) if token_bytes is not None else (),
            progress.log_probs,
            progress.top_log_probs,
            progress.finish_reason,
            progress.stop_reason,
            progress.score,
            progress.error,
            progress.request_finished,
            progress.prompt_tokens,
            progress.cached_tokens,
            progress.generated_tokens,
        )
        if progress.times is not None:
            event.queued_seconds, event.prefill_seconds, event.decode_seconds = progress.times
        if progress.prompt_scores is not None:
            event.prompt_logprobs = progress.prompt_scores.log_probs
            event.prompt_top_logprobs = progress.prompt_scores.top_log_probs or None
        return event

    @classmethod
    def joined(cls, events: Sequence["Event"]) -> "Event":
        """Successive events of one sequence as one."""
        first, last = events[0], events[-1]
        if first is last:
            return last
        return replace(
            last,
            text="".join(event.text for event in events),
            token_ids=tuple(chain.from_iterable(event.token_ids for event in events)),
            token_bytes=tuple(chain.from_iterable(event.token_bytes for event in events)),
            logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
            top_logprobs=tuple(chain.from_iterable(event.top_logprobs for event in events)),
            prompt_logprobs=first.prompt_logprobs,
            prompt_top_logprobs=first.prompt_top_logprobs,
        )


@dataclass
class Completion:
    """One returned sequence, without the prompt unless `echo` asked for it. Attributes as of an `Event`.

    Example:
        >>> engine.generate("Monday,", num_beams=2, num_return_sequences=2, max_new_tokens=2).completions[0]
        Completion(text=' Tuesday,', token_ids=[1094, 15], finish_reason='length', score=-0.7...)
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_bytes: list[bytes] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogProbs] | None = None
    score: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __repr__(self) -> str:
        ending = {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason, "score": self.score}
        return brief("Completion", text=self.text, token_ids=self.token_ids, **ending)

    def __str__(self) -> str:
        return self.text

    def add(self, event: Event) -> None:
        """Append the contents of an event."""
        self.text += event.text
        self.token_ids += event.token_ids
        self.token_bytes += event.token_bytes
        if event.logprobs:
            self.logprobs = [*(self.logprobs or []), *event.logprobs]
        if event.top_logprobs:
            self.top_logprobs = [*(self.top_logprobs or []), *event.top_logprobs]
        self.score = event.score
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason

    def views(self, tokenizer: Tokenizer | None) -> list[TokenView]:
        """The tokens as a notebook shows them; the text in one piece if there are no log-probabilities."""
        if self.logprobs is None:
            return [TokenView(self.text)]
        return view_tokens(self.token_ids, self.token_bytes, self.logprobs, self.top_logprobs, tokenizer)

    def note(self) -> str:
        """The line that a notebook shows below the text."""
        parts = [f"{len(self.token_ids)} tokens"]
        if self.finish_reason is not None:
            parts.append(self.finish_reason + ("" if self.stop_reason is None else f" at {self.stop_reason!r}"))
        if self.score is not None:
            parts.append(f"score {self.score:.4g}")
        if self.logprobs:
            parts.append(f"log-probability {math.fsum(self.logprobs):.4g}")
        return " · ".join(parts)


@dataclass
class Generation:
    """Result of one prompt. Two are equal if the results are, whatever was cached and however long they took.

    `str` of it is its text. A notebook shows the text; with `logprobs` each token has a shade, the deeper the less
    likely it was, and with `top_logprobs` the one under the pointer has its alternatives beside it.

    Example:
        >>> answer = engine.generate("A list of colors: red,", max_new_tokens=4, top_logprobs=2)
        >>> answer
        Generation(prompt_tokens=8, completions=[Completion(text=' orange, yellow,', ..., finish_reason='length')])
        >>> print(answer)
         orange, yellow,
        >>> [engine.tokenizer.token(token) for token, _ in answer.completions[0].top_logprobs[0]]
        [' orange', ' pink']
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float | None] | None = None
    """With `echo` and `logprobs`: log-probability of each prompt token given those before it; None for the first"""
    prompt_top_logprobs: list[TopLogProbs | None] | None = None
    """With `echo` and `top_logprobs`: the most likely tokens in each one's place, best first; None for the first"""
    cached_tokens: int = field(default=0, compare=False)
    """Number of prompt tokens whose keys and values were in the prefix cache, by the first completion"""
    queued_seconds: float = field(default=0.0, compare=False)
    """From the request's making to its first step. Of several sequences the times are those of the last to end"""
    prefill_seconds: float = field(default=0.0, compare=False)
    """From there until the prompt was computed"""
    decode_seconds: float = field(default=0.0, compare=False)
    """From there to the end"""

    def __post_init__(self) -> None:
        self._tokenizer: Tokenizer | None = None  # names the alternatives in a notebook

    def __repr__(self) -> str:
        return brief("Generation", prompt_tokens=self.prompt_tokens, completions=self.completions)

    def __str__(self) -> str:
        return self.text

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None}  # a pickle is of results, not of vocabularies

    def _repr_html_(self) -> str:
        prompt = []
        if self.prompt_logprobs is not None and self._tokenizer is not None:
            ids, tokenizer = self.prompt_token_ids, self._tokenizer
            spelled = [tokenizer.token_bytes(token) for token in ids]
            prompt = view_tokens(ids, spelled, self.prompt_logprobs, self.prompt_top_logprobs, tokenizer)
        return results_html((prompt, one.views(self._tokenizer), one.note()) for one in self.completions)

    @classmethod
    def of(
        cls, prompt_token_ids: list[int], events: Iterable[Event], tokenizer: Tokenizer | None = None
    ) -> "Generation":
        """All events of a finished request, merged; `tokenizer` names the alternatives of tokens in a notebook.

        Raises:
            Exception: the error that ended it.
        """
        generation, completions = cls(prompt_token_ids, []), dict[int, Completion]()
        generation._tokenizer = tokenizer
        for event in events:
            if event.error is not None:
                raise event.error
            completions.setdefault(event.index, Completion()).add(event)
            generation._add(event)
        # beam search may return fewer than asked for
        ended = {index: one for index, one in completions.items() if one.finish_reason is not None}
        generation.completions = [ended[index] for index in sorted(ended)]
        return generation

    def _add(self, event: Event) -> None:
        """Take what an event says of the request."""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs, self.prompt_top_logprobs = event.prompt_logprobs, event.prompt_top_logprobs
        self.cached_tokens = event.cached_tokens if event.index == 0 else self.cached_tokens
        self.queued_seconds = event.queued_seconds or self.queued_seconds
        self.prefill_seconds = event.prefill_seconds or self.prefill_seconds
        self.decode_seconds = event.decode_seconds or self.decode_seconds

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def generated_tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)

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
    """Log-probabilities of a text's tokens. A notebook shows the text, its tokens in shades as of a `Generation`.

    Example:
        >>> engine.score("A list of colors: red, orange, yellow")
        Score(tokens=11, total=..., perplexity=...)
    """

    token_ids: list[int]
    logprobs: list[float | None]
    """Natural logarithms; None for the first token"""
    token_bytes: list[bytes] = field(default_factory=list, compare=False)
    """UTF-8 bytes of each token, as of an `Event`; empty without a tokenizer"""

    def __repr__(self) -> str:
        return brief("Score", tokens=len(self.token_ids), total=self.total, perplexity=self.perplexity)

    def _repr_html_(self) -> str:
        note = f"{len(self.token_ids)} tokens · log-probability {self.total:.4g} · perplexity {self.perplexity:.4g}"
        return results_html([([], view_tokens(self.token_ids, self.token_bytes, self.logprobs), note)])

    @property
    def total(self) -> float:
        """Summed log-probability of all tokens after the first."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp(-mean log-probability); 1 for fewer than two tokens."""
        return math.exp(-self.total / max(1, len(self.token_ids) - 1))
