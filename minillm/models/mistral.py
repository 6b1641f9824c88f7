"""Mistral (Jiang et al., arXiv 2310.06825): Llama with sliding window attention."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import TOKENS, LlamaConfig, build, canonical_names, outline, read_kin, tensor_table
from .reading import read_layer_types, read_layers, refuse_other_layers

__all__ = ["SHAPES", "build", "canonical_names", "outline", "read_config", "tensor_table"]

WINDOW = 4096
"""Sliding window if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Mistral's configuration from config.json; `sliding_window` null means full causal attention.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(TOKENS | {"sliding_window": WINDOW} | dict(raw))
    refuse_other_layers(fields, windows=True)
    window = None if fields.raw["sliding_window"] is None else fields.size("sliding_window")
    read_layer_types(fields, ("full_attention" if window is None else "sliding_attention",))
    return read_kin(fields, "mistral", windows=(window,) * read_layers(fields))


def _shape(**more: Any) -> dict[str, Any]:
    """config.json of the 7B model, in all its versions."""
    return {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": _shape(sliding_window=4096),
    "mistral-7b-v0.3": _shape(sliding_window=None, vocab_size=32768, rope_theta=1000000.0),
}
"""Published sizes, with the values of their config.json."""
