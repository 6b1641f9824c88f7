"""Benchmarks are scripts: their folder goes on the path, and the environment they set is put back."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
SMALL = {
    "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
    "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


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
    from minillm.models import opt

    from ..shapes import BASE

    monkeypatch.setitem(opt.SHAPES, "tiny", BASE)
    return "tiny"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A shape whose rows divide into llama.cpp's groups of 32."""
    from minillm.models import opt

    monkeypatch.setitem(opt.SHAPES, "small", SMALL)
    return "small"


@pytest.fixture
def subprocess_environment() -> dict[str, str]:
    """For a script that runs by itself, as if minillm were installed."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
