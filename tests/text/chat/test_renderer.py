"""The process that renders chat templates: shared by threads, left alone after a fork, replaced when it ends."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minillm.errors import CheckpointError
from minillm.text.chat import ChatTemplate, renderer

from ...children import in_child
from ...conversations import user

TEMPLATE = ChatTemplate("{{ messages[0].content }}")
ENDLESS = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")


@pytest.fixture(autouse=True)
def own_renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[renderer.Renderer]:
    """A renderer whose process has not been started."""
    own = renderer.Renderer()
    monkeypatch.setattr(renderer, "RENDERER", own)
    yield own
    own.close()


def greet(name: str = "Hi") -> str:
    return TEMPLATE.render([user(name)])


def children() -> set[str]:
    """Processes started by this one, ended ones that nobody waited for included."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def descriptors_open() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


@pytest.mark.longer
def test_threads_get_their_own_answers() -> None:
    names = [f"{i} " + "é\ud800\n" * i for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(greet, names)) == names


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_starts_its_own() -> None:
    def greetings(name: str) -> bool:
        return all(greet(f"{name} {i}") == f"{name} {i}" for i in range(50))

    def child() -> bool:
        same = greetings("child")
        renderer.RENDERER.close()
        return same

    greet()
    with ThreadPoolExecutor(1) as pool:
        parent = pool.submit(greetings, "parent")
        assert in_child(child)
        assert parent.result()


@pytest.mark.longer
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_stopped_leaves_no_process_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 0.2)
    processes, descriptors = children(), descriptors_open()
    for _ in range(3):
        with pytest.raises(CheckpointError, match=r"was stopped: it takes more than 0\.2 s"):
            ENDLESS.render([user("Hi")])
    assert children() == processes
    assert descriptors_open() == descriptors
    assert greet() == "Hi"


@pytest.mark.longer
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_was_ended_is_replaced() -> None:
    before = children()
    greet()
    for process in children() - before:
        os.kill(int(process), signal.SIGKILL)
        os.waitid(os.P_PID, int(process), os.WEXITED | os.WNOWAIT)
    assert greet("again") == "again"


@pytest.mark.longer
@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interrupted_request_does_not_reach_the_next_one() -> None:
    program = (
        "import os, signal, threading\n"
        "from minillm.text.chat import ChatTemplate\n"
        "say = lambda text: ChatTemplate('{{ messages[0].content }}').render([{'role': 'user', 'content': text}])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell's background jobs ignore
        "say('a')\n"
        "loops = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
        "try:\n"
        "    threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()\n"  # as Ctrl-C does
        "    ChatTemplate(loops).render([{'role': 'user', 'content': 'Hi'}])\n"
        "except KeyboardInterrupt:\n"
        "    print(say('b'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, start_new_session=True, check=False
    )
    assert done.stdout == "b\n", done.stderr


@pytest.mark.parametrize("interpreter", ["", "/usr/sbin/uwsgi", "/nowhere/python3"])
def test_without_a_process_a_warning_says_that_nothing_limits_a_template(
    interpreter: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    assert (greet("a"), greet("b")) == ("a", "b")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "without limits" in caplog.text
    with pytest.raises(CheckpointError, match="refused by the sandbox"):
        ChatTemplate("{{ ''.__class__.__mro__ }}").render([user("Hi")])


@pytest.mark.longer
def test_the_process_loads_no_numpy() -> None:
    program = "import sys; sys.path += sys.argv[1:]; import sandbox; print(sorted(sys.modules))"
    folder = Path(renderer.__file__).parent
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(folder), *sys.path], capture_output=True, text=True, check=True
    )
    assert "jinja2" in loaded.stdout
    assert "numpy" not in loaded.stdout
    assert "minillm" not in loaded.stdout
