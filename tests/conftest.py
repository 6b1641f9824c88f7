"""Fixtures that several test modules use."""

import gc
import getpass
import os
import re
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # several workers of pytest share the cores: none may spin
os.environ["ONEDNN_DEFAULT_FPMATH_MODE"] = "STRICT"  # products of torch are in float32, whatever the processor offers
# What is compiled stays for the next run in the folder where pytest keeps those of its last runs, not in the user's.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(tempfile.gettempdir(), f"pytest-of-{getpass.getuser()}", "kept")))
os.environ.setdefault("XDG_STATE_HOME", os.environ["XDG_CACHE_HOME"])
# Who wants no bytecode beside the sources gets it there: each of many processes would compile every file, and pytest
# write the assertions of every test anew, which takes half of the time of collecting them.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.pycache_prefix = os.environ.setdefault(
        "PYTHONPYCACHEPREFIX", str(Path(os.environ["XDG_CACHE_HOME"], "bytecode"))
    )
    sys.dont_write_bytecode = False

import pytest

from minillm import Engine
from minillm.backends.cpu import compiling
from minillm.backends.cpu.launching import set_threads

from .tiny import write_checkpoint

MODULE_MARKS = re.compile(r"^pytestmark = (\[[^]]*|.*)", re.MULTILINE)

if "PYTEST_XDIST_WORKER" in os.environ:
    set_threads(1)  # the workers share the cores; tests of threads set their number


if library := os.environ.get("MINILLM_TEST_LIBRARY"):  # compiled kernels to test in place of this checkout's
    compiling.use(Path(library))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests never become garbage: looking for it among them took a third of the time of collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@cache
def left_out(expression: str) -> frozenset[str]:
    """The marks whose tests a run's `-m` leaves out, whatever other marks they have."""
    conditions = re.sub(r"\([^()]*\)", "", expression)
    return frozenset() if re.search(r"\bor\b|\(", conditions) else frozenset(re.findall(r"\bnot (\w+)", conditions))


def left_out_by(config: pytest.Config) -> frozenset[str]:
    """The same, or none where tests are named one by one: pytest has no other way to say that one is deselected."""
    return frozenset() if any("::" in argument for argument in config.args) else left_out(config.option.markexpr)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module of which a run leaves everything out is not imported, nor is torch, by a run without comparisons."""
    if collection_path.suffix != ".py" or not (excluded := left_out_by(config)):
        return None
    marks = MODULE_MARKS.search(collection_path.read_text(encoding="utf-8"))
    return bool(marks and excluded.intersection(re.findall(r"pytest\.mark\.(\w+)", marks[0]))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """The cases of a function that a run leaves out, a third of all, are not made."""
    if not name.startswith(("test", "Test")):
        return None
    marks = getattr(obj, "pytestmark", [])  # of a module that is imported by this name perhaps one alone
    marks = marks if isinstance(marks, list) else [marks]
    return [] if left_out_by(collector.config).intersection(mark.name for mark in marks) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every n-th case of a test that is `sampled(n, slow=m)` stays as it is; of the others every m-th becomes slow, and
    the rest exhaustive.
    """
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if not isinstance(item, pytest.Function) or not sampled:
            continue
        number = sum(set(item.callspec.indices.values()))  # of each parameter; those of one decorator are equal
        if not item.get_closest_marker("slow") and number % sampled.args[0]:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.unsampled)
        if item.get_closest_marker("slow") and number % sampled.kwargs.get("slow", 1):
            item.add_marker(pytest.mark.exhaustive)


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


@pytest.fixture
def listening() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in a shell's background, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
