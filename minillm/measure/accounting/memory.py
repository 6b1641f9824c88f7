"""A model's memory: weights by place, K/V cache, activations; the largest batch and context that fit."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...backends.states import SLOTS_PER_SEQUENCE, state_bytes
from ...backends.storage import Experts
from ...cache.windows import MARGIN
from ...config import ModelConfig
from ...models import shape_model
from ...models.base import weight_paths
from ...models.points import encoder_points, names_matching, points_of
from ...reference.experts import expected_experts
from .costs import place_of, run, shape_backend
from .schedule import Part, Step
from .storage import Storage

CHUNK = 512
"""The engine's prefill chunk in tokens, which bounds a prefill's activations"""


class Held(NamedTuple):
    """Parameters and bytes of the weights in one place of the model, summed over all layers."""

    name: str
    parameters: int
    bytes: int
    active: int = 0
    """Parameters that a token uses: k experts of each layer; all others, tables included"""


@lru_cache(maxsize=64)
def parts_held(config: ModelConfig, storage: Storage) -> tuple[Held, ...]:
    """Parameters and bytes of every place of the model that has some; a tied head's count as the embedding's."""
    backend = shape_backend(storage)
    parts: dict[str, Held] = {}
    for path, placeholder in weight_paths(shape_model(config, backend)):
        weight = backend.loader.prepared.pop(placeholder.name, None)  # None: a constant, or a tied head
        if weight is not None:
            place = place_of(path)
            before = parts.get(place, Held(place, 0, 0))
            parameters = math.prod(weight.shape) + (0 if weight.bias is None else weight.bias.size)
            active = parameters
            if isinstance(weight.data, Experts):
                active = parameters // config.num_experts * config.experts_per_token
            sums = before.parameters + parameters, before.bytes + weight.nbytes, before.active + active
            parts[place] = Held(place, *sums)
    return tuple(parts.values())


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied head counts once, as the token embedding."""
    return sum(part.parameters for part in parts_held(config, Storage()))


def active_parameter_count(config: ModelConfig) -> int:
    """Number of parameters that one token uses: all but the experts that it does not choose."""
    return sum(part.active for part in parts_held(config, Storage()))


def experts_read(config: ModelConfig, tokens: int) -> float:
    """Experts of a layer that a step of so many tokens reads: the expected number, if each chooses at random."""
    return expected_experts(tokens, config.num_experts, config.experts_per_token) if config.num_experts else 0.0


def weights_bytes(config: ModelConfig, storage: Storage) -> int:
    """Bytes of all weights."""
    return sum(part.bytes for part in parts_held(config, storage))


def looked_up(config: ModelConfig, storage: Storage | None = None) -> Held:
    """Parameters and bytes of the tables that a step reads by rows, one for each token.

    They are the positions, the token types, and the tokens where no head shares them.
    """
    names = ("embedding.positions", "embedding.types", "embedding.tokens")[: 2 if config.tied_head else 3]
    tables = [part for part in parts_held(config, storage or Storage()) if part.name in names]
    return Held("tables", sum(table.parameters for table in tables), sum(table.bytes for table in tables))


def cache_bytes_per_token(config: ModelConfig, storage: Storage) -> int:
    """Bytes of one token in the K/V cache: keys and values of one position in all layers that have their own.

    An encoder keeps none: during a pass its layers take turns in the memory of one.
    """
    return cache_bytes(config, storage, 1)


def cache_bytes(config: ModelConfig, storage: Storage, context: int) -> int:
    """Bytes of a text of `context` tokens in the K/V cache, but for what pages round up to.

    Layers with a window keep the positions in it, and `MARGIN` before it.
    """
    positions = [context if group.window is None else min(context, group.window + MARGIN) for group in config.kv_groups]
    return sum(count * position_bytes(config, storage, group) for group, count in enumerate(positions))


def position_bytes(config: ModelConfig, storage: Storage, number: int) -> int:
    """Bytes of one position in the cache of a group of layers (`ModelConfig.kv_groups`)."""
    group = config.kv_groups[number]
    layers = min(1, len(group.layers)) if config.bidirectional else len(group.layers)
    memory = shape_backend(storage).memory
    return layers * memory.position_bytes(group.num_kv_heads, group.head_dim, group.value_dim)


def expanded_bytes_per_token(config: ModelConfig, storage: Storage) -> int:
    """Bytes that one token's keys and values of all heads would take, expanded from latents; 0 in other models."""
    cache = shape_backend(storage).memory.cache
    heads = sum(cache.row_bytes(width) for width in config.expanded_widths)
    return config.num_layers * config.num_heads * heads


def state_bytes_per_sequence(config: ModelConfig) -> int:
    """Bytes of the state that layers without keys and values keep of a sequence, whatever its length."""
    return state_bytes(config.layer_states)


@lru_cache(maxsize=256)
def activation_bytes(config: ModelConfig, storage: Storage, T: int, R: int) -> int:
    """Bytes of a forward pass's results in minillm's arena.

    If the results of all layers have the same shapes, two layers stand for all, between which the arena takes turns. In
    an encoder-decoder, a decoder pass and an encoder pass with as many tokens share it.

    Args:
        config: the model
        storage: format of activations
        T: new tokens of all sequences
        R: rows that go through the head
    """
    backend = shape_backend(storage)
    few = config if config.mixed_layers else replace(config, num_layers=min(config.num_layers, 2))
    source = 1 if config.encoder_layers else 0
    model = shape_model(replace(few, encoder_layers=min(few.encoder_layers, 2)), backend)
    run(model, backend, Step((Part(T, T, source=source),), R))
    if config.encoder_layers:
        backend.memory.arena.restart()
        run(model, backend, Step((Part(T, T),), 0))
    return backend.memory.arena.nbytes


def watched_bytes(config: ModelConfig, watch: Iterable[str], tokens: int, source: int = 0) -> int:
    """Bytes of the rows that a request with `watch` keeps until it ends, float32; result and events come besides.

    A row of a causal attention pattern has the keys up to its own. Of several texts of one request those with a common
    beginning share its rows.

    Args:
        config: the model
        watch: patterns of names of points, as of `Engine.generate`
        tokens: of the prompt and of the answer but its last, which is not computed
        source: tokens that the encoder of an encoder-decoder reads

    Raises:
        ParameterError: a pattern names no point.

    Example:
        >>> watched_bytes(engine.config, ["blocks.*.residual"], tokens=100)
        460800
    """
    model = shape_model(config, shape_backend(Storage()))
    encoder = encoder_points(model)
    shapes = points_of(model).shapes | (encoder.shapes if encoder is not None else {})
    rows = 0
    for name in {name for pattern in watch for name in names_matching(pattern, shapes, "watch")}:
        T = source if name.startswith("encoder.") else tokens
        everything = config.bidirectional or name.startswith("encoder.") or ".cross." in name
        keys = T * (source if ".cross." in name else T) if everything else T * (T + 1) // 2  # of all rows together
        _, *sizes = shapes[name]
        numbers = math.prod(size for size in sizes if isinstance(size, int))
        rows += numbers * (keys if "S" in sizes else T)
    return 4 * rows


def needed(config: ModelConfig, storage: Storage, batch: int, context: int) -> int:
    """Bytes needed to run `batch` sequences of `context` tokens: weights, cache, and the activations of one step.

    With chunked prefill a step has at most as many new tokens as a chunk or the batch. An encoder-decoder has a source
    of as many tokens beside the decoder's text, which its encoder reads in one pass.
    """
    T = max(batch, context if config.encoder_layers else min(CHUNK, context))
    cache = batch * cache_bytes(config, storage, context) * (2 if config.encoder_layers else 1)
    cache += batch * SLOTS_PER_SEQUENCE * state_bytes_per_sequence(config)
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
    limit = memory // cache_bytes(config, storage, context) + 1
    return largest(lambda batch: needed(config, storage, batch, context) <= memory, limit)


def largest_context(config: ModelConfig, storage: Storage, batch: int, memory: int) -> int:
    """The longest context of `batch` sequences that fits into `memory` bytes, not limited by the model's positions.

    They limit it where all layers have a window, so that no context is too long.
    """
    longest = config.max_positions
    grows = cache_bytes(config, storage, longest + 1) - cache_bytes(config, storage, longest)
    limit = memory // (batch * grows) + 1 if grows else longest
    return largest(lambda context: needed(config, storage, batch, context) <= memory, limit)
