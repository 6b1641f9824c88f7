"""Qwen3 (arXiv 2505.09388): Llama with RMS norm of each query and key head before rotation."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import LlamaConfig, build, canonical_names, outline, read_kin, tensor_table
from .qwen2 import layer_windows

__all__ = ["SHAPES", "build", "canonical_names", "outline", "read_config", "tensor_table"]

HEAD_DIM = 128
"""Head width D if config.json has none; independent of the model's width"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Qwen3's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(raw)
    bias = fields.get("attention_bias", False)
    return read_kin(
        fields,
        "qwen3",
        windows=layer_windows(fields),
        head_dim=fields.size("head_dim", HEAD_DIM),
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
    )


def _shape(E: int, L: int, H: int, F: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": E,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _shape(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _shape(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _shape(4096, 36, 32, 12288),
    "qwen3-14b": _shape(5120, 40, 40, 17408),
}
"""Published sizes, with the values of their config.json."""
