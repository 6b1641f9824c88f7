"""What is computed when: the new tokens and context of each sequence in each forward pass.

A schedule follows from the prompts and the strategy (`generation`), or is recorded from a run (`recording`), as it has
to be where the model's own answers decide: which guess is accepted, when a beam ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ..backends.base import Backend
from ..backends.observe import Runs, WrappedBackend, put_between
from ..batch import Batch


class Part(NamedTuple):
    """What one sequence brings to a step."""

    new: int
    """Its new tokens: all of a prompt, one in decoding"""
    context: int
    """S: cached positions and the new ones"""
    depths: tuple[int, ...] = ()
    """Of the last new tokens, where they are a tree of guesses: how many ancestors each has among them"""

    def pairs(self, window: int | None = None) -> int:
        """Pairs of a new token and a position that it sees, itself included.

        The new tokens stand at the end of the context, so the last sees all S, the one before it S - 1, and so on:
        n S - n (n - 1) / 2. With a window none sees more than that: the first that do see as many as their place says.
        A tree's token sees the line before the tree, its ancestors and itself.
        """
        line, end = self.new - len(self.depths), self.context - len(self.depths)
        first, window = end - line + 1, window or self.context  # the first token of the line sees so many
        short = min(line, max(0, window - first))  # tokens that see less than a window
        pairs = short * first + short * (short - 1) // 2 + (line - short) * min(window, end)
        return pairs + sum(min(window, end + depth + 1) for depth in self.depths)

    def reach(self, window: int | None = None) -> int:
        """Positions that at least one new token sees."""
        return min(self.context, self.new + (window or self.context) - 1)

    @property
    def square(self) -> int:
        """All pairs of a new token and a position: n S. Many tools count these, and some kernels compute them."""
        return self.new * self.context


class Step(NamedTuple):
    """One forward pass."""

    parts: tuple[Part, ...]
    rows: int
    """R: how many rows go through the head"""

    @property
    def tokens(self) -> int:
        """T"""
        return sum(part.new for part in self.parts)

    def reach(self, window: int | None = None) -> int:
        """Positions of all sequences whose keys and values are read."""
        return sum(part.reach(window) for part in self.parts)

    def pairs(self, window: int | None = None) -> int:
        """Visible pairs of all sequences."""
        return sum(part.pairs(window) for part in self.parts)

    @property
    def square(self) -> int:
        """All pairs of all sequences."""
        return sum(part.square for part in self.parts)


def generation(
    prompt_lengths: Sequence[int], new_tokens: int, *, use_cache: bool = True, width: int = 1
) -> Iterator[Step]:
    """The forward passes that generate `new_tokens` after each prompt.

    The first computes the prompts and gives the first token; the token that comes out last is never fed. With a
    cache each later step computes one token of each sequence, the naive way computes all of them again. A prompt that
    is computed in chunks, or a batch that runs in several, takes other steps and the same FLOPs.

    Args:
        prompt_lengths: tokens of each prompt
        new_tokens: generated after each
        use_cache: False: the naive way
        width: sequences of each prompt after the first step: the beams of beam search, of which none ends early; or
            the samples of one prompt
    """
    for done in range(new_tokens):
        contexts = [length + done for length in prompt_lengths for _ in range(width if done else 1)]
        parts = tuple(Part(1 if use_cache and done else context, context) for context in contexts)
        yield Step(parts, len(parts))


class Recorder(WrappedBackend):
    """Writes down the schedule of the forward passes that go through it, and nothing about their operations."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.steps: list[Step] = []

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """Write the step down."""
        parts = []
        for span in batch.spans:
            depths = () if span.tree is None else tuple(int(seen) - 1 for seen in span.tree.sum(axis=1))
            parts.append(Part(span.stop - span.start, span.context_len, depths))
        self.steps.append(Step(tuple(parts), len(rows)))
        return super().upload(batch, rows)


def recording(runner: Runs) -> AbstractContextManager[Recorder]:
    """Record the schedule of what a runner computes inside the `with` block."""
    return put_between(runner, Recorder(runner.backend))
