"""Youtu-LLM's configuration: DeepSeek-V3's latent attention without experts."""

from typing import Any

from .test_deepseek_v2 import SIZES, YARN

# transformers zeroes the embedding of a padding token when it loads a checkpoint of this family.
CONFIG: dict[str, Any] = SIZES | {"model_type": "youtu", "q_lora_rank": 20, "pad_token_id": None}

CONFIGS: dict[str, dict[str, Any]] = {
    "tied": CONFIG,
    "queries of full rank, a head of its own": CONFIG | {"q_lora_rank": None, "tie_word_embeddings": False},
    "halves, yarn, biases": CONFIG | {"rope_interleave": False, "rope_parameters": YARN, "attention_bias": True},
}

PARAMETERS: dict[str, int] = {"youtu-2b": 1_961_560_064}
