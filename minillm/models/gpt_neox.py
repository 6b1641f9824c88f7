"""GPT-NeoX (Black et al., arXiv 2204.06745) and Pythia (Biderman et al., arXiv 2304.01373).

    x = tokens[ids]
    x = x + attention(norm(x)) + mlp(norm'(x))             in each layer
    logits = norm(x) W_lm

Attention and MLP read the same x, unless config.json puts one after the other. Positions enter by rotating a part of
each query and key, a quarter in the published models. The rows of the stored Q, K, V projection are ordered head by
head: the first head's Q, K, V, then the second's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Tensor
from ..config import Fields, ModelConfig
from ..errors import CheckpointError
from ..layers.attention import Attention
from ..layers.block import Parallel, PreNorm
from ..layers.embedding import Embedding
from ..layers.head import LMHead
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..reference.rotary import Rotation
from .base import Shapes, Tensors, linear_tensors, norm_tensors, shorten, without_tied_head
from .decoder import Decoder
from .outline import Embed, Norm, Outline, head, mlp, self_attention
from .reading import read_activation, read_heads, read_layers, refuse_other_layers
from .rearranged import with_qkv_apart
from .rotary import BASE, RotaryConfig, read_rotary, rope_table

ROTARY_SHARE = 0.25
"""Share of each head's dimensions that are rotated if config.json has none."""


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    """The shared fields and GPT-NeoX's own."""

    epsilon: float
    """Added to the variance in each layer norm"""
    activation: str
    rotary: RotaryConfig
    parallel: bool
    """True: attention and MLP read the same x; False: the MLP reads x + attention"""
    attention_bias: bool
    tied_head: bool
    """The LM head is the token embedding"""


def read_config(raw: Mapping[str, Any]) -> GPTNeoXConfig:
    """GPT-NeoX's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling.
    """
    fields = Fields({"bos_token_id": 0, "eos_token_id": 2} | dict(raw))
    refuse_other_layers(fields)
    hidden_size, heads, head_dim = read_heads(fields)
    if fields.size("head_dim", head_dim) != head_dim:
        raise CheckpointError(f"config.json: head_dim should be hidden_size / num_attention_heads = {head_dim} here")
    rotary = _read_rotary(fields, head_dim)
    return GPTNeoXConfig(
        model_type="gpt_neox",
        hidden_size=hidden_size,
        num_layers=read_layers(fields),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_positions=rotary.longest,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("layer_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act", "gelu"),
        rotary=rotary,
        parallel=fields.get("use_parallel_residual", True),
        attention_bias=fields.get("attention_bias", True),
        tied_head=fields.get("tie_word_embeddings", False),
    )


def _read_rotary(fields: Fields, head_dim: int) -> RotaryConfig:
    """Partial rotary position embedding, from the table of transformers 5 or from the older field names."""
    table = rope_table(fields)
    old = {"rope_theta": ("rotary_emb_base", BASE), "partial_rotary_factor": ("rotary_pct", ROTARY_SHARE)}
    found = {}
    for name, (older, default) in old.items():
        found[name] = table.number(name, fields.number(older, default))
        if fields.number(name, found[name]) != found[name]:  # transformers 4 writes both names
            raise CheckpointError(
                f"{fields.source}: {name} should be {found[name]:g} as {older} or the rotary table has it, "
                f"found {fields.raw[name]}"
            )
    share = found["partial_rotary_factor"]
    if share > 1:
        raise CheckpointError(
            f"{fields.source}: partial_rotary_factor (or rotary_pct) should be above 0 and at most 1, found {share}"
        )
    return read_rotary(fields, int(head_dim * share), fields.size("max_position_embeddings"), base=found["rope_theta"])


def tensor_table(config: GPTNeoXConfig) -> Shapes:
    """Name (without `gpt_neox.`) and shape of every tensor."""
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    table: Shapes = {"embed_in.weight": (V, E)}
    for i in range(config.num_layers):
        part = f"layers.{i}"
        table |= linear_tensors(f"{part}.attention.query_key_value", 3 * E, E, config.attention_bias)
        table |= linear_tensors(f"{part}.attention.dense", E, E, config.attention_bias)
        table |= linear_tensors(f"{part}.mlp.dense_h_to_4h", F, E) | linear_tensors(f"{part}.mlp.dense_4h_to_h", E, F)
        table |= norm_tensors(f"{part}.input_layernorm", E) | norm_tensors(f"{part}.post_attention_layernorm", E)
    table |= norm_tensors("final_layer_norm", E)
    if not config.tied_head:
        table["embed_out.weight"] = (V, E)
    return table


def canonical_names(stored: Mapping[str, Tensor], config: GPTNeoXConfig) -> dict[str, Tensor]:
    """Tensors by canonical name, without the prefix `gpt_neox.` and the masks and frequencies of old checkpoints.

    The rows of Q, K and V are reordered: Q of all heads, then K, then V, as in `layers.attention`.
    """
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    head = "embed_out.weight"
    in_memory = {"lm_head.weight": head}  # transformers 5's name in memory
    tensors = shorten({in_memory.get(name, name): t for name, t in stored.items()}, "gpt_neox.", left_out=buffers)
    if config.tied_head:
        tensors = without_tied_head(tensors, "embed_in.weight", head)
    return with_qkv_apart(tensors, config.num_heads)


def build(config: GPTNeoXConfig, stored: Mapping[str, Tensor], backend: Backend) -> Decoder:
    """Build the model from tensors under canonical names.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    tensors, rotation = Tensors(stored, tensor_table(config), backend), config.rotary.rotation(backend)
    embedding = Embedding(tensors.table("embed_in", "vocabulary"))
    lm_head = LMHead(embedding.tokens if config.tied_head else tensors.table("embed_out", "vocabulary"))
    layers = tuple(_build_layer(config, tensors, rotation, i) for i in range(config.num_layers))
    return Decoder(config, embedding, layers, LayerNorm(tensors.norm("final_layer_norm"), config.epsilon), lm_head)


def _build_layer(config: GPTNeoXConfig, tensors: Tensors, rotation: Rotation, i: int) -> Parallel | PreNorm:
    part = f"layers.{i}"
    up, down = tensors.linear(f"{part}.mlp.dense_h_to_4h"), tensors.linear(f"{part}.mlp.dense_4h_to_h")
    block = Parallel if config.parallel else PreNorm
    return block(
        LayerNorm(tensors.norm(f"{part}.input_layernorm"), config.epsilon),
        Attention(
            layer=i,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            scale=config.head_dim**-0.5,
            qkv=tensors.linear(f"{part}.attention.query_key_value"),
            out=tensors.linear(f"{part}.attention.dense"),
            rotation=rotation,
        ),
        LayerNorm(tensors.norm(f"{part}.post_attention_layernorm"), config.epsilon),
        MLP(up, down, config.activation),
    )


def outline(config: GPTNeoXConfig) -> Outline:
    """The components in execution order, for `accounting`."""
    E, b = config.hidden_size, config.attention_bias
    layer = (
        Norm(name="attention norm", width=E),
        *self_attention(config, bias=b, out_bias=b, between=(config.rotary.outline(config),)),
        Norm(name="MLP norm", width=E),
        *mlp(config, config.activation),
    )
    return Outline(
        before=(Embed(name="embedding", width=E, vectors=config.vocab_size),),
        layers=(layer,) * config.num_layers,
        after=(Norm(name="final norm", width=E),),
        head=head(config, tied=config.tied_head),
    )


def _shape(E: int, L: int, H: int, V: int = 50304, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": E, "num_hidden_layers": L, "num_attention_heads": H, "intermediate_size": 4 * E}
    return {
        "model_type": "gpt_neox",
        "vocab_size": V,
        "max_position_embeddings": 2048,
        "eos_token_id": 0,
        **sizes,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "pythia-70m": _shape(512, 6, 8),
    "pythia-160m": _shape(768, 12, 12),
    "pythia-410m": _shape(1024, 24, 16),
    "pythia-1b": _shape(2048, 16, 8),
    "pythia-1.4b": _shape(2048, 24, 16),
    "pythia-2.8b": _shape(2560, 32, 32),
    "pythia-6.9b": _shape(4096, 32, 32, 50432),
    "pythia-12b": _shape(5120, 36, 40, 50688),
    "gpt-neox-20b": _shape(6144, 44, 64, 50432, hidden_act="gelu_fast"),
}
"""The published sizes (Pythia's paper, table 1; GPT-NeoX's, section 2.1), with the values of their config.json."""
