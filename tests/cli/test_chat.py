"""minillm chat, of a model with a chat template; one without is in test_other_commands."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from minillm import Engine
from minillm.cli.main import run

from ..conversations import TEMPLATES, assistant, system, user
from ..tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that talks in Qwen3's form, and likes to end a text."""
    folder = write_checkpoint(tmp_path_factory.mktemp("chat"), seed=2, max_position_embeddings=400)
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user types."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_each_line_is_a_turn_of_one_conversation(folder, monkeypatch, capsys):
    say(monkeypatch, "Hi", "And?")
    arguments = [
        "--model",
        str(folder),
        "--max-new-tokens",
        "6",
        "--chat-template-kwargs",
        '{"enable_thinking": false}',
    ]
    assert run(["chat", "--system", "Be brief.", "--stats", *arguments]) == 0
    captured = capsys.readouterr()
    messages = [system("Be brief."), user("Hi")]
    told = {"max_new_tokens": 6, "chat_template_kwargs": {"enable_thinking": False}}
    with Engine(folder) as engine:
        first = engine.chat(messages, **told)
        second = engine.chat([*messages, assistant(first.text), user("And?")], **told)
    assert captured.out == f"{first.text}\n{second.text}\n"
    counts = [tuple(map(int, re.findall(r"\d+", line))) for line in captured.err.splitlines()]
    assert [prompt for prompt, _, _ in counts] == [len(first.prompt_token_ids), len(second.prompt_token_ids)]
    assert counts[0][2] == 0
    # The empty thoughts before the first answer are gone by then: what precedes them is found.
    assert counts[1][2] >= len(first.prompt_token_ids) - len("<think>\n\n</think>\n\n")
    assert all(prompt == computed + cached for prompt, computed, cached in counts)


def test_special_tokens_are_not_shown(folder, monkeypatch, capsys, tmp_path):
    with Engine(folder) as engine:
        answer = engine.chat([user("Hi")], max_new_tokens=12, eos_token_id=[])
        tokens = [engine.tokenizer.token(token_id) for token_id in answer.token_ids]
    token = next(token for token in tokens if len(token) > 2 and token.isalpha())
    before = answer.text[: answer.text.index(token)]
    assert before
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": token}))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [answer.token_ids[tokens.index(token)]]}))
    say(monkeypatch, "Hi")
    assert run(["chat", "--model", str(other)]) == 0
    assert capsys.readouterr().out == before + "\n"


def test_what_goes_wrong_is_one_line(folder, monkeypatch, capsys, tmp_path):
    demo = "this model has no chat template: leave it out"
    cases = {
        ("--system", "S"): f"--system: {demo}",
        ("--chat-template-kwargs", "{}"): f"--chat-template-kwargs: {demo}",
        ("--model", str(folder), "--chat-template-kwargs", "{"): "should be a JSON object",
        ("--model", str(folder), "--chat-template-kwargs", "[]"): "should be a JSON object",
        ("--model", str(folder), "--chat-template-kwargs", '{"thinking": 1}'): "does not use 'thinking'",
    }
    for arguments, words in cases.items():
        say(monkeypatch, "Hi")
        assert run(["chat", *arguments]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert len(captured.err.splitlines()) == 1
        assert captured.out == ""


def test_a_template_that_knows_no_system_says_so(folder, monkeypatch, capsys, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text((TEMPLATES / "gemma.jinja").read_text())
    say(monkeypatch, "Hi")
    assert run(["chat", "--model", str(other), "--system", "S"]) == 2
    assert capsys.readouterr().err.endswith("refuses the messages: there is no role system\n")


def test_a_chat_serves_the_checkpoints_beams_and_goes_on_with_one_answer(folder, monkeypatch, capsys, tmp_path):
    other = shutil.copytree(folder, tmp_path / "model")
    settings = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 4}
    (other / "generation_config.json").write_text(json.dumps(settings))
    say(monkeypatch, "Hi")
    assert run(["chat", "--model", str(other), "--max-new-tokens", "4"]) == 0
    with Engine(other) as engine:
        expected = engine.chat([user("Hi")], num_return_sequences=1, max_new_tokens=4).text
    assert capsys.readouterr().out == expected + "\n"
