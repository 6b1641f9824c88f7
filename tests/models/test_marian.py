"""MarianMT: post-norm, sinusoidal positions, a bias of the logits; source and target share one vocabulary."""

from typing import Any

import pytest

from minillm.errors import UnsupportedModelError
from minillm.models import marian

from .test_bart import CONFIG

MARIAN = CONFIG | {"model_type": "marian", "decoder_start_token_id": 95, "eos_token_id": 0, "pad_token_id": 95}

CONFIGS: dict[str, dict[str, Any]] = {
    "swish, scaled": MARIAN | {"activation_function": "swish", "scale_embedding": True},
    "relu": MARIAN | {"activation_function": "relu", "encoder_layers": 1},
}

PARAMETERS = {"opus-mt-en-de": 74_410_496 - 2 * 512 * 512 + 58_101}
"""As of `test_pegasus`."""


def test_a_second_vocabulary_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="share_encoder_decoder_embeddings is False; in this family"):
        marian.read_config(MARIAN | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 90})
