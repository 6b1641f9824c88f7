"""Servers with the model in the package."""

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.server import make_app

from .client import TEMPLATE


@pytest.fixture(scope="session")
def demo() -> Iterator[Engine]:
    """The model in the package, with a chat template."""
    with Engine(max_batch_size=8, prefix_cache=True) as engine:
        engine.chat_template = TEMPLATE
        yield engine


@pytest.fixture(scope="session")
def app(demo: Engine) -> Starlette:
    """A server of it."""
    return make_app({"demo": demo})
