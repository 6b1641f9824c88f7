"""Whisper's configuration, its names, and what its encoder reads."""

from typing import Any

import numpy as np
import pytest

from minillm.encoder_input import AudioFeatures
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import config_of, published, tensor_shapes, whisper

CONFIG: dict[str, Any] = {
    "model_type": "whisper",
    "vocab_size": 96,
    "d_model": 32,
    "num_mel_bins": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_source_positions": 20,
    "max_target_positions": 64,
    "decoder_start_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "base": CONFIG,
    "scaled, relu": CONFIG | {"scale_embedding": True, "activation_function": "relu", "max_source_positions": 7},
    "other sizes": CONFIG | {"encoder_layers": 1, "decoder_layers": 3, "num_mel_bins": 5, "d_model": 16},
}

PARAMETERS = {"whisper-tiny": 37_760_640, "whisper-base": 72_593_920, "whisper-large-v3": 1_543_490_560}
"""As transformers counts them in the published checkpoints."""


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d_model": None}, CheckpointError, "d_model is missing"),
        ({"num_mel_bins": 0}, CheckpointError, "num_mel_bins should be at least 1, found 0"),
        ({"max_source_positions": -1}, CheckpointError, "max_source_positions should be at least 1, found -1"),
        ({"encoder_attention_heads": 8}, UnsupportedModelError, "encoder_attention_heads is 8 and decoder_attention"),
        ({"tie_word_embeddings": False}, UnsupportedModelError, "tie_word_embeddings is False; in this family"),
        (
            {"architectures": ["WhisperForAudioClassification"]},
            UnsupportedModelError,
            "architectures is 'WhisperForAudioClassification'; of this family minillm runs WhisperForCondit",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        whisper.read_config(CONFIG | change)


@pytest.mark.parametrize(("shape", "count"), PARAMETERS.items())
def test_published_sizes_have_as_many_numbers(shape: str, count: int) -> None:
    shapes = tensor_shapes(config_of(published()[shape]))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == count


def test_positions_of_frames_are_half_as_many() -> None:
    assert AudioFeatures(np.zeros((40, 12), np.float32)).positions == 20
