"""minillm's models in LangChain (package `langchain-core`), in this process: a chat model and vectors.

    from minillm.integrations.langchain import ChatMinillm, MinillmEmbeddings

    chat = ChatMinillm(model="HuggingFaceTB/SmolLM2-135M-Instruct", temperature=0)
    chat.invoke("Who are you?").content
    chat.bind_tools([weather]).invoke("Is it raining in Rome?").tool_calls
    chat.with_structured_output(Person).invoke("Ada is 36.")

Source: https://docs.langchain.com/oss/python/integrations/chat, langchain-core 1.8: `language_models/chat_models.py`
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..engine.engine import Engine
from ..errors import ParameterError
from ..text.chat.calls import AnswerDelta, ArgumentsDelta, CallBegin, ReasoningDelta
from .reply import Reply, embed, sampling_fields


class ChatMinillm(BaseChatModel):  # type: ignore[misc]  # mypy reads no langchain
    """A model that answers conversations, with streaming, stop texts, tools and schemas.

    A call's own keyword arguments are generation fields. Thoughts are in `additional_kwargs["reasoning_content"]`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | None = None
    """A folder, a GGUF file or a hub id; None: the packaged model"""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An engine in place of `model`"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `Engine`"""
    max_tokens: int | None = None
    """Longest answer; None: to its end"""
    temperature: float | None = None
    """0: always the likeliest token"""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def _load(self) -> Self:
        if self.engine is None:
            self.engine = Engine(self.model, **self.options)
        elif self.model is not None or self.options:
            raise ParameterError("engine stands beside model or options: give one of them")
        return self

    @property
    def _llm_type(self) -> str:
        return "minillm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model", "options", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
        return {name: getattr(self, name) for name in names}

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return generate_from_stream(self._stream(messages, *args, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        own: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }
        own |= {"seed": self.seed, "max_new_tokens": self.max_tokens, "stop_strings": stop or self.stop}
        renamed = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in kwargs.items()}
        fields = sampling_fields(**own | renamed)
        given = convert_to_openai_messages(messages, text_format="string")
        reply = Reply(self.engine, given, tools=tools, choice=tool_choice, **fields)
        try:
            for delta in reply:
                chunk = ChatGenerationChunk(message=_chunk(delta))
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        finally:
            reply.close()
        count = reply.event.generated_tokens
        usage = {"input_tokens": reply.event.prompt_tokens, "output_tokens": count}
        usage["total_tokens"] = sum(usage.values())
        reason = "tool_calls" if reply.answer.calls else reply.event.finish_reason
        last = AIMessageChunk("", usage_metadata=usage, response_metadata={"finish_reason": reason})
        yield ChatGenerationChunk(message=last)

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | bool | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Runnable:
        """The model with tools that it may call: functions, LangChain's tools, pydantic models, or dicts.

        `tool_choice`: "auto", "none", "any" or "required" (also True), the name of the tool to call, or OpenAI's form.
        """
        choice = tool_choice["function"]["name"] if isinstance(tool_choice, Mapping) else tool_choice
        if choice in (True, "any"):
            choice = "required"
        choice = choice or "auto"
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], tool_choice=choice, **kwargs)

    def with_structured_output(
        self, schema: Mapping[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable:
        """The model with answers that satisfy a schema, as a guide holds them (extra `guided`).

        `schema` is a pydantic model, of which the result is an instance, or a TypedDict or JSON schema, of which it is
        a dict. With `include_raw` the result is a dict of "raw", "parsed" and "parsing_error".
        """
        if kwargs.pop("method", "json_schema") != "json_schema" or kwargs:
            raise ParameterError("with_structured_output takes method='json_schema' alone: leave other arguments out")
        pydantic = isinstance(schema, type) and issubclass(schema, BaseModel)
        parser = PydanticOutputParser(pydantic_object=schema) if pydantic else JsonOutputParser()
        model = self.bind(guided_json=convert_to_json_schema(schema, strict=True))  # no keys but the schema's
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(
            parsed=lambda result: parser.invoke(result["raw"]), parsing_error=lambda _: None
        )
        failed = RunnableLambda(lambda result: result | {"parsed": None})
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


class MinillmEmbeddings(Embeddings):  # type: ignore[misc]
    """Vectors of texts, as `Engine.embed` computes them."""

    def __init__(self, model: str | None = None, *, engine: Engine | None = None, **options: Any) -> None:
        """Vectors of a model, or of an engine.

        Args:
            model: what `Engine` loads
            engine: an engine in its place
            **options: further arguments of `Engine`
        """
        self.engine = Engine(model, **options) if engine is None else engine

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts, [E] each, with the checkpoint's prompt for documents, if it has one."""
        return embed(self.engine, texts, "document")

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question, [E], with the checkpoint's prompt for questions, if it has one."""
        return embed(self.engine, [text], "query")[0]


def _chunk(delta: AnswerDelta) -> AIMessageChunk:
    """A message of what is new."""
    if isinstance(delta, CallBegin):
        call = {"index": delta.index, "id": delta.id, "name": delta.name, "args": ""}
    elif isinstance(delta, ArgumentsDelta):
        call = {"index": delta.index, "id": None, "name": None, "args": delta.text}
    elif isinstance(delta, ReasoningDelta):
        return AIMessageChunk("", additional_kwargs={"reasoning_content": delta.text})
    else:
        return AIMessageChunk(delta.text)
    return AIMessageChunk("", tool_call_chunks=[call | {"type": "tool_call_chunk"}])
