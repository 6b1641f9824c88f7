"""Conversations with tools against transformers' apply_chat_template. Needs the reference extra."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the comparison needs the reference extra")
transformers = pytest.importorskip("transformers", reason="the comparison needs the reference extra")

from minillm.errors import PromptError  # noqa: E402
from minillm.formats import open_model  # noqa: E402

from ...conversations import assistant, write_tokenizer  # noqa: E402
from .conversations import ASKED, CONVERSATIONS, NAMES, TOOL_TEMPLATES, TOOLS, WEATHER, call  # noqa: E402

pytestmark = pytest.mark.reference

OFFERS: dict[str, Any] = {"two": TOOLS, "one": [WEATHER], "an empty list": [], "none": None}


@pytest.mark.parametrize("name", NAMES)
def test_each_template_gives_the_same_text(name: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, (TOOL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_model(folder).chat_template
    assert ours is not None
    same = 0
    for messages in CONVERSATIONS.values():
        for tools in OFFERS.values():
            for begin in (True, False):
                try:
                    expected = theirs.apply_chat_template(
                        messages, tools=tools, tokenize=False, add_generation_prompt=begin
                    )
                except Exception:  # of many kinds
                    with pytest.raises(PromptError):
                        ours.render(messages, tools=tools, add_generation_prompt=begin)
                    continue
                assert ours.render(messages, tools=tools, add_generation_prompt=begin) == expected
                same += 1
    assert same >= len(CONVERSATIONS) * len(OFFERS)


def test_arguments_as_json_text_are_rendered_as_the_object(tmp_path: Path) -> None:
    arguments = {"city": "Paris", "days": 2}
    for name in NAMES:
        folder = write_tokenizer(tmp_path / name, (TOOL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_model(folder).chat_template
        assert ours is not None
        as_object, as_text = (
            [*ASKED, assistant("", tool_calls=[call("get_weather", value)])]
            for value in (arguments, json.dumps(arguments, indent=1))
        )
        expected = theirs.apply_chat_template(as_object, tools=TOOLS, tokenize=False)
        assert ours.render(as_text, tools=TOOLS, add_generation_prompt=False) == expected


@pytest.mark.parametrize("layout", ["list", "folder"])
def test_the_template_for_tools_is_taken_alike(layout: str, tmp_path: Path) -> None:
    default, tool_use = "default {{ messages | length }}", "with tools {{ tools | length }}"
    if layout == "list":
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
        folder = write_tokenizer(tmp_path, default, chat_template=named)
        (folder / "chat_template.jinja").unlink()
    else:
        folder = write_tokenizer(tmp_path, default)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_model(folder).chat_template
    assert ours is not None
    for tools in OFFERS.values():
        expected = theirs.apply_chat_template(ASKED, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours.render(ASKED, tools=tools) == expected
    assert ours.render(ASKED, tools=TOOLS) == "with tools 2"
