"""OPT (Zhang et al., arXiv 2205.01068), and Galactica (arXiv 2211.09085), which is OPT with another activation.

    x = tokens[ids] + positions[i + 2]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

opt-350m differs: post-norm instead of pre-norm, no final norm, and an embedding narrower than the model, with a
projection in and out. Galactica has GELU for ReLU, no biases, and norms without gain and bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Tensor
from ..config import Fields, ModelConfig
from ..layers.attention import Attention
from ..layers.block import PostNorm, PreNorm
from ..layers.embedding import Embedding
from ..layers.head import LMHead
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from .base import Shapes, Tensors, linear_tensors, norm_tensors, shorten, without_tied_head
from .decoder import Decoder
from .outline import Component, Embed, Linear, Norm, Outline, head, mlp, self_attention
from .reading import read_activation, read_heads, read_layers, refuse_other_layers

POSITION_OFFSET = 2
"""Index of position 0 in the position table, whose first two rows served padded batches."""

NORM_EPSILON = 1e-5
"""Added to the variance in each layer norm; not in config.json."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """The shared fields and OPT's own."""

    embedding_size: int
    """W, the width of the token embedding: E except in opt-350m"""
    pre_norm: bool
    """True: norm before attention and MLP; False: after each residual sum (opt-350m)"""
    final_norm: bool
    activation: str
    biases: bool
    norm_affine: bool
    """Norms have gain and bias"""
    tied_head: bool
    """The LM head is the token embedding"""


def read_config(raw: Mapping[str, Any]) -> OPTConfig:
    """OPT's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation.
    """
    fields = Fields({"bos_token_id": 2, "eos_token_id": 2} | dict(raw))
    refuse_other_layers(fields)
    hidden_size, heads, head_dim = read_heads(fields)
    pre_norm = fields.get("do_layer_norm_before", True)
    return OPTConfig(
        model_type="opt",
        hidden_size=hidden_size,
        num_layers=read_layers(fields),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.size("ffn_dim"),
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("max_position_embeddings"),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        embedding_size=fields.size("word_embed_proj_dim", hidden_size),
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.get("_remove_final_layer_norm", False),
        activation=read_activation(fields, "activation_function", "relu"),
        biases=fields.get("enable_bias", True),
        norm_affine=fields.get("layer_norm_elementwise_affine", True),
        tied_head=fields.get("tie_word_embeddings", True),
    )


def tensor_table(config: OPTConfig) -> Shapes:
    """Name (without `model.decoder.`) and shape of every tensor."""
    E, F, V, W = config.hidden_size, config.intermediate_size, config.vocab_size, config.embedding_size
    table: Shapes = {
        "embed_tokens.weight": (V, W),
        "embed_positions.weight": (config.max_positions + POSITION_OFFSET, E),
    }
    if W != E:
        table |= {"project_in.weight": (E, W), "project_out.weight": (W, E)}
    linears = {f"self_attn.{name}_proj": (E, E) for name in "qkv"}
    linears |= {"self_attn.out_proj": (E, E), "fc1": (F, E), "fc2": (E, F)}
    for i in range(config.num_layers):
        for name, (outputs, inputs) in linears.items():
            table |= linear_tensors(f"layers.{i}.{name}", outputs, inputs, config.biases)
        if config.norm_affine:
            table |= norm_tensors(f"layers.{i}.self_attn_layer_norm", E)
            table |= norm_tensors(f"layers.{i}.final_layer_norm", E)
    if config.final_norm and config.norm_affine:
        table |= norm_tensors("final_layer_norm", E)
    if not config.tied_head:
        table["lm_head.weight"] = (V, W)
    return table


def canonical_names(stored: Mapping[str, Tensor], config: OPTConfig) -> dict[str, Tensor]:
    """Tensors by canonical name, without `model.decoder.` or `decoder.`, copies of a tied head and version numbers."""
    tensors = shorten(stored, "model.", "decoder.", left_out=("version",))
    return without_tied_head(tensors, "embed_tokens.weight") if config.tied_head else tensors


def build(config: OPTConfig, stored: Mapping[str, Tensor], backend: Backend) -> Decoder:
    """Build the model from tensors under canonical names.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    tensors = Tensors(stored, tensor_table(config), backend)
    narrow = config.embedding_size != config.hidden_size
    embedding = Embedding(
        tensors.table("embed_tokens", "vocabulary"),
        tensors.table("embed_positions", "positions").rows_from(POSITION_OFFSET),
        tensors.linear("project_in") if narrow else None,
    )
    lm_head = LMHead(
        embedding.tokens if config.tied_head else tensors.table("lm_head", "vocabulary"),
        tensors.linear("project_out") if narrow else None,
    )
    layers = tuple(_build_layer(config, tensors, i) for i in range(config.num_layers))
    final_norm = LayerNorm(tensors.norm("final_layer_norm"), NORM_EPSILON) if config.final_norm else None
    return Decoder(config, embedding, layers, final_norm, lm_head)


def _build_layer(config: OPTConfig, tensors: Tensors, i: int) -> PreNorm | PostNorm:
    part = f"layers.{i}"
    qkv = tensors.linear(f"{part}.self_attn.qkv", *(f"{part}.self_attn.{name}_proj" for name in "qkv"))
    out = tensors.linear(f"{part}.self_attn.out_proj")
    block = PreNorm if config.pre_norm else PostNorm
    return block(
        LayerNorm(tensors.norm(f"{part}.self_attn_layer_norm"), NORM_EPSILON),
        Attention(i, config.num_heads, config.num_kv_heads, config.head_dim**-0.5, qkv, out),
        LayerNorm(tensors.norm(f"{part}.final_layer_norm"), NORM_EPSILON),
        MLP(tensors.linear(f"{part}.fc1"), tensors.linear(f"{part}.fc2"), config.activation),
    )


def outline(config: OPTConfig) -> Outline:
    """The components in execution order, for `accounting`."""
    E, V, W, b = config.hidden_size, config.vocab_size, config.embedding_size, config.biases
    positions = config.max_positions + POSITION_OFFSET
    before: tuple[Component, ...] = (Embed(name="embedding", width=E, vectors=V, positions=positions),)
    if W != E:
        before = (
            Embed(name="position embedding", width=E, vectors=0, positions=positions),
            Embed(name="token embedding", width=W, vectors=V),
            Linear(name="project in", inputs=W, outputs=E, residual=True),
        )
    attention = self_attention(config, bias=b, out_bias=b)
    ffn = mlp(config, config.activation, bias=b)
    norms = [Norm(name=f"{part} norm", width=E, affine=config.norm_affine) for part in ("attention", "MLP", "final")]
    layer = (norms[0], *attention, norms[1], *ffn) if config.pre_norm else (*attention, norms[0], *ffn, norms[1])
    return Outline(
        before=before,
        layers=(layer,) * config.num_layers,
        after=(norms[2],) if config.final_norm else (),
        head=head(config, tied=config.tied_head, width=W),
    )


def _shape(E: int, L: int, H: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": E, "num_hidden_layers": L, "num_attention_heads": H, "ffn_dim": 4 * E}
    return {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048, **sizes, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "opt-125m": _shape(768, 12, 12),
    "opt-350m": _shape(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _shape(2048, 24, 32),
    "opt-2.7b": _shape(2560, 32, 32),
    "opt-6.7b": _shape(4096, 32, 32),
    "opt-13b": _shape(5120, 40, 40),
    "opt-30b": _shape(7168, 48, 56),
    "opt-66b": _shape(9216, 64, 72),
    "opt-175b": _shape(12288, 96, 96),
}
"""The published sizes (paper, table 1), with the values of their config.json."""
