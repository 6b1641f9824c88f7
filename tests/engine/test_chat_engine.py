"""Chat with an engine: answers, arguments, and checkpoints without a template."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.engine.results import Completion
from minillm.errors import CheckpointError, ParameterError, PromptError

from ..conversations import TALK, TEMPLATES, WRITTEN, assistant, user
from ..pages import block
from ..tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that talks in ChatML, whose tokenizer would write </s> in front of a prompt."""
    folder = write_checkpoint(tmp_path_factory.mktemp("chat"), seed=2, max_position_embeddings=512)
    source = (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + source, encoding="utf-8")
    return folder


@pytest.fixture
def chatting(folder: Path) -> Iterator[Engine]:
    """An engine on it."""
    with Engine(folder, prefix_cache=True) as engine:
        yield engine


def test_an_answer_continues_the_rendered_text(chatting: Engine) -> None:
    assert chatting.tokenizer is not None
    text = chatting.render_chat(TALK)
    assert text == "</s>" + WRITTEN["chatml"]
    ids = chatting.tokenizer.encode(text, add_special_tokens=False)
    assert ids == chatting.tokenizer.encode(WRITTEN["chatml"])  # not </s> twice
    answer = chatting.chat(TALK, max_new_tokens=8)
    assert answer == chatting.generate(ids, max_new_tokens=8)
    streamed = Completion()
    for event in chatting.stream_chat(TALK, max_new_tokens=8):
        streamed.add(event)
    assert [streamed] == answer.completions


def test_its_arguments_are_those_of_rendering_and_of_generation(chatting: Engine) -> None:
    assert chatting.tokenizer is not None
    unfinished = [user("Name one."), assistant("One is: ")]
    answer = chatting.chat(unfinished, max_new_tokens=2, continue_final_message=True)
    text = chatting.render_chat(unfinished, continue_final_message=True)
    assert answer.prompt_token_ids == chatting.tokenizer.encode(text, add_special_tokens=False)
    assert text.endswith("One is: ")
    assert len(answer.token_ids) == 2
    for field, words in {
        "tools": "should be a list of function definitions",
        "documents": "does not pass them to chat templates",
        "nonsense": "nonsense",
    }.items():
        for method in (chatting.chat, chatting.stream_chat):
            with pytest.raises(ParameterError, match=words):
                method(TALK, **{field: 7})


def test_any_of_the_checkpoints_ends_stops_an_answer(folder: Path, chatting: Engine, tmp_path: Path) -> None:
    whole = chatting.chat(TALK, max_new_tokens=30, eos_token_id=[])
    ends = whole.token_ids[5], whole.token_ids[9]  # of which the first is met first
    first = min(whole.token_ids.index(end) for end in ends)
    other = shutil.copytree(folder, tmp_path / "other")
    settings = {"eos_token_id": [511, *reversed(ends)], "max_new_tokens": 30}
    (other / "generation_config.json").write_text(json.dumps(settings))
    with Engine(other) as engine:
        (completion,) = engine.chat(TALK).completions
    assert (completion.token_ids, completion.finish_reason) == (whole.token_ids[: first + 1], "stop")


def test_the_next_turn_finds_the_conversation_in_the_cache(folder: Path, chatting: Engine) -> None:
    first = chatting.chat(TALK, max_new_tokens=8)
    said = assistant(first.text)
    before = chatting.stats.prefill_tokens
    second = chatting.chat([*TALK, said, user("And?")], max_new_tokens=4)
    computed = chatting.stats.prefill_tokens - before
    assert computed <= len(second.prompt_token_ids) - len(first.prompt_token_ids)
    with Engine(folder) as fresh:
        assert fresh.chat([*TALK, said, user("And?")], max_new_tokens=4) == second


def test_the_conversation_of_the_guide(chatting: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("minillm/engine/README.md", "python", "messages = [")
    names: dict[str, Any] = {"engine": chatting}
    exec(code, names)
    answer = chatting.chat(names["messages"], max_new_tokens=20)
    assert capsys.readouterr().out == answer.text + chatting.render_chat(names["messages"]) + "\n"


def test_a_model_without_a_template_says_what_to_do(engine: Engine) -> None:
    for method in (engine.chat, engine.stream_chat, engine.render_chat):
        with pytest.raises(PromptError, match="no chat template: give a prompt to `generate`"):
            method(TALK)
    assert engine.stats.steps == 0


def test_a_template_that_writes_nothing_is_no_prompt(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{# nothing #}")
    with Engine(other) as engine, pytest.raises(PromptError, match="renders these messages as an empty text"):
        engine.chat(TALK)


def test_a_broken_template_leaves_generation_alone(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{% if %}")
    with Engine(other) as engine:
        assert engine.generate("Hi", max_new_tokens=1).token_ids
        with pytest.raises(CheckpointError, match="not a valid Jinja template"):
            engine.chat(TALK)
