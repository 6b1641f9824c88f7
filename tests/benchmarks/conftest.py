"""Benchmarks are scripts: their folder goes on the path, and the environment they set is put back."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"


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
def subprocess_environment() -> dict[str, str]:
    """For a script that runs by itself, as if minillm were installed."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
