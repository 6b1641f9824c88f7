"""The real model, SmolLM2-135M-Instruct in GGUF's Q4_1: its file, engines on it, and transformers' results on it.

    python -m pytest tests/real -m real

The first run fetches the file (98 MB). What the tests measure (perplexities, acceptance rates) is printed at the end.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.backends.cpu.compiling import available
from minillm.formats.gguf.write import write_gguf

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fetch_smollm2 import fetch

HERE = Path(__file__).parent
CACHE_BYTES = 600 << 20
"""Room for 13,000 positions of 46 kB"""

Engines = Callable[..., Engine]


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The path of the GGUF file."""
    return fetch()


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    """transformers' results; scripts/make_real_golden.py writes them and says what they are."""
    return json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def text() -> str:
    """1,800 tokens of English."""
    return (HERE / "alice.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def engines(model_file: Path) -> Iterator[Engines]:
    """Makes engines on the real model, by default in float32 on the kernels in C. Of equal options, the same engine."""
    made: dict[str, Engine] = {}

    def make(model: Path = model_file, **options: Any) -> Engine:
        chosen = {"backend": "cpu", "dtype": "float32", "max_batch_size": 8, "cache_bytes": CACHE_BYTES} | options
        if chosen["backend"] == "cpu" and not available():
            pytest.skip("the kernels in C need a C compiler")
        key = repr((model, sorted(chosen.items())))
        if key not in made:
            made[key] = Engine(model, **chosen)
        engine = made[key]
        assert not engine.busy, "the test before left a request behind"
        return engine

    yield make
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="session")
def engine(engines: Engines) -> Engine:
    """The model in float32, on the kernels in C."""
    return engines()


@pytest.fixture(scope="session")
def int4(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in int4, in a GGUF file of its own: a draft, or an amateur."""
    path = tmp_path_factory.mktemp("quantised") / "int4.gguf"
    write_gguf(model_file, path, "int4")
    return path


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Notes a line for the summary at the end of the run."""
    return lambda line: record_property("measured", line)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the lines that tests noted."""
    reports = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    if lines := [value for report in reports for name, value in report.user_properties if name == "measured"]:
        terminalreporter.section("measured on SmolLM2-135M-Instruct")
        for line in lines:
            terminalreporter.line(line)
