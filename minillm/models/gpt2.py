"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    x = tokens[ids] + positions[i]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

Q, K and V are stored as one projection, and the head is the token embedding. Checkpoints store projections as
[in, out], other families as [out, in].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Tensor
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.attention import Attention
from ..layers.block import PreNorm
from ..layers.embedding import Embedding
from ..layers.head import LMHead
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from .base import Shapes, Tensors, linear_tensors, norm_tensors, shorten, without_tied_head
from .decoder import Decoder
from .outline import Embed, Norm, Outline, head, mlp, self_attention
from .reading import merge_names, read_activation, read_heads, read_layers, refuse_other_layers
from .rearranged import transposed

END_OF_TEXT = 50256
"""The BOS and EOS token id if config.json has none."""

OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
"""Names of the sizes in other families; transformers accepts either."""

PROJECTIONS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
"""Projections stored as [in, out]."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """The shared fields and GPT-2's own."""

    epsilon: float
    """Added to the variance in each layer norm"""
    activation: str
    tied_head: bool
    """The LM head is the token embedding"""
    scales: tuple[float, ...]
    """Factor of each layer's attention scores: 1 / sqrt D, unless config.json switches it off or divides it by the
    layer's number"""


def read_config(raw: Mapping[str, Any]) -> GPT2Config:
    """GPT-2's configuration from config.json.

    `reorder_and_upcast_attn` asks for attention scores in float32, which they always are here.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: cross-attention, or an unsupported activation.
    """
    fields = Fields({"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT} | merge_names(raw, OTHER_NAMES))
    if fields.get("add_cross_attention", False):
        raise UnsupportedModelError("config.json: add_cross_attention is true; minillm runs decoders by themselves")
    refuse_other_layers(fields)
    hidden_size, heads, head_dim = read_heads(fields, "n_embd", "n_head")
    layers = read_layers(fields, "n_layer")
    scale = head_dim**-0.5 if fields.get("scale_attn_weights", True) else 1.0
    by_layer = fields.get("scale_attn_by_inverse_layer_idx", False)
    return GPT2Config(
        model_type="gpt2",
        hidden_size=hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.size("n_inner", 4 * hidden_size),
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("n_positions"),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        epsilon=fields.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        tied_head=fields.get("tie_word_embeddings", True),
        scales=tuple(scale / (i + 1) if by_layer else scale for i in range(layers)),
    )


def tensor_table(config: GPT2Config) -> Shapes:
    """Name (without `transformer.`) and shape of every tensor; projections are [out, in]."""
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    sizes = dict(zip(PROJECTIONS, [(3 * E, E), (E, E), (F, E), (E, F)], strict=True))
    table: Shapes = {"wte.weight": (V, E), "wpe.weight": (config.max_positions, E)}
    for i in range(config.num_layers):
        for name, (outputs, inputs) in sizes.items():
            table |= linear_tensors(f"h.{i}.{name}", outputs, inputs)
        table |= norm_tensors(f"h.{i}.ln_1", E) | norm_tensors(f"h.{i}.ln_2", E)
    table |= norm_tensors("ln_f", E)
    if not config.tied_head:
        table["lm_head.weight"] = (V, E)
    return table


def canonical_names(stored: Mapping[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """Tensors by canonical name, without the prefix `transformer.`, copies of a tied head and stored causal masks."""
    tensors = shorten(stored, "transformer.", left_out=(".attn.bias", ".attn.masked_bias"))
    if config.tied_head:
        tensors = without_tied_head(tensors, "wte.weight")
    weights = tuple(f".{name}.weight" for name in PROJECTIONS)
    return {name: transposed(tensor) if name.endswith(weights) else tensor for name, tensor in tensors.items()}


def build(config: GPT2Config, stored: Mapping[str, Tensor], backend: Backend) -> Decoder:
    """Build the model from tensors under canonical names.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    tensors = Tensors(stored, tensor_table(config), backend)
    embedding = Embedding(tensors.table("wte", "vocabulary"), tensors.table("wpe", "positions"))
    lm_head = LMHead(embedding.tokens if config.tied_head else tensors.table("lm_head", "vocabulary"))
    layers = tuple(_build_layer(config, tensors, i) for i in range(config.num_layers))
    return Decoder(config, embedding, layers, LayerNorm(tensors.norm("ln_f"), config.epsilon), lm_head)


def _build_layer(config: GPT2Config, tensors: Tensors, i: int) -> PreNorm:
    qkv, out, up, down = (tensors.linear(f"h.{i}.{name}") for name in PROJECTIONS)
    return PreNorm(
        LayerNorm(tensors.norm(f"h.{i}.ln_1"), config.epsilon),
        Attention(i, config.num_heads, config.num_kv_heads, config.scales[i], qkv, out),
        LayerNorm(tensors.norm(f"h.{i}.ln_2"), config.epsilon),
        MLP(up, down, config.activation),
    )


def outline(config: GPT2Config) -> Outline:
    """The components in execution order, for `accounting`."""
    E = config.hidden_size
    layer = (
        Norm(name="attention norm", width=E),
        *self_attention(config, bias=True, out_bias=True),
        Norm(name="MLP norm", width=E),
        *mlp(config, config.activation),
    )
    return Outline(
        before=(Embed(name="embedding", width=E, vectors=config.vocab_size, positions=config.max_positions),),
        layers=(layer,) * config.num_layers,
        after=(Norm(name="final norm", width=E),),
        head=head(config, tied=config.tied_head),
    )


def _shape(E: int, L: int, H: int) -> dict[str, Any]:
    sizes = {"n_embd": E, "n_layer": L, "n_head": H}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, **sizes}


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _shape(768, 12, 12),
    "gpt2-medium": _shape(1024, 24, 16),
    "gpt2-large": _shape(1280, 36, 20),
    "gpt2-xl": _shape(1600, 48, 25),
    "distilgpt2": _shape(768, 6, 12),
}
"""The published sizes (paper, table 2, with the sizes of the released weights), and DistilGPT-2."""
