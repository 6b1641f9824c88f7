"""The interface of a model, and the loading of its tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import numpy as np

from ..backends.formats import Role
from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Tensor, Weight
from ..batch import Batch
from ..config import ModelConfig
from ..errors import CheckpointError
from ..progress import report

Shapes = dict[str, tuple[int, ...]]
"""A family's tensor table: the shape of every tensor that a configuration requires, by name."""


def linear_tensors(name: str, outputs: int, inputs: int, bias: bool = True) -> Shapes:
    """Names and shapes of a projection's tensors."""
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def norm_tensors(name: str, width: int) -> Shapes:
    """Names and shapes of a layer norm's tensors."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


class Model(Protocol):
    """A decoder-only transformer: a function of a batch and a K/V cache."""

    config: ModelConfig

    def forward(
        self, backend: Backend, batch: Batch, cache: Pages, *, layers: range | None = None, x: Any = None
    ) -> Any:
        """The last hidden state of every new token, after the final norm; or a stage (see `Decoder`). [T] -> [T, E]"""

    def states(self, backend: Backend, x: Any) -> Any:
        """The input of the language model head's product. [R, E] -> [R, W]"""

    def logits(self, backend: Backend, hidden: Any) -> Any:
        """The language model head. [R, W] -> [R, V]"""


class Tensors:
    """Checks tensors against a family's table and prepares them as weights one by one."""

    def __init__(self, stored: Mapping[str, Tensor], table: Shapes, backend: Backend) -> None:
        """Check names and shapes before reading any data.

        Raises:
            CheckpointError: a tensor is missing, has the wrong shape or is not in the table.
        """
        check_tensors(stored, table)
        self._stored = stored
        self._loader = backend.loader
        self._total, self._done = sum(math.prod(shape) for shape in table.values()), 0

    def linear(self, name: str, *parts: str) -> Weight:
        """The projection `name`, or several `parts` fused into one; with biases if the checkpoint has them."""
        names = parts or (name,)
        biases = [self._stored[f"{part}.bias"] for part in names if f"{part}.bias" in self._stored]
        return self._prepare(name, [self._stored[f"{part}.weight"] for part in names], biases, "projection")

    def table(self, name: str, role: Role) -> Weight:
        """An embedding table or the LM head."""
        return self._prepare(name, [self._stored[f"{name}.weight"]], (), role)

    def norm(self, name: str) -> Weight:
        """The norm `name`: gain and bias, or neither if the model has none."""
        return self.linear(name) if f"{name}.weight" in self._stored else Weight(name, None)

    def _prepare(self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor], role: Role) -> Weight:
        weight = self._loader.prepare(name, tensors, biases, role)
        self._done += sum(math.prod(tensor.shape) for tensor in (*tensors, *biases))
        report(self._done, self._total)
        return weight


def shorten(stored: Mapping[str, Tensor], *prefixes: str, left_out: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Strip `prefixes` from tensor names, one after the other.

    Args:
        stored: tensors by their names in the checkpoint
        *prefixes: prefixes that some checkpoints use
        left_out: suffixes of tensors to drop, such as masks and frequencies, which are computed instead

    Raises:
        CheckpointError: a tensor occurs twice, with a prefix and without.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        short = name
        for prefix in prefixes:
            short = short.removeprefix(prefix)
        if short.endswith(left_out):
            continue
        if short in tensors:
            raise CheckpointError(f"the checkpoint holds tensor {short} twice, once as {name}: leave one out")
        tensors[short] = tensor
    return tensors


def without_tied_head(tensors: Mapping[str, Tensor], embedding: str, head: str = "lm_head.weight") -> dict[str, Tensor]:
    """Drop the stored copy of a tied head; if only the head is stored, use it as the embedding.

    Raises:
        CheckpointError: head and embedding differ. Releases of transformers disagree on which one to use then.
    """
    kept = dict(tensors)
    copy = kept.pop(head, None)
    if copy is None:
        return kept
    source = kept.setdefault(embedding, copy)
    if source is not copy and not _equal(source, copy):
        raise CheckpointError(
            f"config.json: tie_word_embeddings says that the LM head is the embedding, but {head} and {embedding} "
            "differ: set it to false, or leave the former out"
        )
    return kept


def _equal(a: Tensor, b: Tensor) -> bool:
    """True if two matrices have the same values; compared in chunks of rows."""
    return a.shape == b.shape and len(a.shape) == 2 and all(map(np.array_equal, a.chunks(), b.chunks()))


def check_tensors(stored: Mapping[str, Tensor], table: Shapes) -> None:
    """Compare a checkpoint's tensors with those that the configuration requires."""
    missing = [name for name in table if name not in stored]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}, which its config.json asks for")
    extra = [name for name in stored if name not in table]
    if extra:
        raise CheckpointError(f"the checkpoint holds {_some(extra)}, which its config.json leaves no place for")
    for name, shape in table.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"tensor {name} should have shape {list(shape)} by config.json, found {list(stored[name].shape)}"
            )


def weights_of(model: Any) -> list[Weight]:
    """All weights of a model or of one of its components, without duplicates."""
    found: dict[int, Weight] = {}
    parts = [model]
    while parts:
        part = parts.pop()
        if isinstance(part, Weight):
            found[id(part)] = part
        elif isinstance(part, tuple):
            parts += part
        elif is_dataclass(part):
            parts += [getattr(part, field.name) for field in fields(part)]
    return list(found.values())


def _some(names: Sequence[str]) -> str:
    """The first three names and the number of further ones."""
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"


def random_tensors(table: Shapes, seed: int, std: float, backend: Backend) -> dict[str, Tensor]:
    """Random tensors for a whole model, generated on the backend's device; for benchmarks of a published size."""
    return {name: backend.loader.random(name, shape, seed, std) for name, shape in table.items()}
