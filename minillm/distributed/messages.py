"""The messages of rank 0 to the other ranks, in the order in which it did the same."""

import pickle
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..batch import Batch


class Look(NamedTuple):
    """The points that a text of a batch looks at, for the ranks that have not its functions."""

    number: int
    """The text's number in the batch"""
    watched: tuple[str, ...]
    """Points whose rows are kept"""
    changed: tuple[str, ...]
    """Points with functions"""


Task = Literal["tokens", "labels", "states"]
"""Result of a pass: the next token's logits, spread over the ranks of the last stage; or, for whole texts,
logits of labels or hidden states, whole on each of these ranks"""


class NewPages(NamedTuple):
    """Reserve the pages of a K/V cache."""

    number: int
    """The cache's number in the messages that follow"""
    pages: int
    page_size: int
    prefix_cache: bool
    """Whether other texts may use what a pass computes, so that all of it must be finite"""
    task: Task = "tokens"
    states: int = 0
    """Slots for states"""


class FreePages(NamedTuple):
    """Give back the pages of a cache."""

    number: int


class CopyPositions(NamedTuple):
    """Copy positions `first` to `stop` of a page to another one, in all layers."""

    number: int
    source: int
    target: int
    first: int
    stop: int


class MicroBatch(NamedTuple):
    """A part of a forward pass; a stage computes them one after the other, while the next is at the one before."""

    batch: Batch
    rows: tuple[int, ...]
    """Rows of the batch whose logits are wanted"""


class Pass(NamedTuple):
    """Compute a forward pass."""

    number: int
    """Number of its cache"""
    parts: tuple[MicroBatch, ...]
    best: tuple[int, ...]
    """Number of a row's largest logits to send to rank 0, row by row of all parts. [R]"""
    whole: bool
    """Send all logits too"""
    maps: tuple[int, ...] = ()
    """Layers whose attention maps to send, each by the ranks that have its heads"""
    looks: tuple[Look, ...] = ()
    """Texts with hooks; there is one part then"""


class Encode(NamedTuple):
    """Run the encoder over sources, before the decoder's pass."""

    number: int
    """Number of the cache"""
    batch: Batch
    looks: tuple[Look, ...] = ()
    """Texts with hooks"""


class Fetch(NamedTuple):
    """Send rows of the last pass to rank 0."""

    what: str
    """"logits" or "hidden" """
    rows: tuple[int, ...]


class End(NamedTuple):
    """Rank 0 has closed its engine."""


Message = NewPages | FreePages | CopyPositions | Pass | Encode | Fetch | End


def packed(messages: Sequence[Message]) -> bytes:
    """Messages as bytes."""
    return pickle.dumps(list(messages), protocol=5)


def unpacked(message: bytes) -> list[Message]:
    """The messages in what `packed` made on rank 0 of the same job."""
    messages: list[Message] = pickle.loads(message)
    return messages
