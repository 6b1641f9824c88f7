"""What clients send in good faith, and the servers of the field ignore, is ignored; what changes an answer is not."""

import itertools
import json
import logging
import random
import typing
from typing import Any

import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.decoding.fields import FIELDS
from minillm.decoding.foreign import API, WORDS
from minillm.errors import ParameterError, PromptError
from minillm.server import make_app
from minillm.server.generation_request import CHAT, COMPLETIONS, FUNCTIONS
from minillm.server.messages import ROLES, log_skipped
from minillm.server.responses import INCLUDED, LOGPROBS, RESPONSES, SKIPPED
from minillm.text.chat import ChatTemplate

from ..server.client import calling_engine, error_of, post
from ..text.chat.conversations import WEATHER

CHATS = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?\nSoon."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "clear"},
    {"role": "assistant", "content": "Clear."},
    {"role": "user", "content": "Thanks."},
]
"""A conversation in which nothing is without effect"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with calling_engine(tmp_path_factory.mktemp("messages")) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    return make_app(engine)


def prompt(app: Starlette, messages: list[Any], **more: Any) -> Any:
    """The tokens of a conversation."""
    response = post(app, "/tokenize", {"messages": messages, "tools": [WEATHER]} | more)
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


def with_keys(role: str, **keys: Any) -> list[Any]:
    """The conversation with further keys in each message of one role."""
    return [message | keys if message["role"] == role else message for message in PLAIN]


KEYS: dict[str, Any] = {
    "provider_specific_fields": {"refusal": None},
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "timestamp": 1750000000,
    "name": "alex",
    "cache_control": {"type": "ephemeral"},
    "annotations": [{"type": "url_citation"}],
    "audio": None,
    "function_call": None,
    "refusal": None,
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    "id": "msg_1",
    "finish_reason": "stop",
    "prompt_cache_breakpoint": {"mode": "explicit"},
    "parsed": {"a": 1},
}


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_keys_of_a_message_that_the_template_does_not_read_are_ignored(app: Starlette, role: str) -> None:
    for key, value in KEYS.items():
        assert prompt(app, with_keys(role, **{key: value})) == prompt(app, PLAIN), key
    assert prompt(app, with_keys(role, **KEYS)) == prompt(app, PLAIN)


def test_the_same_keys_are_refused_in_python(engine: Engine) -> None:
    for key in ("timestamp", "cache_control", "provider_specific_fields"):
        with pytest.raises(PromptError, match=f"'{key}' has no effect"):
            engine.render_chat(with_keys("user", **{key: "x"}))
    with pytest.raises(ParameterError, match="does not use 'shout'"):
        engine.render_chat(PLAIN, chat_template_kwargs={"shout": True})


def test_thoughts_are_given_to_a_template_that_reads_them_and_to_no_other(app: Starlette, engine: Engine) -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        thoughtful = with_keys("assistant", **{key: "hm"})
        assert prompt(app, thoughtful) == prompt(app, PLAIN)
        own, engine.chat_template = (
            engine.chat_template,
            ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"),
        )
        try:
            assert prompt(app, thoughtful) != prompt(app, PLAIN)
        finally:
            engine.chat_template = own


def test_calls_come_back_with_what_clients_add_to_them(app: Starlette) -> None:
    function = CALL["function"]
    for call in (
        CALL | {"index": 0},
        CALL | {"type": None, "index": 0},
        {"id": "c1", "function": function, "cache_control": {"type": "ephemeral"}},
        CALL | {"function": function | {"provider": None}},  # type: ignore[operator]
    ):
        assert prompt(app, with_keys("assistant", tool_calls=[call])) == prompt(
            app, with_keys("assistant", tool_calls=[CALL])
        )
    nothing = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    for arguments in ("", None, {}):
        call = {"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": {}}
        assert prompt(app, [*PLAIN, said]) == prompt(app, [*PLAIN, nothing])
    custom = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "a b"}}
    function = {"name": "f", "arguments": {"input": "a b"}}
    said = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in (custom, {"function": function})]
    assert prompt(app, [*PLAIN, said[0]]) == prompt(app, [*PLAIN, said[1]])


def test_an_answer_without_text_comes_back(app: Starlette) -> None:
    for role, keys in itertools.product(("assistant", "tool"), ({"content": None}, {}, {"content": []})):
        more = {"tool_call_id": "c1"} if role == "tool" else {"reasoning_content": "hm", "tool_calls": []}
        assert prompt(app, [*PLAIN, {"role": role} | keys | more]) == prompt(
            app, [*PLAIN, {"role": role, "content": "", "tool_call_id": "c1"}]
        )
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    assert prompt(app, [*PLAIN, refused]) == prompt(app, [*PLAIN, {"role": "assistant", "content": "I will not."}])
    assert "no content" in error_of(post(app, CHATS, {"messages": [{"role": "user"}]}))["message"]


PARTS: list[list[Any]] = [
    [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Soon."}],
    [{"type": "text", "text": "Weather?", "annotations": []}, {"type": "refusal", "refusal": "Soon."}],
    [{"type": "input_text", "text": "Weather?"}, {"type": "output_text", "text": "Soon.", "logprobs": None}],
    ["Weather?", {"text": "Soon."}],
    [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Weather?\nSoon."}],
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_parts_of_text_are_joined_where_a_template_wants_one_text(app: Starlette, parts: list[Any]) -> None:
    assert prompt(app, with_keys("user", content=parts)) == prompt(app, with_keys("user", content="Weather?\nSoon."))


def test_a_template_that_reads_parts_gets_them_without_marks(app: Starlette, engine: Engine) -> None:
    reads = "{% for m in messages %}{% for p in m.content %}<{{ p }}>{% endfor %}{% endfor %}{{ 'text' }}"
    own, engine.chat_template = engine.chat_template, ChatTemplate(reads)
    try:
        given, plain = (
            prompt(app, [{"role": "user", "content": [{"type": "text", "text": "a"} | more]}])
            for more in ({"cache_control": {}}, {})
        )
    finally:
        engine.chat_template = own
    assert given == plain


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file"},
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": []},
        5,
        None,
    ],
    ids=str,
)
def test_a_part_that_is_no_text_is_refused(app: Starlette, part: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    assert error_of(post(app, CHATS, {"messages": messages}))["param"] == "messages"


def test_variables_that_the_template_does_not_use_are_ignored(app: Starlette, engine: Engine) -> None:
    unused = {"enable_thinking": False, "thinking": True, "preserve_thinking": True, "x": {"a": [None]}}
    assert prompt(app, PLAIN, chat_template_kwargs=unused) == prompt(app, PLAIN)
    body = {"messages": PLAIN, "max_tokens": 4, "temperature": 0}
    plain = post(app, CHATS, body).json()["choices"]
    for more in ({"reasoning_effort": "none"}, {"verbosity": "low", "enable_thinking": True}):
        assert post(app, CHATS, body | more).json()["choices"] == plain
    thinks = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}no{% endif %}"
    own, engine.chat_template = engine.chat_template, ChatTemplate(thinks)
    try:
        counts = [
            post(app, CHATS, body | {"reasoning_effort": effort}).json()["usage"]["prompt_tokens"]
            for effort in ("high", "none")
        ]
    finally:
        engine.chat_template = own
    assert counts[0] < counts[1]


# --- fields -----------------------------------------------------------------------------------------------------------


def official_client() -> Any:
    """The package openai; without it the test is skipped."""
    return pytest.importorskip("openai", reason="the official client needs the reference extra")


def known(endpoint: Any) -> set[str]:
    own = set(endpoint.request.__struct_fields__) | (FIELDS.keys() - FUNCTIONS)
    return own | WORDS[endpoint.reader].keys() | WORDS[API].keys()


@pytest.mark.longer
def test_every_field_of_openais_requests_is_done_ignored_or_refused_by_decision() -> None:
    official_client()
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    for base, endpoint in (
        (completions.CompletionCreateParamsBase, COMPLETIONS),
        (chat.CompletionCreateParamsBase, CHAT),
        (responses.ResponseCreateParamsBase, RESPONSES),
    ):
        assert not base.__annotations__.keys() - known(endpoint)


def test_every_item_of_openais_inputs_is_read_skipped_or_refused_by_decision() -> None:
    official_client()
    from openai.types.responses.response_includable import ResponseIncludable
    from openai.types.responses.response_input_item_param import ResponseInputItemParam

    read = {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    }
    types = {
        kind
        for item in typing.get_args(ResponseInputItemParam)
        for hint in [typing.get_type_hints(item, include_extras=False)["type"]]
        for kind in [*typing.get_args(hint), *itertools.chain(*map(typing.get_args, typing.get_args(hint)))]
        if isinstance(kind, str)
    }
    assert types == SKIPPED | read | {"item_reference"}
    assert {*typing.get_args(ResponseIncludable)} == INCLUDED | {LOGPROBS}


VLLM: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "presence_penalty": 0.0,
    "stop": [],
    "stream": False,
    "tool_choice": "none",
    "include_reasoning": True,
    "parallel_tool_calls": True,
    "use_beam_search": False,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "bad_words": [],
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "priority": 0,
    "request_id": "x",
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "max_repetition_pattern_size": 0,
    "min_repetition_pattern_size": 0,
    "repetition_min_count": 0,
    "vllm_xargs": {},
    "extra_body": {},
    "allowed_token_ids": None,
    "structured_outputs": None,
}
"""What a client sends that fills in all defaults of vLLM's server"""
LLAMA_CPP: dict[str, Any] = {
    "cache_prompt": True,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 40,
    "typical_p": 1,
    "samplers": "",
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "timings_per_token": False,
    "reasoning_format": "auto",
    "id_slot": -1,
}


@pytest.mark.parametrize("defaults", [VLLM, LLAMA_CPP], ids=["vLLM", "llama.cpp"])
def test_the_defaults_of_other_servers_are_taken(app: Starlette, defaults: dict[str, Any]) -> None:
    body = {"messages": PLAIN, "max_tokens": 4, "temperature": 0}
    whole = post(app, CHATS, body | defaults)
    assert whole.status_code == 200, whole.text
    assert whole.json()["choices"] == post(app, CHATS, body).json()["choices"]


def test_what_an_order_of_samplers_leaves_out_has_no_effect(app: Starlette) -> None:
    """As in llama.cpp's server; XTC beyond one half is off, and DRY without a multiplier."""
    body = {"prompt": "Once", "max_tokens": 8, "seed": 1, "temperature": 2.0}
    idle = {"top_k": 1, "xtc_probability": 1, "xtc_threshold": 0.9, "dry_multiplier": 0, "dry_base": 0}

    def text(**fields: Any) -> str:
        answer = post(app, "/v1/completions", body | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    assert text(**idle, samplers=["temperature", "min_p"]) == text() != text(top_k=1)
    assert text(samplers="t", min_p=0.5) == text()
    assert text(samplers=["temperature", "min_p"], min_p=0.5) != text(samplers=["min_p", "temperature"], min_p=0.5)
    assert "no sampler" in error_of(post(app, "/v1/completions", body | {"samplers": ["infill"]}))["message"]


BUDGETS = [
    *({name: 2} for name in ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens")),
    {"thinking": {"type": "enabled", "budget_tokens": 2}},
    {"reasoning": {"max_tokens": 2}},
]


def test_a_budget_of_thoughts_is_taken_in_each_form(app: Starlette) -> None:
    """And has no effect, nor is it an error, on a model without thoughts; -1 is none."""
    body = {"prompt": [40, 7, 41], "max_tokens": 8, "temperature": 0, "return_token_ids": True}

    def tokens(fields: dict[str, Any]) -> list[int]:
        answer = post(app, "/v1/completions", body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    plain = tokens({})
    for budget in BUDGETS:
        assert tokens(budget) == plain
        assert tokens(budget | {"thinking_tokens": [7, 9]})[1] == 9 != plain[1]
    assert tokens({"thinking_token_budget": -1}) == plain
    wrong = error_of(post(app, "/v1/completions", body | {"thinking_token_budget": "x", "thinking_tokens": [7, 9]}))
    assert wrong["message"].startswith("thinking_token_budget='x'")


def test_a_field_that_is_misspelt_still_gets_its_suggestion(app: Starlette) -> None:
    body = {"messages": PLAIN}
    for wrong, right in (("temprature", "temperature"), ("max_token", "max_tokens"), ("tol_choice", "tool_choice")):
        assert f"did you mean '{right}'" in error_of(post(app, CHATS, body | {wrong: 1}))["message"]


def test_a_top_p_of_zero_is_greedy_and_a_top_k_of_minus_one_is_no_limit(app: Starlette) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "seed": 1}

    def text(**fields: Any) -> str:
        answer = post(app, "/v1/completions", body | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    greedy = text(temperature=0)
    for temperature in ({}, {"temperature": 0}, {"temperature": 1.5}):
        assert text(top_p=0, **temperature) == text(top_p=0.0, top_k=-1, **temperature) == greedy
    assert text(top_k=-1) == text(top_k=0) == text() != greedy
    assert text(top_k=1) == greedy
    for wrong in ({"top_k": -2}, {"top_p": -1e-9}, {"top_p": False}):
        assert error_of(post(app, "/v1/completions", body | wrong))["param"] == next(iter(wrong))
    ollama = {"model": "minillm", "prompt": "Once", "raw": True, "stream": False}
    for options in ({"top_p": 0}, {"temperature": 0}):
        answer = post(app, "/api/generate", ollama | {"options": options | {"num_predict": 8}}).json()
        assert answer["response"] == greedy


# --- /v1/responses ----------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello."}


def asked(app: Starlette, given: Any, **more: Any) -> Any:
    """The answer to an input."""
    response = post(app, "/v1/responses", {"input": given, "temperature": 0, "max_output_tokens": 4} | more)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["usage"]["input_tokens"], [item["content"] for item in answer["output"]]


def test_a_response_as_agents_ask_for_it(app: Starlette) -> None:
    plain = asked(app, [USER])
    for more in (
        {"store": False, "include": ["reasoning.encrypted_content"]},
        {"store": True, "truncation": "auto", "service_tier": "priority", "prompt_cache_retention": "24h"},
        {"reasoning": {"effort": "low", "summary": "auto", "context": "auto"}},
        {"text": {"verbosity": "low"}, "prompt_cache_key": "x", "safety_identifier": "y", "metadata": {"a": "b"}},
        {"text": {"format": None}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
        {"client_metadata": {"a": "b"}, "max_tool_calls": 3, "background": False, "previous_response_id": None},
    ):
        assert asked(app, [USER], **more) == plain


def test_the_effort_of_reasoning_is_a_variable_of_the_template(app: Starlette, engine: Engine) -> None:
    thinks = "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}"
    own, engine.chat_template = engine.chat_template, ChatTemplate(thinks)
    try:
        counts = [asked(app, [USER], reasoning={"effort": effort})[0] for effort in (None, "low", "x" * 40)]
    finally:
        engine.chat_template = own
    assert counts == sorted(set(counts))


def test_items_as_agents_send_them_back(app: Starlette) -> None:
    text = {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}
    plain = asked(app, [USER, SAID, USER])
    for said in (
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [text]},
        {"type": "message", "role": "assistant", "content": [text], "phase": "final_answer"},
        {"role": "assistant", "content": "Hello.", "internal": {"a": 1}},
    ):
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "content": None}
        for skipped in ([], [thought], [{"type": "item_reference", "id": "rs_1"}]):
            assert asked(app, [USER, *skipped, said, USER]) == plain
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"input": "x"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    called = asked(app, [USER, call, result])
    custom = {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "c1",
        "name": "f",
        "input": "x",
        "status": "completed",
    }
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]}
    assert asked(app, [USER, custom, output]) == called
    assert asked(app, [USER, call | {"id": "fc_1", "status": "completed"}, result | {"id": "fco_1"}]) == called


def test_tools_of_other_types_are_skipped_with_one_line(app: Starlette, caplog: pytest.LogCaptureFixture) -> None:
    log_skipped.cache_clear()
    function = {"type": "function"} | WEATHER["function"]
    others: list[Any] = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}]
    alone = asked(app, [USER], tools=[function])
    with caplog.at_level(logging.WARNING, "minillm.server"):
        for _ in range(2):
            assert asked(app, [USER], tools=[*others, function | {"defer_loading": True}]) == alone
        assert asked(app, [USER], tools=others) == asked(app, [USER])
    lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(lines) == 3
    assert "tools of the type local_shell are skipped" in lines[2]


def test_counts_of_tokens_have_what_clients_expect(app: Starlette) -> None:
    body = {"model": "minillm", "input": "A new text of some length.", "max_output_tokens": 2}
    usage = official_client().types.responses.Response.model_validate(post(app, "/v1/responses", body).json()).usage
    details = usage.input_tokens_details
    assert details.cache_write_tokens + details.cached_tokens == usage.input_tokens


@pytest.mark.slow
def test_whatever_clients_send_back_is_answered_or_refused(app: Starlette, engine: Engine) -> None:
    """Messages of random keys and values are read by the server's own way as they are by the strict one, or refused."""
    rng = random.Random(5)
    values: list[Any] = [None, "", "a", 0, [], {}, [None], [{"type": "text", "text": "x"}], {"a": [1]}, ["x"], True]
    keys = [*KEYS, "content", "tool_calls", "tool_call_id", "reasoning_content", "role", "x"]
    for _ in range(300):
        message = {"role": rng.choice(ROLES), "content": rng.choice(["a", "", *values])}
        message |= {rng.choice(keys): rng.choice(values) for _ in range(rng.randrange(4))}
        response = post(app, "/tokenize", {"messages": [*PLAIN, message]})
        assert response.status_code in (200, 400), (message, response.text)
        plain = {key: message[key] for key in ("role", "content", "tool_call_id") if message.get(key) is not None}
        if response.status_code == 400 or not isinstance(message.get("content"), str) or message.get("tool_calls"):
            continue
        if plain["role"] != "tool":
            plain.pop("tool_call_id", None)
        plain["role"] = "system" if plain["role"] == "developer" else plain["role"]
        name = {"name": message["name"]} if plain["role"] == "tool" and message.get("name") is not None else {}
        text = engine.render_chat([*PLAIN, plain | name])
        assert response.json()["tokens"] == engine.tokenizer.encode(text, add_special_tokens=False), json.dumps(message)


SENTENCES = ["Weather?", "Soon.", "", "a\nb", "<|im_end|>", "\u65e5", "{}", " "]


def sent_and_plain(rng: random.Random) -> tuple[list[Any], list[Any]]:
    """A conversation as a client sends it, and with nothing in it that is without effect."""
    sent: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    for i in range(rng.randrange(1, 6)):
        role = rng.choice(["user", "assistant", "system", "developer"])
        texts = rng.choices(SENTENCES, k=rng.randrange(1, 4))
        message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": "\n".join(texts)}
        plain.append(message)
        sent.append(message | {"role": role} | dict(rng.sample([*KEYS.items()], rng.randrange(4))))
        if role == "assistant":
            sent[-1][rng.choice(["reasoning_content", "reasoning", "thinking", "refusal"])] = rng.choice(["hm", None])
        if rng.random() < 0.5:
            marks: list[Any] = [{}, {"cache_control": {"type": "ephemeral"}}, {"annotations": []}, {"logprobs": None}]
            kinds = ["text", "input_text", "output_text"]
            parts: list[Any] = [{"type": rng.choice(kinds), "text": text} | rng.choice(marks) for text in texts]
            if rng.random() < 0.3:
                parts.insert(rng.randrange(len(parts) + 1), {"type": "thinking", "thinking": "hm", "signature": "x"})
            sent[-1]["content"] = parts
        if role == "assistant" and rng.random() < 0.5:
            function = {"name": "get_weather", "arguments": json.dumps({"city": rng.choice(SENTENCES)})}
            call = {"id": f"c{i}", "type": "function", "function": function}
            extra = rng.choice([{}, {"index": 0}, {"provider_specific_fields": {}}])
            plain[-1] = message | {"tool_calls": [call]}
            sent[-1]["tool_calls"] = [call | extra]
            result = {"role": "tool", "tool_call_id": f"c{i}", "content": rng.choice(SENTENCES)}
            plain.append(result)
            sent.append(result | {"timestamp": 5} | rng.choice([{}, {"name": "get_weather"}, {"cache_control": {}}]))
    return sent, plain


@pytest.mark.parametrize(
    "start",
    [pytest.param(start, marks=pytest.mark.exhaustive if start else pytest.mark.slow) for start in range(0, 2000, 250)],
)
def test_conversations_as_clients_send_them_are_read_as_they_are_meant(
    app: Starlette, engine: Engine, start: int
) -> None:
    for number in range(start, start + 250):
        sent, plain = sent_and_plain(random.Random(number))
        named = [message | {"name": "get_weather"} if message["role"] == "tool" else message for message in plain]
        text = engine.render_chat(named, tools=[WEATHER])
        assert engine.tokenizer is not None
        assert prompt(app, sent) == engine.tokenizer.encode(text, add_special_tokens=False), number
