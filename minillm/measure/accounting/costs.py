"""The cost of a model's operations: a forward pass on a backend of shapes, under the counting observer.

No number is computed. What counts as a FLOP or a byte is said beside each operation (`reference/cost.py` has the
conventions); here are other tools' conventions, and the names of the rows.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...backends.formats import BLOCKS, CACHE_FORMATS, FORMATS, STORED_FORMATS, WEIGHT_FORMATS, WeightFormats
from ...backends.observe import CountingBackend
from ...backends.operations import Backend
from ...backends.shapes import ShapeBackend, without_numbers
from ...backends.weights import Weight
from ...config import ModelConfig
from ...encoder_input import FRAMES_PER_POSITION
from ...models import shape_model
from ...models.base import Model, weight_paths
from ...models.encoder_decoder import EncoderDecoder
from ...reference.disentangled import positions_flops
from .schedule import Step
from .storage import Storage


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Counting conventions in which tools differ. The defaults are minillm's."""

    full_square: bool = False
    """Count all pairs of a query and a key in attention, not only the causal ones"""
    products_only: bool = False
    """Count only matrix products: no norms, softmax, activations, biases or sums"""
    multiply_add: int = 2
    """FLOPs of a multiply-add; 1 counts MACs"""


class Row(NamedTuple):
    """One operation of a step."""

    name: str
    """The weight's place in the model ("attention.qkv", "mlp.up"), or the operation's name if it has none"""
    kind: str
    """Name of the backend's operation"""
    layer: int | None
    """None before the first layer, the number of layers after the last, as in `backends.observe`"""
    flops: int
    bytes_read: int
    bytes_written: int
    fusion_saves: int

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


def operations(
    config: ModelConfig, step: Step, storage: Storage | None = None, conventions: Conventions | None = None
) -> list[Row]:
    """The operations of one forward pass in execution order."""
    backend, model = _model_of(config, storage or Storage())
    observer = RowBackend(backend, model, conventions or Conventions())
    run(model, observer, step, full_square=observer.conventions.full_square)
    return observer.rows


@lru_cache(maxsize=16)
def _model_of(config: ModelConfig, storage: Storage) -> tuple[ShapeBackend, Model]:
    backend = shape_backend(storage)
    return backend, shape_model(config, backend)


def shape_backend(storage: Storage) -> ShapeBackend:
    """The backend of shapes for these formats."""
    form = STORED_FORMATS[storage.weights]
    if form.block:
        weights = WeightFormats(form, BLOCKS["Q6_K"], None)  # as llama.cpp mixes them
    else:
        weights = replace(WEIGHT_FORMATS[f"{form.kind}{form.bits}"], projection=form).in_groups(storage.group)
    return ShapeBackend(
        replace(weights, vocabulary=None) if storage.keeps_vocabulary else weights,
        cache=CACHE_FORMATS.get(storage.cache) or FORMATS[storage.cache],
        activations=FORMATS[storage.activations],
        checkpoint=FORMATS[storage.checkpoint],
    )


def run(model: Model, backend: Any, step: Step, *, full_square: bool = False) -> None:
    """One forward pass on a backend of shapes, or an observer of one: the operations of `Runner.forward`."""
    batch: Any = _ShapeBatch(step, full_square)
    groups = [SimpleNamespace(heads=group.num_kv_heads, value_dim=group.value_dim) for group in model.config.kv_groups]
    pages: Any = SimpleNamespace(**vars(groups[0]), groups=groups)
    if isinstance(model, EncoderDecoder) and step.encodes:
        if width := model.config.frame_width:
            batch.frames = without_numbers((FRAMES_PER_POSITION * step.tokens, width))
        model.encode(backend, batch, pages)
        return
    x = model.forward(backend, batch, pages)  # [T] -> [T, E]
    if step.rows < step.tokens:
        x = backend.take_rows(x, without_numbers((step.rows,), int))  # [T, E] -> [R, E]
    model.logits(backend, model.states(backend, x))  # [R, E] -> [R, V]


class _ShapeBatch:
    """A batch by its lengths alone: the attributes of `Batch` that operations on shapes and their costs read."""

    def __init__(self, step: Step, full_square: bool) -> None:
        self.num_tokens = step.tokens
        self.token_ids = self.positions = without_numbers((step.tokens,), int)
        self.types = self.positions
        self.spans = step.parts
        self.visible_pairs = cache(
            lambda window=None, causal=True: step.square if full_square else step.pairs(window, causal=causal)
        )
        self.reach = cache(step.reach)
        self._step = step

    def in_group(self, group: int) -> "_ShapeBatch":
        """As of `Batch`."""
        return self

    @cached_property
    def over_sources(self) -> "_ShapeBatch":
        """As of `Batch`."""
        return _ShapeBatch(self._step.over_sources, full_square=True)


def place_of(path: str) -> str:
    """A weight's place in the model, the same in each layer: "attention.qkv" of "layers.3.attention.qkv"."""
    return re.sub(r"\blayers\.\d+\.", "", path)


class RowBackend(CountingBackend):
    """Makes a row of each operation of one forward pass, on shapes or on numbers."""

    only_looks = True

    def __init__(self, inner: Backend, model: Model, conventions: Conventions) -> None:
        super().__init__(inner)
        self.conventions = conventions
        self.rows: list[Row] = []
        self._places: dict[int, list[str]] = {}
        for path, weight in weight_paths(model):  # in execution order
            self._places.setdefault(id(weight), []).append(place_of(path))

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Add a row."""
        self.reset()
        super().observe(operation, weight, result, **arguments)
        cost = self.total
        products = 0
        if operation in ("linear", "linear_experts") and weight is not None:
            products = result.size * weight.shape[-1]
        elif operation == "linear_heads" and weight is not None:
            products = len(result) * math.prod(weight.shape)
        elif operation == "attend":  # for each pair and head D for the score, V for the value
            (_, H, V), spec = result.shape, arguments["spec"]
            batch = arguments["batch"].over_sources if spec.cross else arguments["batch"]
            products = H * (arguments["q"].shape[2] + V) * batch.visible_pairs(spec.window, causal=spec.causal)
            if spec.relative is not None:
                products += positions_flops(spec.relative, batch.num_tokens, batch.reach()) // 2
        other = 0 if self.conventions.products_only else cost.flops - 2 * products
        flops = self.conventions.multiply_add * products + other
        places = [operation] if weight is None else self._places[id(weight)]
        name = places.pop(0) if len(places) > 1 else places[0]  # a tied head is the embedding once more
        self.rows.append(Row(name, operation, self.layer, flops, *cost[1:]))
