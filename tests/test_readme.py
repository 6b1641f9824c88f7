"""The README's commands and examples, run as printed."""

import doctest
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.cli.main import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP, TEST, _ = re.findall(r"^\$ (pip install .*)$", README, re.MULTILINE)


def sessions() -> list[tuple[str, str]]:
    """Each `$ command` of a console block that shows what it prints, with that text."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL):
        for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            if printed:
                found.append((command, printed))
    return found


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        pytest.param(*session, id=session[0], marks=[pytest.mark.slow] if "perplexity" in session[0] else [])
        for session in sessions()
    ],
)
def test_a_session_prints_what_the_readme_shows(command, printed):
    arguments = shlex.split(command)
    assert arguments[0] == "python"
    result = subprocess.run([sys.executable, *arguments[1:]], capture_output=True, cwd=ROOT, check=False, timeout=120)
    complaints = [line for line in result.stderr.splitlines() if not line.startswith(b"minillm: compil")]  # a first run
    assert complaints == []
    pieces = re.split(r"^\.\.\.\n", printed, flags=re.MULTILINE)  # such a line stands for any lines
    assert re.fullmatch("(?:.*\n)*".join(map(re.escape, pieces)), result.stdout.decode())


def test_the_first_command_generates_text():
    command = SETUP.split("&&")[1]
    result = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, cwd=ROOT, check=False, timeout=120
    )
    assert result.returncode == 0
    assert result.stdout.decode().strip()


def test_ci_runs_the_two_commands():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in (*SETUP.split(" && "), TEST.split(" && ")[1]):
        assert command.removeprefix("pip install ") in script


def test_the_python_session_says_what_it_shows():
    results = doctest.testmod(_module(), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 3
    assert results.failed == 0


def _module() -> object:
    """A module whose docstring is the README's interactive Python."""
    module = type(sys)("readme")
    module.__doc__ = "\n".join(re.findall(r"```python\n(>>>.*?)```", README, re.DOTALL))
    return module


def test_the_python_example_runs(tmp_path, capsys):
    """The plain example, with the names it leaves open filled in and the demo model in place of a folder."""
    (code,) = re.findall(r"```python\n(from minillm import.*?)```", README, re.DOTALL)
    code = code.replace('"path/to/checkpoint"', "None").replace('Engine.random("opt-1.3b")', "None")
    names = {"prompt": "A list of colors: red,", "prompt_a": "1, 2,", "prompt_b": "Monday,", "text": "a b c"}
    exec(code, {**names, "token_ids": [2, 5, 6]})
    assert capsys.readouterr().out


def test_the_asyncio_example_runs(capsys):
    (code,) = re.findall(r"```python\n(import asyncio.*?)```", README, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert printed.startswith(" ")
    assert "Load(waiting=0, running=0" in printed


def test_the_loop_of_the_guide_generates(capsys):
    guide = (ROOT / "minillm" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    expected = names["engine"].generate("A list of colors: red,", max_new_tokens=8).token_ids
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_guides_first_reading_is_short():
    guide = (ROOT / "minillm" / "README.md").read_text(encoding="utf-8")
    order = guide[guide.index("## Where to begin") : guide.index("Generation is then a loop")]
    files = [ROOT / "minillm" / name for name in re.findall(r"`([a-z0-9_/]+\.py)`", order)]
    assert len(files) == 11
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 1900


def test_what_it_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize(
    "name",
    ["README.md", "minillm/README.md", "minillm/server/DEPLOYMENT.md", "kernels/README.md", "benchmarks/README.md"],
)
def test_tables_are_whole(name):
    """An empty line ends a table: the rows below it would be shown as text."""
    lines = ["", *(ROOT / name).read_text(encoding="utf-8").splitlines()]
    for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not above.startswith("|"):
            assert re.fullmatch(r"\|[-:| ]+\|", below), line


def test_the_commands_for_tasks_are_understood():
    """They need models of the hub, so they are only read."""
    section = README[README.index("## Tasks") : README.index("## Chat")]
    commands = re.findall(r"^python -m minillm (.*)$", section, re.MULTILINE)
    assert {shlex.split(command)[0] for command in commands} == {"translate", "summarize", "classify", "embed"}
    for command in commands:
        assert build_parser().parse_args(shlex.split(command)).model


@pytest.mark.slow
def test_the_served_examples_answer_as_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """The server of the README on a free port: curl's answer, and that of OpenAI's client."""
    pytest.importorskip("starlette", reason="the server needs the extra serve")
    section = README[README.index("## Serving") : README.index("## Fast on a CPU")]
    [shell] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    _, serve, curl = shell.replace("\\\n", "").splitlines()
    with Engine() as engine, socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        colors = engine.generate("A list of colors: red,", max_new_tokens=4).text
        count = engine.generate("Count from 3 to 9:", max_new_tokens=6).text
        story = engine.generate("Once upon a time", do_sample=True, top_k=20, seed=2, max_new_tokens=12).text
    command = [sys.executable, *shlex.split(serve.replace("8000", str(port)))[1:]]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("listening" in line for line in process.stderr)  # reads as far as that line
        if shutil.which("curl"):
            done = subprocess.run(
                ["curl", "-s", *shlex.split(curl.replace("8000", str(port)))[1:]], capture_output=True
            )
            assert json.loads(done.stdout)["choices"][0]["text"] == colors
        pytest.importorskip("openai", reason="the client is in the extra reference")
        names: dict[str, Any] = {}
        exec(code.replace("8000", str(port)), names)
        names["client"].close()
        assert capsys.readouterr().out == f"{count}\n{story}"
    finally:
        process.terminate()
        process.communicate(timeout=60)
