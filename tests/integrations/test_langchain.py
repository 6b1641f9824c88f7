"""The chat model and the vectors of LangChain: its own package runs them, with the packaged model."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from minillm import Engine
from minillm.errors import ParameterError

pytest.importorskip("langchain_core", reason="LangChain's interfaces")

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import BaseModel

from minillm.integrations import langchain
from minillm.integrations.langchain import ChatMinillm, MinillmEmbeddings

from ..pages import block
from .models import PLAIN, TOOLS, write_encoder, write_model

pytestmark = pytest.mark.slow

PROMPT = "A list of colors: red,"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: Any) -> Iterator[Engine]:
    with Engine(write_model(tmp_path_factory.mktemp("plain"), PLAIN)) as engine:
        yield engine


@pytest.fixture(scope="module")
def calling(tmp_path_factory: Any) -> Iterator[Engine]:
    with Engine(write_model(tmp_path_factory.mktemp("tools"), TOOLS.read_text(encoding="utf-8"))) as engine:
        yield engine


def weather(city: str) -> str:
    """Tells the weather."""
    return f"sun in {city}"


def test_an_answer_is_the_engine_s_with_its_counts(engine: Engine) -> None:
    expected = engine.chat([{"role": "user", "content": PROMPT}], max_new_tokens=6)
    answer = ChatMinillm(engine=engine, max_tokens=6).invoke(PROMPT)
    assert answer.content == expected.text and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata == {"input_tokens": 8, "output_tokens": 6, "total_tokens": 14}
    whole = ChatMinillm(engine=engine).invoke(PROMPT)  # without a limit to the end
    assert whole.response_metadata["finish_reason"] == "stop" and whole.content.startswith(answer.content)


def test_a_stream_comes_in_pieces_also_to_coroutines(engine: Engine) -> None:
    chat = ChatMinillm(engine=engine, max_tokens=6)
    pieces = [chunk.content for chunk in chat.stream(PROMPT)]
    assert "".join(pieces) == chat.invoke(PROMPT).content and len([piece for piece in pieces if piece]) == 6

    async def collect() -> list[Any]:
        return [chunk.content async for chunk in chat.astream(PROMPT)]

    assert [piece for piece in asyncio.run(collect()) if piece] == [piece for piece in pieces if piece]


def test_fields_stand_in_the_model_or_in_the_call(engine: Engine) -> None:
    chat = ChatMinillm(engine=engine, temperature=1.5, seed=3, max_tokens=8, stop=["zzz"])
    messages = [{"role": "user", "content": PROMPT}]
    drawn = engine.chat(messages, do_sample=True, temperature=1.5, seed=3, max_new_tokens=8, stop_strings=["zzz"])
    assert chat.invoke(PROMPT).content == drawn.text
    assert chat.invoke(PROMPT, temperature=0, stop=[" green"]).content == " orange, yellow,"
    assert chat.invoke(PROMPT, temperature=0, max_tokens=2).content == " orange,"
    with pytest.raises(ParameterError, match="top_q"):
        chat.invoke(PROMPT, top_q=1)


def test_many_conversations_share_the_engine(engine: Engine) -> None:
    chat = ChatMinillm(engine=engine, max_tokens=4)
    prompts = [PROMPT, "Count from 3 to 9:", "Monday,"]
    assert [answer.content for answer in chat.batch(prompts)] == [chat.invoke(prompt).content for prompt in prompts]


def test_messages_and_tools_reach_the_template(calling: Engine) -> None:
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "call_1"}
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "Rome?"}]),
        AIMessage("", tool_calls=[call]),
        ToolMessage("sun", tool_call_id="call_1"),
    ]
    prompts = []
    chat = ChatMinillm(engine=calling, max_tokens=1).bind_tools([weather])
    hooked = calling.stream_chat
    calling.stream_chat = lambda given, **fields: (
        prompts.append(  # type: ignore[method-assign]
            calling.render_chat(given, tools=fields["tools"])
        )
        or hooked(given, **fields)
    )
    try:
        chat.invoke(messages)
    finally:
        del calling.stream_chat
    [prompt] = prompts
    for text in ("Be brief.", "Rome?", '"city": "Rome"', "<tool_response>\nsun", "Tells the weather."):
        assert text in prompt


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_required_call_is_parsed(calling: Engine, choice: str) -> None:
    pytest.importorskip("llguidance", reason="holds the form of calls")
    chat = ChatMinillm(engine=calling, max_tokens=120, temperature=1, seed=4).bind_tools([weather], tool_choice=choice)
    answer = chat.invoke("Rome?", stop=["\n</tool_call>"])
    [call] = answer.tool_calls
    assert call["name"] == "weather" and isinstance(call["args"]["city"], str) and call["id"]
    assert answer.response_metadata["finish_reason"] == "tool_calls" and answer.content == ""
    with pytest.raises(ParameterError, match="there is no tool 'wether'; there is weather"):
        ChatMinillm(engine=calling).bind_tools([weather], tool_choice="wether").invoke("Rome?")


def test_no_call_where_none_may_be(calling: Engine) -> None:
    chat = ChatMinillm(engine=calling, max_tokens=4).bind_tools([weather], tool_choice="none")
    plain = ChatMinillm(engine=calling, max_tokens=4).invoke("Rome?")
    assert chat.invoke("Rome?").usage_metadata == plain.usage_metadata  # the prompt tells of no tool


def test_a_schema_holds(engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="holds schemas")

    class Frog(BaseModel):
        age: int
        green: bool

    chat = ChatMinillm(engine=engine, temperature=1, seed=5, max_tokens=60)
    frog = chat.with_structured_output(Frog).invoke("A frog: ")
    assert isinstance(frog, Frog)
    schema = Frog.model_json_schema()
    assert chat.with_structured_output(schema).invoke("A frog: ") == frog.model_dump()
    raw = chat.with_structured_output(Frog, include_raw=True).invoke("A frog: ")
    assert raw["parsed"] == frog and raw["parsing_error"] is None and isinstance(raw["raw"], AIMessage)
    cut = ChatMinillm(engine=engine, max_tokens=1).with_structured_output(Frog, include_raw=True).invoke("A frog: ")
    assert cut["parsed"] is None and cut["parsing_error"] is not None


def test_vectors_have_the_prompts_of_their_roles(tmp_path: Any) -> None:
    with Engine(write_encoder(tmp_path)) as engine:
        vectors = MinillmEmbeddings(engine=engine)
        assert vectors.embed_query("the film") == engine.embed("the film", prompt="good ").tolist()
        assert vectors.embed_documents(["a", "film"]) == engine.embed(["a", "film"], prompt="bad ").tolist()
        assert vectors.embed_documents([]) == []


def test_an_engine_beside_a_model_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="engine stands beside model or options"):
        ChatMinillm(engine=engine, model="x")


def test_the_page_s_example_runs(calling: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("llguidance", reason="holds schemas")
    loaded: list[str | None] = []
    monkeypatch.setattr(langchain, "Engine", lambda model, **options: loaded.append(model) or calling)

    class Person(BaseModel):
        name: Literal["Ada"]
        age: Literal[36]

    names = {"weather": weather, "Person": Person}
    code = block("minillm/integrations/README.md", "python", "from minillm.integrations.langchain")
    exec(code.replace("temperature=0)", "temperature=0, max_tokens=60)"), names)
    assert loaded == ["HuggingFaceTB/SmolLM2-135M-Instruct", "sentence-transformers/all-MiniLM-L6-v2"]
    assert len(names["vectors"][0]) == 192 and capsys.readouterr().out  # type: ignore[index]
