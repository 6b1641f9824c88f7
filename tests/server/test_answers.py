"""Answers equal the engine's own, whole or streamed, in OpenAI's shape."""

import math
from typing import Any

import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.engine.results import Generation
from minillm.reference.philox import fold_in

from .client import chunks_of, get, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "A list of colors: red,"
TALK = [{"role": "user", "content": "A list of colors: red,"}]


def greedy(engine: Engine, prompt: Any = PROMPT, **fields: Any) -> Generation:
    """What the engine generates by itself."""
    found = engine.generate(prompt, do_sample=False, **{"max_new_tokens": 12} | fields)
    assert isinstance(found, Generation)
    return found


def complete(app: Starlette, **body: Any) -> dict[str, Any]:
    """A completion, at temperature 0 unless the body says otherwise."""
    response = post(app, COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(app: Starlette, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = post(app, path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return chunks_of(response.text)


def test_a_completion_is_what_the_engine_generates(app: Starlette, demo: Engine) -> None:
    answer, expected = complete(app), greedy(demo)
    [choice] = answer.pop("choices")
    assert choice == {
        "index": 0,
        "text": expected.text,
        "logprobs": None,
        "finish_reason": expected.completions[0].finish_reason,
        "stop_reason": None,
    }
    prompt, new = len(expected.prompt_token_ids), len(expected.token_ids)
    usage = answer.pop("usage")
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, new, prompt + new)
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}
    assert answer.pop("id").startswith("cmpl-") and isinstance(answer.pop("created"), int)
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {"object": "text_completion", "model": "demo"}


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, [PROMPT, "Count to 9:"], [40, 41, 42], [[40, 41, 42], [50, 51]]],
    ids=["text", "texts", "ids", "lists"],
)
def test_prompts_of_every_form(app: Starlette, demo: Engine, prompt: Any) -> None:
    prompts = (
        prompt if isinstance(prompt[0], list) or (isinstance(prompt, list) and isinstance(prompt[0], str)) else [prompt]
    )
    choices = complete(app, prompt=prompt)["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    assert [choice["text"] for choice in choices] == [greedy(demo, one).text for one in prompts]


def test_several_results_of_several_prompts_stand_in_order(app: Starlette, demo: Engine) -> None:
    prompts = [PROMPT, "Count to 9:"]
    body = {"prompt": prompts, "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 6}
    choices = complete(app, **body)["choices"]
    expected = [
        demo.generate(p, do_sample=True, top_k=0, temperature=0.9, seed=seed, num_return_sequences=3, max_new_tokens=6)
        for p, seed in zip(prompts, [5, fold_in(5, 1)], strict=True)
    ]
    assert [c["text"] for c in choices] == [c.text for generation in expected for c in generation.completions]
    pieces = ["" for _ in choices]
    for chunk in streamed(app, COMPLETIONS, body):
        for choice in chunk["choices"]:
            pieces[choice["index"]] += choice["text"]
    assert pieces == [c["text"] for c in choices]


def test_a_completion_in_pieces_is_the_same(app: Starlette) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 2, "return_token_ids": True}
    whole = complete(app, **body)
    chunks = streamed(app, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1 and {chunk["object"] for chunk in chunks} == {"text_completion"}
    [choice], pieces = whole["choices"], [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
    assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
    assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert not any("prompt_token_ids" in piece for piece in pieces[1:])
    for name in ("tokens", "text_offset"):
        assert [x for piece in pieces for x in piece["logprobs"][name]] == choice["logprobs"][name]
    values = [x for piece in pieces for x in piece["logprobs"]["token_logprobs"]]
    assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)


def test_log_probabilities_of_a_completion_are_the_engine_s(app: Starlette, demo: Engine) -> None:
    [choice], expected = complete(app, logprobs=3)["choices"], greedy(demo, logprobs=True, top_logprobs=3)
    found, completion = choice["logprobs"], expected.completions[0]
    assert found["token_logprobs"] == pytest.approx(completion.logprobs, abs=1e-5)
    assert "".join(found["tokens"]) == choice["text"]
    assert [choice["text"][i:].startswith(t) for i, t in zip(found["text_offset"], found["tokens"], strict=True)]
    assert completion.top_logprobs is not None and demo.tokenizer is not None
    for mine, theirs in zip(found["top_logprobs"], completion.top_logprobs, strict=True):
        assert mine == pytest.approx({demo.tokenizer.token(i): v for i, v in theirs}, abs=1e-5)


def test_without_alternatives_the_chosen_token_alone_is_told(app: Starlette) -> None:
    [choice] = complete(app, logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"] is None and len(choice["logprobs"]["token_logprobs"]) == 12


def test_an_unlikely_token_stands_beside_the_alternatives(app: Starlette) -> None:
    [choice] = complete(app, logprobs=1, logit_bias={"40": 100}, max_tokens=2)["choices"]
    assert [len(best) for best in choice["logprobs"]["top_logprobs"]] == [2, 2]


def test_tokens_as_ids(app: Starlette) -> None:
    [choice] = complete(app, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_characters_of_several_tokens_have_bytes(app: Starlette, demo: Engine) -> None:
    assert demo.tokenizer is not None
    ids = demo.tokenizer.encode("日", add_special_tokens=False)
    assert len(ids) > 1  # or this tests nothing
    forced = {"prompt": "x", "guided_choice": ["日本"], "max_tokens": 12, "temperature": 0}
    found = complete(app, **forced, logprobs=0)["choices"][0]
    assert found["text"] == "日本" and found["logprobs"]["tokens"][0].startswith("bytes:\\x")
    offsets = found["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[1] == 0 and max(offsets) == 2
    body = {"messages": TALK, "guided_choice": ["日本"], "logprobs": True, "temperature": 0}
    content = post(app, CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for token in content[:-1] for b in token["bytes"]).decode() == "日本"


def test_best_of_returns_the_most_likely(app: Starlette, demo: Engine) -> None:
    answer = complete(app, best_of=5, n=2, seed=3, temperature=4.0, max_tokens=5)
    fields = {"do_sample": True, "top_k": 0, "temperature": 4.0, "seed": 3, "max_new_tokens": 5}
    all_of_them = demo.generate(PROMPT, num_return_sequences=5, logprobs=True, **fields).completions
    ranked = sorted(all_of_them, key=lambda c: math.fsum(c.logprobs or ()) / len(c.token_ids), reverse=True)
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in ranked[:2]]
    assert len({c.text for c in all_of_them}) > 2  # or this tests nothing
    assert answer["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in all_of_them)
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "fields",
    [{"guidance_scale": 0, "negative_prompt": "Once upon a time"}, {"dola_layers": "low"}, {"dola_layers": [0, 2]}],
    ids=["guidance", "dola", "layers"],
)
def test_guidance_and_dola(app: Starlette, demo: Engine, fields: dict[str, Any]) -> None:
    expected = greedy(demo, max_new_tokens=6, **fields).text
    assert complete(app, max_tokens=6, temperature=0, **fields)["choices"][0]["text"] == expected
    error = post(app, "/v1/completions", {"prompt": "A", "negative_prompt": "B"}).json()["error"]
    assert error["param"] == "negative_prompt"


def test_echo(app: Starlette) -> None:
    [choice], [plain] = complete(app, echo=True)["choices"], complete(app)["choices"]
    assert choice["text"] == PROMPT + plain["text"]
    pieces = streamed(app, COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == choice["text"]


def test_the_prompt_s_log_probabilities(app: Starlette, demo: Engine) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 4.0, "seed": 1, "n": 2}
    score = demo.score(PROMPT)
    choices = complete(app, **body)["choices"]
    assert demo.tokenizer is not None
    for choice in choices:
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        count = len(score.logprobs)
        assert found["token_logprobs"][1:count] == pytest.approx(score.logprobs[1:], abs=1e-4)
        assert len(found["tokens"]) == len(found["text_offset"]) == count + 3
        for i, token in enumerate(score.token_ids):
            if token not in demo.tokenizer.special_ids:
                assert choice["text"][found["text_offset"][i] :].startswith(demo.tokenizer.token(token))
        assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:])
    pieces: list[dict[str, list[Any]]] = [{}, {}]
    for chunk in streamed(app, COMPLETIONS, body):
        [piece] = chunk["choices"]
        for name, values in piece["logprobs"].items():
            pieces[piece["index"]].setdefault(name, []).extend(values)
    assert [p["tokens"] for p in pieces] == [c["logprobs"]["tokens"] for c in choices]
    assert [p["text_offset"] for p in pieces] == [c["logprobs"]["text_offset"] for c in choices]


def test_a_prompt_may_be_scored_alone(app: Starlette, demo: Engine) -> None:
    [choice] = complete(app, echo=True, logprobs=1, max_tokens=0)["choices"]
    score = demo.score(PROMPT)
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(score.logprobs[1:], abs=1e-4)
    best = [max(top, key=top.get) for top in choice["logprobs"]["top_logprobs"][1:]]  # as lm-eval asks for greedy
    assert any(a == b for a, b in zip(best, choice["logprobs"]["tokens"][1:], strict=True))


def test_what_ended_a_text(app: Starlette) -> None:
    [stopped] = complete(app, stop=[" green", "zzz"])["choices"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", " green")
    token = complete(app, return_token_ids=True)["choices"][0]["token_ids"][2]
    [ended] = complete(app, stop_token_ids=[token])["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", token)
    [by_itself] = complete(app, logit_bias={"2": 100})["choices"]
    assert (by_itself["finish_reason"], by_itself["stop_reason"]) == ("stop", None)


def test_cached_tokens_are_told(app: Starlette) -> None:
    prompt = "A list of colors: red, " * 40
    counts = [
        complete(app, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in "ab"
    ]
    assert counts[0] < counts[1]


def test_a_chat_is_what_the_engine_answers(app: Starlette, demo: Engine) -> None:
    body = {"messages": TALK, "temperature": 0, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    response = post(app, CHAT, body)
    answer = response.json()
    expected = demo.chat(TALK, do_sample=False, max_new_tokens=9, logprobs=True, top_logprobs=2)
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    content = choice["logprobs"]["content"]
    assert [token["logprob"] for token in content] == pytest.approx(expected.completions[0].logprobs, abs=1e-5)
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == expected.text
    assert [len(token["top_logprobs"]) for token in content] == [2] * 9
    chunks = streamed(app, CHAT, body | {"return_token_ids": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == expected.text
    logprobs = [t for chunk in chunks for t in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [t["token"] for t in logprobs] == [t["token"] for t in content]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == expected.token_ids
    assert chunks[0]["choices"][0]["prompt_token_ids"] == expected.prompt_token_ids


@pytest.mark.slow
def test_a_chat_uses_the_rest_of_the_context(app: Starlette, demo: Engine) -> None:
    answer = post(app, CHAT, {"messages": TALK, "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == demo.context
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_json_schema_holds(app: Starlette) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = post(app, CHAT, {"messages": TALK, "response_format": form, "seed": 1}).json()
    assert answer["choices"][0]["message"]["content"] in ('{"a":true}', '{"a":false}')
    text = post(app, CHAT, {"messages": TALK, "response_format": {"type": "json_object"}, "max_tokens": 3}).json()
    assert text["choices"][0]["message"]["content"].startswith("{")


def test_messages_of_openai_s_forms(app: Starlette, demo: Engine) -> None:
    parts = [{"type": "text", "text": "A list of"}, {"type": "text", "text": "colors:"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "refusal": None}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    answer = post(app, CHAT, body).json()
    assert demo.tokenizer is not None
    assert demo.tokenizer.decode(answer["prompt_token_ids"]) == (
        "system: Be brief.\nuser: A list of\ncolors:\nassistant:"
    )


def test_continuing_the_last_message(app: Starlette, demo: Engine) -> None:
    messages = [*TALK, {"role": "assistant", "content": " orange"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 4, "temperature": 0}
    expected = demo.chat(messages, continue_final_message=True, do_sample=False, max_new_tokens=4)
    assert post(app, CHAT, body).json()["choices"][0]["message"]["content"] == expected.text


def test_variables_of_the_template(app: Starlette, demo: Engine) -> None:
    body = {"messages": TALK, "chat_template_kwargs": {"shout": True}, "max_tokens": 1, "return_token_ids": True}
    ids = post(app, CHAT, body).json()["prompt_token_ids"]
    assert demo.tokenizer is not None and demo.tokenizer.decode(ids).endswith("assistant: LOUD")


@pytest.mark.slow
def test_equal_seeds_repeat_and_others_do_not(app: Starlette) -> None:
    texts = [complete(app, temperature=4, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2, -3, -3)]
    assert texts[0] == texts[1] != texts[2] and texts[3] == texts[4]
    assert len({complete(app, temperature=4, max_tokens=30)["choices"][0]["text"] for _ in range(4)}) > 1


def test_tokens_of_texts_and_conversations(app: Starlette, demo: Engine) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    answer = post(app, "/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    ids = tokenizer.encode(PROMPT)
    assert answer == {"count": len(ids), "max_model_len": demo.context, "tokens": ids} | {
        "token_strs": [tokenizer.token(i) for i in ids]
    }
    assert post(app, "/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"] == tokenizer.encode(
        PROMPT, add_special_tokens=False
    )
    chat = post(app, "/tokenize", {"messages": TALK}).json()["tokens"]
    assert tokenizer.decode(chat) == f"user: {PROMPT}\nassistant:"
    assert post(app, "/detokenize", {"tokens": ids}).json() == {
        "prompt": tokenizer.decode(ids, skip_special_tokens=False)
    }
    info = get(app, "/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.token(info["eos_token_id"]) and "assistant:" in info["chat_template"]


def test_models_and_version(app: Starlette, demo: Engine) -> None:
    [card] = get(app, "/v1/models").json()["data"]
    assert card["id"] == "demo" and card["max_model_len"] == demo.context
    assert get(app, "/v1/models/demo").json() == card
    assert get(app, "/health").json() == {"status": "ok"}
    assert get(app, "/version").json().keys() == {"version"}
