"""A model that the server offers: its engine, its name, and how a request reaches it."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from .. import __version__
from ..decoding.fields import FIELDS
from ..decoding.prompts import encode_prompt, encode_text, need_tokenizer, source_config
from ..engine.async_engine import AsyncEngine
from ..engine.engine import Engine
from ..errors import PromptError, shown
from ..text.chat import CallFormat, ReasoningFormat
from ..text.infill import InfillPrompt, infill_prompt
from .http_json import ApiError
from .logprobs import TokenTexts
from .messages import conversation, joined_instructions, log_joined, template_variables
from .text_queue import TextQueue

OPENAI_DEFAULTS = {"do_sample": True, "temperature": 1.0, "top_k": 0}
"""Generation fields that a request leaves out, where OpenAI's default differs from transformers'."""

_COUNTS = {"max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "stop_strings"}


def server_defaults(checkpoint: Mapping[str, Any], sampling: Literal["openai", "checkpoint"]) -> dict[str, Any]:
    """The fields of a request that sets none: what belongs to the model among a checkpoint's own.

    Its tokens that end, begin and are suppressed always count. Its lengths and searches never do. What shapes its
    sampling (temperature, top_p, repetition_penalty) counts if `sampling` says so, else OpenAI's defaults do.
    """
    groups = {"text"} if sampling == "openai" else {"text", "sampling"}
    own = {
        name: value
        for name, value in checkpoint.items()
        if name not in _COUNTS | {"seed", "do_sample"} and (name not in FIELDS or FIELDS[name].group in groups)
    }
    return OPENAI_DEFAULTS | own


class ServedModel:
    """One model of the server, or one of its LoRA adapters under a name of its own."""

    def __init__(
        self,
        name: str,
        aio: AsyncEngine,
        *,
        parent: str | None = None,
        lora: str | None = None,
        tool_parser: CallFormat | None = None,
        reasoning_format: ReasoningFormat | Literal["auto"] | None = "auto",
        max_waiting: int = 1024,
        chat_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        name: the model's name in requests
        aio: its engine
        parent: the model's name, if this is an adapter
        lora: the adapter's name in the engine, if this is one
        tool_parser: the format of tool calls; by default the chat template's
        reasoning_format: the format of thoughts; by default the chat template's; None: thoughts stay in the content
        max_waiting: requests with texts to embed or classify that may wait
        chat_sampling: generation fields with which the page samples
        """
        self.name, self.aio, self.parent, self.lora = name, aio, parent, lora
        self.tool_parser, self.max_waiting, self.chat_sampling = tool_parser, max_waiting, dict(chat_sampling or {})
        self._reasoning_format = reasoning_format
        self.created = int(time.time())
        self.queue = TextQueue(aio)
        self.transcribing = 0  # requests
        self.texts = TokenTexts(self.engine.tokenizer)

    @property
    def engine(self) -> Engine:
        """The engine behind `aio`."""
        return self.aio.engine

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format of the model's thoughts, where they are told from its answers."""
        if self._reasoning_format != "auto":
            return self._reasoning_format
        template = self.engine.chat_template
        return None if template is None else template.reasoning_format

    @cached_property
    def endpoints(self) -> tuple[str, ...]:
        """Paths of the endpoints that depend on what the model computes, and that it has."""
        config, path, labels = self.engine.config, self.engine.path, self.engine.labels
        judges = ("/rerank", "/score", "/classify") if len(labels) == 1 else ("/classify",)
        if config.output == "labels":
            return judges
        vectors: tuple[str, ...] = ("/v1/embeddings", "/score", "/rerank")
        if self.engine.embedding.late is not None:
            vectors = vectors[1:]
        if config.output != "tokens":
            return vectors
        texts = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        if config.frame_width:
            return ("/v1/audio/transcriptions",)
        if config.encoder_layers:
            return texts[:1]
        if labels:
            return texts + judges
        embeds = path is not None and (path / "modules.json").is_file() and not self.engine.embedding.refused
        return texts + vectors if embeds else texts

    def need(self, endpoint: str, path: str | None = None) -> None:
        """Refuse a request to an endpoint that the model has not. `path`: what it was asked by; by default the same.

        Raises:
            ApiError: the model computes something else; the message lists its endpoints.
        """
        if endpoint not in self.endpoints:
            has = ", ".join(self.endpoints)
            message = f"{shown(path or endpoint)} is not for the model {shown(self.name)}, which has {has}"
            raise ApiError(message, status=404, param="model", code="not_found")

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the model and the program, so that a seed repeats a result while it is equal."""
        config = f"{__version__} {self.name} {self.lora} {self.engine.config}"
        return f"fp_{hashlib.sha256(config.encode()).hexdigest()[:10]}"

    def encode(self, prompts: Sequence[str | Sequence[int]], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of prompts; the beginning-of-sequence token for an empty one.

        Raises:
            PromptError: as `Engine.add`.
        """
        engine = self.engine
        inputs: list[str | Sequence[int]] = [
            encode_text(prompt, engine.tokenizer, engine.config, add_special_tokens=False)
            if isinstance(prompt, str) and not add_special_tokens
            else prompt
            for prompt in prompts
        ]
        config = source_config(engine.config) if engine.config.encoder_layers else engine.config
        return [encode_prompt(prompt, engine.tokenizer, config) for prompt in inputs]

    def infill(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> InfillPrompt:
        """The prompt for the text between two others; `files`: names and texts of other files that matter.

        Raises:
            PromptError: the model has no tokens for it, or the texts are far too long.
        """
        engine = self.engine
        tokenizer = need_tokenizer(engine.tokenizer)
        for text in (prefix, suffix, *(text for _, text in files)):
            if tokenizer.exceeds(text, engine.config.max_positions):
                raise PromptError(f"a text of {len(text)} characters is longer than the context of {engine.context}")
        return infill_prompt(tokenizer, prefix, suffix, files)

    def render(self, body: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The conversation in a request's body, as the model's template writes it. `tools` are those that it may call.

        Raises:
            PromptError, ParameterError, CheckpointError: as `Engine.render_chat`; or it is empty.
        """
        template, messages, variables = self.engine.chat_template, body.messages, None
        if template is not None:
            template = template if tools is None else template.for_tools
            messages, variables = conversation(messages, template), template_variables(body, template)
        render = partial(
            self.engine.render_chat,
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=variables,
        )
        try:
            text = render(messages)
        except PromptError as refusal:
            text = self._render_joined(messages, render, refusal)
        if not text:
            raise PromptError("the chat template renders these messages as an empty text")
        return text

    @staticmethod
    def _render_joined(messages: list[Any], render: Callable[[list[Any]], str], refusal: PromptError) -> str:
        """A conversation that was refused as it is, with its instructions and turns joined."""
        joined = joined_instructions(messages)
        if joined == messages:
            raise refusal
        try:
            text = render(joined)
        except PromptError:
            raise refusal from None
        log_joined()
        return text
