"""Conversations for the tests of chat templates, and the templates in tests/data/chat_templates."""

import json
import shutil
from pathlib import Path
from typing import Any

from .tiny import TOKENIZER

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def user(content: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "system", "content": content}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hi")],
    "with a system": [system(" Be brief. "), user("Hi")],
    "two turns": [user("Hi"), assistant("Hello, you."), user("Who?")],
    "two turns, system": [system("S"), user("1 + 1"), assistant("2"), user("2 + 2"), assistant("4")],
    "spaces": [user("  two \n"), assistant("\n three  "), user("\t")],
    "an answer to go on with": [user("Name one."), assistant("One is: ")],
    "thoughts": [
        user("Q"),
        assistant("<think>\nhm\n</think>\n\nA"),
        user("R"),
        assistant("<think>\nso\n</think>\n\nB"),
    ],
    "characters": [user("日本 <b>&'\"\\ {{ bos_token }} {% x %} 🙂"), assistant("é\u2028</s>")],
    "empty": [system(""), user(""), assistant("")],
    "only a system": [system("alone")],
    "assistant first": [assistant("I begin"), user("no")],
    "twice the user": [user("a"), user("b")],
    "another role": [user("a"), {"role": "critic", "content": "b"}],
    "stop": [user("go"), assistant("Stop"), user("on")],
}


TALK = [system("Be brief."), user("Hi"), assistant("Hello, you."), user("Who?")]
WRITTEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "Hello, you.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
    "inst": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello, you. </s><s>[INST] Who? [/INST]",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello, you.</s>\n<|user|>\nWho?</s>\n"
    "<|assistant|>\n",
    "mistral": "<s>[INST] Hi[/INST] Hello, you.</s>[INST] Be brief.\n\nWho?[/INST]",
    "phi": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello, you.<|end|>\n<|user|>\nWho?"
    "<|end|>\n<|assistant|>\n",
    "loops": "2 of 4, User: Hi\n3 of 4, Assistant: Hello, you.\n4 of 4, User: Who?\nAssistant:",
    "generation": "<|system|>Be brief.\n<|user|>Hi\n<|assistant|>Hello, you.</s>\n<|user|>Who?\n<|assistant|>",
}
"""TALK as some of the forms have it."""


def write_tokenizer(folder: Path, template: str, **settings: Any) -> Path:
    """The small tokenizer's folder with a template in chat_template.jinja; `settings` go into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
