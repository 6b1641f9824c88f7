"""One continuation of a prompt during generation: its tokens, its text, and when it ends."""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from ..backends.token_sampler import TokenSampler
from .event import Event, FinishReason
from .functions import StoppingCriteria
from .guided import Guide
from .prompt_scores import TopLogProbs
from .stop_strings import StopStrings


class TokenDecoder(Protocol):
    """Incremental detokeniser: `tokenizer.StreamDecoder`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Turns tokens into final text: whole characters, and no part of a stop string."""

    def __init__(self, decoder: TokenDecoder, stops: StopStrings | None = None, text: str = "") -> None:
        """`text` is what comes before the tokens' own: the prompt, if it is echoed."""
        self._decoder = decoder
        self._stops = stops
        self.text = text
        """All text released so far."""
        self.stop_string: str | None = None
        """The stop string that was found, or None"""

    def push(self, token_id: int) -> None:
        """Add the next token."""
        self._release(self._decoder.push(token_id))

    def _release(self, piece: str) -> None:
        """Add decoded text, except what may begin a stop string."""
        if self._stops is not None:
            piece = self._stops.push(piece)
            self.stop_string = self._stops.matched
        self.text += piece

    def flush(self) -> None:
        """End the text: release what was held back, unless a stop string was found."""
        if self.stop_string is None:
            self._release(self._decoder.flush())
            if self._stops is not None and self.stop_string is None:
                self.text += self._stops.flush()

    def fork(self) -> "TextStream":
        """An independent copy."""
        return copy.deepcopy(self)


class Continuation:
    """One continuation: a returned sequence, or a hypothesis of a search."""

    def __init__(
        self,
        index: int,
        eos_token_ids: tuple[int, ...],
        max_new_tokens: int,
        stream: TextStream | None,
        guide: Guide | None = None,
        spelled: Mapping[int, str] = MappingProxyType({}),
        criteria: StoppingCriteria | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        """Begin an empty continuation.

        Args:
            index: among the request's returned sequences
            eos_token_ids: end it
            max_new_tokens: likewise, so many
            stream: receives its text; None without a tokenizer
            guide: restricts its tokens
            spelled: the end-of-sequence tokens that a stop string spells
            criteria: the user's functions that may end it
            token_bytes: the tokenizer's
        """
        self.index = index
        self.eos_token_ids = eos_token_ids
        self.max_new_tokens = max_new_tokens
        self.stream = stream
        self.guide = guide
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[TopLogProbs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The token, the stop string or the name of the criterion that ended it"""
        self.score: float | None = None
        self._spelled = spelled
        self._criteria = criteria
        self._token_bytes = token_bytes
        self._taken_tokens = 0
        self._taken_text = 0
        self._taken_end = False

    def push(self, token_id: int, log_prob: float | None = None, top: TopLogProbs | None = None) -> bool:
        """Append a token. Returns True if it ends the continuation.

        An end-of-sequence token, a stop string and a criterion end it for the reason "stop", the last allowed token for
        "length".
        """
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        if log_prob is not None:
            self.log_probs.append(log_prob)
        if top is not None:
            self.top_log_probs.append(top)
        if self.stream is not None:
            self.stream.push(token_id)
        if self.guide is not None and token_id not in self.eos_token_ids:
            self.guide.push(token_id)
        criterion = None if self._criteria is None else self._criteria(self.token_ids)
        if token_id in self.eos_token_ids:
            self.stop_reason = self._spelled.get(token_id, token_id)
            self.finish("stop")
        elif self.stream is not None and self.stream.stop_string is not None:
            self.stop_reason = self.stream.stop_string
            self.finish("stop")
        elif criterion is not None:
            self.stop_reason = criterion
            self.finish("stop")
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish("length")
        return self.finish_reason is not None

    def finish(self, reason: FinishReason) -> None:
        """End it here."""
        self.finish_reason = reason
        if self.stream is not None:
            self.stream.flush()

    def decode(self, make_stream: Callable[[], TextStream] | None) -> None:
        """Decode the text, if that has been left out so far; `make_stream` is None without a tokenizer."""
        if self.stream is None and make_stream is not None:
            self.stream = make_stream()
            for token in self.token_ids:
                self.stream.push(token)
            if self.finish_reason is not None:
                self.stream.flush()

    def cut_off(self, reason: FinishReason) -> None:
        """End it for an external reason (an abort, an error), even if its text cannot be decoded."""
        try:
            self.finish(reason)
        except Exception:  # decoding the text failed; `finish_reason` is set
            self.stream = None

    def fork(self) -> "Continuation":
        """An independent copy, for searches that branch."""
        twin = copy.copy(self)
        twin.token_ids = self.token_ids.copy()
        twin.log_probs = self.log_probs.copy()
        twin.top_log_probs = self.top_log_probs.copy()
        twin.stream = None if self.stream is None else self.stream.fork()
        twin.guide = None if self.guide is None else self.guide.fork()
        return twin

    def take(self) -> Event | None:
        """The tokens and the text since the last call as an event of request 0; None if there are none."""
        text = "" if self.stream is None else self.stream.text[self._taken_text :]
        ended = self.finish_reason is not None and not self._taken_end
        tokens = tuple(self.token_ids[self._taken_tokens :])
        if not (tokens or text or ended):
            return None
        event = Event(
            0,
            self.index,
            text,
            tokens,
            () if self._token_bytes is None else tuple(map(self._token_bytes, tokens)),
            tuple(self.log_probs[self._taken_tokens :]),
            tuple(self.top_log_probs[self._taken_tokens :]),
            self.finish_reason,
            self.stop_reason,
            self.score,
            generated_tokens=len(self.token_ids),
        )
        self._taken_tokens, self._taken_text, self._taken_end = len(self.token_ids), self._taken_text + len(text), ended
        return event


def reports(
    sampler: TokenSampler, logits: Any, tokens: Sequence[int], tops: Sequence[int]
) -> list[tuple[float, TopLogProbs | None]]:
    """Log-probabilities of R chosen tokens, and the most likely ones beside them, for `Continuation.push`.

    Args:
        sampler: the sampler for the logits
        logits: [R, V] of the model, before processors
        tokens: [R]
        tops: [R], how many of the most likely tokens are wanted in each row; 0 gives None
    """
    most = max(tops)
    log_probs = sampler.log_probs(logits, np.asarray(tokens), most)
    ids, values = log_probs.top_ids.tolist(), log_probs.top.tolist()
    return [
        (chosen, [*zip(ids[row][:top], values[row][:top], strict=True)] if top else None)
        for row, (chosen, top) in enumerate(zip(log_probs.chosen.tolist(), tops, strict=True))
    ]
