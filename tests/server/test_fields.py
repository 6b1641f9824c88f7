"""Every field of a request does something, is known to do nothing, or is refused by name."""

import json
import re
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.decoding.fields import FIELDS
from minillm.decoding.foreign import API, RESPONSES, WORDS, ignored, refused, renamed
from minillm.server import make_app
from minillm.server.generation_request import (
    CHAT,
    COMPLETIONS,
    FUNCTIONS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    translate,
)

from .. import seq2seq
from ..adapters import write_adapter
from ..decoding.test_every_field import PROMPT, WALK, Plain, plugins  # noqa: F401  # used by itself
from ..tiny import write_checkpoint
from .client import error_of, get, post

Fields = dict[str, Any]
TALK = [{"role": "user", "content": "A list of colors: red,"}]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """The engines of the table of witnesses."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"), seed=3)
    other = write_checkpoint(tmp_path_factory.mktemp("other"), seed=4)
    adapters = {"one": write_adapter(tmp_path_factory.mktemp("adapter"))}
    return {
        "plain": Engine(model, max_batch_size=4),
        "draft": Engine(model, draft=other),
        "amateur": Engine(model, amateur=other),
        "lora": Engine(model, adapters=adapters),
        "encoder": Engine(seq2seq.write_checkpoint(tmp_path_factory.mktemp("t5"))),
    }


@pytest.fixture(scope="module")
def tiny(engines: dict[str, Engine]) -> Starlette:
    return make_app(engines)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIELDS.keys() - FUNCTIONS - WORDS[COMPLETIONS.reader].keys() - {"logprobs"}))
def test_a_generation_field_does_over_http_what_it_does_in_the_engine(
    engines: dict[str, Engine], tiny: Starlette, name: str
) -> None:
    generation = engines["plain"].generate(PROMPT, max_new_tokens=8, do_sample=False)
    witness, _ = WALK[name](Plain(generation.token_ids, generation.text))
    fields = {"do_sample": False} | witness
    if fields.pop("potential", None):  # a function, which cannot be sent: a guide weighs the texts as well
        fields["guided_regex"] = "[a-z ]{3,30}"
    model, prompt = fields.pop("with", "plain"), fields.pop("prompt", PROMPT)
    if fields.pop("prefix_allowed_tokens_fn", None):  # a pattern that speculation finds; it only makes more of it
        prompt = list(prompt)
    if not {"max_new_tokens", "max_length"} & fields.keys():
        fields["max_new_tokens"] = 8
    body = {"model": model, "prompt": prompt, "return_token_ids": True} | json.loads(json.dumps(fields, default=list))
    if (count := body.pop("top_logprobs", None)) is not None or body.pop("logprobs", None):
        body["logprobs"] = count or 0
    response = post(tiny, "/v1/completions", body)
    assert response.status_code == 200, response.text
    expected = engines[model].generate(prompt, **{"top_k": 0} | fields if fields["do_sample"] else fields)
    choices = response.json()["choices"]
    assert [c["token_ids"] for c in choices] == [c.token_ids for c in expected.completions]
    assert [c["text"] for c in choices] == [c.text for c in expected.completions]


PLAIN: Fields = {"prompt": "A list of colors: red,", "temperature": 0, "max_tokens": 6}
CHATTING: Fields = {"messages": TALK, "temperature": 0, "max_tokens": 6}
HOT: Fields = {"temperature": 4.0, "seed": 1}
THINKING: Fields = {"prompt": [40, 7, 41], "thinking_tokens": [7, 9]}
COMPLETION_WITNESSES: dict[str, tuple[Fields, Fields]] = {
    "model": ({"model": "nobody"}, {}),
    "prompt": ({"prompt": "Count to 9:"}, {}),
    "max_tokens": ({"max_tokens": 3}, {}),
    "max_completion_tokens": ({"max_tokens": None, "max_completion_tokens": 3}, {}),
    "n": (HOT | {"n": 2}, HOT),
    "best_of": (HOT | {"best_of": 4}, HOT),
    "stop": ({"stop": [","]}, {}),
    "include_stop_str_in_output": ({"stop": ",", "include_stop_str_in_output": True}, {"stop": ","}),
    "min_tokens": ({"stop_token_ids": [15], "min_tokens": 5}, {"stop_token_ids": [15]}),
    "stop_token_ids": ({"stop_token_ids": [15]}, {}),
    "ignore_eos": ({"ignore_eos": True, "logit_bias": {"2": 100}}, {"logit_bias": {"2": 100}}),
    "logit_bias": ({"logit_bias": {"40": 100}}, {}),
    "logprobs": ({"logprobs": 1}, {}),
    "stream": ({"stream": True}, {}),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True}),
    "use_beam_search": (
        {"use_beam_search": True, "n": 3, "length_penalty": -3.0, "early_stopping": True},
        {"num_beams": 1},
    ),
    "timeout": ({"timeout": 1e-9}, {}),
    "return_token_ids": ({"return_token_ids": True}, {}),
    "return_tokens_as_token_ids": ({"logprobs": 1, "return_tokens_as_token_ids": True}, {"logprobs": 1}),
    "add_special_tokens": ({"add_special_tokens": False}, {}),
} | {
    name: (THINKING | {name: 1}, THINKING | {name: 5})
    for name in ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget")
}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
WRITTEN = re.escape("".join(json.dumps({"name": name, "arguments": {}}) for name in ("f", "g")))
CALLING: Fields = {"tools": TOOLS, "guided_regex": WRITTEN, "max_tokens": 60}
CHAT_WITNESSES: dict[str, tuple[Fields, Fields]] = {
    "messages": ({"messages": [{"role": "user", "content": "Count"}]}, {}),
    "response_format": ({"response_format": {"type": "json_object"}}, {}),
    "add_generation_prompt": ({"add_generation_prompt": False}, {}),
    "continue_final_message": ({"continue_final_message": True}, {}),
    "chat_template_kwargs": ({"chat_template_kwargs": {"shout": True}}, {}),
    "reasoning_effort": ({"reasoning_effort": "high"}, {}),
    "verbosity": ({"verbosity": "low"}, {}),
    "enable_thinking": ({"enable_thinking": True}, {}),
    "tools": (CALLING, CALLING | {"tools": None}),
    "tool_choice": (CALLING | {"tool_choice": "none"}, CALLING),
    "parallel_tool_calls": (CALLING | {"parallel_tool_calls": False}, CALLING),
}
LABELS = {"user"}
ELSEWHERE = {"priority": "test_limits.py, where requests wait", "logits_processors": "test_plugins.py"}
ELSEWHERE |= dict.fromkeys(("include_reasoning", "reasoning_format"), "test_reasoning.py, where a model thinks")
ELSEWHERE["suffix"] = "test_infill.py, where a model has tokens for it"


def answer(app: Starlette, path: str, body: Fields) -> Any:
    """All of an answer but its id and the time."""
    response = post(app, path, body)
    if response.headers["content-type"] != "application/json":
        return [line for line in response.text.splitlines() if "usage" in line], "stream"
    found = response.json()
    for name in ("id", "created"):
        found.pop(name, None)
    found.get("usage", {}).pop("prompt_tokens_details", None)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPLETION_WITNESSES)
def test_a_field_of_a_completion_has_an_effect(app: Starlette, name: str) -> None:
    with_it, without = COMPLETION_WITNESSES[name]
    assert answer(app, "/v1/completions", PLAIN | with_it) != answer(app, "/v1/completions", PLAIN | without)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHAT_WITNESSES)
def test_a_field_of_a_chat_has_an_effect(app: Starlette, name: str) -> None:
    with_it, without = CHAT_WITNESSES[name]
    assert answer(app, "/v1/chat/completions", CHATTING | with_it) != answer(
        app, "/v1/chat/completions", CHATTING | without
    )


def test_every_field_has_a_witness() -> None:
    def names(kind: type) -> set[str]:
        return {field.name for field in msgspec.structs.fields(kind)}

    common = names(GenerationRequest)
    known = names(CompletionRequest) | renamed(API).keys()
    assert known - LABELS - ELSEWHERE.keys() == COMPLETION_WITNESSES.keys()
    assert names(ChatRequest) - common - ELSEWHERE.keys() == CHAT_WITNESSES.keys()
    assert FIELDS.keys() == WALK.keys()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*refused(API), *sorted(FUNCTIONS), "no_such_field", "Temperature", ""])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_not_done_is_refused_by_name(app: Starlette, path: str, name: str) -> None:
    base = PLAIN if path.endswith("/completions") and "chat" not in path else CHATTING
    error = error_of(post(app, path, base | {name: {"surely": "something"}}))
    assert error["param"] == name and (name in error["message"]) and error["type"] == "invalid_request_error"


def test_logits_processors_need_a_server_that_allows_them(app: Starlette) -> None:
    error = error_of(post(app, "/v1/completions", PLAIN | {"logits_processors": "even"}))
    assert error["param"] == "logits_processors" and "it allows none (--logits-processor NAME)" in error["message"]


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"watch": ["final"]}, "calls in Python, as Engine.generate"),
        ({"hooks": {"final": "f"}}, "functions, which cannot be sent"),
        ({"logits_processor": "even"}, "logits_processors takes the names"),
    ],
)
def test_what_only_python_offers_is_refused_with_its_reason(app: Starlette, field: dict[str, Any], reason: str) -> None:
    error = error_of(post(app, "/v1/completions", PLAIN | field))
    assert error["message"].startswith(f"{min(field)} is not offered: ") and reason in error["message"]
    assert error["code"] == "unsupported_parameter"


NOTHING: list[tuple[str, Any]] = [
    (name, value) for name, word in (WORDS[API] | WORDS[RESPONSES]).items() for value in word.neutral
]
NOTHING += [(name, value) for name in refused(API).keys() - CHAT_WITNESSES.keys() for value in ("", [], {}, False)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "value"), sorted(NOTHING, key=str))
def test_asking_for_what_happens_anyway_is_no_error(app: Starlette, name: str, value: Any) -> None:
    assert answer(app, "/v1/chat/completions", CHATTING | {name: value}) == answer(
        app, "/v1/chat/completions", CHATTING
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_has_no_effect_changes_nothing(app: Starlette, path: str) -> None:
    base = PLAIN if path == "/v1/completions" else CHATTING
    assert answer(app, path, base | dict.fromkeys([*LABELS, *ignored(API)], "any")) == answer(app, path, base)
    assert answer(app, path, base | {name: {"a": [1]} for name in ignored(API)}) == answer(app, path, base)


def test_no_field_is_sorted_twice() -> None:
    known = FIELDS.keys() | renamed(API).keys() | {field.name for field in msgspec.structs.fields(GenerationRequest)}
    assert not ignored(API) & (known | refused(API).keys())
    assert not known & refused(API).keys()


def test_null_is_as_good_as_leaving_a_field_out(app: Starlette) -> None:
    nothing = dict.fromkeys(
        [*renamed(API), *FIELDS, *refused(API), *(f.name for f in msgspec.structs.fields(CompletionRequest))], None
    )
    assert answer(app, "/v1/completions", nothing | PLAIN) == answer(app, "/v1/completions", PLAIN)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_new_tokens"),
        ({"n": 1, "num_return_sequences": 1}, "num_return_sequences"),
        ({"stop": "a", "stop_strings": "b"}, "stop_strings"),
        ({"logit_bias": {"5": 1}, "sequence_bias": [[[5], 1.0]]}, "logit_bias"),
        ({"ignore_eos": True, "eos_token_id": 3}, "ignore_eos"),
        ({"use_beam_search": True, "num_beams": 3}, "use_beam_search"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_contradict_each_other(app: Starlette, body: Fields, name: str) -> None:
    error = error_of(post(app, "/v1/completions", {"prompt": "A"} | body))
    assert error["param"] == name, error


# --- sampling ---------------------------------------------------------------------------------------------------------


def fields_of(**body: Any) -> Fields:
    return translate({"prompt": "A"} | body, COMPLETIONS).fields


def test_a_temperature_of_zero_is_greedy_search() -> None:
    assert fields_of(temperature=0) == {"do_sample": False}
    assert fields_of(temperature=0.0, top_p=0.3, top_k=5, min_p=0.1, seed=7) == {"do_sample": False}
    assert fields_of(temperature=0, penalty_alpha=0.5, top_k=5) == {
        "do_sample": False,
        "penalty_alpha": 0.5,
        "top_k": 5,
    }
    assert fields_of(temperature=0, frequency_penalty=1.0) == {"do_sample": False, "frequency_penalty": 1.0}
    assert fields_of(temperature=0, do_sample=True, typical_p=0.5) == {"do_sample": False}
    assert fields_of(temperature=False) == {"temperature": False}  # no number: refused by the engine


def test_beams_do_not_sample_unless_asked() -> None:
    assert fields_of(num_beams=3) == {"num_beams": 3, "do_sample": False}
    assert fields_of(num_beams=3, temperature=0.5) == {"num_beams": 3, "temperature": 0.5}
    words: Fields = {"num_beams": 3, "force_words": ["a", ["b", "c"]], "force_words_ids": [[5, 6]]}
    assert fields_of(**words) == words | {"do_sample": False}
    assert fields_of(use_beam_search=True, n=2) == {"num_return_sequences": 2, "num_beams": 2, "do_sample": False}
    assert fields_of(use_beam_search=True, n=2, best_of=5)["num_beams"] == 5


def test_what_clients_send_back_or_send_as_null_is_taken(app: Starlette) -> None:
    """An answer as OpenAI's client returns it, and a field of a later version of the API."""
    said = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    body = {"messages": [*TALK, said, *TALK], "max_tokens": 2, "prompt_cache_retention": None}
    assert answer(app, "/v1/chat/completions", body)["choices"]


def test_several_results_at_a_temperature_of_zero_are_the_same(app: Starlette) -> None:
    tied = {"50": 1e8, "60": 1e8}
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "top_p": 0.5, "seed": 3, "logit_bias": tied}
    [one] = answer(app, "/v1/completions", body)["choices"]
    for more in ({}, {"num_beams": 1}):
        choices = answer(app, "/v1/completions", body | more | {"n": 6})["choices"]
        assert [choice["text"] for choice in choices] == 6 * [one["text"]]


def test_tokens_that_end_are_added_to_the_request_s_own(app: Starlette, demo: Engine) -> None:
    prompt, tokenizer = "A list of colors: red,", demo.tokenizer
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 6}
    greedy = demo.generate(prompt, do_sample=False, max_new_tokens=6).token_ids
    for end in ({"eos_token_id": greedy[2]}, {"eos_token_id": [greedy[2]]}, {}):
        [choice] = answer(app, "/v1/completions", body | end | {"stop_token_ids": [greedy[4]]})["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == tokenizer.decode(greedy[: 3 if end else 5])


@pytest.mark.longer
def test_the_defaults_are_openai_s(app: Starlette, demo: Engine) -> None:
    texts = [answer(app, "/v1/completions", {"prompt": "The", "seed": seed})["choices"][0]["text"] for seed in range(5)]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 16}
    assert texts == [demo.generate("The", seed=seed, **sampling).text for seed in range(5)]


def test_the_checkpoint_s_defaults_count_if_the_server_is_told_so(tmp_path: Any) -> None:
    folder = write_checkpoint(tmp_path / "model", seed=3)
    lengths = {"max_length": 9, "min_new_tokens": 3, "num_beams": 4, "num_return_sequences": 2, "do_sample": False}
    given = lengths | {"temperature": 0.01, "top_k": 1, "suppress_tokens": [5]}
    (folder / "generation_config.json").write_text(json.dumps(given))
    body = {"prompt": PROMPT, "seed": 1, "max_tokens": 8, "return_token_ids": True}

    def tokens(**options: Any) -> list[int]:
        with Engine(folder) as engine:
            [choice] = post(make_app(engine, **options), "/v1/completions", body).json()["choices"]
            found: list[int] = choice["token_ids"]
            return found

    with Engine(folder) as engine:
        engine.generation_defaults = {}
        fields = {"max_new_tokens": 8, "suppress_tokens": [5]}
        greedy = engine.generate(PROMPT, do_sample=False, **fields).token_ids
        sampled = engine.generate(PROMPT, do_sample=True, top_k=0, seed=1, **fields).token_ids
    assert greedy != sampled and tokens() == sampled and tokens(sampling="checkpoint") == greedy


# --- several models ---------------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_the_name_chooses_the_model(engines: dict[str, Engine], tiny: Starlette) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True}
    found = {name: post(tiny, "/v1/completions", body | {"model": name}).json() for name in ("plain", "lora", "one")}
    assert {name: answer["model"] for name, answer in found.items()} == {name: name for name in found}
    ids = {name: answer["choices"][0]["token_ids"] for name, answer in found.items()}
    assert ids["plain"] == ids["lora"] != ids["one"]  # "one" is an adapter of "lora"
    assert ids["one"] == engines["lora"].generate(PROMPT, lora="one", do_sample=False, max_new_tokens=16).token_ids
    assert post(tiny, "/v1/completions", body).json()["model"] == "plain"
    cards = {card["id"]: card["parent"] for card in get(tiny, "/v1/models").json()["data"]}
    assert cards == dict.fromkeys(engines) | {"one": "lora"}
    error = error_of(post(tiny, "/v1/completions", body | {"model": "two"}), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"


def test_chat_takes_no_echo_and_completions_no_messages(app: Starlette) -> None:
    assert error_of(post(app, "/v1/chat/completions", CHATTING | {"echo": True}))["param"] == "echo"
    assert error_of(post(app, "/v1/completions", PLAIN | {"messages": TALK}))["param"] == "messages"
    assert error_of(post(app, "/v1/chat/completions", CHATTING | {"add_special_tokens": True}))["param"]
    assert set(refused(CHAT.reader)) == {"echo", "add_special_tokens"}
