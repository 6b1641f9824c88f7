"""A long sound in chunks that overlap, transcribed apart and joined where their texts agree.

Each chunk but the first shares its beginning with the one before, and each but the last its end with the one after.
Texts are joined at the middle of their longest common sequence, allowing for some tokens that differ; times within an
overlap are left to the join. Results are those of transformers' pipeline with `chunk_length_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .speech_tokens import SECONDS_PER_POSITION

Times = tuple[float, float]
"""From when to when a token is said"""


@dataclass(frozen=True)
class Chunk:
    """A part of a sound, in samples."""

    start: int
    length: int
    left: int
    """Samples that it shares with the chunk before"""
    right: int
    """Samples that it shares with the chunk after"""


@dataclass(frozen=True)
class ChunkTokens:
    """The tokens of a chunk's transcript, and when each was said, if words are to have times."""

    length: float
    """Seconds"""
    left: float
    right: float
    token_ids: list[int]
    token_times: list[float] = field(default_factory=list)


@dataclass
class Passage:
    """Joined tokens from one time to another; None: no such time was said."""

    start: float | None = None
    end: float | None = None
    token_ids: list[int] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)


def chunks_of(count: int, length: int, left: int, right: int) -> list[Chunk]:
    """The chunks of a sound: of `count` samples in all, of `length` each, of which `left` and `right` overlap."""
    chunks = []
    for start in range(0, count, length - left - right):
        stop = min(start + length, count)
        first, last = start == 0, start + length >= count
        chunk = Chunk(start, stop - start, 0 if first else left, 0 if last else right)
        if chunk.length > chunk.left:
            chunks.append(chunk)
        if last:
            break
    return chunks


def joined(parts: Sequence[ChunkTokens], first_timestamp: int, positions: int) -> list[Passage]:
    """The passages of a sound, each up to a time that was said outside the overlaps.

    Args:
        parts: the chunks in their order
        first_timestamp: the token of 0 seconds, after all of text
        positions: of the model's window
    """
    join = _Join(first_timestamp, positions)
    for part in parts:
        join.add(part)
    return join.end()


class _Join:
    """Chunks are added one after the other; a passage ends at a time behind which no overlap is open."""

    def __init__(self, first_timestamp: int, positions: int) -> None:
        self.zero, self.positions = first_timestamp, positions
        self.passages: list[Passage] = []
        self.passage = Passage()
        self.offset = 0.0
        """Seconds at which the next chunk begins, without what it shares"""
        self.texts: list[list[int]] = []
        """The texts of the passage, to be joined"""
        self.spans: list[list[Times]] = []
        self.skipping = False
        """A time in an overlap was left out: the next one, its pair's, is too"""

    def add(self, part: ChunkTokens) -> None:
        """Take a chunk's tokens."""
        self.offset -= part.left
        first, last = self._borders(part)
        clock = _Clock(self.zero, self.positions)
        text: list[int] = []
        spans: list[Times] = []
        for place, token in enumerate(part.token_ids):
            if token < self.zero:
                text.append(token)
                if part.token_times:
                    before = part.token_times[place - 1] if place else 0.0
                    spans.append((round(before + self.offset, 2), round(part.token_times[place] + self.offset, 2)))
                continue
            time = round(clock.read(part.token_ids, place) + self.offset, 2)
            if last is not None and token >= last:
                self.skipping = True
            elif self.skipping or (self.texts and token < first):
                self.skipping = False
            elif self.passage.start is None:
                self.passage.start = time
            elif time != self.passage.start:
                self.passage.end = time
                self._close(text, spans)
                text, spans = [], []
        self.offset += part.length - part.right
        if text:
            self.texts.append(text)
            self.spans.append(spans)
        elif not any(self.texts):
            self.passage, self.texts, self.spans = Passage(), [], []

    def end(self) -> list[Passage]:
        """All passages."""
        if self.texts:
            text, spans = self.texts.pop(), self.spans.pop()
            self._close(text, spans)
        return self.passages

    def _borders(self, part: ChunkTokens) -> tuple[float, int | None]:
        """The tokens of times before which, and from which on, a time is in an overlap."""
        first = self.zero + part.left / SECONDS_PER_POSITION
        last = None
        if part.right:
            for token in reversed([token for token in part.token_ids if token >= self.zero]):
                seconds = (token - self.zero) * SECONDS_PER_POSITION
                if last is not None and seconds < part.length - part.right:
                    break
                last = token
        return first, last

    def _close(self, text: list[int], spans: list[Times]) -> None:
        """End the passage with a text."""
        timed = bool(spans) or any(self.spans)
        joined_text, joined_spans = common_join([*self.texts, text], [*self.spans, spans] if timed else None)
        self.passage.token_ids, self.passage.times = joined_text, joined_spans
        self.passages.append(self.passage)
        self.passage, self.texts, self.spans = Passage(), [], []


class _Clock:
    """The times in a chunk's text: those of a window that follows another in the same chunk begin at 0 again."""

    def __init__(self, zero: int, positions: int) -> None:
        self.zero, self.window = zero, positions * SECONDS_PER_POSITION
        self.before, self.latest, self.last_but_one = 0.0, 0.0, 0.0
        """Seconds of the windows before; the last time in this one, and the one before it"""

    def read(self, token_ids: Sequence[int], place: int) -> float:
        """The seconds of a token of a time, from the chunk's beginning."""
        seconds = (token_ids[place] - self.zero) * SECONDS_PER_POSITION
        if seconds < self.latest:
            paired = token_ids[place - 1] >= self.zero and token_ids[place - 2] >= self.zero
            if place >= 2 and not paired:  # the window's text ended with one time: all of it was read
                self.before += self.window
            else:
                self.latest = self.last_but_one
                self.before += self.last_but_one
        self.last_but_one, self.latest = self.latest, seconds
        return seconds + self.before


def common_join(
    texts: Sequence[list[int]], spans: Sequence[list[Times]] | None = None
) -> tuple[list[int], list[Times]]:
    """Texts that overlap as one: up to the middle of what two have in common from the left one, then from the right.

    Of all ways to lay the right text over the left one's end, the best has the most equal tokens for its length, and
    two at least; with `spans`, when each token was said, equal tokens count that are said in order.
    """
    whole: list[int] = []
    whole_spans: list[Times] = []
    left, left_spans = texts[0], spans[0] if spans else []
    for number, right in enumerate(texts[1:], 1):
        right_spans = spans[number] if spans else []
        most, cut, resume = 0.0, len(left), 0
        for shared in range(1, len(left) + len(right)):
            start, stop = max(0, len(left) - shared), min(len(left), len(left) + len(right) - shared)
            begin, end = max(0, shared - len(left)), min(len(right), shared)
            equal = np.array(left[start:stop]) == np.array(right[begin:end])
            if spans:
                pairs = zip(left_spans[start:stop], right_spans[begin:end], strict=True)
                equal = equal & np.array([one <= other for one, other in pairs], bool)
            count = int(equal.sum())
            rating = count / shared + shared / 10000  # long agreements are preferred
            if count > 1 and rating > most:
                most, cut, resume = rating, (start + stop) // 2, (begin + end) // 2
        whole += left[:cut]
        whole_spans += left_spans[:cut]
        left, left_spans = right[resume:], right_spans[resume:]
    return [*whole, *left], [*whole_spans, *left_spans]
