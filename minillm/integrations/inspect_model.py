"""The model of Inspect's provider "minillm" (`inspect_provider`): conversations, tools, log-probabilities."""

import json
from typing import Any

import anyio
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    Content,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo

from ..engine.engine import Engine
from ..errors import ParameterError
from .reply import Reply, sampling_fields

PACKAGED = "packaged"
REFUSED = (
    "best_of",
    "num_choices",
    "prompt_logprobs",
    "modalities",
    "parallel_tool_calls",
    "effort",
    "reasoning_effort",
)
"""Fields of GenerateConfig that would change an answer"""
SAME = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs")
"""Fields that generation fields are named after"""


class MinillmAPI(ModelAPI):  # type: ignore[misc]  # mypy reads no inspect_ai
    """A model that answers conversations."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        *,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """Load a model, or take an engine, which stays open.

        Args:
            model_name: what `Engine` loads, or "packaged"
            base_url: none is taken, for there is no server
            api_key: unused
            config: Inspect's generation fields
            engine: an engine in place of the model
            **options: arguments of `Engine`
        """
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if base_url is not None:
            raise ParameterError("minillm runs in this process: leave base_url out, or use the provider openai-api")
        self._own = engine is None
        self.engine = Engine(None if model_name == PACKAGED else model_name, **options) if engine is None else engine

    def close(self) -> None:
        """Free the model, unless the engine was given."""
        if self._own:
            self.engine.close()

    def max_connections(self) -> int:
        """The number of samples that run at once."""
        return 16

    def collapse_user_messages(self) -> bool:
        """Templates refuse two messages of the user in a row: they are one."""
        return True

    def collapse_assistant_messages(self) -> bool:
        """The same of the model's."""
        return True

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer a conversation.

        Raises:
            MinillmError: the model refuses the conversation or a field.
        """
        return await anyio.to_thread.run_sync(self._generate, input, tools, tool_choice, config)

    def _generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        choice = tool_choice.name if isinstance(tool_choice, ToolFunction) else tool_choice
        functions = [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"options"})} for tool in tools
        ]
        messages = [message_of(message) for message in input]
        words = {"any": "required"}
        reply = Reply(self.engine, messages, tools=functions, choice=words.get(choice, choice), **fields_of(config))
        try:
            for _ in reply:
                anyio.from_thread.check_cancelled()  # a sample's limit of time
        finally:
            reply.close()
        usage = {"input_tokens": reply.event.prompt_tokens, "output_tokens": reply.event.generated_tokens}
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(reply)],
            usage=ModelUsage(**usage, total_tokens=sum(usage.values())),
        )

    def _choice(self, reply: Reply) -> ChatCompletionChoice:
        """The answer as Inspect has it."""
        answer, completion = reply.answer, reply.completion
        content: str | list[Content] = answer.content
        if answer.reasoning:
            content = [ContentReasoning(reasoning=answer.reasoning), ContentText(text=answer.content)]
        message = ChatMessageAssistant(
            content=content,
            tool_calls=[call_of(call.id, call.name, call.arguments) for call in answer.calls] or None,
            model=self.model_name,
            source="generate",
        )
        reason = "tool_calls" if answer.calls else "max_tokens" if completion.finish_reason == "length" else "stop"
        return ChatCompletionChoice(message=message, stop_reason=reason, logprobs=self._logprobs(reply))

    def _logprobs(self, reply: Reply) -> Logprobs | None:
        completion, tokenizer = reply.completion, self.engine.tokenizer
        if completion.logprobs is None:
            return None

        def entry(kind: Any, token: int, logprob: float, **more: Any) -> Any:
            spelled = b"" if tokenizer is None else tokenizer.token_bytes(token)
            name = str(token) if tokenizer is None else tokenizer.token(token)
            return kind(token=name, logprob=logprob, bytes=[*spelled], **more)

        tops = completion.top_logprobs or [[] for _ in completion.token_ids]
        rows = zip(completion.token_ids, completion.logprobs, tops, strict=True)
        return Logprobs(
            content=[
                entry(Logprob, token, logprob, top_logprobs=[entry(TopLogprob, *pair) for pair in top] or None)
                for token, logprob, top in rows
            ]
        )


def message_of(message: ChatMessage) -> dict[str, Any]:
    """A message of Inspect's as OpenAI's API has it.

    Raises:
        ParameterError: its content is no text.
    """
    parts = [] if isinstance(message.content, str) else message.content
    unread = next((part.type for part in parts if part.type not in ("text", "reasoning")), None)
    if unread is not None:
        raise ParameterError(f"minillm reads text only, found a content of type {unread}: leave it out")
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if isinstance(message, ChatMessageAssistant):
        thoughts = [part.reasoning for part in parts if part.type == "reasoning"]
        entry |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        if message.tool_calls:
            entry["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
    elif isinstance(message, ChatMessageTool):
        entry |= {"tool_call_id": message.tool_call_id, "name": message.function}
        entry["content"] = message.text if message.error is None else message.error.message
    return entry


def call_of(id: str, name: str, arguments: str) -> ToolCall:
    """A call as Inspect has it; with an error if its arguments are no object."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return ToolCall(id, name, parsed)
    return ToolCall(id, name, {}, parse_error=f"the arguments of {name} are no JSON object: {arguments[:200]}")


def fields_of(config: GenerateConfig) -> dict[str, Any]:
    """The generation fields of a configuration.

    Raises:
        ParameterError: a field that would change the answer is not offered.
    """
    for name in REFUSED:
        if (value := getattr(config, name)) not in (None, 1, True):
            raise ParameterError(f"minillm does not take Inspect's {name}={value!r}: leave it out")
    schema = None if config.response_schema is None else config.response_schema.json_schema
    bias = {(int(token),): value for token, value in (config.logit_bias or {}).items()}
    return sampling_fields(
        **{name: getattr(config, name) for name in SAME},
        max_new_tokens=config.max_tokens,
        stop_strings=config.stop_seqs or None,
        max_thinking_tokens=config.reasoning_tokens,
        sequence_bias=bias or None,
        guided_json=None if schema is None else schema.model_dump(exclude_none=True),
    )
