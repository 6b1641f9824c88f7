"""MiniCPM3's configuration: latent attention with the factors of Granite."""

from typing import Any

from .test_deepseek_v2 import SIZES, YARN

CONFIG: dict[str, Any] = SIZES | {"model_type": "minicpm3", "q_lora_rank": 20}
CONFIG |= {"scale_emb": 2.0, "scale_depth": 1.2, "dim_model_base": 24}

CONFIGS: dict[str, dict[str, Any]] = {
    "factors": CONFIG,
    "without factors": CONFIG | {"scale_depth": None, "dim_model_base": None, "v_head_dim": None},
    "queries of full rank, biases": CONFIG
    | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN},
}

PARAMETERS: dict[str, int] = {"minicpm3-4b": 4_073_875_968}
