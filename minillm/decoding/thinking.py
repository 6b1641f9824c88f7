"""The thinking budget: a section of thoughts, such as `<think> ... </think>`, ends after `max_thinking_tokens` tokens.

A section is open after its begin marker until its end marker, or until a turn ends, in the prompt or in the generated
text; a chat template may have opened it. Its tokens count wherever they come from. Once there are as many as the
budget, the end marker is forced, token by token; what the text already has of its beginning is not repeated. A further
section has a budget of its own. The markers' texts are tokenized as they are alone.

A guide begins after the thoughts of an answer to a conversation (`GuideAfterThoughts`).

Which token is forced follows from the tokens so far alone, so that searches may branch and requests may be taken up
again anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError
from ..text.tokenizer import Tokenizer
from .guided import Guide
from .history import History
from .processors import InPlace
from .settings import Settings

MARKERS = (
    ("<think>", "</think>"),  # Qwen, DeepSeek, GLM and others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
)
"""Begin and end of thoughts, where a tokenizer has both as tokens of their own; the first that it has counts"""


def markers_of(tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The tokens that begin and end thoughts in a tokenizer's vocabulary; None if it has none of `MARKERS`."""
    ids = {} if tokenizer is None else tokenizer.added_ids
    return next((((ids[begin],), (ids[end],)) for begin, end in MARKERS if {begin, end} <= ids.keys()), None)


def with_markers(settings: Settings, tokenizer: Tokenizer | None, vocab_size: int) -> Settings:
    """The settings with their markers in tokens, and behind these the tokens that end a turn.

    Raises:
        ParameterError: there are no markers, or they are not in the vocabulary, or they are the same.
    """
    given = settings.thinking_tokens
    if given is None:
        markers = markers_of(tokenizer)
    elif tokenizer is None and any(isinstance(marker, str) for marker in given):
        raise ParameterError("thinking_tokens: this model has no tokenizer; give the markers as token ids")
    else:
        markers = _encoded(given[0], tokenizer), _encoded(given[1], tokenizer)
    if markers is None:
        raise ParameterError(
            f"max_thinking_tokens={settings.max_thinking_tokens} needs thinking_tokens=(begin, end): the vocabulary has"
            f" no {' and '.join(MARKERS[0])} or other known markers"
        )
    begin, end = markers
    for token in (*begin, *end):
        if token >= vocab_size:
            raise ParameterError(f"thinking_tokens: {token} is not in the vocabulary of {vocab_size} tokens")
    if begin == end:
        raise ParameterError("thinking_tokens: both markers are the same tokens; expected two different ones")
    turn_ends = () if tokenizer is None else tokenizer.turn_ends
    return replace(settings, thinking_tokens=(begin, end, tuple(sorted({*turn_ends, *settings.eos_token_ids}))))


def _encoded(marker: str | tuple[int, ...], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens of a marker."""
    if not isinstance(marker, str):
        return marker
    assert tokenizer is not None
    return tuple(tokenizer.encode(marker, add_special_tokens=False))


@dataclass(frozen=True)
class ThinkingBudget(InPlace):
    """Force the end of a section of thoughts that has `most` tokens; see the module docstring."""

    most: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    turn_ends: tuple[int, ...] = ()

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        for row in range(len(history.lengths)):
            token = self.forced(history.sequence(row))
            if token is not None:
                place = history.at(np.asarray([row]))
                logits[place] = -xp.inf
                logits[place, token] = 0.0
        return logits

    def forced(self, line: NDArray[np.int64]) -> int | None:
        """The token that has to follow; None: any may. line: [T]"""
        ends = [_after(line, self.end), *(_after(line, (token,)) for token in self.turn_ends)]
        outside = max(int(places[-1]) if len(places) else 0 for places in ends)
        begins = _after(line[outside:], self.begin)
        if not len(begins):
            return None
        thoughts = line[outside + int(begins[0]) :]
        if len(thoughts) < self.most:
            return None
        last = thoughts[-len(self.end) :].tolist()
        present = (n for n in range(len(self.end) - 1, 0, -1) if last[-n:] == [*self.end[:n]])
        return self.end[next(present, 0)]


class GuideAfterThoughts(Guide):
    """A guide that begins after a model's thoughts, in which any token is allowed but one that ends the text.

    Unless the prompt has begun them the text may, with their marker, or it begins with what the guide allows.
    """

    def __init__(self, guide: Guide, begin: int, end: Sequence[int], *, opened: bool) -> None:
        """Args:
        guide: follows the text after the thoughts
        begin: token of their begin marker
        end: tokens of their end marker
        opened: the prompt has begun them
        """
        self._guide, self._begin, self._end = guide, begin, tuple(end)
        self._last: tuple[int, ...] | None = () if opened else None
        """Within thoughts, their last tokens"""
        self._begun = opened

    @property
    def words(self) -> int:
        """W, the number of words of 32 bits in a mask."""
        return self._guide.words

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """As `Guide.fill`."""
        if self._last is not None:
            mask[:] = ~np.uint32(0)
            for token in self._guide._eos_token_ids:
                mask[token // 32] &= ~np.uint32(1 << token % 32)
            return
        self._guide.fill(mask)
        if not self._begun:
            mask[self._begin // 32] |= np.uint32(1 << self._begin % 32)

    def push(self, token_id: int) -> None:
        """As `Guide.push`."""
        if self._last is not None:
            self._last = (*self._last, token_id)[-len(self._end) :]
            if self._last == self._end:
                self._last = None
        elif not self._begun and token_id == self._begin:
            self._last = ()
        else:
            self._guide.push(token_id)
        self._begun = True

    def fork(self) -> "GuideAfterThoughts":
        """As `Guide.fork`."""
        twin = GuideAfterThoughts(self._guide.fork(), self._begin, self._end, opened=False)
        twin._last, twin._begun = self._last, self._begun
        return twin


def _after(line: NDArray[np.int64], sequence: Sequence[int]) -> NDArray[np.int64]:
    """The places right after each occurrence of a sequence. [T] -> [occurrences]"""
    places = np.arange(len(sequence), len(line) + 1)
    for i, token in enumerate(sequence):
        places = places[line[places - len(sequence) + i] == token]
    return places
