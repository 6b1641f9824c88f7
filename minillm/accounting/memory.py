"""A model's memory: weights by component, K/V cache, activations; the largest batch and context that fit."""

from collections.abc import Callable
from typing import NamedTuple

from ..config import ModelConfig
from ..models import outline_of
from ..models.outline import Attend, Component, Embed, Gate, Linear, Norm, Rotate, StoreKV, TakeRows
from .formulas import parameters_of, weight_bytes_of
from .storage import VECTOR_BYTES, Storage

CHUNK = 512
"""The engine's prefill chunk in tokens, which bounds a prefill's activations"""


class Held(NamedTuple):
    """Parameters and bytes of one component, summed over all layers."""

    name: str
    parameters: int
    bytes: int


def parts_held(config: ModelConfig, storage: Storage) -> list[Held]:
    """Parameters and bytes of every component that has some."""
    outline = outline_of(config)
    groups = (outline.before, *outline.layers, outline.after, outline.head)
    held: dict[str, Held] = {}
    for part in (part for parts in groups for part in parts if parameters_of(part)):
        before = held.get(part.name, Held(part.name, 0, 0))
        parameters, size = before.parameters + parameters_of(part), before.bytes + weight_bytes_of(part, storage)
        held[part.name] = Held(part.name, parameters, size)
    return list(held.values())


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied head counts once, as the token embedding."""
    return sum(held.parameters for held in parts_held(config, Storage()))


def weights_bytes(config: ModelConfig, storage: Storage) -> int:
    """Bytes of all weights."""
    return sum(held.bytes for held in parts_held(config, storage))


def cache_bytes_per_token(config: ModelConfig, storage: Storage) -> int:
    """Bytes of one token in the K/V cache: keys and values of one position in L layers."""
    return config.num_layers * storage.position_bytes(config.num_kv_heads, config.head_dim)


def activation_bytes(config: ModelConfig, storage: Storage, T: int, R: int) -> int:
    """Bytes of a forward pass's results in minillm's arena.

    The n-th results of all layers share one buffer, as large as the largest of them. If that buffer still holds the
    previous layer's last result, a second one is used.

    Args:
        config: the model
        storage: format of activations
        T: new tokens of all sequences
        R: rows that go through the head
    """
    outline = outline_of(config)

    def results(parts: tuple[Component, ...], rows: int) -> list[int]:
        wanted = [part for part in parts if not (isinstance(part, TakeRows) and R == T)]
        return [size for part in wanted for size in result_bytes(part, storage, rows)]

    turns = [results(outline.before, T), *(results(layer, T) for layer in outline.layers)]
    turns.append(results(outline.after, T) + results(outline.head, R))
    places: dict[tuple[int, bool], int] = {}
    last = (-1, False)
    for sizes in turns:
        kept = last
        for number, size in enumerate(sizes):
            last = number, kept == (number, False)
            places[last] = max(size, places.get(last, 0))
    return sum(places.values())


def result_bytes(part: Component, storage: Storage, rows: int) -> tuple[int, ...]:
    """Bytes of each array that a component's operation returns."""
    a = storage.activation_bytes * rows
    match part:
        case Embed() | Gate() | TakeRows():
            return (a * part.width,)
        case Norm():
            return (a * part.rows * part.width,)
        case Linear():
            return ((VECTOR_BYTES * rows if part.role == "vocabulary" else a) * part.outputs,)
        case Rotate():
            return a * part.heads * part.head_dim, a * part.kv_heads * part.head_dim
        case Attend():
            return (a * part.heads * part.head_dim,)
        case StoreKV():
            return ()


def needed(config: ModelConfig, storage: Storage, batch: int, context: int) -> int:
    """Bytes needed to run `batch` sequences of `context` tokens: weights, cache, and the activations of one step.

    With chunked prefill a step has at most as many new tokens as a chunk or the batch.
    """
    T = max(batch, min(CHUNK, context))
    cache = batch * context * cache_bytes_per_token(config, storage)
    return weights_bytes(config, storage) + cache + activation_bytes(config, storage, T, batch)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 0 to `limit` that fits, by bisection; if n fits, n - 1 must."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def largest_batch(config: ModelConfig, storage: Storage, context: int, memory: int) -> int:
    """The most sequences of `context` tokens that fit into `memory` bytes; 0 if not even one does."""
    limit = memory // (context * cache_bytes_per_token(config, storage)) + 1
    return largest(lambda batch: needed(config, storage, batch, context) <= memory, limit)


def largest_context(config: ModelConfig, storage: Storage, batch: int, memory: int) -> int:
    """The longest context of `batch` sequences that fits into `memory` bytes, not limited by the model's positions."""
    limit = memory // (batch * cache_bytes_per_token(config, storage)) + 1
    return largest(lambda context: needed(config, storage, batch, context) <= memory, limit)
