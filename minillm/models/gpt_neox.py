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
from ..config import Fields, ModelConfig
from ..errors import CheckpointError
from ..layers.block import Parallel, PreNorm
from ..layers.embedding import Embedding, LMHead
from ..reference.rotary import Rotation
from .decoder import Decoder
from .parameters import Weights
from .reading import read_activation, read_heads, read_shared, refuse_other_layers
from .rotary import BASE, RotaryConfig, from_tables, read_rotary, rope_table
from .tensor_names import Names

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


def read_config(raw: Mapping[str, Any]) -> GPTNeoXConfig:
    """GPT-NeoX's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling.
    """
    fields = Fields({"bos_token_id": 0, "eos_token_id": 2} | dict(raw))
    refuse_other_layers(fields)
    shared = read_heads(fields) | read_shared(fields, tied_head=False)
    head_dim = shared["head_dim"]
    if fields.size("head_dim", head_dim) != head_dim:
        raise CheckpointError(f"config.json: head_dim should be hidden_size / num_attention_heads = {head_dim} here")
    rotary = from_tables(fields, lambda table: _read_rotary(table, head_dim))
    return GPTNeoXConfig(
        model_type="gpt_neox",
        **shared,
        intermediate_size=fields.size("intermediate_size"),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("layer_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act", "gelu"),
        rotary=rotary,
        parallel=fields.get("use_parallel_residual", True),
        attention_bias=fields.get("attention_bias", True),
    )


def _read_rotary(fields: Fields, head_dim: int) -> RotaryConfig:
    """Partial rotary position embedding, from the table of transformers 5 or from the older field names."""
    table = rope_table(fields)
    old = {"rope_theta": ("rotary_emb_base", BASE), "partial_rotary_factor": ("rotary_pct", ROTARY_SHARE)}
    values = {}
    for name, (older, default) in old.items():
        values[name] = table.number(name, fields.number(older, default))
        if fields.number(name, values[name]) != values[name]:  # transformers 4 writes both names
            raise CheckpointError(
                f"{fields.source}: {name} should be {values[name]:g} as {older} or the rotary table has it, "
                f"found {fields.raw[name]}"
            )
    share = values["partial_rotary_factor"]
    if share > 1:
        raise CheckpointError(
            f"{fields.source}: partial_rotary_factor (or rotary_pct) should be above 0 and at most 1, found {share}"
        )
    return read_rotary(fields, int(head_dim * share), fields.size("max_position_embeddings"), base=values["rope_theta"])


NAMES = Names(
    prefixes=("gpt_neox.",),
    left_out=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    embedding="embed_in.weight",
    head="embed_out.weight",
)
"""Tensors of checkpoints: (gpt_neox.)layers.0.mlp.dense_h_to_4h.weight; old ones hold masks and frequencies."""


def build(config: GPTNeoXConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(weights.table("embed_in", V, E, "vocabulary"))
    lm_head = LMHead(embedding.tokens if config.tied_head else weights.table("embed_out", V, E, "vocabulary"))
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i) for i in range(config.num_layers))
    final_norm = weights.layer_norm("final_layer_norm", E, config.epsilon)
    return Decoder(config.sharded(weights.ranks), embedding, layers, final_norm, lm_head)


def _build_layer(config: GPTNeoXConfig, weights: Weights, rotation: Rotation, i: int) -> Parallel | PreNorm:
    E, F, bias = config.hidden_size, config.intermediate_size, config.attention_bias
    H = config.num_heads
    block = Parallel if config.parallel else PreNorm
    return block(
        weights.layer_norm("input_layernorm", E, config.epsilon),
        weights.attention(
            config,
            i,
            qkv=weights.linear(
                "attention.query_key_value", 3 * E, inputs=E, bias=bias, split="outputs", blocks=3, heads=H
            ),
            out=weights.linear("attention.dense", E, inputs=E, bias=bias, split="inputs"),
            rotation=rotation,
        ),
        weights.layer_norm("post_attention_layernorm", E, config.epsilon),
        weights.mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", E, F, config.activation),
    )
