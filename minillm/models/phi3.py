"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Abdin et al., arXiv 2404.14219): Llama with LongRoPE or a sliding window.

Checkpoints have Q, K and V as one tensor, gate and up as another. Phi-4-mini rotates three quarters of each head.

With LongRoPE a text of more than the original length has other frequencies at all of its positions: when a text grows
beyond that length, its keys are computed anew (`ModelConfig.keys_change_beyond`), as in transformers.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError
from .llama import NAMES, LlamaConfig, build, read_kin
from .reading import read_grouped_heads, read_layer_types, read_layers, refuse_other_layers
from .rotary import RotaryConfig, from_tables, read_rotary, rope_table

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"bos_token_id": 1, "eos_token_id": 32_000, "original_max_position_embeddings": 4096}
"""BOS and EOS token ids and original length if config.json does not have the fields."""

OLDER_NAMES = ("su", "yarn")
"""Names of LongRoPE in earlier checkpoints of this family."""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Phi-3's configuration from config.json; `sliding_window` null or absent means full causal attention.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(DEFAULTS | dict(raw))
    refuse_other_layers(fields, windows=True)
    window = None if fields.raw.get("sliding_window") is None else fields.size("sliding_window")
    read_layer_types(fields, ("full_attention" if window is None else "sliding_attention",))
    return read_kin(
        fields,
        "phi3",
        windows=(window,) * read_layers(fields),
        rotary=from_tables(fields, _read_rotary),
        epsilon=fields.number("rms_norm_eps", 1e-5),
        fused=True,
    )


def _read_rotary(fields: Fields) -> RotaryConfig:
    """Rotary embedding of the first `partial_rotary_factor` of each head."""
    table = rope_table(fields)
    beside = fields.number("partial_rotary_factor", 1.0)
    share = table.number("partial_rotary_factor", beside, most=1.0)
    dim = int(share * read_grouped_heads(fields)["head_dim"])
    kind = "type" if table.raw.get("rope_type") is None else "rope_type"
    renamed = {kind: "longrope"} if table.raw.get(kind) in OLDER_NAMES else {}
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = Fields({"rope_theta": fields.raw.get("rope_theta"), name: {**table.raw, **renamed}}, fields.source)
    positions = fields.size("max_position_embeddings", 4096)
    rotary = read_rotary(rope, dim, positions, kinds=("default", "longrope"))
    if rotary.short is not None and rotary.short > positions:
        raise CheckpointError(
            f"{fields.source}: original_max_position_embeddings should be at most max_position_embeddings {positions}, "
            f"found {rotary.short}"
        )
    return rotary
