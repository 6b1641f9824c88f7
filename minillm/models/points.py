"""The points of a model at which `watch` and `hooks` look in: their names and shapes, and where they are met.

Names are the same in every family; `measure/README.md` has TransformerLens's beside them. A block's begin with its
number, "blocks.3.attention.z"; those of the encoder of an encoder-decoder with "encoder.", which ends with its `final`.
A block has the points that its kind has: one that computes attention and MLP side by side has no `residual_mid`, one
with experts has `experts.probabilities` in place of `mlp.hidden`.

    embedding                  [T, E]     what enters the first block
    blocks.3.attention.q       [T, H, D]  queries, after norms and rotation
    blocks.3.attention.k, .v   [T, K, D]  keys (rotated) and values, before they are stored
    blocks.3.attention.pattern [T, H, S]  softmax(scores): the weight of each key for each query
    blocks.3.attention.z       [T, H, D]  the heads' results, before their gates and the output product
    blocks.3.attention.out     [T, E]     their product with W^O, before any norm of it and the residual sum
    blocks.3.convolution.out   [T, E]     the same of a convolution, in a block that has one in place of attention
    blocks.3.delta_net.out     [T, E]     the same of a linear attention by the delta rule
    blocks.3.mamba.out         [T, E]     the same of Mamba-2, in place of attention or beside it
    blocks.3.residual_mid      [T, E]     the residual stream between attention and MLP
    blocks.3.cross.*                      the same of cross-attention: q, pattern, z, out, residual
    blocks.3.mlp.in            [T, E]     what the MLP, or the router of the experts, reads
    blocks.3.mlp.hidden        [T, F]     after the activation, and the gate if there is one
    blocks.3.mlp.out           [T, E]     the MLP's result, before any norm of it and the residual sum
    blocks.3.experts.probabilities [T, X] softmax of the router's logits, or their sigmoids
    blocks.3.experts.shared    [T, E]     the result of the shared expert; `mlp.out` is that of the others
    blocks.3.experts.out       [T, E]     the result of experts beside an MLP (Gemma 4), before any norm of it
    blocks.3.residual          [T, E]     the residual stream after the block
    final                      [T, E]     after the final norm
    logits                     [T, V]     the head's result, of rows that a strategy reads; where they are watched,
                                          of the others too, in a call of their own

Of latent attention `k` is the rotated part of the key and `v` the normed latent, [T, 1, r] and [T, 1, C], as the cache
keeps them; `q` [T, H, r + n] begins with the rotated numbers.

Granite's and MiniCPM3's stream (`embedding`, `residual`, `residual_mid`) is computed without its factor m: times m it
is the paper's. So is Falcon-H1's without `ssm_out_multiplier`; `attention.out`, `mamba.out` and `mlp.out` are what is
added to it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ParameterError, listed, shown
from ..layers.block import OutputNorm, Parallel, PostNorm, Sublayer
from ..layers.convolution import ConvolutionBlock, ShortConvolution
from ..layers.cross_attention import PostNormCross
from ..layers.delta_net import DeltaNetBlock, GatedDeltaNet
from ..layers.embedding import LMHead
from ..layers.experts import ExpertMLP
from ..layers.latent_attention import LatentAttention
from ..layers.mamba import Mamba2, MambaBlock, ParallelMamba
from ..layers.mlp import MLP

RECURRENT: dict[type, str] = {ShortConvolution: "convolution", GatedDeltaNet: "delta_net", Mamba2: "mamba"}
"""Layers in place of attention, and the names of their points"""
Shape = tuple[int | str, ...]
"""Sizes of a point's array; "T" tokens and "S" positions of the context differ from call to call"""


@dataclass(frozen=True, eq=False)
class Points:
    """The points of a model, or of its encoder, and the weights at which its operations meet them."""

    prefix: str = ""
    """Beginning of all names"""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Name -> shape, in the order of the computation"""
    inputs: dict[int, str] = field(default_factory=dict)
    """id of a product's weight -> the point that the product reads"""
    summands: dict[int, str] = field(default_factory=dict)
    """id of a product's weight -> the point that is its result without the residual"""
    results: dict[int, str] = field(default_factory=dict)
    """id of a product's weight -> the point that is its result"""
    before: dict[int, str] = field(default_factory=dict)
    """id of a norm's weight -> the point that it reads"""
    after: dict[int, str] = field(default_factory=dict)
    """id of a norm's weight -> the point that is its result"""
    last: int = 0
    """Number of layers"""
    closing: str | None = None
    """The point met when all layers have run, where no final norm follows"""

    def name(self, layer: int | None, point: str) -> str:
        """The name of a point, in a block or outside."""
        inside = layer is not None and layer < self.last and point not in ("final", "logits", "embedding")
        return f"{self.prefix}blocks.{layer}.{point}" if inside else self.prefix + point


def points_of(model: Any) -> Points:
    """The points of a decoder, or of a model for texts; without those of its encoder if it has one."""
    points, head = _points(model, ""), model.head
    if isinstance(head, LMHead):
        points.shapes["logits"] = "T", model.config.vocab_size
        if head.scale == 1 and head.cap is None:  # else the scaling's result
            points.results[id(head.weight)] = "logits"
    return points


def encoder_points(model: Any) -> Points | None:
    """The points of an encoder-decoder's encoder; None of another model."""
    return _points(model.encoder, "encoder.") if hasattr(model, "encoder") else None


def _points(stack: Any, prefix: str) -> Points:
    """The points of a stack of layers between an embedding and a final norm."""
    closing = "final" if stack.final_norm is None else None
    points = Points(prefix, last=len(stack.layers), closing=closing)
    operator = operator_of(stack.layers[0])
    E = (operator.down if isinstance(operator, MLP | ExpertMLP) else operator.out).shape[-2]
    points.shapes[points.name(None, "embedding")] = "T", E
    for i, block in enumerate(stack.layers):
        for point, shape in _of_block(block, points, E):
            points.shapes[points.name(i, point)] = shape
    points.shapes[points.name(None, "final")] = "T", E
    if stack.final_norm is not None:
        points.after[id(stack.final_norm.weight)] = "final"
    return points


def _of_block(block: Any, points: Points, E: int) -> Iterator[tuple[str, Shape]]:
    """The points of a block with their shapes, in order; notes in `points` the weights at which they are met."""
    mlp: Any = block.part if isinstance(block, Sublayer) else block.mlp
    for operator in operators_of(block):
        yield from _of_operator(operator, points, E)
    cross = getattr(block, "cross", None)
    normed_first = not isinstance(block, PostNorm | PostNormCross | OutputNorm)
    if not isinstance(block, Parallel | Sublayer):
        yield "residual_mid", ("T", E)
        following = block.mlp_norm if cross is None else block.cross_norm
        norm, met = (following, points.before) if normed_first else (block.attention_norm, points.after)
        met[id(norm.weight)] = "residual_mid"
    if cross is not None:
        H, D = cross.num_heads, cross.out.shape[1] // cross.num_heads
        yield "cross.q", ("T", H, D)
        yield "cross.pattern", ("T", H, "S")
        yield "cross.z", ("T", H, D)
        yield "cross.out", ("T", E)
        yield "cross.residual", ("T", E)
        points.summands[id(cross.out)] = "cross.out"
        norm, met = (block.mlp_norm, points.before) if normed_first else (block.cross_norm, points.after)
        met[id(norm.weight)] = "cross.residual"
    if not hasattr(mlp, "down"):  # a layer of attention or Mamba-2 alone
        yield "residual", ("T", E)
        return
    yield "mlp.in", ("T", E)
    if isinstance(mlp, ExpertMLP):
        yield "experts.probabilities", ("T", mlp.router.shape[0])
        points.inputs[id(mlp.router)] = "mlp.in"
        if mlp.shared is not None:
            yield "experts.shared", ("T", E)
            points.summands[id(mlp.shared.down)] = "experts.shared"
    else:
        yield "mlp.hidden", ("T", mlp.down.shape[1])
        points.inputs[id(mlp.gate_up if hasattr(mlp, "gate_up") else mlp.up)] = "mlp.in"
        points.inputs[id(mlp.down)] = "mlp.hidden"
        points.summands[id(mlp.down)] = "mlp.out"
    yield "mlp.out", ("T", E)
    if (beside := getattr(block, "experts", None)) is not None:
        yield "experts.probabilities", ("T", beside.experts.router.shape[0])
        yield "experts.out", ("T", E)
    yield "residual", ("T", E)


def _of_operator(operator: Any, points: Points, E: int) -> Iterator[tuple[str, Shape]]:
    """The points of a block's attention, or of what is in its place; none of an MLP or experts alone in a layer."""
    if isinstance(operator, MLP | ExpertMLP):
        return
    if type(operator) in RECURRENT:
        result = f"{RECURRENT[type(operator)]}.out"
        yield result, ("T", E)
        points.summands[id(operator.out)] = result
        return
    H, K, D = operator.num_heads, operator.num_kv_heads, operator.out.shape[1] // operator.num_heads
    q, k, v = D, D, D
    if isinstance(operator, LatentAttention):
        q, k, v = operator.widths
        points.inputs[id(operator.keys)] = "attention.q"
        points.results[id(operator.values)] = "attention.z"
    yield "attention.q", ("T", H, q)
    if not getattr(operator, "only_reads", False):
        yield "attention.k", ("T", K, k)
        yield "attention.v", ("T", K, v)
    yield "attention.pattern", ("T", H, "S")
    yield "attention.z", ("T", H, D)
    yield "attention.out", ("T", E)
    points.summands[id(operator.out)] = "attention.out"


def operators_of(block: Any) -> tuple[Any, ...]:
    """The parts of a block before its MLP: `operator_of`, and Mamba-2 beside attention."""
    return (block.attention, block.mamba) if isinstance(block, ParallelMamba) else (operator_of(block),)


def operator_of(block: Any) -> Any:
    """The part of a block before its MLP: attention, or what is in its place; or its only part."""
    if isinstance(block, Sublayer):
        return block.part
    if isinstance(block, MambaBlock):
        return block.mamba
    if isinstance(block, DeltaNetBlock):
        return block.delta_net
    return block.convolution if isinstance(block, ConvolutionBlock) else block.attention


def names_matching(pattern: object, names: Iterable[str], argument: str) -> list[str]:
    """The names that a pattern stands for; `*` in it is any one part between dots, or a piece of one, `**` any parts.

    Raises:
        ParameterError: it is not a text, or stands for none; the message names `argument` and the nearest names.
    """
    names = [*names]
    if isinstance(pattern, str):
        pieces = re.findall(r"\*+|[^*]+", pattern)
        if chosen := [name for name in names if _matches(pieces, name)]:
            return chosen
    kinds = dict.fromkeys(re.sub(r"\d+", "*", name) for name in names)
    last = max(int(number) for name in names for number in re.findall(r"blocks\.(\d+)\.", name))
    theirs = " (measure/README.md has TransformerLens's beside them)" if "hook_" in str(pattern) else ""
    raise ParameterError(
        f"{argument}: {shown(pattern)} names no point of this model; expected names of Engine.names(){theirs}, with * "
        f"for any one part of them and ** for any, and blocks up to {last}: {listed(kinds, 400)}"
    )


def _matches(pieces: Sequence[str], name: str) -> bool:
    """Whether a name is these pieces one after the other: texts, "*" for no dot, more stars for anything."""
    ends = {0}
    for piece in pieces:
        if piece == "*":
            ends = {
                end for start in ends for end in range(start, len(name[:start] + name[start:].partition(".")[0]) + 1)
            }
        elif piece[0] == "*":
            ends = {*range(min(ends, default=len(name) + 1), len(name) + 1)}
        else:
            ends = {start + len(piece) for start in ends if name.startswith(piece, start)}
    return len(name) in ends
