"""One continuation of a prompt as it grows: its tokens, its text, and when it ends."""

import copy
from dataclasses import dataclass
from typing import Literal, Protocol

from .guided import Guide
from .stopping import StopStrings

FinishReason = Literal["stop", "length", "abort", "error"]
TopLogProbs = list[tuple[int, float]]
"""The likeliest tokens at one position with their log-probabilities, best first."""


class TokenDecoder(Protocol):
    """Turns tokens into text one by one: `tokenizer.StreamDecoder`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Tokens in, text out that is certain: whole characters, and no part of a stop string."""

    def __init__(self, decoder: TokenDecoder, stops: StopStrings | None = None) -> None:
        self._decoder = decoder
        self._stops = stops
        self.text = ""
        """All text released so far."""

    @property
    def stopped(self) -> bool:
        """A stop string has been found."""
        return self._stops is not None and self._stops.matched is not None

    def push(self, token_id: int) -> None:
        """Take the next token."""
        piece = self._decoder.push(token_id)
        self.text += piece if self._stops is None else self._stops.push(piece)

    def flush(self) -> None:
        """The end: release what was held back, unless a stop string ended the text."""
        if not self.stopped:
            piece = self._decoder.flush()
            if self._stops is not None:
                piece = self._stops.push(piece)
                piece += "" if self.stopped else self._stops.flush()
            self.text += piece

    def fork(self) -> "TextStream":
        """An independent copy."""
        return copy.deepcopy(self)


@dataclass(frozen=True)
class Progress:
    """What a continuation gained since it was last asked."""

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    finish_reason: FinishReason | None = None
    score: float | None = None
    error: Exception | None = None
    """Why it cannot go on, where `finish_reason` is "error"."""


class Continuation:
    """One continuation: a returned sequence, or a hypothesis of a search."""

    def __init__(
        self,
        index: int,
        eos_token_ids: tuple[int, ...],
        max_new_tokens: int,
        stream: TextStream | None,
        guide: Guide | None = None,
    ) -> None:
        self.index = index
        self.eos_token_ids = eos_token_ids
        self.max_new_tokens = max_new_tokens
        self.stream = stream
        self.guide = guide
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[TopLogProbs] = []
        self.finish_reason: FinishReason | None = None
        self.score: float | None = None
        self._taken_tokens = 0
        self._taken_text = 0
        self._taken_end = False

    def push(self, token_id: int, log_prob: float | None = None, top: TopLogProbs | None = None) -> bool:
        """Append a token. True when the continuation has ended with it.

        An end-of-sequence token and a stop string end it for the reason "stop", the last allowed token for "length".
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
        if token_id in self.eos_token_ids or (self.stream is not None and self.stream.stopped):
            self.finish("stop")
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish("length")
        return self.finish_reason is not None

    def finish(self, reason: FinishReason) -> None:
        """End it here."""
        self.finish_reason = reason
        if self.stream is not None:
            self.stream.flush()

    def cut_off(self, reason: FinishReason) -> None:
        """End it here for a reason that is not its own, whatever state its text is in."""
        try:
            self.finish(reason)
        except Exception:  # what failed was the text itself; `finish_reason` is set
            self.stream = None

    def fork(self) -> "Continuation":
        """An independent copy, for a search that follows several continuations of one beginning."""
        twin = copy.copy(self)
        twin.token_ids = self.token_ids.copy()
        twin.log_probs = self.log_probs.copy()
        twin.top_log_probs = self.top_log_probs.copy()
        twin.stream = None if self.stream is None else self.stream.fork()
        twin.guide = None if self.guide is None else self.guide.fork()
        return twin

    def take(self) -> Progress | None:
        """What is new since the last call; None when nothing is."""
        text = "" if self.stream is None else self.stream.text[self._taken_text :]
        ended = self.finish_reason is not None and not self._taken_end
        tokens = self.token_ids[self._taken_tokens :]
        if not (tokens or text or ended):
            return None
        progress = Progress(
            self.index,
            tuple(tokens),
            text,
            tuple(self.log_probs[self._taken_tokens :]),
            tuple(self.top_log_probs[self._taken_tokens :]),
            self.finish_reason,
            self.score,
        )
        self._taken_tokens, self._taken_text, self._taken_end = len(self.token_ids), self._taken_text + len(text), ended
        return progress
