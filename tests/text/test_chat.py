"""Conversations: rendering by templates, the sandbox, and the files that templates are read from."""

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from minillm.errors import CheckpointError, ParameterError, PromptError
from minillm.formats import open_model
from minillm.text.chat import ChatTemplate

from ..conversations import CONVERSATIONS, NAMES, TALK, TEMPLATES, WRITTEN, assistant, user, write_tokenizer

LEAST = "{% for m in messages %}{{ m.content }}{% endfor %}"


def template(name: str) -> ChatTemplate:
    """One of tests/data/chat_templates."""
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversation_as_each_form_has_it(name: str) -> None:
    assert template(name).render(TALK) == WRITTEN[name]


def test_the_generation_prompt_is_left_out_on_request() -> None:
    for name in NAMES:
        if name not in ("gemma", "inst", "mistral"):  # one refuses this conversation, two know no such prompt
            with_it, without = (template(name).render(TALK, add_generation_prompt=wanted) for wanted in (True, False))
            assert with_it != without
            assert with_it == template(name).render(TALK)


def test_going_on_with_the_last_message_ends_within_it() -> None:
    unfinished = [user("Name one."), assistant("One is: ")]
    end = {"chatml": "assistant\nOne is: ", "gemma": "model\nOne is:", "macros": "<ASSISTANT>\nOne is: "}  # gemma trims
    for name, expected in end.items():
        text = template(name).render(unfinished, continue_final_message=True)
        assert text.endswith(expected)
        assert "CONTINUE" not in text
    told = ChatTemplate("{{ add_generation_prompt }} " + LEAST)
    assert told.render([user("a")], continue_final_message=True) == "False a"
    parts = [user("a"), assistant([{"type": "text", "text": "b"}, {"type": "text", "text": "c "}])]
    assert template("macros").render(parts, continue_final_message=True).endswith("<ASSISTANT>\nb|c ")


def test_a_variable_and_the_day() -> None:
    headers = template("headers")
    assert f"It is {datetime.now():%d %b %Y}." in headers.render(TALK)
    assert "It is long ago." in headers.render(TALK, chat_template_kwargs={"date_string": "long ago"})


def test_thoughts_are_kept_after_the_last_question_only() -> None:
    qwen3 = template("qwen3")
    first = [user("Q"), assistant("A", reasoning="hm")]
    assert "<think>\nhm\n</think>\n\nA" in qwen3.render(first)
    assert "hm" not in qwen3.render([*first, user("R")])
    assert qwen3.render(first, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")


def test_messages_may_come_from_any_iterable_and_are_left_as_they_are() -> None:
    messages = CONVERSATIONS["two turns"]
    before = json.dumps(messages)
    expected = template("chatml").render(messages)
    assert template("chatml").render(m for m in messages) == expected
    assert template("chatml").render(tuple(messages)) == expected
    template("chatml").render(messages, continue_final_message=True)
    assert json.dumps(messages) == before


# --- messages that are none -------------------------------------------------------------------------------------------

BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "text": ("Hi", "messages should be a list .* found text: use `generate`"),
    "one alone": (user("Hi"), "found a single message: put it into a list"),
    "a number": (3, "found int"),
    "none": ([], "messages is empty"),
    "a conversation of conversations": ([[user("Hi")]], r"messages\[0\] should be \{.*found list"),
    "no role": ([user("a"), {"content": "b"}], r"messages\[1\] has no role"),
    "role without a value": ([{"role": None, "content": "b"}], r"messages\[0\] has no role"),
    "role of a wrong type": ([{"role": 1, "content": "b"}], "role should be text, found 1"),
    "no content": ([user("a"), {"role": "assistant"}], r'messages\[1\] has no content: give its text, which may be ""'),
    "content without a value": ([user(None)], r"messages\[0\] has no content"),
    "content of a wrong type": ([user(3)], "content should be text or a list of text parts, found int"),
    "bytes": ([user(b"a")], "found bytes"),
    "unknown key": ([user("a") | {"contents": "b"}], "'contents' has no effect"),
    "key that is no text": ([user("a") | {3: "b"}], "3 has no effect"),
    "a picture": ([user([{"type": "image_url", "image_url": "x"}])], "part of type 'image_url': minillm accepts text"),
    "part without a type": ([user([{"text": "a"}])], "a part of content should be"),
    "part of nothing": ([user(["a"])], "a part of content should be"),
    "part with more": ([user([{"type": "text", "text": "a", "x": 1}])], "a part of content should be"),
    "parts where text is meant": (
        [user([{"type": "text", "text": "a"}])],
        "not a list of parts: join them",
    ),
    "an old role": ([{"role": "function", "content": "4"}], "give a tool's result in the role 'tool'"),
    "an old call": ([assistant("", function_call={"name": "f"})], "'function_call' is not supported: give calls as"),
    "no call": ([assistant("", tool_calls=[{"a": 1}])], r"messages\[0\].tool_calls\[0\] should be .* found \{'a': 1\}"),
    "calls as text": ([assistant("", tool_calls="f()")], "tool_calls should be a list of calls, found 'f\\(\\)'"),
    "a user's call": ([user("") | {"tool_calls": [{"function": {"name": "f"}}]}], "belongs to the role 'assistant'"),
    "a result's id": ([{"role": "tool", "tool_call_id": 4, "content": "4"}], "tool_call_id should be text, found 4"),
    "a user's result": ([user("a") | {"tool_call_id": "x"}], "'tool_call_id' has no effect"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_what_is_no_conversation_is_named(name: str) -> None:
    messages, words = BAD_MESSAGES[name]
    with pytest.raises(PromptError, match=words) as error:
        template("chatml").render(messages)
    assert "\n" not in str(error.value)


@pytest.mark.longer
def test_a_key_that_the_template_reads_holds_plain_values() -> None:
    assert template("json").render([user("a") | {"name": "me"}]) != template("json").render([user("a")])
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), circle, deep):
        with pytest.raises(PromptError, match="should hold only JSON values"):
            template("json").render([user("a") | {"name": value}])


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"continue_final_message": True, "add_generation_prompt": True}, "leave one of them out"),
    "no flag": ({"continue_final_message": "content"}, "should be True or False, found 'content'"),
    "no flag either": ({"add_generation_prompt": 1}, "should be True or False, found 1"),
    "variables as text": ({"chat_template_kwargs": "{}"}, "should be a dict of variables, found '{}'"),
    "unknown variable": (
        {"chat_template_kwargs": {"date": 1}},
        "not use 'date'; its variables: bos_token, date_string",
    ),
    "argument as a variable": ({"chat_template_kwargs": {"messages": []}}, "messages is an argument of the call"),
    "tools as a variable": ({"chat_template_kwargs": {"tools": []}}, "tools is an argument of the call"),
    "documents": ({"chat_template_kwargs": {"documents": []}}, "does not pass them to chat templates"),
    "not plain": ({"chat_template_kwargs": {"date_string": object()}}, "should hold only JSON values"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_without_a_meaning_are_named(name: str) -> None:
    arguments, words = BAD_ARGUMENTS[name]
    with pytest.raises(ParameterError, match=words):
        template("headers").render(TALK, **arguments)


# --- templates that go wrong, or too far ------------------------------------------------------------------------------

BAD_TEMPLATES: dict[str, tuple[str, type[Exception], str]] = {
    "syntax": ("a\n{% for %}", CheckpointError, "here, line 2: not a valid Jinja template"),
    "unknown filter": ("{{ messages | rot13 }}", CheckpointError, "rot13"),
    "break outside": ("{% break %}", CheckpointError, "not a valid Jinja template"),
    "its own refusal": ("{{ raise_exception('no\nsystem') }}", PromptError, "here refuses the messages: no system$"),
    "undefined": ("{{ nobody.knows }}", PromptError, "here fails on these messages: 'nobody' is undefined"),
    "types": ("{{ messages + 1 }}", PromptError, "fails on these messages"),
    "no end": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", CheckpointError, "endless recursion"),
    "no end either": ("{% for i in range(1000000000) %}a{% endfor %}", PromptError, "Range too big"),
    "a file": ("{% include '/etc/passwd' %}", PromptError, "no loader"),
    "classes": ("{{ ''.__class__.__mro__ }}", CheckpointError, "refused by the sandbox: .*'__class__'"),
    "classes by filter": ("{{ (''|attr('__class__')).__mro__ }}", CheckpointError, "refused by the sandbox"),
    "classes by format": ("{{ '{0.__class__.__mro__}'.format('') }}", CheckpointError, "refused by the sandbox"),
    "modules": ("{{ lipsum.__globals__['os'].popen('id') }}", CheckpointError, "refused by the sandbox"),
    "our modules": ("{{ strftime_now.__globals__['json'] }}", CheckpointError, "refused by the sandbox"),
    "change of a list": ("{{ messages.append(1) }}", CheckpointError, "refused by the sandbox"),
    "change of a message": ("{{ messages[0].update(role='x') }}", CheckpointError, "refused by the sandbox"),
    "private names": (
        "{% set n = namespace() %}{% set n.__call__ = 1 %}",
        CheckpointError,
        "sandbox: .*'__call__'",
    ),
    "private names at once": (
        "{% set n = namespace(__html__=1) %}",
        CheckpointError,
        "sandbox: .*'__html__'",
    ),
}


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_a_template_that_goes_wrong_or_too_far_ends_in_one_line(name: str) -> None:
    source, kind, words = BAD_TEMPLATES[name]
    messages = [user("Hi")]
    with pytest.raises(kind, match=words) as error:
        ChatTemplate(source, "here").render(messages)
    assert "\n" not in str(error.value)
    assert messages == [user("Hi")]


def test_what_cannot_be_continued_is_said() -> None:
    for source, words in {"{{ messages[0].role }}": "leaves out the end", LEAST * 2: "more than once"}.items():
        with pytest.raises(PromptError, match=words):
            ChatTemplate(source).render([user("Hi")], continue_final_message=True)
    with pytest.raises(PromptError, match="leaves out the end"):
        template("macros").render([user("a"), assistant([])], continue_final_message=True)


# --- where it is found ------------------------------------------------------------------------------------------------


def test_the_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "file {{ eos_token }}", chat_template="configuration {{ bos_token }}")
    found = open_model(folder).chat_template
    assert found is not None
    assert found.render([user("a")]) == "file </s>"
    (folder / "chat_template.jinja").unlink()
    found = open_model(folder).chat_template
    assert found is not None
    assert found.render([user("a")]) == "configuration </s>"


def test_of_several_the_default_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = open_model(tmp_path).chat_template
    assert found is not None
    assert found.source == "b"
    assert not caplog.records
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[:1]}))
    assert open_model(tmp_path).chat_template is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "tool_use" in caplog.text


@pytest.mark.parametrize("settings", [None, {}, {"chat_template": None}], ids=str)
def test_none_is_none(settings: dict[str, Any] | None, tmp_path: Path) -> None:
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_model(tmp_path).chat_template is None


@pytest.mark.parametrize("value", [7, {"default": "a"}, ["a"], [{"name": "default"}]], ids=str)
def test_a_template_that_is_no_text_is_named(value: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template should be text, or a list"):
        _ = open_model(tmp_path).chat_template


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected UTF-8 text"):
        _ = open_model(tmp_path).chat_template
