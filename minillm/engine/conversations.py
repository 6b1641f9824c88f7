"""Conversations: messages, rendered by the checkpoint's chat template, and the model's answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ..decoding.conversation_ends import chat_defaults
from ..decoding.keywords import ChatFields, RequestFields, with_fields
from ..decoding.prompts import Prompt, encode_text
from ..decoding.settings import GenerationConfig
from ..decoding.strategy import Request
from ..errors import PromptError
from ..progress import showing
from ..text.chat import RENDER_ARGUMENTS, Messages, refuse_documents
from ..text.chat.reasoning import Thoughts
from .arguments import read, refuse_task
from .prefixes import EnginePrefixes
from .results import Generation
from .stream import EventStream


class EngineConversations(EnginePrefixes):
    """An engine's answers to conversations, each a text that `Engine` generates after a prompt."""

    if TYPE_CHECKING:

        def requests(
            self,
            prompts: Sequence[Prompt | None] | None,
            config: GenerationConfig | None = None,
            **fields: Unpack[RequestFields],
        ) -> list[Request]: ...

        def run(self, requests: Sequence[Request]) -> list[Generation]: ...

    @with_fields
    def chat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        progress: bool = True,
        **fields: Unpack[ChatFields],
    ) -> Generation:
        """Answer a conversation.

        Unless you set `eos_token_id` the answer ends at `turn_end_ids`, perhaps more than the checkpoint's EOS ids.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first
            config: generation parameters
            progress: show a bar on a terminal or in a notebook
            **fields: as of `generate`, and arguments of `render_chat`

        Raises:
            MinillmError: as `render_chat` and `add`, before anything is run.

        Example:
            >>> messages = [{"role": "user", "content": "A list of colors: red,"}]
            >>> engine.chat(messages, max_new_tokens=4).text
            ' orange, yellow,'

        A model that thinks has its thoughts in `Generation.reasoning`, and what follows them in `answer`; a guide
        begins after them.
        """
        request = self.chat_request(messages, config, **fields)
        with showing(read("progress", progress)):
            return self.run([request])[0]

    @with_fields
    def stream_chat(
        self, messages: Messages, config: GenerationConfig | None = None, **fields: Unpack[ChatFields]
    ) -> EventStream:
        """Answer a conversation and yield the new text after each step; `chat` as a stream.

        Raises:
            MinillmError: as `chat`, immediately.

        Example:
            >>> messages = [{"role": "user", "content": "Count from 3 to 9:"}]
            >>> [event.text for event in engine.stream_chat(messages, max_new_tokens=4)]
            [' 3', ',', ' 4', ',']
        """
        return EventStream(self._driver, self.chat_request(messages, config, **fields))

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation by the checkpoint's chat template, special tokens spelled out.

        To use it as a prompt, encode it with `tokenizer.encode(text, add_special_tokens=False)`.

        Args:
            messages: as for `chat`
            tools: functions that the model may call, as OpenAI's API and transformers have them; `chat.read_calls`
                finds the calls in the answer (see `minillm.text.chat.tools`)
            add_generation_prompt: end with the prefix of an answer; by default unless continue_final_message is set
            continue_final_message: continue the last message instead of answering it
            chat_template_kwargs: further variables for the template, such as Qwen3's "enable_thinking"

        Raises:
            PromptError: the model has no chat template, the messages are malformed, or the template refuses them.
            CheckpointError: the template is broken, or violates the sandbox.
            ParameterError: the arguments contradict each other, or the template does not use a variable.

        Example:
            >>> engine.render_chat([{"role": "user", "content": "Hello"}])
            'Hello'
        """
        if self.chat_template is None:
            advice = "give a prompt to `generate` or `stream`"
            raise PromptError("this model has no chat template", field="messages", advice=advice)
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def chat_request(
        self, messages: Messages, config: GenerationConfig | None = None, **fields: Unpack[ChatFields]
    ) -> Request:
        """The request that `chat` would run; as `request`.

        Raises:
            MinillmError: as `render_chat` and `request`.
        """
        prompt, rest = self._chat_prompt(messages, fields)
        rest["defaults"] = chat_defaults(self._maker, read("defaults", rest.get("defaults")))
        return self.requests([prompt], config, **rest)[0]

    def _chat_prompt(self, messages: Messages, fields: ChatFields) -> tuple[list[int], dict[str, Any]]:
        """A conversation as token ids, and the arguments that are not for `render_chat`."""
        refuse_task(self.config, "tokens", "chat")
        arguments: dict[str, Any] = {**fields}
        refuse_documents(arguments)
        options = {name: arguments.pop(name) for name in RENDER_ARGUMENTS if name in arguments}
        text = self.render_chat(messages, **options)
        if not text:
            raise PromptError("the chat template renders these messages as an empty text")
        form = None if self.chat_template is None else self.chat_template.call_format
        if options.get("tools") and form is not None and form.hidden_by(self.tokenizer):
            arguments.setdefault("skip_special_tokens", False)
        reasoning = None if self.chat_template is None else self.chat_template.reasoning_format
        if reasoning is not None:
            arguments["thoughts"] = Thoughts(reasoning, reasoning.opened_by(text))
            if reasoning.hidden_by(self.tokenizer):
                arguments.setdefault("skip_special_tokens", False)
        # the template has written the special tokens
        return encode_text(text, self.tokenizer, self.config, add_special_tokens=False), arguments
