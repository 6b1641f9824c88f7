"""Pegasus: pre-norm, final norms and sinusoidal positions."""

from typing import Any

from .test_bart import CONFIG

PEGASUS = CONFIG | {"model_type": "pegasus", "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": PEGASUS,
    "relu, scaled": PEGASUS | {"activation_function": "relu", "scale_embedding": True, "decoder_layers": 3},
}

PARAMETERS = {"pegasus-xsum": 569_748_480 - 2 * 512 * 1024 + 96_103}
"""As of `test_bart`; without the positions of both stacks, which are computed."""
