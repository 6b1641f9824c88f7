"""One continuation of a prompt during generation: its tokens, its text, and when it ends.

Stop strings are matched incrementally in the generated text.

The text is read one character at a time and ends at the first character that completes a stop string. When that
character completes several at once, the longest wins, since it begins first. The rule depends on the text alone, never
on how the text is split into tokens.

A stop string may begin inside the prompt, but must end in generated text: a match entirely inside the prompt stops
nothing. The stop string is left out of the text, as in OpenAI's API.

For ordinary tokens, transformers stops at the same point (`StopStringCriteria`). The two differ at special tokens and
at ids without a token (the padded rows of a model). Here these have no text, so a stop string matches across them: the
returned text never contains one. transformers counts a special token's spelling as text and matches nothing across an
id without a token. The most common use works here too: a stop string that spells a special token, such as
"<|im_end|>", ends the sequence at that token as if it were in eos_token_id (`request.py`); a longer one matches only
its spelling in ordinary tokens.
"""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from ..backends.chooser import Chooser
from ..errors import ParameterError, shown
from .functions import StoppingCriteria
from .guided import Guide
from .prompt_scores import PromptScores, TopLogProbs


class StopStrings:
    """Finds the first stop string in a growing text and lets through only text that cannot belong to one.

    The stop strings are held in one trie with failure links (Aho and Corasick, "Efficient string matching", 1975), so
    the whole text costs time linear in its length, however many stop strings there are. A node's depth is the length of
    the longest suffix of the text that is a prefix of a stop string: exactly the text to hold back, and always shorter
    than the longest stop string.

    Args:
        stop_strings: strings that end the text; may be empty.
        prompt_tail: the end of the prompt, as text. Only the last `max(len(stop)) - 1` characters matter.
        include_stop: release the stop string too.

    Raises:
        ParameterError: a stop string is empty or not a string.
    """

    matched: str | None
    """The stop string that was found, or None."""

    def __init__(self, stop_strings: Sequence[str], prompt_tail: str = "", include_stop: bool = False) -> None:
        _check(stop_strings)
        self.matched = None
        self._include_stop = include_stop
        self._grow_trie(stop_strings)
        self._link_failures()
        self._node = 0
        reach = max(self._depth) - 1
        for character in prompt_tail[-reach:] if reach > 0 else "":
            self._node = self._advance(character)
        self._held = ""  # generated, but possibly the beginning of a stop string

    def push(self, text: str) -> str:
        """Add generated text; returns the text released by it, "" if all of it is held back.

        When a stop string is complete, `matched` is set and the rest is dropped. Nothing may be pushed after that.
        """
        assert self.matched is None, "the text has ended: nothing may follow a stop string"
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._advance(character)
            stop = self._complete[self._node]
            if stop is not None:
                self.matched, self._held = stop, ""
                return pending[: position if self._include_stop else max(0, position - len(stop))]
        # The partial match may reach back into the prompt: then all generated text is held.
        released = max(0, len(pending) - self._depth[self._node])
        self._held = pending[released:]
        return pending[:released]

    def flush(self) -> str:
        """End the text without a stop string; returns the text that was held back ("" after a match)."""
        held, self._held = self._held, ""
        return held

    def __deepcopy__(self, memo: dict[int, object]) -> "StopStrings":
        """An independent copy. The trie is immutable and shared."""
        return copy.copy(self)

    def _advance(self, character: str) -> int:
        node = self._node
        while node and character not in self._children[node]:
            node = self._failure[node]
        return self._children[node].get(character, 0)

    def _grow_trie(self, stop_strings: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._complete: list[str | None] = [None]  # node -> the longest stop string that ends there
        for stop in stop_strings:
            node = 0
            for character in stop:
                if character not in self._children[node]:
                    self._children[node][character] = len(self._children)
                    self._children.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._complete.append(None)
                node = self._children[node][character]
            self._complete[node] = stop

    def _link_failures(self) -> None:
        """Link each node, in order of depth, to the longest proper suffix of its string that is in the trie."""
        self._failure = [0] * len(self._children)
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                fallback = self._failure[node]
                while fallback and character not in self._children[fallback]:
                    fallback = self._failure[fallback]
                self._failure[child] = self._children[fallback].get(character, 0)
                self._complete[child] = self._complete[child] or self._complete[self._failure[child]]
                queue.append(child)


def _check(stop_strings: Sequence[str]) -> None:
    if isinstance(stop_strings, str):
        raise ParameterError(f"stop strings should be a list, found the single string {shown(stop_strings)}")
    for stop in stop_strings:
        if not isinstance(stop, str) or not stop:
            raise ParameterError(f"a stop string should be a string of at least one character, found {shown(stop)}")


FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


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

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None."""
        return None if self._stops is None else self._stops.matched

    @property
    def stopped(self) -> bool:
        """True once a stop string has been found."""
        return self.stop_string is not None

    def push(self, token_id: int) -> None:
        """Add the next token."""
        piece = self._decoder.push(token_id)
        self.text += piece if self._stops is None else self._stops.push(piece)

    def flush(self) -> None:
        """End the text: release what was held back, unless a stop string was found."""
        if not self.stopped:
            piece = self._decoder.flush()
            if self._stops is not None:
                piece = self._stops.push(piece)
                piece += "" if self.stopped else self._stops.flush()
            self.text += piece

    def fork(self) -> "TextStream":
        """An independent copy."""
        return copy.deepcopy(self)


@dataclass(slots=True)
class Progress:
    """Tokens and text added to a continuation since the last call of `Continuation.take`."""

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    finish_reason: FinishReason | None = None
    score: float | None = None
    error: Exception | None = None
    """The cause, if `finish_reason` is "error"."""
    stop_reason: int | str | None = None
    """The token, the stop string or the name of the criterion that ended it, if `finish_reason` is "stop"."""
    generated_tokens: int = 0
    """Number of tokens of the continuation so far."""
    request_finished: bool = False
    """True in the very last progress of the request."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    times: tuple[float, float, float] | None = None
    """In the last progress of a continuation, seconds in the queue, until the prompt was computed, and after it."""
    prompt_scores: PromptScores | None = None
    """In the first progress of a request that asked for it."""


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
    ) -> None:
        """`spelled` are the end-of-sequence tokens that a stop string spells, `criteria` the user's own."""
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
        elif self.stream is not None and self.stream.stopped:
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

    def take(self) -> Progress | None:
        """Progress since the last call; None if there is none."""
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
            stop_reason=self.stop_reason,
            generated_tokens=len(self.token_ids),
        )
        self._taken_tokens, self._taken_text, self._taken_end = len(self.token_ids), self._taken_text + len(text), ended
        return progress


def reports(
    chooser: Chooser, logits: Any, tokens: Sequence[int], tops: Sequence[int]
) -> list[tuple[float, TopLogProbs | None]]:
    """Log-probabilities of R chosen tokens, and the most likely ones beside them, for `Continuation.push`.

    Args:
        chooser: the chooser for the logits
        logits: [R, V] of the model, before processors
        tokens: [R]
        tops: [R], how many of the most likely tokens are wanted in each row; 0 gives None
    """
    most = max(tops)
    found = chooser.log_probs(logits, np.asarray(tokens), most)
    ids, values = found.top_ids.tolist(), found.top.tolist()
    return [
        (chosen, [*zip(ids[row][:top], values[row][:top], strict=True)] if top else None)
        for row, (chosen, top) in enumerate(zip(found.chosen.tolist(), tops, strict=True))
    ]
