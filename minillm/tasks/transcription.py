"""Transcripts of sounds: windows of 30 seconds one after the other, each begun where the last said that it ended.

Whisper reads windows of fixed length. Of a longer sound the first is transcribed with timestamps; the next begins at
the last complete segment's end (Radford et al., arXiv 2212.04356, section 4.5; transformers' long-form `generate`, with
the spectrogram of the whole sound).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .speech_tokens import SECONDS_PER_POSITION, SpeechTokens
from .word_times import Word

FRAMES_PER_TIME = 2
"""Frames of the spectrogram from one token of a time to the next"""


@dataclass
class Segment:
    """The words from one time to another."""

    start: float
    """Seconds from the beginning of the sound"""
    end: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """With the tokens of times"""
    token_times: list[float] = field(default_factory=list)
    """When each token was said; it and `words`: only where words were asked for"""
    words: list[Word] = field(default_factory=list)
    temperature: float | None = None
    """At which its window was decoded; it and those that follow: None if none was asked for"""
    avg_logprob: float | None = None
    """The mean log-probability of the window's tokens"""
    compression_ratio: float | None = None
    no_speech_prob: float | None = None


@dataclass
class Transcript:
    """The words in a sound, and their times."""

    text: str
    segments: list[Segment]
    """One for all, if no timestamps were asked for"""
    language: str | None
    """The code of the language that was given or detected; None of a model of one language"""
    duration: float
    """Seconds of the sound"""

    def __str__(self) -> str:
        return self.text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all segments."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def words(self) -> list[Word]:
        """The words of all segments, where they were asked for."""
        return [word for segment in self.segments for word in segment.words]


def window_of(frames: NDArray[np.float32], seek: int, length: int) -> NDArray[np.float32]:
    """The frames of a window, zeros behind the sound's end. [F, M] -> [length, M]"""
    window = np.zeros((length, frames.shape[1]), np.float32)
    part = frames[seek : seek + length]
    window[: len(part)] = part
    return window


def segments_of(token_ids: list[int], tokens: SpeechTokens, seek: int, frames: int) -> tuple[list[Segment], int]:
    """The segments in a window's text with timestamps, and how many frames further the next window begins.

    Args:
        token_ids: without what it was begun with, and without the end
        tokens: the model's
        seek: the window's first frame
        frames: of the sound in the window
    """
    first, begin = tokens.first_timestamp, seek * SECONDS_PER_POSITION / FRAMES_PER_TIME

    def seconds(token: int) -> float:
        return begin + (token - first) * SECONDS_PER_POSITION

    timed = [token >= first for token in token_ids]
    ends = [i + 1 for i in range(len(timed) - 1) if timed[i] and timed[i + 1]]
    if not ends:  # all of it is one segment
        length, times = frames // FRAMES_PER_TIME, [token for token in token_ids if token >= first]
        if times and times[-1] != first:
            length = times[-1] - first
        return [Segment(begin, begin + length * SECONDS_PER_POSITION, token_ids=token_ids)], frames
    alone = timed[-2:] == [False, True]  # nothing is said after it
    if alone:
        ends.append(len(token_ids))
    else:
        ends[-1] += 1  # with both times of the last pair
    segments = []
    for start, stop in zip([0, *ends], ends, strict=False):
        part = token_ids[start:stop]
        last = part[-1] if alone or stop != ends[-1] else part[-2]
        segments.append(Segment(seconds(part[0]), seconds(last), token_ids=part))
    return segments, frames if alone else (token_ids[ends[-1] - 2] - first) * FRAMES_PER_TIME


def text_tokens(token_ids: Iterable[int], tokens: SpeechTokens) -> list[int]:
    """The tokens without those of times."""
    beyond = float("inf") if tokens.no_timestamps is None else tokens.no_timestamps
    return [token for token in token_ids if token < beyond]
