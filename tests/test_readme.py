"""The README's commands and examples, run as printed."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(("command", "printed"), sessions(), ids=[command for command, _ in sessions()])
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
    (code,) = re.findall(r"```python\n(from minillm.*?)```", README, re.DOTALL)
    code = code.replace('"path/to/checkpoint"', "None").replace('Engine.random("opt-1.3b")', "None")
    names = {"prompt": "A list of colors: red,", "prompt_a": "1, 2,", "prompt_b": "Monday,", "text": "a b c"}
    exec(code, {**names, "token_ids": [2, 5, 6]})
    assert capsys.readouterr().out


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
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 1650


def test_what_it_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
