"""The parameters of a model, and where they come from.

`build` of a family asks a `Weights` for each parameter, and says there all that is known of it: the tensors in the
checkpoint, their shapes and order, its role, and how several devices share it. What answers is a checkpoint, random
numbers or shapes alone (`building.py`), and for one rank of several only its rows or columns.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.formats import Role
from ..backends.loader import Member, RandomTensor, Rearranged, Regrouped, Shifted, Tensor
from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import ModelConfig
from ..errors import ParameterError
from ..layers.attention import Attention, HeadNorms, ProjectionNorms
from ..layers.mlp import MLP, GatedMLP
from ..layers.norm import LayerNorm, RMSNorm
from ..progress import Work
from ..reference.attention import AttentionSpec
from .decoder import Decoder

Build = Callable[[Any, "Weights", Backend], Decoder]
"""A family's `build`: (configuration, weights, backend) -> model"""
PARAMETERS = "parameters"
"""The unit of progress"""
Split = Literal["outputs", "inputs"]
"""How ranks share a projection: each has some of its outputs, or some of its inputs (the sum of all ranks' results is
the product)."""


class HeadOrder(NamedTuple):
    """A checkpoint's order of each head's rows; the model has the rotated ones first, a half after the other."""

    width: int
    """D"""
    rotated: int
    """Rotated numbers of each head, which come first in the model"""
    last: bool = False
    """They are the head's last, not its first"""
    paired: bool = True
    """The numbers of each rotated pair are side by side"""

    def arranged(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Rows [H D, ...] in the model's order."""
        first = self.width - self.rotated if self.last else 0
        turned = range(first, first + self.rotated)
        order = [*turned[::2], *turned[1::2]] if self.paired else [*turned]
        order += [i for i in range(self.width) if i not in turned]
        by_head = stored.reshape(-1, self.width, *stored.shape[1:])  # [H D, ...] -> [H, D, ...]
        return by_head[:, order].reshape(stored.shape)  # [H, D, ...] -> [H D, ...]


@dataclass(frozen=True)
class Parameter:
    """A matrix for which `build` asks, as the checkpoint has it, and its place in the model's own weight."""

    name: str
    """Its published name without ".weight": "layers.3.self_attn.k_proj" """
    weight: str
    """The weight that it is a part of: "layers.3.self_attn.qkv" """
    outputs: int
    inputs: int
    first: int = 0
    """Its first row in the weight"""
    role: Role = "projection"
    blocks: int | tuple[int, ...] = 1
    heads: int | None = None
    """Rows are stored head by head (`Weights.linear`)"""
    order: HeadOrder | None = None
    """Rows of each head are stored in another order (`Weights.linear`)"""
    transposed: bool = False
    """Published as [inputs, outputs]"""
    is_expert: bool = False
    """One of several experts' matrices"""

    def arranged(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows in the checkpoint's order as the model has them. [outputs, ...]"""
        if self.order is not None:
            return self.order.arranged(rows)
        return rows if self.heads is None else rows_by_block(rows, self.heads, self.blocks)


class Zeros(RandomTensor):
    """Zeros in place of a bias that a part of a projection has not, and so no checkpoint."""


class Weights:
    """The parameters of a model, or of one rank's share of it, prepared for a backend one by one."""

    def __init__(
        self,
        find: Callable[[str, tuple[int, ...]], Tensor],
        backend: Backend,
        *,
        as_built: bool = True,
        rank: int = 0,
        ranks: int = 1,
        holds: Callable[[str], bool] = lambda name: True,
        looked_up: Collection[str] = (),
        progress: Work | None = None,
        on_parameter: Callable[[Parameter, Sequence[Tensor]], None] | None = None,
    ) -> None:
        """Set the source.

        Args:
            find: the whole tensor of a name and shape
            backend: prepares the weights
            as_built: tensors are as the model uses them, as random numbers and the quantised checkpoints that minillm
                writes; else in the order of the family's published checkpoints, and gains of norms less their offset
            rank: whose share to take
            ranks: how many share the model
            holds: whether a parameter is needed here, by its name; others, such as other stages', have no data
            looked_up: names of tables of which only rows are read (`base.only_looked_up`)
            progress: counts the numbers that are prepared
            on_parameter: called for each matrix of projections and tables, with the tensors that this rank has of it
        """
        self.rank, self.ranks = rank, ranks
        self._find, self._backend, self._as_built, self._holds = find, backend, as_built, holds
        self._progress, self._prefix = progress or Work("loading", None, PARAMETERS), ""
        self._on_parameter, self._looked_up = on_parameter, looked_up

    @property
    def prepared(self) -> int:
        """Numbers prepared so far."""
        return self._progress.done

    def at(self, prefix: str) -> "Weights":
        """The same source, for names that begin with `prefix` and a dot."""
        child = copy.copy(self)
        child._prefix = f"{self._prefix}{prefix}."
        return child

    def share(self, count: int, units: int | None = None) -> slice:
        """This rank's part of `count` rows, columns or heads.

        They are shared in `units` that stay whole; where these are fewer than the ranks, several ranks have the same.

        Raises:
            ParameterError: they cannot be shared equally.
        """
        units = units or count
        if units % self.ranks and (self.ranks % units or units == count):
            raise ParameterError(f"{self.ranks} ranks cannot share {units} rows, columns or heads equally")
        size = count // min(units, self.ranks)
        first = self.rank * min(units, self.ranks) // self.ranks * size
        return slice(first, first + size)

    def linear(
        self,
        name: str,
        outputs: int | Mapping[str, int],
        *,
        inputs: int,
        bias: bool | Collection[str] = False,
        split: Split | None = None,
        blocks: int | tuple[int, ...] | Mapping[str, int | tuple[int, ...]] = 1,
        heads: int | Mapping[str, int] | None = None,
        units: Sequence[int] | None = None,
        orders: Mapping[str, HeadOrder] = MappingProxyType({}),
        transposed: bool = False,
        role: Role = "projection",
    ) -> Weight:
        """A projection [outputs, inputs]; "NAME.weight" and "NAME.bias" in the checkpoint.

        Args:
            name: the projection's name
            outputs: its rows; several tensors that become one projection: the rows of each, by name
            inputs: its columns
            bias: whether it has one; of several tensors, the names of those that have: the others' is zeros
            split: how ranks share it; None: each has all of it. The bias goes with the outputs; with "inputs" rank 0
                alone has it, since the ranks' results are added
            blocks: blocks of rows (Q, K, V) that one tensor holds, their number if they are equal, or the rows of each,
                by name if tensors differ: a rank takes its share of each
            heads: the checkpoint has the blocks' rows head by head (each head's Q, K, V), of so many heads; by name if
                not all tensors have blocks, which are then no others
            units: the heads in each tensor, or in each block of one: ranks take whole ones, and several have the same
                where there are fewer than ranks (key/value heads)
            orders: how checkpoints have each head's rows, of tensors by name, if not as the model
            transposed: the checkpoint has it as [inputs, outputs]
            role: "labels" of a classification head
        """
        tensors: list[Tensor] = []
        biases: list[Tensor] = []
        parts, first = outputs if isinstance(outputs, Mapping) else {name: outputs}, 0
        for i, (stem, rows) in enumerate(parts.items()):
            own = blocks.get(stem, 1) if isinstance(blocks, Mapping) else blocks
            by_head = heads.get(stem) if isinstance(heads, Mapping) else heads
            count = own if isinstance(own, int) else len(own)
            within = units if units is None or len(parts) == 1 else (units[i],) * count
            order = orders.get(stem)
            asked: dict[str, Any] = {"split": split, "blocks": own, "heads": by_head, "units": within, "order": order}
            place = {"blocks": own if by_head or isinstance(own, int) else 1, "heads": by_head, "order": order}
            matrix = self._tensors(f"{stem}.weight", (rows, inputs), **asked, transposed=transposed)
            self._listen(stem, name, matrix, outputs=rows, inputs=inputs, first=first, transposed=transposed, **place)
            tensors += matrix
            if bias is True or (bias and stem in bias):
                biases += self._tensors(f"{stem}.bias", (rows,), **asked)
            elif bias:
                biases += [Zeros(f"{stem}.bias", tensor.shape[:1], seed=0, std=0) for tensor in matrix]
            first += rows
        if split == "inputs" and self.rank:
            biases = []
        return self._prepare(name, tensors, biases, role)

    def by_head(
        self, name: str, published: str, heads: int, rows: range, *, of: int, inputs: int, transposed: bool = False
    ) -> Weight:
        """A matrix of each head, [heads out, in], some `rows` of each head's in a projection; ranks share the heads.

        Args:
            name: the weight's, and its tensor's in checkpoints that are written as the model is built
            published: the projection's, [heads of, inputs]
            heads: their number
            rows: those of each head
            of: rows of each head in the projection
            inputs: its columns
            transposed: whether each head's matrix is used the other way round: its `rows` are inputs, not outputs
        """
        place: dict[str, Any] = {"split": "outputs", "units": (heads,)}
        if self._as_built:
            outputs, columns = (inputs, len(rows)) if transposed else (len(rows), inputs)
            return self._prepare(
                name, self._tensors(f"{name}.weight", (heads * outputs, columns), **place), [], "projection"
            )

        def arrange(stored: NDArray[Any]) -> NDArray[Any]:
            part = stored.reshape(-1, of, inputs)[:, rows.start : rows.stop]  # [heads of, in] -> [heads, rows, in]
            return (part.transpose(0, 2, 1) if transposed else part).reshape(-1, len(rows) if transposed else inputs)

        whole = self._tensors(f"{published}.weight", (heads * of, inputs), **place)
        return self._prepare(
            name, [Regrouped(tensor, arrange, f"{self._prefix}{name}.weight") for tensor in whole], [], "projection"
        )

    def experts(
        self,
        name: str,
        outputs: Mapping[str, int],
        *,
        inputs: int,
        count: int,
        bias: bool = False,
        split: Split | None = None,
        blocks: int = 1,
    ) -> Weight:
        """One projection [outputs, inputs] of each of `count` experts.

        Args:
            name: the projection's name
            outputs: the tensors that become one projection, with the rows of each; `*` stands for the expert's number:
                "mlp.experts.*.up_proj" is "mlp.experts.3.up_proj.weight" in the checkpoint
            inputs: its columns
            count: X
            bias: whether each expert has one
            split: as of `linear`, within each expert
            blocks: as of `linear`, of each tensor
        """
        experts: list[list[Tensor]] = [[] for _ in range(count)]
        biases: list[list[Tensor]] = [[] for _ in range(count if bias else 0)]
        for expert, tensors in enumerate(experts):
            first = 0
            for pattern, rows in outputs.items():
                stem = pattern.replace("*", str(expert))
                matrix = self._tensors(f"{stem}.weight", (rows, inputs), split=split, blocks=blocks)
                place = {"outputs": rows, "inputs": inputs, "first": first, "blocks": blocks}
                self._listen(stem, f"{name}.{expert}", matrix, **place, is_expert=True)
                tensors += matrix
                first += rows
                if bias:
                    biases[expert] += self._tensors(f"{stem}.bias", (rows,), split=split)
        if split == "inputs" and self.rank:
            biases = []
        if not self._holds(self._prefix + name):
            return Weight(self._prefix + name, None)
        weight = self._backend.loader.prepare_experts(self._prefix + name, experts, biases)
        self._prepared([tensor for tensors in (*experts, *biases) for tensor in tensors])
        return weight

    def table(
        self,
        name: str,
        rows: int,
        width: int,
        role: Role,
        *,
        bias: str | None = None,
        published: tuple[int, ...] | None = None,
        split: Split | None = None,
    ) -> Weight:
        """An embedding table or the LM head [rows, width]; a rank has some of its rows if each token has one.

        `bias` is the name of a head's bias, which checkpoints have in the shape `published`, by default [1, rows];
        `split` "inputs": a rank has some columns, as of a table with one for each head.
        """
        tensors = self._tensors(f"{name}.weight", (rows, width), split=split)
        biases: list[Tensor] = []
        if bias is not None and (self._as_built or published == (rows,)):
            biases += self._tensors(bias, (rows,))
        elif bias is not None:
            biases += [Rearranged(tensor, np.ravel) for tensor in self._tensors(bias, published or (1, rows))]
        first = None
        if self.ranks > 1 and role == "vocabulary":
            first, stop = vocabulary_share(rows, self.rank, self.ranks)
            tensors, biases = ([tensor.part(0, first, stop) for tensor in whole] for whole in (tensors, biases))
        kind: Role = "projection" if role == "router" else role  # a linear layer, as others see it
        self._listen(name, name, tensors, outputs=rows, inputs=width, role=kind)
        weight = self._prepare(name, tensors, biases, role)
        return weight if first is None else replace(weight, first=first)

    def norm(
        self,
        name: str,
        width: int,
        *,
        bias: bool = False,
        gain: bool = True,
        offset: float = 0.0,
        factor: float = 1.0,
        split: Split | None = None,
    ) -> Weight:
        """The gain of a norm [width], and its bias, or neither.

        Published checkpoints of some families have the gain less an `offset`: Gemma's of 1 is stored as 0; or what is
        the gain times a `factor`. `split` "outputs": a rank has its share of the gain.
        """
        if not gain:
            return Weight(self._prefix + name, None)
        gains, biases = self._tensors(f"{name}.weight", (width,), split=split), []
        if (offset or factor != 1) and not self._as_built:
            gains = [Shifted(tensor, offset, factor) for tensor in gains]
        if bias:
            biases = self._tensors(f"{name}.bias", (width,))
        return self._prepare(name, gains, biases, "projection")

    def vector(
        self,
        name: str,
        width: int,
        *,
        published: tuple[int, ...] | None = None,
        beside: str | None = None,
        split: Split | None = None,
    ) -> Weight:
        """A vector [width] that is neither a gain nor a projection's bias; checkpoints have it in another shape.

        `beside` is the name of another that goes with it, as its bias; `split`: ranks share both.
        """
        published = published if published is not None and not self._as_built else (width,)
        whole = self._tensors(name, published, split=split)
        other = self._tensors(beside, (width,), split=split) if beside is not None else []
        return self._prepare(name, [Rearranged(t, np.ravel) if len(t.shape) > 1 else t for t in whole], other, "router")

    def taps(
        self, name: str, channels: int, width: int, *, bias: bool = False, blocks: tuple[int, ...] | None = None
    ) -> Weight:
        """The weights of a causal depthwise convolution, or of a rank's channels. [width channels]

        The oldest input's come first. Checkpoints have them as [channels, 1, width]. A rank has its share of each of
        the `blocks` of channels, by default one.
        """
        own, sizes = np.arange(channels), blocks or (channels,)
        if self.ranks > 1:
            firsts = np.cumsum([0, *sizes[:-1]])
            own = np.concatenate([own[first:][self.share(size)] for first, size in zip(firsts, sizes, strict=True)])
        shape = (width * channels,) if self._as_built else (channels, 1, width)

        def arrange(stored: NDArray[Any]) -> NDArray[Any]:
            taps = stored.reshape(width, channels) if self._as_built else stored[:, 0].T  # [C, 1, k] -> [k, C]
            return taps[:, own].reshape(-1)  # [k, C] -> [k C]

        taps = [Rearranged(tensor, arrange) for tensor in self._tensors(f"{name}.weight", shape)]
        biases = self._tensors(f"{name}.bias", (channels,), split="outputs", blocks=sizes) if bias else []
        return self._prepare(name, taps, biases, "projection")

    def convolution(self, name: str, outputs: int, width: int, *, inputs: int) -> Weight:
        """A convolution of all channels, as a projection of so many rows side by side, with a bias. [outputs, width in]

        Checkpoints have it as [outputs, inputs, width].
        """

        def arrange(stored: NDArray[Any]) -> NDArray[Any]:
            return stored.transpose(0, 2, 1).reshape(len(stored), -1)  # [out, in, k] -> [out, k in]

        shape = (outputs, width * inputs) if self._as_built else (outputs, inputs, width)
        matrix = self._tensors(f"{name}.weight", shape)
        if not self._as_built:
            matrix = [Regrouped(tensor, arrange, f"{self._prefix}{name}.weight") for tensor in matrix]
        return self._prepare(name, matrix, self._tensors(f"{name}.bias", (outputs,)), "projection")

    def rates(self, heads: int) -> Weight:
        """The logarithms of the rates of decay of a rank's heads of Mamba-2, then the factors to skip. [2 heads]

        The bias is that of the steps. [heads]
        """
        tensors = [part for name in ("A_log", "D") for part in self._tensors(name, (heads,), split="outputs")]
        return self._prepare("rates", tensors, self._tensors("dt_bias", (heads,), split="outputs"), "router")

    def layer_norm(self, name: str, width: int, epsilon: float) -> LayerNorm:
        """A layer norm with gain and bias."""
        return LayerNorm(self.norm(name, width, bias=True), epsilon)

    def rms_norm(self, name: str, width: int, epsilon: float, *, offset: float = 0.0) -> RMSNorm:
        """An RMS norm; `offset` as of `norm`."""
        return RMSNorm(self.norm(name, width, offset=offset), epsilon)

    def attention(
        self,
        config: ModelConfig,
        layer: int,
        spec: AttentionSpec | None = None,
        *,
        qkv: Weight,
        out: Weight,
        kind: type[Attention] = Attention,
        **others: Any,
    ) -> Attention:
        """This rank's heads of one layer's attention; `others` are further fields of its `kind`.

        Without a `spec`, scores are scaled by 1 / sqrt D and masked causally.
        """
        rank, spec = config.sharded(self.ranks), spec or AttentionSpec(config.head_dim**-0.5)
        shape: Any = {"group": config.kv_group(layer)}
        return kind(config.kv_source(layer), rank.num_heads, rank.kv_shape(layer)[0], spec, qkv, out, **shape, **others)

    def mlp(self, up: str, down: str, E: int, F: int, activation: str, *, bias: bool = True) -> MLP:
        """An MLP of two projections, E -> F -> E, by their names."""
        return MLP(
            self.linear(up, F, inputs=E, bias=bias, split="outputs"),
            self.linear(down, E, inputs=F, bias=bias, split="inputs"),
            activation,
        )

    # --- projections with the names of Llama's tensors ---------------------------------------------------------------

    def qkv_proj(
        self,
        config: ModelConfig,
        *,
        bias: bool = False,
        split: Split | None = "outputs",
        fused: bool = False,
        pairs: int | None = None,
    ) -> Weight:
        """Queries, keys and values of a layer, which checkpoints have apart or `fused`. [(H + 2 K) D, E]

        `pairs`: checkpoints have the numbers of each rotated pair side by side, so many pairs of each head. Scores do
        not depend on the order of a head's numbers, so the model has them as all others do: a half after the other.
        """
        H, K = config.num_heads, config.num_kv_heads
        Q, KV = H * config.head_dim, K * config.head_dim
        outputs, blocks = {f"self_attn.{name}_proj": rows for name, rows in zip("qkv", (Q, KV, KV), strict=True)}, None
        if fused:
            outputs, blocks = {"self_attn.qkv_proj": Q + 2 * KV}, (Q, KV, KV)
        place: dict[str, Any] = {"split": split, "blocks": blocks or 1, "units": (H, K, K)}
        if pairs is not None:
            assert not fused
            place["orders"] = {f"self_attn.{name}_proj": HeadOrder(config.head_dim, 2 * pairs) for name in "qk"}
        return self.linear("self_attn.qkv", outputs, inputs=config.hidden_size, bias=bias, **place)

    def o_proj(self, config: ModelConfig, *, bias: bool = False) -> Weight:
        """The projection of a layer's merged heads. [E, H D]"""
        inputs = config.num_heads * config.head_dim
        return self.linear("self_attn.o_proj", config.hidden_size, inputs=inputs, bias=bias, split="inputs")

    def head_norms(self, config: ModelConfig, epsilon: float, *, offset: float = 0.0) -> HeadNorms:
        """RMS norms of each query and each key head; `offset` as of `norm`."""
        q, k = (self.norm(f"self_attn.{name}_norm", config.head_dim, offset=offset) for name in "qk")
        return HeadNorms(q, k, epsilon)

    def projection_norms(self, config: ModelConfig, epsilon: float) -> ProjectionNorms:
        """RMS norms of all of a token's queries together, and of its keys, of which a rank keeps its share."""
        heads, D = (config.num_heads, config.num_kv_heads), config.head_dim
        widths = [count * D for count in heads]
        q, k = (self.norm(f"self_attn.{name}_norm", width) for name, width in zip("qk", widths, strict=True))
        columns = [self.share(width, count) for width, count in zip(widths, heads, strict=True)]
        own_q, own_k = (slice(part.start // D, part.stop // D) for part in columns)
        return ProjectionNorms(q, k, epsilon, heads, (own_q, own_k))

    def gated_mlp(
        self, E: int, F: int, activation: str, *, bias: bool = False, fused: bool = False, factors: Weight | None = None
    ) -> GatedMLP:
        """A layer's gated MLP, E -> F -> E; checkpoints have gate and up apart or `fused`."""
        outputs, blocks = ({"mlp.gate_up_proj": 2 * F}, 2) if fused else ({"mlp.gate_proj": F, "mlp.up_proj": F}, 1)
        return GatedMLP(
            self.linear("mlp.gate_up", outputs, inputs=E, bias=bias, split="outputs", blocks=blocks),
            self.linear("mlp.down_proj", E, inputs=F, bias=bias, split="inputs"),
            activation,
            factors,
        )

    def _tensors(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        split: Split | None = None,
        blocks: int | tuple[int, ...] = 1,
        heads: int | None = None,
        units: Sequence[int] | None = None,
        order: HeadOrder | None = None,
        transposed: bool = False,
    ) -> list[Tensor]:
        """A tensor in the order in which the model uses it, or this rank's parts of it; arguments as of `linear`."""
        if self._as_built:
            heads, order, transposed = None, None, False
        tensor = self._find(self._prefix + name, shape[::-1] if transposed else shape)
        axis = 0 if split == "outputs" else 1
        parts = [tensor]
        if self.ranks > 1 and split is not None and axis < len(shape):
            sizes: tuple[int, ...] = (shape[axis],)  # head by head, a rank's rows are contiguous
            if axis == 0 and heads is None:
                sizes = blocks if isinstance(blocks, tuple) else (shape[0] // blocks,) * blocks
            where, at, parts = 1 - axis if transposed else axis, 0, []
            for i, size in enumerate(sizes):
                share, scale = self.share(heads or size, None if units is None else units[i]), size // (heads or size)
                parts.append(tensor.part(where, at + share.start * scale, at + share.stop * scale))
                at += size
            heads = heads and heads // self.ranks
        if heads is not None:
            return [by_block(piece, heads, blocks) for piece in parts]
        if order is not None:
            return [Rearranged(piece, order.arranged) for piece in parts]
        return [transpose(piece) for piece in parts] if transposed else parts

    def _listen(self, name: str, weight: str, tensors: Sequence[Tensor], **place: Any) -> None:
        if self._on_parameter is not None:
            self._on_parameter(Parameter(self._prefix + name, self._prefix + weight, **place), tensors)

    def _prepare(self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor], role: Role) -> Weight:
        if not self._holds(self._prefix + name):
            return Weight(self._prefix + name, None, role=role)
        loader = self._backend.loader
        prepare = loader.prepare_looked_up if self._prefix + name in self._looked_up else loader.prepare
        weight = prepare(self._prefix + name, tensors, biases, role)
        self._prepared((*tensors, *biases))
        return weight

    def _prepared(self, tensors: Sequence[Tensor]) -> None:
        self._progress.advance(sum(math.prod(tensor.shape) for tensor in tensors))


def vocabulary_share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """First row and stop of a rank's share of a table of `count` tokens; shares differ by one row at most."""
    return rank * count // ranks, (rank + 1) * count // ranks


def transpose(tensor: Tensor) -> Rearranged:
    """[in, out] as [out, in]."""
    return Rearranged(tensor, np.transpose)


def by_block(tensor: Tensor, heads: int, blocks: int | tuple[int, ...] = 3) -> Rearranged:
    """Rows stored head by head (each head's Q, K, V) as Q of all heads, then K, then V. [H 3 D, ...] -> [3 H D, ...]"""
    return Rearranged(tensor, lambda stored: rows_by_block(stored, heads, blocks))


def rows_by_block(stored: NDArray[Any], heads: int, blocks: int | tuple[int, ...]) -> NDArray[Any]:
    """The rows of an array in the order of `by_block`; `blocks` are equal, or in the proportion of these numbers."""
    shares = (1,) * blocks if isinstance(blocks, int) else blocks
    by_head = stored.reshape(heads, -1, *stored.shape[1:])  # [H 3 D, ...] -> [H, 3 D, ...]
    stops = np.cumsum(shares) * by_head.shape[1] // sum(shares)
    parts = np.split(by_head, stops[:-1], axis=1)  # -> 3 x [H, D, ...]
    return np.concatenate([part.reshape(-1, *stored.shape[1:]) for part in parts])  # -> [3 H D, ...]


def source_of(tensor: Tensor) -> Tensor:
    """The underlying tensor, as the file has it; of an expert's part of a tensor, that part."""
    return tensor.source if isinstance(tensor, Rearranged | Shifted) and not isinstance(tensor, Member) else tensor
