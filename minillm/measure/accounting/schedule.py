"""Schedules: the new tokens and context of each sequence in each forward pass.

A schedule is derived from the prompts (`generation`), or recorded from a run (`recording`) where it depends on the
model's output: which guesses are accepted, when a beam ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ...backends.observe import Runs, WrappedBackend, put_between
from ...backends.operations import Backend
from ...backends.timing import Replaced
from ...batch import Batch


class Part(NamedTuple):
    """One sequence's share of a step."""

    new: int
    """New tokens: all of a prompt, one in decoding"""
    context: int
    """S: cached and new positions"""
    depths: tuple[int, ...] = ()
    """If the last new tokens are a tree of guesses: how many ancestors each has in the tree"""
    source: int = 0
    """Tokens of the source that an encoder-decoder's decoder attends to; 0 in the encoder's pass over it"""

    def pairs(self, window: int | None = None, *, causal: bool = True) -> int:
        """Pairs of a new token and a visible position, its own included.

        The new tokens are at the end of the context, so the last sees all S, the one before it S - 1, and so on:
        n S - n (n - 1) / 2. With a window each sees at most that many. A tree's token sees the positions before the
        tree, its ancestors and itself. If not causal, a whole text is computed, whose tokens see as many on each side.
        """
        if not causal:
            return self.square if window is None else 2 * self.pairs(window) - self.new
        line, end = self.new - len(self.depths), self.context - len(self.depths)
        first, window = end - line + 1, window or self.context  # positions seen by the first token before the tree
        short = min(line, max(0, window - first))  # tokens that see less than a window
        pairs = short * first + short * (short - 1) // 2 + (line - short) * min(window, end)
        return pairs + sum(min(window, end + depth + 1) for depth in self.depths)

    def reach(self, window: int | None = None) -> int:
        """Positions visible to at least one new token."""
        return min(self.context, self.new + (window or self.context) - 1)

    @property
    def square(self) -> int:
        """All pairs of a new token and a position, n S, which many tools count and some kernels compute."""
        return self.new * self.context


class Step(NamedTuple):
    """One forward pass."""

    parts: tuple[Part, ...]
    rows: int
    """R: rows that go through the head"""

    @property
    def tokens(self) -> int:
        """T"""
        return sum(part.new for part in self.parts)

    @property
    def encodes(self) -> bool:
        """Whether it is the encoder's, if the model is an encoder-decoder."""
        return not any(part.source for part in self.parts)

    @property
    def over_sources(self) -> "Step":
        """The same tokens over their sources."""
        return Step(tuple(Part(part.new, part.source) for part in self.parts), self.rows)

    def reach(self, window: int | None = None) -> int:
        """Positions whose keys and values are read, over all sequences."""
        return sum(part.reach(window) for part in self.parts)

    def pairs(self, window: int | None = None, *, causal: bool = True) -> int:
        """Visible pairs of all sequences."""
        return sum(part.pairs(window, causal=causal) for part in self.parts)

    @property
    def square(self) -> int:
        """All pairs of all sequences."""
        return sum(part.square for part in self.parts)


def generation(
    prompt_lengths: Sequence[int],
    new_tokens: int,
    *,
    use_cache: bool = True,
    width: int = 1,
    sources: Sequence[int] = (),
) -> Iterator[Step]:
    """The forward passes that generate `new_tokens` after each prompt.

    The first computes the prompts and yields the first token; the last token is never an input. With a cache each later
    step computes one token of each sequence, naive generation computes all of them again. Chunked prefill or a split
    batch has other steps and the same FLOPs. The encoder of an encoder-decoder runs before the first step; before each
    of them in naive generation.

    Args:
        prompt_lengths: tokens of each prompt
        new_tokens: tokens generated after each
        use_cache: False: naive generation
        width: sequences of each prompt after the first step: beams (none ends early) or samples
        sources: tokens of each source of an encoder-decoder; the prompts are then what the decoder begins with
    """
    read = list(sources) or [0] * len(prompt_lengths)
    for done in range(new_tokens):
        if sources and not (use_cache and done):
            yield Step(tuple(Part(length, length) for length in sources), 0)
        lengths = [pair for pair in zip(prompt_lengths, read, strict=True) for _ in range(width if done else 1)]
        contexts = [(length + done, source) for length, source in lengths]
        parts = (Part(1 if use_cache and done else context, context, source=source) for context, source in contexts)
        yield Step(tuple(parts), len(contexts))


class Recorder(WrappedBackend):
    """Wraps a backend and records the schedule of its forward passes."""

    only_looks = True

    memory: Any

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.memory = Replaced(inner.memory, upload=self._upload)
        self.steps: list[Step] = []

    def _upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """Record the step."""
        parts = []
        for i, span in enumerate(batch.spans):
            depths = () if span.tree is None else tuple(int(seen) - 1 for seen in span.tree.sum(axis=1))
            source = batch.cross_rows[i].context_len if batch.cross_rows else 0
            parts.append(Part(span.stop - span.start, span.context_len, depths, source))
        self.steps.append(Step(tuple(parts), len(rows)))
        uploaded: tuple[Batch, Any] = self.inner.memory.upload(batch, rows)
        return uploaded


def recording(runner: Runs) -> AbstractContextManager[Recorder]:
    """Record the schedule of a runner's forward passes inside the `with` block."""
    return put_between(runner, Recorder(runner.backend))
