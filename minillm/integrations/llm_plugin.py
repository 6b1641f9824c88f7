"""minillm's models in the command `llm` and in its Python library (extra `llm`): chat, schemas, tools, vectors.

    llm -m minillm "A list of colors: red,"                              the packaged model, which continues a text
    llm -m minillm/HuggingFaceTB/SmolLM2-135M-Instruct "Who are you?"    one that `minillm pull` has fetched
    llm -m minillm -o model model.gguf -o temperature 0 "Hello"          any that `Engine` loads
    llm embed -m minillm/sentence-transformers/all-MiniLM-L6-v2 -c "A man is eating."

A model is loaded at its first prompt and stays loaded. Without a chat template it continues a conversation as a text.

Source: https://llm.datasette.io/en/stable/plugins, llm 0.36: `llm/models.py`, `llm/parts.py`
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import llm
from llm.parts import ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart
from pydantic import Field

from ..engine.engine import Engine
from ..errors import MinillmError
from ..formats import cached_models
from ..text.chat.calls import ContentDelta, ReasoningDelta
from .reply import SAMPLING, Reply, sampling_fields

PACKAGED = "minillm"
"""The name of the packaged model; before those of the hub's cache stands it and a slash"""


def names() -> dict[str, str | None]:
    """The models on this machine: llm's name -> what `Engine` loads."""
    cached = {f"{PACKAGED}/{entry.name}": str(entry.folder) for entry in cached_models() if not entry.problem}
    return {PACKAGED: None} | cached


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[..., None]) -> None:
    """Offer the models that generate text; whether one does is known when it is loaded."""
    for name, model in names().items():
        register(MinillmModel(name, model))


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_embedding_models(register: Callable[..., None]) -> None:
    """Offer the same models for vectors."""
    for name, model in names().items():
        register(MinillmEmbedding(name, model))


@cache
def engine_of(model: str | None) -> Engine:
    """The engine of a model, loaded once.

    Raises:
        llm.ModelError: it cannot be loaded.
    """
    try:
        return Engine(model)
    except MinillmError as error:
        raise llm.ModelError(str(error)) from None


class MinillmModel(llm.Model):  # type: ignore[misc]  # mypy reads no llm
    """A model that answers conversations."""

    can_stream = True
    supports_schema = True
    supports_tools = True

    class Options(llm.Options):  # type: ignore[misc]
        """Options of `-o`. Without any of the fields of sampling an answer is as the checkpoint says."""

        model: str | None = Field(None, description="a folder, a GGUF file or a hub id in place of this model's own")
        max_tokens: int | None = Field(None, description="longest answer, in tokens", ge=1)
        temperature: float | None = Field(None, description="0: always the likeliest token", ge=0)
        top_p: float | None = Field(None, description="sample from the likeliest tokens of this probability")
        top_k: int | None = Field(None, description="sample from so many tokens")
        min_p: float | None = Field(None, description="least probability, relative to the likeliest token's")
        seed: int | None = Field(None, description="of the draws")

    def __init__(self, model_id: str, model: str | None) -> None:
        """A model by llm's name and by the engine's, None for the packaged one."""
        self.model_id = model_id
        self._model = model

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[StreamEvent]:
        """Answer a conversation: its thoughts and text in pieces; its calls are added to the response.

        Raises:
            llm.ModelError: the model cannot be loaded, or refuses the conversation or an option.
        """
        engine = engine_of(prompt.options.model or self._model)
        try:
            messages = [entry for message in prompt.messages for entry in read_message(message)]
            reply = Reply(engine, messages, tools=[function_of(tool) for tool in prompt.tools], **fields_of(prompt))
            for delta in reply:
                if isinstance(delta, ContentDelta):
                    yield StreamEvent(type="text", chunk=delta.text)
                elif isinstance(delta, ReasoningDelta):
                    yield StreamEvent(type="reasoning", chunk=delta.text)
        except MinillmError as error:
            raise llm.ModelError(str(error)) from None
        for call in reply.answer.calls:
            arguments = json.loads(call.arguments or "{}")
            response.add_tool_call(llm.ToolCall(call.name, arguments, tool_call_id=call.id))
        response.set_usage(input=reply.event.prompt_tokens, output=reply.event.generated_tokens)


class MinillmEmbedding(llm.EmbeddingModel):  # type: ignore[misc]
    """A model that makes vectors of texts."""

    batch_size = 64

    def __init__(self, model_id: str, model: str | None) -> None:
        """As of `MinillmModel`."""
        self.model_id = model_id
        self._model = model

    def embed_batch(self, items: Iterable[str | bytes], *, key: str | None = None) -> Iterator[list[float]]:
        """The vectors of texts, [E] each."""
        yield from engine_of(self._model).embed([str(item) for item in items], progress=False).tolist()


def read_message(message: Any) -> Iterator[dict[str, Any]]:
    """A message of llm's as messages of a chat template: each result of a tool is one of its own."""
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    thoughts = [part.text for part in message.parts if isinstance(part, ReasoningPart)]
    calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
    results = [part for part in message.parts if isinstance(part, ToolResultPart)]
    for part in results:
        output = part.output or part.exception or ""
        yield {"role": "tool", "name": part.name, "tool_call_id": part.tool_call_id, "content": output}
    if not (texts or calls or thoughts):
        return
    content: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    if calls:
        content["tool_calls"] = [
            {"id": part.tool_call_id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
            for part in calls
        ]
    yield content | ({"reasoning_content": "".join(thoughts)} if thoughts else {})


def function_of(tool: Any) -> dict[str, Any]:
    """A tool of llm's as OpenAI's API has it."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def fields_of(prompt: Any) -> dict[str, Any]:
    """The generation fields of a prompt's options and schema."""
    schema = prompt.schema
    if schema is not None and not isinstance(schema, dict):
        schema = schema.model_json_schema()
    fields = {name: getattr(prompt.options, name) for name in SAMPLING}
    return sampling_fields(**fields, max_new_tokens=prompt.options.max_tokens, guided_json=schema or None)
