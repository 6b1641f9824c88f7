"""A call that is cut short, or ends with a bracket too many, leaves nothing of it in the content."""

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from minillm.decoding.event import Event
from minillm.server import make_app
from minillm.server.tools import FirstCalls, ToolUse
from minillm.text.chat import FORMATS, Answer, AnswerParser, CallFormat, CallParser, read_calls

from ..server.client import calling_engine, chunks_of, post
from ..text.chat.test_call_grammar import TWO

OFFERED = frozenset({"convert", "get-time", "get_weather"})
ARGUMENTS = ['{"from": "m", "to": "km"}', "{}"]


def pieces_of(text: str, form: CallFormat, size: int, *, cut: bool) -> Answer:
    """The answer in a text that comes in pieces."""
    answer, parser = Answer(), CallParser(form, OFFERED)
    for at in range(0, len(text), size):
        answer.add(parser.push(text[at : at + size]))
    answer.add(parser.finish(cut=cut))
    return answer


@pytest.mark.longer
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TWO)
def test_a_text_cut_at_any_character_of_its_calls_has_the_content_before_them(name: str) -> None:
    form, calls = FORMATS[name], TWO[name]
    befores = ["", "I look: 3 < 4.\n"] if form.begin else ["", "\n"]
    for before in befores:
        for end in range(len(calls) + 1):
            text = before + calls[:end]
            for size in (1, 5, len(text) or 1):
                answer = pieces_of(text, form, size, cut=True)
                assert answer.content.rstrip() == before.rstrip(), text
                for call, arguments in zip(answer.calls, ARGUMENTS, strict=False):
                    assert arguments.startswith(call.arguments), text
        assert [call.arguments for call in answer.calls] == ARGUMENTS


@pytest.mark.parametrize("name", [name for name in TWO if FORMATS[name].begin])
def test_a_model_that_ends_within_a_marked_call_has_the_content_before_it(name: str) -> None:
    form, calls = FORMATS[name], TWO[name]
    for end in range(len(form.begin), len(calls) + 1):
        assert pieces_of("I look. " + calls[:end], form, 3, cut=False).content == "I look.", calls[:end]


def test_a_text_that_no_call_begins_with_stays_content_where_it_is_cut() -> None:
    for name, text in (
        ("json", '{"city": "Par'),
        ("json", '{"name": "Bob'),
        ("json", '{"n'),
        ("llama3", '{"title": "A'),
        ("json", "[1, 2"),
        ("json", "```python\npri"),
        ("hermes", "a < b and c <tools"),
        ("mistral", "[1, 2, [TOOL_BOX"),
        ("qwen3-coder", "a <function> b"),
    ):
        expected = "" if text == '{"n' else text  # as a call would begin
        assert read_calls(text, FORMATS[name], OFFERED, cut=True).content == expected, text
        assert read_calls(text, FORMATS[name], OFFERED).content == text, text


def test_what_may_become_a_marker_stays_content_where_the_model_ends() -> None:
    for name, text in (("hermes", "a <tool_"), ("mistral", "see [TOOL"), ("json", '{"name": "get'), ("json", "``")):
        assert read_calls(text, FORMATS[name], OFFERED).content == text
        assert read_calls(text, FORMATS[name], OFFERED, cut=True).content in ("", "a", "see")


@pytest.mark.parametrize("name", TWO)
def test_closing_brackets_too_many_are_no_content(name: str) -> None:
    form, calls = FORMATS[name], TWO[name]
    places = [at for at in range(1, len(calls)) if calls[at - 1] == "}" and calls[at] not in "}"]
    places += [len(calls)]
    if form.begin and form.end:
        places += [at + len(form.end) for at in range(len(calls)) if calls.startswith(form.end, at)]
    for at in places if name != "qwen3-coder" else places[-1:]:
        for more in ("}", "}}", "]", "} ", "}]"):
            if form.lists and "]" in more and at < len(calls) - len(form.end):
                continue  # it ends the list
            for after in ("", "\nDone."):
                answer = pieces_of(calls[:at] + more + calls[at:] + after, form, 4, cut=False)
                assert answer.content == after.strip(), calls[:at] + more
                assert [call.arguments for call in answer.calls] == ARGUMENTS, calls[:at] + more


# --- over HTTP --------------------------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    with calling_engine(tmp_path_factory.mktemp("cut")) as engine:
        yield engine


def message_of(response: httpx.Response) -> tuple[str, str, str]:
    """Content, arguments and finish_reason."""
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    return choice["message"]["content"] or "", arguments, choice["finish_reason"]


def streamed(response: httpx.Response) -> tuple[str, str, str]:
    """The same of a stream."""
    content, arguments, reason = "", "", ""
    for chunk in chunks_of(response.text):
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            calls = choice["delta"].get("tool_calls", ())
            arguments += "".join(call["function"]["arguments"] for call in calls)
            reason = choice["finish_reason"] or reason
    return content, arguments, reason


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("json", "hermes", "llama3") else pytest.mark.exhaustive)
        for name in FORMATS
        if FORMATS[name].guides
    ],
)
def test_a_required_call_cut_at_any_token_is_the_same_streamed_and_no_content(name: str, engine: Any) -> None:
    app: Starlette = make_app(engine, tool_parser=name)
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "temperature": 0}
    most, reason = 0, "length"
    while reason == "length":
        most += 3
        content, arguments, reason = message_of(post(app, CHAT, body | {"max_tokens": most}))
        assert content == ""
        assert '{"city": "Paris"}'.startswith(arguments)
        assert streamed(post(app, CHAT, body | {"max_tokens": most, "stream": True})) == (content, arguments, reason)
    assert (arguments, reason) == ('{"city": "Paris"}', "tool_calls")


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_tokens_after_a_required_call_are_not_told_however_far_the_engine_is_ahead(ahead: int) -> None:
    use = ToolUse([], FORMATS["hermes"], OFFERED, single=True)
    call, after = '<tool_call>{"name": "get-time", "arguments": {}}', "</tool_call>"[:ahead]
    events = [Event(0, 0, text, (i,)) for i, text in enumerate(call + after)]
    events[-1].finish_reason = "length"
    first = FirstCalls([AnswerParser(None, use.parser())])
    told = first.until_complete([(0, event) for event in events])
    assert "".join(event.text for _, event in told) == call
    assert [event.finish_reason for _, event in told] == [None] * (len(call) - 1) + ["stop"]
    assert told[-1][1].request_finished and first.all_ended
    assert first.until_complete([(0, event) for event in events]) == []


@pytest.mark.slow
def test_equal_required_calls_have_equal_usage(engine: Any) -> None:
    app = make_app(engine)
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 300}
    answers = [post(app, CHAT, body).json() for _ in range(8)]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"tool_calls"}
    assert len({answer["usage"]["completion_tokens"] for answer in answers}) == 1


def test_a_cut_call_is_no_content_in_the_other_apis(engine: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    app = make_app(engine)
    talk = [{"role": "user", "content": "Weather?"}]
    flat = {"type": "function", "strict": True, **TOOL["function"]}
    body: dict[str, Any] = {"input": talk, "tools": [flat], "tool_choice": "required", "max_output_tokens": 9}
    answer = post(app, "/v1/responses", body).json()
    assert answer["status"] == "incomplete"
    texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
    assert "".join(texts) == ""
