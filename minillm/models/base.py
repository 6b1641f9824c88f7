"""The interface of a model, and the weights in it."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

from ..backends.formats import Format
from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.storage import format_of
from ..backends.weights import Weight
from ..batch import Batch
from ..config import ModelConfig


class Model(Protocol):
    """A decoder-only transformer: a function of a batch and a K/V cache."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes: this rank's, if several share it."""

    def forward(
        self, backend: Backend, batch: Batch, cache: Pages, *, layers: range | None = None, x: Any = None
    ) -> Any:
        """The last hidden state of every new token, after the final norm; or a stage (see `Decoder`). [T] -> [T, E]"""

    def states(self, backend: Backend, x: Any) -> Any:
        """The input of the language model head's product. [R, E] -> [R, W]"""

    def logits(self, backend: Backend, hidden: Any) -> Any:
        """The language model head. [R, W] -> [R, V]"""


def weight_paths(component: Any, path: str = "") -> Iterator[tuple[str, Weight]]:
    """Every weight of a model or of one of its components, with the fields that lead to it.

    A path is "layers.3.attention.qkv". A weight in two places, as a tied head, comes once for each.
    """
    if isinstance(component, Weight):
        yield path, component
    elif isinstance(component, tuple):
        for i, item in enumerate(component):
            yield from weight_paths(item, f"{path}.{i}")
    elif is_dataclass(component):
        for field in fields(component):
            yield from weight_paths(getattr(component, field.name), f"{path}.{field.name}" if path else field.name)


def only_looked_up(model: Any) -> set[str]:
    """Names of the tables of embeddings that no product has, as tied heads do: a token reads a row of each."""
    fields_of: dict[str, set[str]] = {}
    for path, weight in weight_paths(model):
        fields_of.setdefault(weight.name, set()).add(path.rpartition(".")[2])
    return {name for name, places in fields_of.items() if places <= {"tokens", "positions", "types"}}


def weights_of(model: Any) -> list[Weight]:
    """All weights of a model or of one of its components, without duplicates."""
    return list({id(weight): weight for _, weight in weight_paths(model)}.values())


def stored_format(model: Any) -> Format:
    """The format in which most of a model's numbers are in memory."""
    numbers: Counter[Format] = Counter()
    for weight in weights_of(model):
        if weight.data is not None:
            numbers[format_of(weight.data)] += math.prod(weight.shape)
    return numbers.most_common(1)[0][0]
