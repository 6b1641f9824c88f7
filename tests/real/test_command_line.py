"""A chat with the real model in a terminal, and the README's commands, run as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine

from ..terminal import Terminal

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_chat_in_a_terminal(model_file: Path, expected: dict[str, Any], engine: Engine, tmp_path: Path) -> None:
    case = expected["chats"][0]
    [question] = case["messages"]
    messages = [question, {"role": "assistant", "content": case["text"]}, {"role": "user", "content": "And of Italy?"}]
    second = engine.chat(messages, max_new_tokens=30)
    command = [sys.executable, "-m", "minillm", "chat", "--model", str(model_file), "--dtype", "float32", "--stats"]
    terminal = Terminal([*command, "--max-new-tokens", "30", "--temperature", "0"], XDG_STATE_HOME=str(tmp_path))
    terminal.read_until(">")
    terminal.type(question["content"])
    shown = terminal.read_until("tokens/s\n") + terminal.read_until(">")
    assert case["text"] in shown and "prompt of 37 tokens, 37 computed" in shown
    terminal.type("And of Italy?")
    shown = terminal.read_until("tokens/s\n")
    assert second.text in shown
    prompt, computed, cached = map(int, re.findall(r"prompt of (\d+) tokens, (\d+) computed, (\d+) cached", shown)[0])
    assert prompt == len(second.prompt_token_ids) and prompt == computed + cached and cached > 37
    terminal.read_until(">")
    terminal.write("\x04")  # Ctrl-D
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
