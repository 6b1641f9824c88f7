"""mT5: T5 with a gated MLP and a head of its own, whose input is not scaled, whatever config.json says of ties."""

from typing import Any

from minillm.models import mt5

from .test_t5 import CONFIG

CONFIGS: dict[str, dict[str, Any]] = {
    "untied": CONFIG
    | {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "vocab_size": 112},
    "tied": CONFIG | {"model_type": "mt5", "feed_forward_proj": "gated-gelu"},
}

PARAMETERS = {"mt5-small": 300_176_768, "mt5-base": 582_401_280}
"""As transformers counts them in the published checkpoints, which have a head of their own."""


def test_the_heads_input_is_never_scaled() -> None:
    assert not mt5.read_config(CONFIGS["tied"]).scaled_head
    assert mt5.read_config({"model_type": "mt5"} | CONFIGS["tied"]).gated
