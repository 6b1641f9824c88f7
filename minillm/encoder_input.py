"""The source of an encoder-decoder's request, text or frames of sound, and the pages with its keys and values.

The encoder reads the source once. The keys and values that the decoder's cross-attention needs of it are kept in pages
of the decoder's K/V cache, one position for each of the source's tokens. All sequences of a request (beams, samples)
share them; they are freed with the last of these, and computed anew after a preemption.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FRAMES_PER_POSITION = 2
"""Frames of sound that become one position of an encoder"""


@dataclass(frozen=True, eq=False)
class AudioFeatures:
    """Frames of sound, as a prompt for a model whose encoder reads these in place of token ids."""

    frames: NDArray[np.float32]
    """[2 T, M]: M numbers each of an even number of frames, such as a log-mel spectrogram; T positions"""

    @property
    def positions(self) -> int:
        """T"""
        return len(self.frames) // FRAMES_PER_POSITION


@dataclass(eq=False)
class EncoderInput:
    """The tokens of a source, or its frames, and its block table."""

    token_ids: list[int]
    """With frames one for each position, all 0"""
    frames: NDArray[np.float32] | None = None
    """[2 T, M], of sound; None of a text"""
    pages: list[int] = field(default_factory=list)
    computed: bool = False
    """True if the pages hold the keys and values of cross-attention"""
    users: set[Hashable] = field(default_factory=set)
    """The sequences that need the pages"""

    @property
    def extent(self) -> tuple[int, int, tuple[int, ...]]:
        """Context length, text length and pages, as in a `Span`."""
        return len(self.token_ids), len(self.token_ids), tuple(self.pages)

    def hold(self, user: Hashable, count: int, take: Callable[[], int]) -> None:
        """Keep the pages for a sequence, `count` in all; `take` gives one, or raises CacheFullError."""
        self.users.add(user)
        while len(self.pages) < count:
            self.pages.append(take())

    def release(self, user: Hashable, give_back: Callable[[int], None]) -> None:
        """A sequence no longer needs the pages: the last one gives them back."""
        self.users.discard(user)
        if not self.users:
            for page in reversed(self.pages):
                give_back(page)
            self.pages, self.computed = [], False
