"""Benchmarks are scripts: their folder goes on the path, and the environment they set is put back."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
SMALL = {
    "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
    "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


SMALL_KIN = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
SMALL_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL_KIN | {"rms_norm_eps": 1e-5},
    "llama, tied": SMALL_KIN | {"tie_word_embeddings": True, "rope_theta": 100000.0},
    "qwen2": SMALL_KIN | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64},
}
"""Small shapes of what llama.cpp and CTranslate2 know."""


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a shape that runs in no time."""
    from minillm.models import published

    from ..shapes import BASE

    monkeypatch.setitem(published(), "tiny", BASE)
    return "tiny"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A shape whose rows divide into llama.cpp's groups of 32."""
    from minillm.models import published

    monkeypatch.setitem(published(), "small", SMALL)
    return "small"


@pytest.fixture
def subprocess_environment() -> dict[str, str]:
    """For a script that runs by itself, as if minillm were installed."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
