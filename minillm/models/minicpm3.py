"""MiniCPM3 (OpenBMB, 2024): latent attention, one MLP in each layer, and factors as Granite's.

    x = a tokens[ids]
    x = x + m attention(norm(x));  x = x + m mlp(norm(x))      in each layer, m = scale_depth / sqrt(L)
    logits = norm(x) W_lm / (E / dim_model_base)

The factor of residual sums takes no operation: `granite.py` says how.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .deepseek_v2 import NAMES, LatentConfig, build, read_latent
from .granite import MOST
from .llama import TOKENS
from .reading import read_layers
from .rotary import KINDS

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = TOKENS | {"max_position_embeddings": 32_768}
"""Fields that config.json may lack"""
SIZES = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "kv_lora_rank": 256, "q_lora_rank": 768}
"""Widths of latent attention if config.json has none; that of values is E / H"""


def read_config(raw: Mapping[str, Any]) -> LatentConfig:
    """MiniCPM3's configuration from config.json; a factor that is null is left out.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(DEFAULTS | {name: value for name, value in raw.items() if value is not None})
    E, H, root = fields.size("hidden_size"), fields.size("num_attention_heads"), read_layers(fields) ** 0.5

    def factor(name: str, usual: float, null: float) -> float:
        null_there = name in raw and raw[name] is None
        return fields.number(name, null if null_there else usual, above=1 / MOST, most=MOST)

    embedding, residual = factor("scale_emb", 12.0, 12.0), factor("scale_depth", 1.4, root) / root
    return read_latent(
        raw,
        fields,
        "minicpm3",
        sizes=SIZES | {"v_head_dim": max(1, E // H)},
        interleaved=False,
        kinds=(*KINDS, "longrope"),
        tied_head=True,
        epsilon=fields.number("rms_norm_eps", 1e-5) / residual**2,
        mlp_bias=fields.get("mlp_bias", False),
        embedding_scale=embedding / residual,
        given_scale=1 / residual,
        logit_scale=factor("dim_model_base", 256.0, float(E)) / E,
    )
