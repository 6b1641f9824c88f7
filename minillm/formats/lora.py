"""LoRA adapters in PEFT's folders (Hu et al., arXiv 2106.09685): read, checked, and merged into a model's tensors.

    adapter_config.json         r, lora_alpha, target_modules, ...
    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight [r, in], .lora_B.weight [out, r]; or .bin

A module's matrix W [out, in] becomes W + scale B A, with scale = lora_alpha / r. The modules have the names that the
base model's published tensors have, so that merging happens by name, before tensors are fused or rearranged.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.formats import BFLOAT16, FLOAT16, FORMATS
from ..backends.loader import Rearranged, Tensor
from ..backends.low_rank import AdapterWeights, LowRankWeight
from ..backends.operations import Backend
from ..backends.shapes import ShapeBackend
from ..backends.storage import narrow
from ..config import ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..models import build_of, family_named
from ..models.building import parameters_of
from ..models.parameters import Parameter, Weights
from ..models.tensor_names import Names
from .lora_config import LoraConfig, read_lora_config
from .tensors import ComputedTensor, StoredTensor, check_unchanged
from .weight_files import ADAPTER_CONFIG, open_adapter

logger = logging.getLogger("minillm")

PREFIX = "base_model.model."
"""PEFT's prefix of every tensor."""

# --- shares of ranks --------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The rows and columns of a weight that one of several ranks has."""

    rows: NDArray[np.int64]
    columns: range


class _Place(NamedTuple):
    """The place of a part of a tensor in the whole, which stands for the tensor."""

    extents: tuple[range, ...]
    """Its rows, and columns if it has any"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows and of columns."""
        return tuple(map(len, self.extents))

    def part(self, axis: int, first: int, stop: int) -> "_Place":
        """Rows or columns `first` to `stop`."""
        extents = list(self.extents)
        extents[axis] = extents[axis][first:stop]
        return _Place(tuple(extents))


def shares_of(config: ModelConfig, rank: int, ranks: int) -> dict[str, Share]:
    """The share of each weight that rank number `rank` of `ranks` has, by the weight's name; without experts'.

    The LM head has one of its own.
    """
    shares: dict[str, Share] = {}

    def find(name: str, shape: tuple[int, ...]) -> Any:
        return _Place(tuple(map(range, shape)))

    def add(parameter: Parameter, places: Sequence[Any]) -> None:
        if not parameter.is_expert:
            before = [shares[parameter.weight].rows] if parameter.first else []
            rows = [parameter.first + np.asarray(place.extents[0], np.int64) for place in places]
            shares[parameter.weight] = Share(np.concatenate([*before, *rows]), places[0].extents[1])

    backend = ShapeBackend()
    build_of(config)(
        replace(config, tied_head=False), Weights(find, backend, rank=rank, ranks=ranks, on_parameter=add), backend
    )
    return shares


# --- adapter_model.safetensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LowRank:
    """The change of one module's matrix: up @ down, with the scale in `up`; in the checkpoint's order of rows."""

    up: NDArray[np.float32]
    """[out, r]"""
    down: NDArray[np.float32]
    """[r, in]"""
    lengths: NDArray[np.float32] | None = None
    """DoRA: the length of each row of the sum [out]"""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that fits a model."""

    folder: Path
    changes: Mapping[str, LowRank]
    """By module"""
    replaced: Mapping[str, StoredTensor]
    """Tensors in the place of the model's own, by name"""
    unties: bool
    """Whether it changes the embedding or the LM head of a model in which they are one"""
    modules: Mapping[str, Parameter] = field(repr=False)
    """All of the model's"""
    names: Names
    """Names of the family's published tensors"""


_MATRICES = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|(lora_magnitude_vector)(?:\.weight)?)")


def read_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Read an adapter and check that it fits a model.

    Raises:
        ModelNotFoundError: the folder has no adapter_config.json.
        CheckpointError: a file cannot be read, or a tensor is missing, unexpected or of another shape.
        UnsupportedModelError: another kind of adapter, or a variant of LoRA that is not supported.
    """
    stored, lora, source = open_adapter(folder), read_lora_config(folder), f"adapter {folder}"
    names: Names = family_named(config.model_type).NAMES
    head = names.head.removesuffix(".weight")
    also = head if lora.tie and config.tied_head else None  # PEFT stores it beside the embedding, whatever is named
    modules = parameters_of(build_of(config), replace(config, tied_head=False))  # with a head of its own
    matrices: dict[str, dict[str, StoredTensor]] = {}
    full_names: dict[str, str] = {}
    replaced: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if not name.startswith(PREFIX):
            raise CheckpointError(f"{source}: expected tensors named {PREFIX}..., found {name!r:.100}")
        inner = name.removeprefix(PREFIX)
        if (match := _MATRICES.fullmatch(inner)) is None:
            short = names.short(inner.replace(".base_layer.", ".").replace(".modules_to_save.", "."))
            module = inner.rpartition(".")[0].removesuffix(".base_layer")
            allowed = short == f"{also}.weight" or _may_replace(lora, module, short, ".base_layer." in inner, names)
            if "lora_" in inner or not allowed:
                raise CheckpointError(
                    f"{source}: tensor {name!r:.120} is not among what its {ADAPTER_CONFIG} says: expected lora_A and "
                    "lora_B of target_modules, modules_to_save, and biases by bias"
                )
            replaced[short] = tensor
            continue
        full = match[1]
        module = names.short(f"{full}.weight").removesuffix(".weight")
        kind = match[2] or match[3] or "lengths"
        if module not in modules or (match[3] is not None) != (modules[module].role != "projection" and module != head):
            raise CheckpointError(f"{source}: {full!r:.100} is no module of the model: is it another model's adapter?")
        if module != also and not lora.targets_module(full, head=module == head):
            raise CheckpointError(f"{source}: its {ADAPTER_CONFIG} does not target {full!r:.100}, which it has")
        if kind in matrices.setdefault(module, {}):
            raise CheckpointError(f"{source}: tensor {name!r:.120} is there twice")
        matrices[module][kind] = tensor
        full_names[module] = full
    _check_complete(source, lora, modules, full_names, head)
    changes = {
        module: _read_change(f"{source}: {full_names[module]}", lora, modules[module], tensors, full_names[module])
        for module, tensors in matrices.items()
    }
    check_unchanged(stored.values())
    touched = set(changes) | {name.removesuffix(".weight") for name in replaced}
    embedding = names.embedding.removesuffix(".weight")
    alike = also is not None and head not in touched and embedding.endswith("embed_tokens")  # as PEFT ties the two
    unties = config.tied_head and bool(touched & {head, embedding}) and not alike
    return Adapter(folder, changes, replaced, unties, modules, names)


def _may_replace(lora: LoraConfig, module: str, short: str, is_base: bool, names: Names) -> bool:
    """Whether a tensor that is no low-rank matrix may stand in an adapter: PEFT also stores adapted vocabularies."""
    vocabulary = is_base and short in (names.embedding, names.head)
    return lora.replaces(module) or (lora.biases and short.endswith(".bias")) or vocabulary


def _check_complete(
    source: str, lora: LoraConfig, modules: Mapping[str, Parameter], full_names: Mapping[str, str], head: str
) -> None:
    """Refuse an adapter that lacks a module which its configuration names.

    Experts are no modules of transformers 5: an adapter that has none of them was trained without.
    """
    if not full_names:
        raise CheckpointError(f"{source} has no lora_A and lora_B: expected those of its target_modules")
    module, full = next(((m, f) for m, f in full_names.items() if m != head), (head, head))
    prefix = full.removesuffix(module)
    with_experts = any(modules[name].is_expert for name in full_names if name in modules)
    expected = {
        prefix + name: name
        for name, parameter in modules.items()
        if parameter.role == "projection" and (with_experts or not parameter.is_expert)
    }
    for full, name in (expected | {"lm_head": head, head: head}).items():
        if name not in full_names and lora.targets_module(full, head=name == head):
            raise CheckpointError(f"{source} lacks the matrices of {full!r:.100}, which its {ADAPTER_CONFIG} targets")


def _read_change(
    where: str, lora: LoraConfig, module: Parameter, tensors: Mapping[str, StoredTensor], full: str
) -> LowRank:
    """One module's matrices, in float32.

    PEFT's matrices of an embedding are transposed: its table is [V, E], the change A^T B^T.
    """
    expected = {"A", "B", "lengths"} if lora.decomposed else {"A", "B"}
    if set(tensors) != expected:
        raise CheckpointError(f"{where} should have {', '.join(sorted(expected))}, found {', '.join(sorted(tensors))}")
    r = lora.rank_of(full)
    embedding = "lora_embedding" in tensors["A"].name
    if embedding and lora.decomposed:
        raise UnsupportedModelError(f"{where}: use_dora on an embedding is not supported")
    inputs, outputs = (module.outputs, module.inputs) if embedding else (module.inputs, module.outputs)
    for kind, shape in {"A": (r, inputs), "B": (outputs, r), "lengths": (module.outputs,)}.items():
        if kind in expected and tensors[kind].shape not in (shape, (1, *shape) if kind == "lengths" else shape):
            raise CheckpointError(
                f"{where}.{kind if kind == 'lengths' else 'lora_' + kind} should have shape {list(shape)} by the "
                f"model and r = {r}, found {list(tensors[kind].shape)}: is it another model's adapter?"
            )
    a, b = tensors["A"].load(), tensors["B"].load()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{where}: the matrices hold NaN or infinity")
    scale = np.float32(lora.scale(full))
    if embedding:
        return LowRank(np.ascontiguousarray(a.T) * scale, np.ascontiguousarray(b.T))  # [V, r], [r, E]
    lengths = tensors["lengths"].load().reshape(-1).copy() if lora.decomposed else None
    return LowRank(b * scale, np.array(a), lengths)  # [out, r], [r, in]


# --- merging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Merged(ComputedTensor):
    """A tensor plus a low-rank change, computed in float32 when it is read.

    It counts as stored in the 16 bits of `source`, rounded as PEFT's `merge_and_unload` does; of any other source as
    float32.
    """

    source: Tensor
    left: NDArray[np.float32]
    """[rows, r]"""
    right: NDArray[np.float32]
    """[r, columns]"""
    lengths: NDArray[np.float32] | None = None
    """DoRA: lengths of the rows of the sum, or of its columns, [rows, 1] or [1, columns]"""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The source's shape."""
        return self.source.shape

    @property
    def dtype(self) -> str:
        """float16, bfloat16 or float32."""
        return self.source.dtype if FORMATS.get(self.source.dtype) in (FLOAT16, BFLOAT16) else "float32"

    @cached_property
    def _factors(self) -> NDArray[np.float32] | None:
        """DoRA: the factor of each row or column that gives it its length."""
        if self.lengths is None:
            return None
        axis = 1 if self.lengths.shape[1] == 1 else 0
        total = self.source.load() + self.left @ self.right
        factors: NDArray[np.float32] = self.lengths / np.linalg.norm(total, axis=axis, keepdims=True)
        return factors

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values as float32, some rows at a time."""
        factors, first = self._factors, 0
        for chunk in self.source.chunks():
            rows = slice(first, first + len(chunk))
            total = chunk + self.left[rows] @ self.right
            if factors is not None:
                total *= factors[rows] if factors.shape[1] == 1 else factors
            yield total
            first = rows.stop

    def rounded(self, chunk: NDArray[np.float32]) -> NDArray[Any]:
        """Values in `dtype`."""
        return narrow(chunk, FORMATS[self.dtype])

    def part(self, axis: int, first: int, stop: int) -> "Merged | Rearranged":
        """Rows or columns `first` to `stop`; with DoRA, whose factors need whole rows, all of the source is read."""
        if self.lengths is not None:
            return Rearranged(self, lambda whole: whole).part(axis, first, stop)
        left, right = (self.left[first:stop], self.right) if axis == 0 else (self.left, self.right[:, first:stop])
        return Merged(self.source.part(axis, first, stop), left, right)


def merge_adapter(
    folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor], *, as_built: bool
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """A model's configuration and tensors with the adapter of a folder merged in.

    Matrices stored in 8 or 4 bits are expanded: they stay float32 unless the backend is to round them again.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: the adapter cannot be read, or does not fit.
    """
    adapter = read_adapter(folder, config)
    merged = merge(adapter, tensors, as_built=as_built)
    changed = [tensors[name] for name in merged if name in tensors and merged[name] is not tensors[name]]
    if any("float" not in tensor.dtype for tensor in changed):
        logger.warning(
            "%s: the checkpoint is quantised; the matrices that the adapter changes become float32, unless dtype names "
            "another format",
            folder,
        )
    return replace(config, tied_head=config.tied_head and not adapter.unties), merged


def merge(adapter: Adapter, tensors: Mapping[str, Tensor], *, as_built: bool) -> dict[str, Tensor]:
    """A model's tensors with an adapter in them; if `adapter.unties`, with an LM head beside the embedding.

    Args:
        adapter: fits the model
        tensors: by the names that `build` asks for
        as_built: the tensors are in the model's own order (`Weights`)

    Raises:
        CheckpointError: a replaced tensor has no place in the model, or another shape than the model's.
    """
    merged, names = dict(tensors), adapter.names
    if adapter.unties and names.embedding in merged:
        merged[names.head] = merged[names.embedding]
    for name, replacement in adapter.replaced.items():
        if name not in merged or (not as_built and merged[name].shape != replacement.shape):
            problem = "has none" if name not in merged else f"has {list(merged[name].shape)}"
            raise CheckpointError(
                f"adapter {adapter.folder}: {name} of shape {list(replacement.shape)} is to replace the model's, which "
                f"{problem}"
            )
        merged[name] = _as_built(replacement, adapter.modules, name) if as_built else replacement
    for name, change in adapter.changes.items():
        module, key = adapter.modules[name], f"{name}.weight"
        if key not in merged:
            raise CheckpointError(f"adapter {adapter.folder} changes {key}, which the checkpoint lacks")
        up, lengths = change.up, change.lengths
        if as_built:
            up, lengths = module.arranged(up), None if lengths is None else module.arranged(lengths)
        if module.transposed and not as_built:
            across = None if lengths is None else lengths[None]  # [out] -> [1, out]
            merged[key] = Merged(merged[key], np.ascontiguousarray(change.down.T), np.ascontiguousarray(up.T), across)
        else:
            along = None if lengths is None else lengths[:, None]  # [out] -> [out, 1]
            merged[key] = Merged(merged[key], up, change.down, along)
    return merged


def per_request(adapter: Adapter, backend: Backend, shares: Mapping[str, Share] | None = None) -> AdapterWeights:
    """The weights of an adapter that is applied to the rows of its requests only, in float32.

    The modules of a fused projection (Q, K, V) share one A, stacked, and one B, in blocks: [sum of r, in], [out, sum of
    r]. Where ranks share the model, `shares` are this one's: it takes these columns of A and these rows of B, so that
    the ranks' changes are parts of the whole one as their products are; weights that are not among them are left out.

    Raises:
        UnsupportedModelError: it changes more than projections by low-rank matrices: it can only be merged.
    """
    head = adapter.names.head.removesuffix(".weight")
    tables = [
        name
        for name in adapter.changes
        if adapter.modules[name].role != "projection" and (name != head or adapter.unties)
    ]
    experts = [name for name in adapter.changes if adapter.modules[name].is_expert]
    reason = (
        f"replaces {next(iter(adapter.replaced))}" if adapter.replaced
        else f"changes {tables[0]}, a table" if tables
        else f"changes {experts[0]}, an expert" if experts
        else "has use_dora" if any(change.lengths is not None for change in adapter.changes.values())
        else None
    )  # fmt: skip
    if reason is not None:
        raise UnsupportedModelError(
            f"adapter {adapter.folder} {reason}, which cannot be done for single requests: merge it, as adapter"
        )
    outputs: dict[str, int] = {}
    for module in adapter.modules.values():
        outputs[module.weight] = max(outputs.get(module.weight, 0), module.first + module.outputs)
    parts: dict[str, list[str]] = {}
    for name in adapter.changes:
        parts.setdefault(adapter.modules[name].weight, []).append(name)
    weights = {}
    for weight, names in parts.items():
        downs = [adapter.changes[name].down for name in names]
        up, r = np.zeros((outputs[weight], sum(map(len, downs))), np.float32), 0
        for name, down in zip(names, downs, strict=True):
            module = adapter.modules[name]
            rows = slice(module.first, module.first + module.outputs)
            up[rows, r : r + len(down)] = module.arranged(adapter.changes[name].up)
            r += len(down)
        stacked, constant = np.concatenate(downs), backend.loader.constant
        if shares is not None:
            if weight not in shares:
                continue
            rows_here, columns = shares[weight]
            up, stacked = up[rows_here], np.ascontiguousarray(stacked[:, columns])
        weights[weight] = LowRankWeight(constant(f"{weight}.lora_A", stacked), constant(f"{weight}.lora_B", up))
    return weights


def _as_built(tensor: Tensor, modules: Mapping[str, Parameter], name: str) -> Tensor:
    """A replacement as published, in the model's own order."""
    module = modules.get(name.rpartition(".")[0])
    if module is None:
        return tensor
    if module.transposed and name.endswith(".weight"):
        return Rearranged(tensor, np.transpose)
    return tensor if module.heads is None and module.order is None else Rearranged(tensor, module.arranged)
