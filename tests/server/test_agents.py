"""Requests as coding agents send them: Claude Code's to /v1/messages and Codex's to /v1/responses, field by field.

Each was read from a run of the agent (Claude Code 2.1.197, Codex 0.171.0) against a server whose model a guide had
call a tool; the texts are our own.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.server import make_app
from minillm.text.chat import ChatTemplate

from ..text.chat.conversations import template
from ..tiny import write_checkpoint
from .client import post

CONTEXT = 1280
HEADERS = {
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-api-key": "none",
    "x-app": "cli",
}
KEPT = {"type": "ephemeral"}
SHELL: dict[str, Any] = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
TURN: dict[str, Any] = {
    "model": "minillm",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe date.\n</system-reminder>"},
                {"type": "text", "text": "Make a file", "cache_control": KEPT},
            ],
        },
        {"role": "system", "content": "Agents: Explore."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.53a; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": KEPT},
        {"type": "text", "text": "\nHelp with software.", "cache_control": KEPT},
    ],
    "tools": [SHELL],
    "metadata": {"user_id": '{"device_id":"0","session_id":"1"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
COMMAND = "echo 1 > made.txt"
CALL = f"<tool_call>\n{json.dumps({'name': 'Bash', 'arguments': {'command': COMMAND}})}\n</tool_call>"
STRICT = ChatTemplate(
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}{% endif %}"
    "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Takes instructions only at the beginning, and turns only in turns, as Qwen3.5's and Mistral's templates do"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("agents"), max_position_embeddings=CONTEXT)
    with Engine(folder, max_batch_size=4, prefix_cache=True) as engine:
        engine.chat_template = template("hermes")
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    """A server of it."""
    return make_app(engine)


@pytest.fixture
def strict(engine: Engine) -> Iterator[Starlette]:
    """A server whose model has the strict template."""
    usual, engine.chat_template = engine.chat_template, STRICT
    yield make_app(engine)
    engine.chat_template = usual


def events_of(app: Starlette, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    response = post(app, path, body, headers=HEADERS)
    assert response.status_code == 200, response.text
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line.startswith("data: ")]


def tokens_of(app: Starlette, body: dict[str, Any]) -> int:
    asked = {name: body[name] for name in ("model", "messages", "system", "tools") if name in body}
    response = post(app, "/v1/messages/count_tokens", asked, headers=HEADERS)
    assert response.status_code == 200, response.text
    return int(response.json()["input_tokens"])


@pytest.mark.longer
def test_claude_code_calls_its_tool_and_gets_the_result_back(app: Starlette) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    guide = {"guided_regex": re.escape(CALL), "temperature": 0}
    events = events_of(app, "/v1/messages?beta=true", TURN | guide)
    [call] = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    arguments = "".join(event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta")
    assert (call["type"], call["name"], json.loads(arguments)) == ("tool_use", "Bash", {"command": COMMAND})
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "", "is_error": False, "cache_control": KEPT}
    turns = [
        *TURN["messages"],
        {"role": "assistant", "content": [call | {"input": json.loads(arguments)}]},
        {"role": "user", "content": [result]},
    ]
    asked = TURN | {"messages": turns, "guided_regex": "Done", "temperature": 0}
    events = events_of(app, "/v1/messages?beta=true", asked)
    assert [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"] != []
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["cache_read_input_tokens"] > 0


def test_a_billing_header_is_no_text_of_the_prompt(app: Starlette) -> None:
    plain = tokens_of(app, TURN | {"system": TURN["system"][1:]})
    assert tokens_of(app, TURN) == plain > tokens_of(app, TURN | {"system": TURN["system"][:1]})


@pytest.mark.longer
def test_a_cap_above_the_context_is_no_error_and_its_end_is_told(app: Starlette) -> None:
    asked = TURN | {"ignore_eos": True, "temperature": 0}
    end = events_of(app, "/v1/messages", asked)[-2]
    usage = end["usage"]
    assert end["delta"]["stop_reason"] == "model_context_window_exceeded"
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == CONTEXT
    assert events_of(app, "/v1/messages", asked | {"max_tokens": 3})[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("words", [1500, 9000])
def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_agents_look_for(app: Starlette, words: int) -> None:
    response = post(app, "/v1/messages", TURN | {"messages": [{"role": "user", "content": "red, " * words}]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ") and "\n" not in error["message"]


def test_messages_that_a_strict_template_refuses_are_joined(strict: Starlette) -> None:
    turns = [*TURN["messages"], {"role": "assistant", "content": "I see."}, {"role": "user", "content": "Go on"}]
    asked = {"model": "minillm", "messages": turns, "system": "Be brief."}
    said = "<system-reminder>\nThe date.\n</system-reminder>\nMake a file\n\nAgents: Explore."
    same = [{"role": "user", "content": said}, *turns[2:]]
    assert tokens_of(strict, asked) == tokens_of(strict, asked | {"messages": same})
    first = [{"role": "developer", "content": text} for text in ("Be brief.", "Be kind.")]
    chat = {"messages": [*first, {"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert post(strict, "/v1/chat/completions", chat).status_code == 200
    alone = {"messages": [turns[2], turns[2]], "max_tokens": 1}
    assert "roles must alternate" in post(strict, "/v1/chat/completions", alone).text


@pytest.mark.longer
def test_codex_calls_its_tool_and_gets_the_output_back(app: Starlette) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    tool = {
        "type": "function",
        "name": "Bash",
        "description": "?",
        "strict": False,
        "parameters": SHELL["input_schema"],
    }
    turns: list[dict[str, Any]] = [
        {"type": "message", "id": f"msg_{i}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for i, (role, text) in enumerate(
            [("developer", "You are an agent."), ("developer", "Skills"), ("user", "<cwd>/</cwd>"), ("user", "Make it")]
        )
    ]
    asked: dict[str, Any] = {
        "model": "minillm",
        "stream": True,
        "input": turns,
        "tools": [
            tool,
            {"type": "namespace", "name": "agents", "description": "?", "tools": [tool]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0",
        "client_metadata": {"thread_id": "0"},
        "temperature": 0,
    }
    events = events_of(app, "/v1/responses", asked | {"guided_regex": re.escape(CALL)})
    [call] = events[-1]["response"]["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "Bash",
        {"command": COMMAND},
    )
    output = {"type": "function_call_output", "id": "fco_0", "call_id": call["call_id"], "output": "Exit code 0"}
    answer = events_of(app, "/v1/responses", asked | {"input": [*turns, call, output], "guided_regex": "Done"})[-1]
    assert answer["type"] == "response.completed" and answer["response"]["output"][0]["content"][0]["text"] == "Done"
