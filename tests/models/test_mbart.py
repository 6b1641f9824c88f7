"""mBART: pre-norm and final norms; the decoder begins with the end of the source, and then a language."""

from typing import Any

from .test_bart import CONFIG

MBART = CONFIG | {"model_type": "mbart", "scale_embedding": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "scaled": MBART,
    "relu": MBART | {"activation_function": "relu", "encoder_layers": 2, "scale_embedding": False},
}

PARAMETERS = {"mbart-large-50": 610_879_488 + 250_054}
"""As of `test_bart`."""
