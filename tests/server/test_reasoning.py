"""Reasoning over HTTP: thoughts apart from the answer in each API, beside tools and guides, counted and limited."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from starlette.applications import Starlette

from minillm import Engine
from minillm.server import make_app
from minillm.text.chat import ChatTemplate
from minillm.text.tokenizer import Tokenizer

from ..text.chat.conversations import TOOLS
from ..tiny import write_checkpoint
from .client import chunks_of, post

pytest.importorskip("llguidance", reason="needs the extra `guided`")

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
THOUGHT, ANSWER = "Hm, 1 < 2.", "Yes."
CALL = '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.reasoning_content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools }}<tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def saying(text: str) -> dict[str, Any]:
    """A request that is answered with this text: it is no guide of ours that begins after thoughts."""
    return ASKED | {"guided_regex": re.escape(text), "max_tokens": 300}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model whose markers are plain text, so that a guide says all of its answer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("reasoning"), max_position_embeddings=1024)
    with Engine(folder, max_batch_size=4) as engine:
        engine.chat_template = ChatTemplate(TEMPLATE)
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    """A server of it."""
    return make_app(engine)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model whose markers are tokens."""
    folder = write_checkpoint(tmp_path_factory.mktemp("thinker"), max_position_embeddings=1024, vocab_size=514)
    tokenizer = tokenizers.Tokenizer.from_str(Tokenizer.from_folder(folder).to_json())
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with Engine(folder, max_batch_size=4) as engine:
        engine.chat_template = ChatTemplate(TEMPLATE)
        yield engine


def message_of(app: Starlette, body: dict[str, Any]) -> dict[str, Any]:
    response = post(app, CHAT, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"] | {"finish_reason": choice["finish_reason"]}  # type: ignore[no-any-return]


def streamed(app: Starlette, body: dict[str, Any]) -> tuple[str, str]:
    """Thoughts and content of a stream, whose thoughts all come first."""
    reasoning = content = ""
    for chunk in chunks_of(post(app, CHAT, body | {"stream": True}).text):
        for choice in chunk["choices"]:
            new = choice["delta"].get("reasoning_content") or ""
            assert not (new and content) and new == (choice["delta"].get("reasoning") or "")
            reasoning += new
            content += choice["delta"].get("content") or ""
    return reasoning, content


@pytest.mark.longer
def test_thoughts_are_apart_from_the_answer_whole_and_streamed(app: Starlette, engine: Engine) -> None:
    said = saying(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")
    message = message_of(app, said)
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (THOUGHT, THOUGHT, ANSWER)
    assert streamed(app, said) == (THOUGHT, ANSWER)
    result = engine.chat(ASKED["messages"], guided_regex=said["guided_regex"], max_new_tokens=300)
    assert (result.reasoning, result.answer) == (THOUGHT, ANSWER) and result.text.startswith("<think>")


def test_a_template_may_have_begun_the_thoughts(app: Starlette) -> None:
    said = saying(f"{THOUGHT}</think>{ANSWER}") | {"enable_thinking": True}
    assert streamed(app, said) == (THOUGHT, ANSWER)
    without = saying(ANSWER) | {"enable_thinking": False}
    assert "reasoning_content" not in message_of(app, without) and streamed(app, without) == ("", ANSWER)


@pytest.mark.longer
def test_clients_may_leave_thoughts_out_or_in_the_content(app: Starlette) -> None:
    text = f"<think>{THOUGHT}</think>{ANSWER}"
    for hidden in ({"include_reasoning": False}, {"reasoning_format": "hidden"}):
        assert streamed(app, saying(text) | hidden) == ("", ANSWER)
        assert "reasoning_content" not in message_of(app, saying(text) | hidden)
    for raw in ("none", "raw"):
        assert streamed(app, saying(text) | {"reasoning_format": raw}) == ("", text)
    assert (
        streamed(make_app(app.state.server.models["minillm"].engine, reasoning_format="none"), saying(text))[1] == text
    )


@pytest.mark.longer
def test_thoughts_that_do_not_end_are_no_answer(app: Starlette) -> None:
    said = saying(f"<think>{THOUGHT * 40}</think>{ANSWER}") | {"max_tokens": 40}
    message = message_of(app, said)
    assert (message["content"], message["finish_reason"]) == ("", "length") and message["reasoning_content"]
    assert streamed(app, said) == (message["reasoning_content"], "")


@pytest.mark.longer
def test_calls_come_after_thoughts(app: Starlette) -> None:
    said = saying(f"<think>Shall I {CALL}?</think>\n\n{CALL}") | {"tools": TOOLS}
    for body in (said, said | {"parallel_tool_calls": False}):
        message = message_of(app, body)
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get-time"]
        assert message["reasoning_content"] == f"Shall I {CALL}?" and message["finish_reason"] == "tool_calls"
        assert streamed(app, body) == (f"Shall I {CALL}?", "")


@pytest.mark.longer
def test_usage_counts_the_tokens_of_thoughts(thinker: Engine) -> None:
    app = make_app(thinker)
    for enabled in (True, None):
        begun = {"enable_thinking": True} if enabled else {"logit_bias": {}}
        body = ASKED | {"max_tokens": 30, "max_thinking_tokens": 7, "ignore_eos": True} | begun
        answer = post(app, CHAT, body).json()
        count = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert count == (7 if enabled else 0)  # six after the prompt's line break, and the marker that is forced
        chunks = chunks_of(post(app, CHAT, body | {"stream": True, "stream_options": {"include_usage": True}}).text)
        assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == count


@pytest.mark.longer
def test_a_guide_begins_after_the_thoughts(thinker: Engine) -> None:
    app = make_app(thinker)
    guided = {"guided_choice": ["one", "two"], "max_thinking_tokens": 6, "max_tokens": 60}
    for more in (guided, guided | {"n": 2, "temperature": 1, "seed": 3}):
        choices = post(app, CHAT, ASKED | more | {"enable_thinking": True}).json()["choices"]
        for choice in choices:
            assert choice["message"]["content"] in ("one", "two") and choice["finish_reason"] == "stop"
            assert choice["message"]["reasoning_content"]
    assert message_of(app, ASKED | guided | {"enable_thinking": False})["content"] in ("one", "two")
    required = {"tools": TOOLS, "tool_choice": "required", "max_thinking_tokens": 6, "enable_thinking": True}
    message = message_of(app, ASKED | required | {"max_tokens": 400, "parallel_tool_calls": False})
    assert message["finish_reason"] == "tool_calls" and message["reasoning_content"] and not message["content"]


@pytest.mark.parametrize("search", [{"num_beams": 3}, {"do_sample": True, "seed": 1}])
def test_a_guide_of_any_search_begins_after_the_thoughts(thinker: Engine, search: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"guided_choice": ["one", "two"], "max_thinking_tokens": 6, "max_new_tokens": 40, **search}
    result = thinker.chat(ASKED["messages"], chat_template_kwargs={"enable_thinking": True}, **fields)
    assert result.answer in ("one", "two") and result.completions[0].finish_reason == "stop"
    assert thinker.generate("Hi", **fields | {"max_thinking_tokens": None}).text in ("one", "two")


@pytest.mark.longer
def test_responses_have_items_of_reasoning(app: Starlette) -> None:
    openai = pytest.importorskip("openai", reason="needs the extra `test`")
    body = {"input": "Hi", "temperature": 0, "guided_regex": re.escape(f"<think>{THOUGHT}</think>{ANSWER}")}
    response = post(app, "/v1/responses", body).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert openai.types.responses.Response.model_validate(response).output_text == ANSWER
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    lines = post(app, "/v1/responses", body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    done = next(event for event in events if event["type"] == "response.reasoning_text.done")
    assert "".join(deltas) == done["text"] == THOUGHT
    assert events[-1]["response"]["output"][1]["content"][0]["text"] == ANSWER


def test_thoughts_that_clients_send_back_reach_the_template(app: Starlette) -> None:
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]}
    turn = {"type": "message", "role": "assistant", "content": ANSWER}
    asked = {"role": "user", "content": "Hi"}
    counts = [
        post(app, "/v1/responses", {"input": items, "max_output_tokens": 1}).json()["usage"]["input_tokens"]
        for items in ([asked, turn, asked], [asked, thoughts, turn, asked], [asked, thoughts, asked], [asked, asked])
    ]
    assert counts[0] < counts[1] and counts[2] == counts[3]  # thoughts without an answer belong to no message


def test_ollama_s_answers_have_thinking(app: Starlette) -> None:
    body = {"model": "minillm", "messages": ASKED["messages"], "think": True, "options": {"temperature": 0}}
    body["options"] |= {"num_predict": 12}
    whole = post(app, "/api/chat", body | {"stream": False}).json()
    lines = [json.loads(line) for line in post(app, "/api/chat", body).text.splitlines()]
    assert whole["message"]["thinking"] == "".join(line["message"].get("thinking", "") for line in lines) != ""
    assert whole["message"]["content"] == "".join(line["message"]["content"] for line in lines) == ""
    assert "thinking" in post(app, "/api/show", {"model": "minillm"}).json()["capabilities"]
    refused = post(app, "/api/chat", body | {"think": "very"})
    assert refused.status_code == 400 and "think" in refused.json()["error"]
