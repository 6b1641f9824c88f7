"""A chat with the real model in a terminal, and the README's commands, run as printed."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT)
        os.close(theirs)

    def type(self, line: str) -> None:
        """Type a line and the Enter key."""
        os.write(self._ours, f"{line}\n".encode())

    def read_until(self, end: str, seconds: float = 120) -> str:
        """All that is shown, up to `end` or the command's own end."""
        shown, deadline = b"", time.monotonic() + seconds
        while not shown.endswith(end.encode()):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{end!r} was not shown in {seconds} seconds, but {shown!r}"
            try:
                more = os.read(self._ours, 4096)
            except OSError:  # as Linux says that the other end is closed
                break
            shown += more
        return shown.decode().replace("\r\n", "\n")

    def close(self) -> int:
        """Wait for the command's end. Returns its exit code."""
        code = self.process.wait(timeout=60)
        os.close(self._ours)
        return code


def test_a_chat_in_a_terminal(model_file: Path, expected: dict[str, Any], engine: Engine) -> None:
    case = expected["chats"][0]
    [question] = case["messages"]
    messages = [question, {"role": "assistant", "content": case["text"]}, {"role": "user", "content": "And of Italy?"}]
    second = engine.chat(messages, max_new_tokens=30)
    command = [sys.executable, "-m", "minillm", "chat", "--model", str(model_file), "--dtype", "float32", "--stats"]
    terminal = Terminal([*command, "--max-new-tokens", "30"])
    assert terminal.read_until("> ").endswith("> ")
    terminal.type(question["content"])
    assert terminal.read_until("\n> ").startswith(f"{question['content']}\n{case['text']}\nprompt of 37 tokens, 37 ")
    terminal.type("And of Italy?")
    shown = terminal.read_until("\n> ")
    assert shown.startswith(f"And of Italy?\n{second.text}\n")
    prompt, computed, cached = map(int, re.findall(r"prompt of (\d+) tokens, (\d+) computed, (\d+) cached", shown)[0])
    assert prompt == len(second.prompt_token_ids) and prompt == computed + cached and cached > 37
    os.write(terminal._ours, b"\x04")  # Ctrl-D
    terminal.read_until("\0")
    assert terminal.close() == 0


def test_the_readmes_three_commands() -> None:
    """The last two as printed, by a shell, with the question and the answer that are shown under them."""
    block, question, answer = re.findall(
        r"## A real chat model.*?```console\n(.*?)```.*?```text\n> (.*?)\n(.*?)\n```", README, re.DOTALL
    )[0]
    install, fetch, chat = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    assert install == 'pip install -e ".[gguf]"'
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    run = {"shell": True, "cwd": ROOT, "env": environment, "check": True, "capture_output": True, "text": True}
    assert Path(subprocess.run(fetch, **run, timeout=300).stdout.rstrip("\n")).is_file()
    assert subprocess.run(chat, **run, input=f"{question}\n", timeout=120).stdout == f"{answer}\n"
