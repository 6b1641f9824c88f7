"""Mistral's configuration: the window."""

from typing import Any

import numpy as np
import pytest

from minillm.errors import CheckpointError
from minillm.models import mistral

from ..tiny import logits_of, model_of, runner_of
from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "mistral"}

CONFIGS: dict[str, dict[str, Any]] = {
    "window": CONFIG | {"sliding_window": 9},
    "window of one page": CONFIG | {"sliding_window": 16, "head_dim": 12, "num_key_value_heads": 1},
    "no window": CONFIG | {"sliding_window": None, "tie_word_embeddings": True},
}


PARAMETERS = {"mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552}
"""As the published checkpoints have them."""


def test_the_window_is_read_and_null_is_none() -> None:
    assert mistral.read_config(CONFIG | {"sliding_window": 9}).windows == (9, 9)
    assert mistral.read_config(CONFIG | {"sliding_window": None}).windows == (None, None)
    assert mistral.read_config(CONFIG).windows == (4096, 4096)  # transformers' own default
    with pytest.raises(CheckpointError, match="sliding_window should be at least 1, found 0"):
        mistral.read_config(CONFIG | {"sliding_window": 0})


def test_a_token_two_windows_back_has_no_say_and_one_within_has() -> None:
    """Two layers of a window of 9 reach back 2 * 8 positions and no further."""
    runner = runner_of(model_of(CONFIG | {"sliding_window": 9}))
    line = np.random.default_rng(0).integers(3, 96, 40).tolist()
    last = logits_of(runner, line)[-1]
    for position, reaches in ((39 - 17, False), (39 - 16, True)):
        other = [*line[:position], line[position] ^ 1, *line[position + 1 :]]
        assert (np.abs(logits_of(runner, other)[-1] - last).max() > 1e-6) == reaches
