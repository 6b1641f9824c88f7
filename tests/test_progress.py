"""Reports of long work, which tell everything once, and the bar that shows them where somebody can see it."""

import asyncio
import io
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncEngine, Engine
from minillm.cli.main import run
from minillm.cli.output import read_first
from minillm.errors import ParameterError
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.measure.accounting import parameter_count
from minillm.measure.accounting.hardware import CHIPS
from minillm.measure.comparison import BEAM_SEARCH, STRATEGIES, beam_tree, compare
from minillm.measure.precision import perplexity
from minillm.measure.profiling import profile
from minillm.progress import watching, work
from minillm.text.chat import ChatTemplate

from .terminal import ROOT, Screen, Terminal
from .tiny import tiny_config
from .tiny import write_checkpoint as write_source

TEXT = "A list of colors: red,"
CHAT = [{"role": "user", "content": TEXT}]
LIMIT = {"max_new_tokens": 3, "eos_token_id": ()}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars appear without delay."""
    monkeypatch.setattr("minillm.progress_bar.BAR_DELAY", 0)
    monkeypatch.setattr("minillm.progress_bar.INTERVAL", 0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_batch_size=4) as engine:
        engine.chat_template = ChatTemplate("{{ messages[0].content }}", "a template", {})
        yield engine


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_parameter_is_told_once(checkpoint: Path, dtype: str) -> None:
    told: list[tuple[int, int | None]] = []
    with watching(lambda work: told.append((work.done, work.total))), Engine(checkpoint, dtype=dtype) as engine:
        total = parameter_count(engine.config)
    assert told[-1] == (total, total)
    assert {of for _, of in told} == {total}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    Engine(checkpoint).close()
    assert told[-1] == (total, total), "nobody is told once the block has ended"


def test_before_its_first_token_a_stream_tells_how_much_of_the_prompt_is_in_the_cache(tmp_path: Path) -> None:
    """A chat with a long text was silent until then."""
    folder = write_source(tmp_path, max_position_embeddings=2048)
    prompt, told = [5, 6, 7, 8] * 300, list[tuple[str, int, int | None]]()
    with Engine(folder, max_batch_size=1, prefix_cache=True) as engine:
        for _ in range(2):
            with watching(lambda work: told.append((work.title, work.done, work.total))):
                events = [*read_first(engine.stream(prompt, **LIMIT))]
            assert [event.generated_tokens for event in events] == [1, 2, 3]
    *first, last = told
    assert len(first) >= 2 and [step for _, step, _ in first] == sorted({step for _, step, _ in first})
    assert all(one == ("prompt", one[1], 1200) for one in told)
    assert first[-1] == last == ("prompt", 1200, 1200)  # the second time all but one token was there


def test_of_nested_work_the_outermost_is_told() -> None:
    told: list[tuple[str, int]] = []
    with watching(lambda work: told.append((work.title, work.done))), work("scoring", 5, "tokens"):
        for title, count in (("scoring", 2), ("loading", 7), ("scoring", 3)):
            with work(title, None, "tokens") as inner:
                inner.advance(count)
    assert told == [("scoring", 2), ("scoring", 5)]


# --- the bar ----------------------------------------------------------------------------------------------------------

LONG: dict[str, tuple[Callable[..., object], str]] = {
    "Engine": (lambda engine, source, **more: Engine(source, **more), "loading: 100%"),
    "quantising at load": (lambda engine, source, **more: Engine(source, dtype="int8", **more), "as int8: 100%"),
    "Engine.random": (lambda engine, source, **more: Engine.random("opt-tiny", **more), "drawing: 100%"),
    "generate": (lambda engine, source, **more: engine.generate(TEXT, **LIMIT, **more), "3/3 tokens"),
    "a list": (lambda engine, source, **more: engine.generate([TEXT] * 5, **LIMIT, **more), "5/5 prompts"),
    "beams": (lambda engine, source, **more: engine.generate(TEXT, num_beams=2, **LIMIT, **more), "3/3 tokens"),
    "chat": (
        lambda engine, source, **more: engine.chat([{"role": "user", "content": "Hi"}], **LIMIT, **more),
        "3/3 tokens",
    ),
    "score": (lambda engine, source, **more: engine.score([7] * 150, **more), "scoring: 100%"),
    "forward": (lambda engine, source, **more: engine.forward([7] * 150, **more), "150/150 tokens"),
    "attention": (lambda engine, source, **more: engine.attention([7] * 150, **more), "150/150 tokens"),
    "perplexity": (lambda engine, source, **more: perplexity(engine, TEXT * 60, **more), "scoring: 100%"),
    "compare": (
        lambda engine, source, **more: compare(engine, TEXT, STRATEGIES[:3], max_new_tokens=2, **more),
        "3/3 strategies",
    ),
    "beam_tree": (
        lambda engine, source, **more: beam_tree(engine, TEXT, **LIMIT, **BEAM_SEARCH.fields, **more),
        "searching: 100%",
    ),
    "profile": (
        lambda engine, source, **more: profile(engine, [[2, 5]], hardware=CHIPS["a100"], **LIMIT, **more),
        "8/8 tokens",
    ),
    "write_checkpoint": (
        lambda engine, source, **more: write_checkpoint(source, source.with_name(f"{len(more)}"), "int4", **more),
        "writing int4: 100%",
    ),
}
"""Public calls that may take long, and a part of the bar at their end"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LONG)
def test_long_calls_show_one_bar_unless_it_is_turned_off(
    name: str, engine: Engine, source: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm.models import published

    monkeypatch.setitem(published(), "opt-tiny", tiny_config())
    call, end = LONG[name]
    with redirect_stderr(Screen()) as screen:
        call(engine, source, progress=False)
        assert screen.getvalue() == ""
        call(engine, source)
    assert len(screen.lines) == 1
    assert end in screen.lines[0]


@pytest.mark.parametrize("call", [Engine, lambda **more: Engine.random("opt-125m", **more)])
def test_progress_is_a_switch(call: Callable[..., Any], engine: Engine) -> None:
    for refused in (call, lambda **more: engine.generate(TEXT, **more), lambda **more: engine.score(TEXT, **more)):
        with pytest.raises(ParameterError, match="progress should be True or False"):
            refused(progress="no")
    with pytest.raises(ParameterError, match="progress"):
        engine.stream(TEXT, progress=True)  # prints nothing in any case


def test_a_file_and_a_thread_have_no_bar(source: Path, at_once: None) -> None:
    def load() -> None:
        Engine(source).close()

    with redirect_stderr(Screen()) as screen:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    with redirect_stderr(io.StringIO()) as file:
        load()
    with redirect_stderr(None):
        load()
    assert screen.getvalue() + file.getvalue() == ""


def test_an_async_engine_has_no_bar(source: Path, at_once: None) -> None:
    with watching(lambda work: None):
        inner = Engine(source)

    async def use() -> None:
        async with AsyncEngine(inner) as engine:
            await engine.generate([TEXT, TEXT], max_new_tokens=3)
            await engine.call(inner.score, TEXT)

    with redirect_stderr(Screen()) as screen:
        asyncio.run(use())
    assert screen.getvalue() == ""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_bar_vanishes_when_its_work_ends_early(error: type[BaseException], at_once: None) -> None:
    with redirect_stderr(Screen()) as screen, pytest.raises(error), work("loading", 10, "parts") as loading:
        loading.advance(3)
        assert "loading:  30%" in screen.getvalue()
        raise error
    assert screen.getvalue().rpartition("\r")[2] == ""
    assert screen.getvalue().split("\r")[-2].strip() == ""
    assert "\n" not in screen.getvalue()


def test_work_that_needs_less_than_it_might_ends_at_100(at_once: None, engine: Engine) -> None:
    with redirect_stderr(Screen()) as screen:
        engine.generate(TEXT, max_new_tokens=400)
    assert "generating: 100%" in screen.lines[0]
    assert "/400" not in screen.lines[0]


@pytest.mark.slow
def test_short_work_shows_nothing_and_imports_nothing(tmp_path: Path) -> None:
    code = f"""
        import sys
        from minillm import Engine, progress_bar
        assert progress_bar.BAR_DELAY == 1
        progress_bar.BAR_DELAY = 99  # this machine may be busy
        Engine().generate([{TEXT!r}] * 2, max_new_tokens=2)
        print("END", "tqdm" in sys.modules)
    """
    terminal = Terminal([sys.executable, "-c", textwrap.dedent(code)])
    assert terminal.read_until("END False").strip() == "END False"
    assert terminal.close() == 0


def test_bars_of_commands_leave_nothing(at_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(Screen()) as screen:
        assert run(["generate", "-p", TEXT, "-p", "1, 2,", "-n", "3"]) == 0
    assert "loading: 100%" in screen.getvalue() and "generating: 100%" in screen.getvalue()
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().split("\r")[-2:] == [" " * len(screen.getvalue().split("\r")[-2]), ""]


SLOW_WORK = """
    import sys, time
    from minillm import progress, progress_bar
    progress_bar.BAR_DELAY = 0
    with progress.work("loading", 10, "parts") as loading:
        loading.advance(4)
        {what}
        for _ in range(6):
            loading.advance(1)
"""


@pytest.mark.longer
@pytest.mark.usefixtures("listening")
def test_a_signal_clears_the_bar_of_a_command() -> None:
    code = "from minillm.cli.startup import end_at_signals; end_at_signals()\n" + textwrap.dedent(SLOW_WORK)
    terminal = Terminal([sys.executable, "-c", code.format(what="time.sleep(60)")])
    assert "loading:  40%" in terminal.read_until("4/10 parts")
    terminal.write("\x03")
    shown = terminal.read_until("never shown")
    assert terminal.close() == 130
    _, cleared, rest = shown.rpartition("\r")
    assert cleared and not rest.strip()


STAND_IN = """
    import types

    class Widget:
        def __init__(self, children=(), **fields):
            self.layout, self.style = types.SimpleNamespace(), types.SimpleNamespace()
            self.children, self.value, self.bar_style = children, "", ""
            self.__dict__.update(fields)

    def module(name, **names):
        sys.modules[name] = made = types.ModuleType(name)
        made.__dict__.update(names)

    class ZMQInteractiveShell:
        config = {"IPKernelApp": {}}

    shown = []
    module("ipykernel.zmqshell")
    module("IPython", get_ipython=ZMQInteractiveShell, version_info=(9,))
    module("IPython.display", display=shown.append)
    module("ipywidgets", **dict.fromkeys(("HTML", "HBox", "FloatProgress"), Widget))
"""


@pytest.mark.longer
@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_has_a_widget_or_a_line_of_text(widgets: bool) -> None:
    ends = """
    if shown:
        left, bar, right = shown[0].children
        print(len(shown), left.value.split("%")[0], bar.value, bar.max, bar.bar_style, right.value)
    """
    stand_in = STAND_IN if widgets else STAND_IN.replace('module("ipywidgets"', 'module("none"')
    code = textwrap.dedent("    import sys" + stand_in + SLOW_WORK.format(what="pass") + ends)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    if widgets:
        assert done.stderr == ""
        assert done.stdout.replace("\u2007", " ").startswith("1 loading: 100 10 10 success  10/10")
    else:
        assert "loading: 100%" in done.stderr.split("\r")[-1]
