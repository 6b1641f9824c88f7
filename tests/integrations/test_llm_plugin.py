"""minillm in the library and command of `llm`: its own package runs, with the packaged model or a stand-in."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm import Engine
from minillm.decoding.event import Event
from minillm.errors import PromptError
from minillm.text.chat import FORMATS

llm = pytest.importorskip("llm", reason="needs the extra llm")

from minillm.integrations import llm_plugin  # noqa: E402

pytestmark = pytest.mark.slow

PROMPT = "A list of colors: red,"


@pytest.fixture
def model() -> Any:
    return llm.get_model("minillm")


def test_the_packaged_model_answers_as_the_engine_in_pieces_or_at_once(model: Any) -> None:
    with Engine() as engine:
        expected = engine.generate(PROMPT)
    response = model.prompt(PROMPT, stream=True)
    texts = list(response)
    assert "".join(texts) == expected.text and len(texts) > 5
    assert (response.usage().input, response.usage().output) == (8, len(expected.completions[0].token_ids))
    assert model.prompt(PROMPT, stream=False).text() == expected.text


def test_a_conversation_goes_on_with_the_whole_text(model: Any) -> None:
    conversation = model.conversation()
    first = conversation.prompt(PROMPT, max_tokens=4).text()
    second = conversation.prompt(" green,", max_tokens=4).text()
    with Engine() as engine:
        assert second == engine.generate(f"{PROMPT}{first} green,", max_new_tokens=4).text


def test_options_are_generation_fields_and_wrong_ones_are_one_line(model: Any) -> None:
    sampled = [model.prompt("Once upon", temperature=1.5, seed=seed, max_tokens=8).text() for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    with Engine() as engine:
        assert (
            sampled[2] == engine.generate("Once upon", do_sample=True, temperature=1.5, seed=2, max_new_tokens=8).text
        )
    with pytest.raises(llm.ModelError, match=r"^there is no folder 'nowhere'"):
        model.prompt(PROMPT, model="nowhere").text()


def test_a_schema_holds(model: Any) -> None:
    pytest.importorskip("llguidance")
    ages = {"age": {"enum": [3, 4]}}
    schema = {"type": "object", "properties": ages, "required": ["age"], "additionalProperties": False}
    assert json.loads(model.prompt("A frog", schema=schema).text())["age"] in (3, 4)


class StandIn:
    """An engine that calls a tool, and answers once it has the tool's result; it keeps what it was asked."""

    def __init__(self) -> None:
        self.chat_template = SimpleNamespace(call_format=FORMATS["hermes"], reasoning_format=None)
        self.tokenizer, self.generation_defaults = None, {"max_new_tokens": 20}
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def stream_chat(self, messages: list[dict[str, Any]], **fields: Any) -> Iterator[Any]:
        self.asked.append((messages, fields))
        if messages[-1]["content"] == "fail":
            raise PromptError("the template refuses these messages")
        text = 'It is.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        for piece in "Sunny." if messages[-1]["role"] == "tool" else text:
            yield Event(0, 0, piece, (), finish_reason="stop", prompt_tokens=3, generated_tokens=4)


def test_tools_are_called_and_their_results_are_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, cities = StandIn(), []
    monkeypatch.setattr(llm_plugin, "engine_of", lambda name: engine)

    def weather(city: str) -> str:
        """Tells the weather."""
        cities.append(city)
        return f"sun in {city}"

    assert (
        model.chain("Weather in Rome?", system="Be brief.", tools=[weather]).text() == "It is. Sunny."
    )  # llm puts a space between two answers
    assert cities == ["Rome"]
    [(_, fields), (messages, _)] = engine.asked
    [tool] = fields["tools"]
    assert tool["function"]["name"] == "weather" and tool["function"]["description"] == "Tells the weather."
    assert tool["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    call = messages[2]["tool_calls"][0]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages[3]["content"] == "sun in Rome" and messages[3]["tool_call_id"] == call["id"]
    with pytest.raises(llm.ModelError, match=r"^the template refuses these messages"):
        model.prompt("fail").text()


def test_vectors_are_the_engine_s() -> None:
    texts = ["A man is eating.", "Once upon a time"]
    with Engine() as engine:
        expected = engine.embed(texts).tolist()
    assert list(llm.get_embedding_model("minillm").embed_multi(texts)) == expected


def test_the_command_finds_the_plug_in(tmp_path: Path) -> None:
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "llm", "-m", "minillm", "-o", "max_tokens", "4", PROMPT]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == " orange, yellow,\n", done.stderr
