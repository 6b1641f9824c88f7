"""minillm's models in LlamaIndex (package `llama-index-core`), in this process: texts, chats and vectors.

    from minillm.integrations.llama_index import MinillmEmbedding, MinillmLLM

    Settings.llm = MinillmLLM(model="HuggingFaceTB/SmolLM2-135M-Instruct", temperature=0)
    Settings.embed_model = MinillmEmbedding(model="sentence-transformers/all-MiniLM-L6-v2")
    VectorStoreIndex.from_documents(documents).as_query_engine().query("Who wrote Faust?")

Source: https://developers.llamaindex.ai/python/framework/module_guides/models/llms/usage_custom/, llama-index-core
0.14: `llms/custom.py`, `base/embeddings/base.py`
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from ..cli.generate import limited
from ..engine.engine import Engine
from ..text.chat.calls import ContentDelta, ReasoningDelta
from .reply import Reply, embed, sampling_fields


class MinillmLLM(CustomLLM):  # type: ignore[misc]  # mypy reads no llama_index
    """A model that continues texts and answers conversations; keyword arguments of a call are generation fields.

    Thoughts are in `additional_kwargs["thinking"]` of the message.
    """

    model: str | None = None
    """A folder, a GGUF file or a hub id; None: the packaged model"""
    max_tokens: int | None = Field(default=None, description="longest answer; None: to its end")
    temperature: float | None = Field(default=None, description="0: always the likeliest token")
    fields: dict[str, Any] = Field(default_factory=dict, description="further generation fields")
    _engine: Engine = PrivateAttr()

    def __init__(self, model: str | None = None, *, engine: Engine | None = None, **given: Any) -> None:
        """A model, or an engine in its place; `given`: the fields above, and those of LlamaIndex."""
        super().__init__(model=model, **given)
        self._engine = Engine(model) if engine is None else engine

    @classmethod
    def class_name(cls) -> str:
        """The name in LlamaIndex's records."""
        return "minillm"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's context, answer and kind."""
        return LLMMetadata(
            context_window=self._engine.context,
            num_output=min(self.max_tokens or 256, self._engine.context // 2),
            is_chat_model=self._engine.chat_template is not None,
            model_name=self.model or "minillm",
        )

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text; `formatted` says that it is not to be changed, and none is."""
        *_, last = self.stream_complete(prompt, formatted=True, **kwargs)
        return CompletionResponse(text=last.text, raw=last.raw)

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As `complete`, with the text so far after each step."""
        text = ""
        for event in self._engine.stream(prompt, **limited(self._engine, self._fields(kwargs))):
            text += event.text
            yield CompletionResponse(text=text, delta=event.text, raw=event)

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        *_, last = self.stream_chat(messages, **kwargs)
        return ChatResponse(message=last.message, raw=last.raw)

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, with the answer so far after each step."""
        given = [{"role": message.role.value, "content": message.content or ""} for message in messages]
        reply = Reply(self._engine, given, **self._fields(kwargs))
        text, thoughts = "", ""
        for delta in reply:
            new = delta.text if isinstance(delta, ContentDelta) else ""
            text += new
            thoughts += delta.text if isinstance(delta, ReasoningDelta) else ""
            more = {"thinking": thoughts} if thoughts else {}
            message = ChatMessage(content=text, role=MessageRole.ASSISTANT, additional_kwargs=more)
            yield ChatResponse(message=message, delta=new, raw=reply.event)

    def _fields(self, given: dict[str, Any]) -> dict[str, Any]:
        own = {"temperature": self.temperature, "max_new_tokens": self.max_tokens} | self.fields
        renamed = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in given.items()}
        return sampling_fields(**own | renamed)


class MinillmEmbedding(BaseEmbedding):  # type: ignore[misc]
    """Vectors of texts and questions, as `Engine.embed` computes them with the checkpoint's prompts for each."""

    _engine: Engine = PrivateAttr()

    def __init__(self, model: str | None = None, *, engine: Engine | None = None, **given: Any) -> None:
        """A model, or an engine in its place; `given`: LlamaIndex's fields, such as `embed_batch_size`."""
        super().__init__(model_name=model or "minillm", **given)
        self._engine = Engine(model) if engine is None else engine

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed(self._engine, [query], "query")[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return embed(self._engine, texts, "document")
