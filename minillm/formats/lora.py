"""LoRA adapters in PEFT's folders (Hu et al., arXiv 2106.09685): read, checked, and merged into a model's tensors.

    adapter_config.json         r, lora_alpha, target_modules, ...
    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight [r, in], .lora_B.weight [out, r]; or .bin

A module's matrix W [out, in] becomes W + scale B A, with scale = lora_alpha / r. The modules have the names that the
base model's published tensors have, so that merging happens by name, before tensors are fused or rearranged.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.formats import BFLOAT16, FLOAT16, FORMATS, Role
from ..backends.loader import RandomTensor, Rearranged, Tensor
from ..backends.low_rank import AdapterWeights, LowRankWeight
from ..backends.operations import Backend
from ..backends.shapes import ShapeBackend
from ..backends.weights import Weight, narrow
from ..config import ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..models.sources import Build, Names, Split, Weights, rows_by_block
from . import ADAPTER_CONFIG, StoredTensor, open_adapter
from .lora_config import LoraConfig, read_lora_config

PREFIX = "base_model.model."
"""PEFT's prefix of every tensor."""

# --- the modules of a model ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A matrix of the model as the checkpoint has it, and its place in the model's own weight."""

    weight: str
    """The weight that it is a part of: "layers.3.self_attn.qkv" """
    outputs: int
    inputs: int
    first: int
    """Its first row in the weight"""
    role: Role
    blocks: int = 1
    heads: int | None = None
    """Rows are stored head by head (`Weights.linear`)"""
    transposed: bool = False
    """Published as [inputs, outputs]"""
    is_expert: bool = False
    """One of several experts' matrices"""

    def arranged(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows in the checkpoint's order as the model has them. [outputs, ...]"""
        return rows if self.heads is None else rows_by_block(rows, self.heads, self.blocks)


class _Modules(Weights):
    """Takes up the modules for which a family's `build` asks."""

    def __init__(self, backend: ShapeBackend) -> None:
        super().__init__(lambda name, shape: RandomTensor(name, shape, seed=0, std=0), backend, as_built=True)
        self.found: dict[str, Module] = {}

    def linear(
        self,
        name: str,
        outputs: int | Mapping[str, int],
        *,
        inputs: int,
        bias: bool = False,
        split: Split | None = None,
        blocks: int | tuple[int, ...] = 1,
        heads: int | None = None,
        units: Sequence[int] | None = None,
        transposed: bool = False,
        role: Role = "projection",
    ) -> Weight:
        first = 0
        for part, rows in (outputs if isinstance(outputs, Mapping) else {name: outputs}).items():
            weight, order = self._prefix + name, (blocks if isinstance(blocks, int) else 1, heads, transposed)
            self.found[self._prefix + part] = Module(weight, rows, inputs, first, "projection", *order)
            first += rows
        return super().linear(name, outputs, inputs=inputs, bias=bias, split=split, role=role)

    def experts(
        self, name: str, outputs: Mapping[str, int], *, inputs: int, count: int, split: Split | None = None
    ) -> Weight:
        for expert in range(count):
            first = 0
            for part, rows in outputs.items():
                module = Module(f"{self._prefix}{name}.{expert}", rows, inputs, first, "projection", is_expert=True)
                self.found[self._prefix + part.replace("*", str(expert))] = module
                first += rows
        return super().experts(name, outputs, inputs=inputs, count=count, split=split)

    def table(
        self, name: str, rows: int, width: int, role: Role, *, bias: str | None = None, split: Split | None = None
    ) -> Weight:
        kind: Role = "projection" if role == "router" else role  # a linear layer, as PEFT sees it
        self.found[self._prefix + name] = Module(self._prefix + name, rows, width, 0, kind)
        return super().table(name, rows, width, role, bias=bias, split=split)


def modules_of(build: Build, config: ModelConfig) -> dict[str, Module]:
    """The matrices of a model by the names of its published tensors, without ".weight"."""
    backend = ShapeBackend()
    modules = _Modules(backend)
    build(config, modules, backend)
    return modules.found


class Share(NamedTuple):
    """The rows and columns of a weight that one of several ranks has."""

    rows: NDArray[np.int64]
    columns: range


class _Place(NamedTuple):
    """The place of a part of a tensor in the whole, which stands for the tensor."""

    name: str
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
        return self._replace(extents=tuple(extents))


class _Shares(Weights):
    """Takes up which parts of the modules a rank takes when a family's `build` asks for them."""

    def __init__(self, modules: Mapping[str, Module], rank: int, ranks: int) -> None:
        def find(name: str, shape: tuple[int, ...]) -> Any:
            return _Place(name.removesuffix(".weight"), tuple(map(range, shape)))

        super().__init__(find, ShapeBackend(), rank=rank, ranks=ranks)
        self.modules = modules
        self.found: dict[str, Share] = {}

    def _prepare(self, name: str, tensors: Sequence[Any], biases: Sequence[Any], role: Role) -> Weight:
        if all(place.name in self.modules for place in tensors):
            rows = [self.modules[place.name].first + np.asarray(place.extents[0], np.int64) for place in tensors]
            self.found[self._prefix + name] = Share(np.concatenate(rows), tensors[0].extents[1])
        return super()._prepare(name, tensors, biases, role)


def shares_of(
    build: Build, config: ModelConfig, modules: Mapping[str, Module], rank: int, ranks: int
) -> dict[str, Share]:
    """The share of each weight that rank number `rank` of `ranks` has, by the weight's name; without experts'."""
    shares = _Shares(modules, rank, ranks)
    build(config, shares, ShapeBackend())
    return shares.found


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
    modules: Mapping[str, Module] = field(repr=False)
    """All of the model's"""
    head: str
    """Which of them is the LM head"""


_MATRICES = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|(lora_magnitude_vector)(?:\.weight)?)")


def read_adapter(folder: Path, build: Build, config: ModelConfig, names: Names) -> Adapter:
    """Read an adapter and check that it fits a model.

    Args:
        folder: with adapter_config.json and the adapter's weights
        build: the family's
        config: the model's
        names: of the family's published tensors

    Raises:
        ModelNotFoundError: the folder has no adapter_config.json.
        CheckpointError: a file cannot be read, or a tensor is missing, unexpected or of another shape.
        UnsupportedModelError: another kind of adapter, or a variant of LoRA that is not supported.
    """
    stored = open_adapter(folder)
    lora = read_lora_config(folder)
    source = f"adapter {folder}"
    head = names.head.removesuffix(".weight")
    also = head if lora.tie and config.tied_head else None  # PEFT stores it beside the embedding, whatever is named
    modules = modules_of(build, replace(config, tied_head=False))  # with a head of its own
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
        module: _read_change(f"{source}: {full_names[module]}", lora, modules[module], found, full_names[module], head)
        for module, found in matrices.items()
    }
    stored.check_unchanged()
    touched = set(changes) | {name.removesuffix(".weight") for name in replaced}
    embedding = names.embedding.removesuffix(".weight")
    alike = also is not None and head not in touched and embedding.endswith("embed_tokens")  # as PEFT ties the two
    unties = config.tied_head and bool(touched & {head, embedding}) and not alike
    return Adapter(folder, changes, replaced, unties, modules, head)


def _may_replace(lora: LoraConfig, module: str, short: str, is_base: bool, names: Names) -> bool:
    """Whether a tensor that is no low-rank matrix may stand in an adapter: PEFT also stores adapted vocabularies."""
    vocabulary = is_base and short in (names.embedding, names.head)
    return lora.replaces(module) or (lora.biases and short.endswith(".bias")) or vocabulary


def _check_complete(
    source: str, lora: LoraConfig, modules: Mapping[str, Module], full_names: Mapping[str, str], head: str
) -> None:
    """Refuse an adapter that lacks a module which its configuration names."""
    if not full_names:
        raise CheckpointError(f"{source} has no lora_A and lora_B: expected those of its target_modules")
    module, full = next(((m, f) for m, f in full_names.items() if m != head), (head, head))
    prefix = full.removesuffix(module)
    wanted = {prefix + name: name for name, each in modules.items() if each.role == "projection"}
    for full, name in (wanted | {"lm_head": head, head: head}).items():
        if name not in full_names and lora.targets_module(full, head=name == head):
            raise CheckpointError(f"{source} lacks the matrices of {full!r:.100}, which its {ADAPTER_CONFIG} targets")


def _read_change(
    where: str, lora: LoraConfig, module: Module, found: Mapping[str, StoredTensor], full: str, head: str
) -> LowRank:
    """One module's matrices, in float32.

    PEFT's matrices of an embedding are transposed: its table is [V, E], the change A^T B^T.
    """
    wanted = {"A", "B", "lengths"} if lora.decomposed else {"A", "B"}
    if set(found) != wanted:
        raise CheckpointError(f"{where} should have {', '.join(sorted(wanted))}, found {', '.join(sorted(found))}")
    r = lora.rank_of(full)
    embedding = "lora_embedding" in found["A"].name
    if embedding and lora.decomposed:
        raise UnsupportedModelError(f"{where}: use_dora on an embedding is not supported")
    inputs, outputs = (module.outputs, module.inputs) if embedding else (module.inputs, module.outputs)
    for kind, shape in {"A": (r, inputs), "B": (outputs, r), "lengths": (module.outputs,)}.items():
        if kind in wanted and found[kind].shape not in (shape, (1, *shape) if kind == "lengths" else shape):
            raise CheckpointError(
                f"{where}.{kind if kind == 'lengths' else 'lora_' + kind} should have shape {list(shape)} by the "
                f"model and r = {r}, found {list(found[kind].shape)}: is it another model's adapter?"
            )
    a, b = found["A"].load(), found["B"].load()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{where}: the matrices hold NaN or infinity")
    scale = np.float32(lora.scale(full))
    if embedding:
        return LowRank(np.ascontiguousarray(a.T) * scale, np.ascontiguousarray(b.T))  # [V, r], [r, E]
    lengths = found["lengths"].load().reshape(-1).copy() if lora.decomposed else None
    return LowRank(b * scale, np.array(a), lengths)  # [out, r], [r, in]


# --- merging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Merged:
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
    """DoRA: those of the rows of the sum, or of its columns, [rows, 1] or [1, columns]"""

    @property
    def shape(self) -> tuple[int, ...]:
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

    def load(self) -> NDArray[np.float32]:
        """The values as float32."""
        out = np.empty(self.shape, np.float32)
        self._fill(out)
        return out

    def stored(self) -> NDArray[Any]:
        """The values in `dtype`."""
        out = np.empty(self.shape, FORMATS[self.dtype].dtype)
        self.read_into(out)
        return out

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the values: as float32, or in `dtype`."""
        self._fill(out, None if out.dtype == np.float32 else lambda chunk: narrow(chunk, FORMATS[self.dtype]))

    def _fill(self, out: NDArray[Any], convert: Callable[[NDArray[np.float32]], NDArray[Any]] | None = None) -> None:
        first = 0
        for chunk in self.chunks():
            out[first : first + len(chunk)] = chunk if convert is None else convert(chunk)
            first += len(chunk)

    def merged_with(self, other: Any) -> None:
        """None: the sum is in no file."""

    def part(self, axis: int, first: int, stop: int) -> "Merged | Rearranged":
        """Rows or columns `first` to `stop`; with DoRA, whose factors need whole rows, all of the source is read."""
        if self.lengths is not None:
            return Rearranged(self, lambda whole: whole).part(axis, first, stop)
        left, right = (self.left[first:stop], self.right) if axis == 0 else (self.left, self.right[:, first:stop])
        return Merged(self.source.part(axis, first, stop), left, right)


def merge(adapter: Adapter, tensors: Mapping[str, Tensor], names: Names, *, as_built: bool) -> dict[str, Tensor]:
    """A model's tensors with an adapter in them; if `adapter.unties`, with an LM head beside the embedding.

    Args:
        adapter: fits the model
        tensors: by the names that `build` asks for
        names: of the family's published tensors
        as_built: the tensors are in the model's own order (`Weights`)

    Raises:
        CheckpointError: a replaced tensor has no place in the model, or another shape than the model's.
    """
    merged = dict(tensors)
    if adapter.unties and names.embedding in merged:
        merged[names.head] = merged[names.embedding]
    for name, replacement in adapter.replaced.items():
        if name not in merged or (not as_built and merged[name].shape != replacement.shape):
            found = "has none" if name not in merged else f"has {list(merged[name].shape)}"
            raise CheckpointError(
                f"adapter {adapter.folder}: {name} of shape {list(replacement.shape)} is to replace the model's, which "
                f"{found}"
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
    tables = [
        name
        for name in adapter.changes
        if adapter.modules[name].role != "projection" and (name != adapter.head or adapter.unties)
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


def _as_built(tensor: Tensor, modules: Mapping[str, Module], name: str) -> Tensor:
    """A replacement as published, in the model's own order."""
    module = modules.get(name.rpartition(".")[0])
    if module is None:
        return tensor
    if module.transposed and name.endswith(".weight"):
        return Rearranged(tensor, np.transpose)
    return tensor if module.heads is None else Rearranged(tensor, module.arranged)
