"""The bar that shows how far a model is loaded: it counts every parameter once, and is silent without a terminal."""

import io
from pathlib import Path

import pytest

from minillm import Engine
from minillm.accounting import parameter_count
from minillm.cli.loading_bar import loading_bar
from minillm.progress import watching


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_parameter_is_told_once(checkpoint: Path, dtype: str) -> None:
    told: list[tuple[int, int]] = []
    with watching(lambda done, total: told.append((done, total))), Engine(checkpoint, dtype=dtype) as engine:
        total = parameter_count(engine.config)
    assert told[-1] == (total, total)
    assert {of for _, of in told} == {total}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    Engine(checkpoint).close()
    assert told[-1] == (total, total), "nobody is told once the block has ended"


def test_the_bar_shows_on_a_terminal_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.cli.loading_bar.SECONDS", 0)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        with loading_bar():
            Engine(checkpoint, draft=checkpoint).close()
        assert ("100%" in stream.getvalue()) is shown
        assert stream.getvalue().count("loading: 100%") == (2 if shown else 0)
