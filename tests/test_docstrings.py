"""The examples in the docstrings of what users call, run as printed on the model in the package."""

import asyncio
import doctest
from collections.abc import Iterator
from typing import Any

import pytest

import minillm
from minillm import AsyncEngine, Engine, GenerationConfig
from minillm.engine.conversations import EngineConversations
from minillm.engine.lifecycle import EngineLifecycle
from minillm.engine.loading import DEMO_MODEL
from minillm.engine.prefixes import EnginePrefixes
from minillm.engine.readings import EngineReadings
from minillm.engine.stream import EventStream
from minillm.engine.text_readings import EngineTextReadings
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.text.chat import ChatTemplate

PUBLIC = [value for name in minillm.__all__ if isinstance(value := getattr(minillm, name), type)]
SHOWN = {
    Engine: {"generate", "stream", "add", "step", "abort", "run"},
    EngineConversations: {"chat", "render_chat", "stream_chat"},
    EnginePrefixes: {"save_prefix", "load_prefix"},
    EngineReadings: {"forward", "score", "score_continuations", "explain", "attention", "names", "hooks"},
    EngineLifecycle: {"random", "summary"},
    GenerationConfig: {"from_dict", "merged"},
    AsyncEngine: {"submit", "call", "abort", "drain"},
}
"""Methods that have an example of their own"""
SLOW = {"EngineLifecycle.random"}
"""Examples that take seconds"""


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What examples need not make: a folder; an engine, with a chat template that writes a message as it is."""
    more = {"asyncio": asyncio, "DEMO_MODEL": DEMO_MODEL, "write_checkpoint": write_checkpoint}
    more["folder"] = tmp_path_factory.mktemp("examples")
    with Engine() as engine:
        engine.chat_template = ChatTemplate("{{ messages[-1].content }}")
        yield {name: getattr(minillm, name) for name in minillm.__all__} | more | {"engine": engine}


def examples() -> list[doctest.DocTest]:
    """The examples of each docstring of the package and its public classes."""
    finder = doctest.DocTestFinder(recurse=False)
    found = finder.find(minillm, "minillm", globs={})
    for kind in (
        *PUBLIC,
        EngineConversations,
        EnginePrefixes,
        EngineReadings,
        EngineTextReadings,
        EngineLifecycle,
        EventStream,
    ):
        found += doctest.DocTestFinder().find(kind, kind.__name__, globs={})
    found += finder.find(write_checkpoint, "write_checkpoint", globs={})
    return [one for one in found if one.examples]


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.name in SLOW else []) for one in examples()],
)
def test_an_example_prints_what_it_shows(example: doctest.DocTest, names: dict[str, Any]) -> None:
    example.globs = dict(names)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    result = runner.run(example, out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted > 0


def test_what_is_public_has_an_example() -> None:
    shown = {example.name for example in examples()}
    assert {kind.__name__ for kind in PUBLIC} <= shown
    assert {f"{kind.__name__}.{method}" for kind, methods in SHOWN.items() for method in methods} <= shown
