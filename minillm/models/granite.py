"""Granite 3 (IBM, 2024): Llama with factors of the embedding, of attention scores, of each residual sum, and of logits.

    x = a tokens[ids]
    x = x + m attention(norm(x));  x = x + m mlp(norm(x))      in each layer
    logits = norm(x) W_lm / s

The factor m of the residual sums takes no operation. With y = x / m these lines are

    y = (a / m) tokens[ids]
    y = y + attention(norm(m y));  y = y + mlp(norm(m y))
    logits = norm(m y) W_lm / s

and RMS norm of m y is that of y with epsilon / m^2 in place of epsilon: what this model computes is y.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import NAMES, TOKENS, LlamaConfig, build, read_kin
from .reading import refuse_other_layers

__all__ = ["NAMES", "build", "read_config", "read_factors"]

MOST = 1e6
"""Upper bound of a factor and of its inverse."""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Granite's configuration from config.json; factors that it does not have are 1, the scores' too.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(TOKENS | dict(raw))
    refuse_other_layers(fields)
    bias = fields.get("attention_bias", False)
    mlp_bias = fields.get("mlp_bias", False)
    config: LlamaConfig = read_kin(
        fields, "granite", qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, **read_factors(fields)
    )
    return config


def read_factors(fields: Fields) -> dict[str, Any]:
    """The four factors of Granite's families, and the norms' epsilon: fields of `LlamaConfig`.

    Raises:
        CheckpointError: one is invalid.
    """
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, scores, logits = (fields.number(name, 1.0, above=1 / MOST, most=MOST) for name in names)
    return {
        "epsilon": fields.number("rms_norm_eps", 1e-6) / residual**2,
        "embedding_scale": embedding / residual,
        "given_scale": embedding / residual,
        "score_scale": scores,
        "logit_scale": 1 / logits,
    }
