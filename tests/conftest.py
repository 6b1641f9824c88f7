"""Fixtures that several test modules use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from minillm import Engine

from .tiny import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random tiny OPT and the small tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=2)


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    """An engine on that checkpoint, whose cache is empty again at the end of the test."""
    with Engine(checkpoint) as engine:
        yield engine
        assert not engine.busy
        assert engine.runner.cache.free_pages == engine.runner.cache.num_pages
