"""Inspect's provider: its own package evaluates a task, with the packaged model."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.errors import ParameterError

pytest.importorskip("inspect_ai", reason="Inspect's interfaces")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolCall, ToolFunction, tool
from inspect_ai.util import json_schema

from .models import PLAIN, TOOLS, write_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPT = "A list of colors: red,"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: Any) -> Iterator[Engine]:
    with Engine(write_model(tmp_path_factory.mktemp("plain"), PLAIN)) as engine:
        yield engine


@pytest.fixture(scope="module")
def calling(tmp_path_factory: Any) -> Iterator[Engine]:
    with Engine(write_model(tmp_path_factory.mktemp("tools"), TOOLS.read_text(encoding="utf-8"))) as engine:
        yield engine


@tool
def weather() -> Any:
    async def execute(city: str) -> str:
        """Tells the weather.

        Args:
            city: where
        """
        return f"sun in {city}"

    return execute


def answer(engine: Engine, given: Any, *, tools: Any = (), tool_choice: Any = None, **config: Any) -> Any:
    async def ask() -> Any:
        model = get_model("minillm/given", engine=engine, memoize=False)
        return await model.generate(given, tools=[*tools], tool_choice=tool_choice, config=GenerateConfig(**config))

    return asyncio.run(ask())


def test_a_task_is_evaluated_by_the_name_of_a_model(tmp_path: Path) -> None:
    samples = [Sample(PROMPT, target="orange"), Sample("Monday,", target="Tuesday"), Sample("1, 2,", target="zebra")]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    [log] = eval(task, model="minillm/packaged", max_tokens=8, temperature=0, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert round(log.results.scores[0].metrics["accuracy"].value, 2) == 0.67
    with Engine() as engine:
        tokens = sum(
            answer.generated_tokens for answer in engine.generate([s.input for s in samples], max_new_tokens=8)
        )
    assert log.stats.model_usage["minillm/packaged"].output_tokens == tokens


def test_an_answer_is_the_engine_s_with_counts_and_probabilities(engine: Engine) -> None:
    expected = engine.chat([{"role": "user", "content": PROMPT}], max_new_tokens=4, top_logprobs=2)
    output = answer(engine, PROMPT, max_tokens=4, logprobs=True, top_logprobs=2)
    assert output.completion == expected.text and output.choices[0].stop_reason == "max_tokens"
    assert (output.usage.input_tokens, output.usage.output_tokens) == (8, 4)
    [completion] = expected.completions
    rows = output.choices[0].logprobs.content
    assert [row.logprob for row in rows] == completion.logprobs
    assert b"".join(bytes(row.bytes) for row in rows).decode() == expected.text
    assert [top.logprob for top in rows[0].top_logprobs] == [value for _, value in completion.top_logprobs[0]]
    assert answer(engine, PROMPT).choices[0].stop_reason == "stop"


def test_fields_are_the_engine_s(engine: Engine) -> None:
    drawn = engine.chat(
        [{"role": "user", "content": PROMPT}], do_sample=True, temperature=1.5, top_k=9, seed=3, max_new_tokens=8
    )
    assert answer(engine, PROMPT, temperature=1.5, top_k=9, seed=3, max_tokens=8).completion == drawn.text
    assert answer(engine, PROMPT, temperature=0, top_k=9, stop_seqs=[" green"]).completion == " orange, yellow,"
    [orange] = engine.tokenizer.encode(" orange", add_special_tokens=False)
    assert not answer(engine, PROMPT, logit_bias={orange: -100}, max_tokens=1).completion.startswith(" orange")
    schema = ResponseSchema(name="frog", json_schema=json_schema(bool))
    assert answer(engine, PROMPT, response_schema=schema).completion in ("true", "false")


@pytest.mark.parametrize("config", [{"best_of": 3}, {"num_choices": 2}, {"parallel_tool_calls": False}])
def test_a_field_that_is_not_offered_is_refused_by_name(engine: Engine, config: dict[str, Any]) -> None:
    [name] = config
    with pytest.raises(ParameterError, match=f"does not take Inspect's {name}="):
        answer(engine, PROMPT, **config)


def test_messages_and_tools_reach_the_template(calling: Engine) -> None:
    call = ToolCall("call_1", "weather", {"city": "Rome"})
    talk = [
        ChatMessageSystem(content="Be brief."),
        ChatMessageUser(content="Rome?"),
        ChatMessageAssistant(content="", tool_calls=[call]),
        ChatMessageTool(content="sun", tool_call_id="call_1", function="weather"),
    ]
    output = answer(calling, talk, tools=[weather()], max_tokens=1)
    functions = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tells the weather.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "description": "where"}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    written = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "call_1", "name": "weather"},
    ]
    prompt = calling.chat(written, tools=functions, max_new_tokens=1).prompt_tokens
    assert output.usage.input_tokens == prompt > 60


@pytest.mark.parametrize("choice", ["any", ToolFunction("weather")])
def test_a_required_call_is_parsed(calling: Engine, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="holds the form of calls")
    output = answer(calling, "Rome?", tools=[weather()], tool_choice=choice, max_tokens=200, temperature=1, seed=4)
    calls = output.message.tool_calls
    assert (calls[0].function, *calls[0].arguments) == ("weather", "city")  # a later one may be cut
    assert (len(calls) == 1 or choice == "any") and output.choices[0].stop_reason == "tool_calls"
