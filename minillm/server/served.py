"""A model that the server offers: its engine, its name, and how a request reaches it."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from .. import __version__
from ..decoding.fields import FIELDS
from ..decoding.prompts import encode_prompt, encode_text, source_config
from ..decoding.settings import GenerationConfig
from ..decoding.strategy import Request
from ..errors import MinillmError, PromptError, shown
from ..text.chat import CallFormat
from .limits import Limits
from .logprobs import TokenTexts
from .messages import conversation, template_variables
from .protocol import ApiError, ChatRequest, GenerationRequest
from .text_queue import TextQueue
from .translate import Translated

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine, AsyncEventStream
    from ..engine.engine import Engine

OPENAI_DEFAULTS = {"do_sample": True, "temperature": 1.0, "top_k": 0}
"""Generation fields that a request leaves out, where OpenAI's default differs from transformers'."""

_COUNTS = {"max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "stop_strings"}


def server_defaults(checkpoint: Mapping[str, Any], sampling: Literal["openai", "checkpoint"]) -> dict[str, Any]:
    """The fields of a request that sets none: of a checkpoint's own what belongs to the model.

    Its tokens that end, begin and are suppressed always count. Its lengths and searches never do. What shapes its
    sampling (temperature, top_p, repetition_penalty) counts if `sampling` says so, else OpenAI's defaults do.
    """
    groups = {"text"} if sampling == "openai" else {"text", "sampling"}
    kept = {
        name: value
        for name, value in checkpoint.items()
        if name not in _COUNTS | {"seed", "do_sample"} and (name not in FIELDS or FIELDS[name].group in groups)
    }
    return OPENAI_DEFAULTS | kept


class Served:
    """One model of the server, or one of its LoRA adapters under a name of its own."""

    def __init__(
        self,
        name: str,
        aio: "AsyncEngine",
        *,
        root: str | None = None,
        parent: str | None = None,
        lora: str | None = None,
        tool_parser: CallFormat | None = None,
        max_waiting: int = 1024,
        chat_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        name: of the model in requests
        aio: its engine
        root: the checkpoint's path or id; by default `name`
        parent: of an adapter, the model's name
        lora: of an adapter, its name in the engine
        tool_parser: the format of tool calls; by default that of the model's chat template
        max_waiting: requests with texts to embed or classify that may wait
        chat_sampling: generation fields with which the page samples
        """
        self.queue = TextQueue(aio)
        self.max_waiting = max_waiting
        self.tool_parser = tool_parser
        self.name, self.aio, self.root, self.parent, self.lora = name, aio, root or name, parent, lora
        self.created = int(time.time())
        self.chat_sampling = dict(chat_sampling or {})
        self.texts = TokenTexts(self.engine.tokenizer)

    @property
    def engine(self) -> "Engine":
        """The engine behind `aio`."""
        return self.aio.engine

    @cached_property
    def endpoints(self) -> tuple[str, ...]:
        """Paths of the endpoints that depend on what the model computes, and that it has."""
        config, path, labels = self.engine.config, self.engine.path, self.engine.labels
        judges = ("/rerank", "/score", "/classify") if len(labels) == 1 else ("/classify",)
        if config.output == "labels":
            return judges
        vectors = ("/v1/embeddings", "/score", "/rerank")
        if config.output == "states":
            return vectors
        texts = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
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
        config = f"{__version__} {self.root} {self.lora} {self.engine.config}"
        return f"fp_{hashlib.sha256(config.encode()).hexdigest()[:10]}"

    def encode(self, prompts: Sequence[str | Sequence[int]], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of prompts; of an empty one the beginning-of-sequence token.

        Raises:
            PromptError: as `Engine.add`.
        """
        engine = self.engine
        found: list[str | Sequence[int]] = [
            encode_text(prompt, engine.tokenizer, engine.config, add_special_tokens=False)
            if isinstance(prompt, str) and not add_special_tokens
            else prompt
            for prompt in prompts
        ]
        config = source_config(engine.config) if engine.config.encoder_layers else engine.config
        return [encode_prompt(prompt, engine.tokenizer, config) for prompt in found]

    def prepare(
        self, asked: Translated[Any], prompts: list[list[int]], limits: Limits, default: int | None
    ) -> dict[str, Any]:
        """Check the lengths of a request, and complete its generation fields.

        Args:
            asked: the request
            prompts: its prompts
            limits: of the server
            default: new tokens by default; None: as many as fit, for one prompt

        Raises:
            ApiError: a prompt, or a prompt with its new tokens, is too long; or a count is above its limit.
        """
        fields, request, context = dict(asked.fields), asked.request, self.engine.context
        longest = max(map(len, prompts))
        if limits.max_prompt_tokens is not None and longest > limits.max_prompt_tokens:
            raise ApiError(
                f"the prompt has {longest} tokens: this server allows {limits.max_prompt_tokens}",
                code="context_length_exceeded",
            )
        if self.engine.config.encoder_layers:
            longest = 1  # the context is the decoder's, whose text begins with one token
        for field, most in (
            ("num_return_sequences", limits.max_n),
            ("num_beams", limits.max_n),
            ("top_logprobs", limits.max_logprobs),
        ):
            asked.limit(field, most)
        wanted = fields.get("max_new_tokens", 0 if default is None else min(default, 1))
        if isinstance(wanted, int) and longest + max(wanted, 1 - bool(fields.get("echo"))) > context:
            name = asked.names.get("max_new_tokens", "max_tokens")
            more = f" and {name}={wanted}" if wanted and "max_new_tokens" in fields else ""
            raise ApiError(
                f"a prompt of {longest} tokens{more} does not fit into the context of {context}: shorten the prompt"
                + (f", or lower {name}" if more else ""),
                param=name if more else None,
                code="context_length_exceeded",
            )
        if "max_length" not in fields and "max_new_tokens" not in fields:
            room = context - longest
            fields["max_new_tokens"] = room if default is None else min(default, max(1, room))
        if request.stop_token_ids and not request.ignore_eos:
            own = fields.get("eos_token_id", self.ends(asked))
            fields["eos_token_id"] = [*(own if isinstance(own, list | tuple) else [own]), *request.stop_token_ids]
            asked.names.setdefault("eos_token_id", "stop_token_ids")
        if self.lora is not None:
            fields.setdefault("lora", self.lora)
        return fields

    async def submit(
        self,
        asked: Translated[Any],
        encode: Callable[[], list[list[int]]],
        count: int,
        limits: Limits,
        default: int | None,
        request_id: str,
    ) -> "list[AsyncEventStream]":
        """Queue a request. Returns a stream for each prompt, once all are queued.

        Args:
            asked: the request
            encode: returns its prompts' token ids; called in a worker thread
            count: of its prompts
            limits: of the server
            default: as of `prepare`
            request_id: a name of its own

        Raises:
            ApiError: the engine refuses it; then nothing is queued.
        """
        request: GenerationRequest = asked.request

        def make() -> list[Request]:
            prompts = encode()
            config = GenerationConfig.from_dict(self.prepare(asked, prompts, limits, default))
            priority, timeout = request.priority or 0, limits.seconds(request.timeout)
            defaults = self.engine.chat_defaults if isinstance(request, ChatRequest) else None
            requests = self.engine.requests(prompts, config, priority=priority, timeout=timeout, defaults=defaults)
            if {"max_new_tokens", "max_length"} & asked.fields.keys():
                return requests
            return [*map(self.engine.fitted, requests)]

        try:
            return await self.aio.submit_made(make, count, request_id=request_id)
        except MinillmError as error:
            raise asked.error(error) from None

    def ends(self, asked: Translated[Any]) -> tuple[int, ...]:
        """The tokens that end the text of a request, unless it says others: of a conversation also those of turns."""
        return self.engine.turn_end_ids if isinstance(asked.request, ChatRequest) else self.engine.eos_token_ids

    def render(self, request: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The conversation of a request, as the model's template writes it. `tools` are those that it may call.

        Raises:
            PromptError, ParameterError, CheckpointError: as `Engine.render_chat`; or it is empty.
        """
        template, messages, variables = self.engine.chat_template, request.messages, None
        if template is not None:
            template = template if tools is None else template.for_tools
            messages, variables = conversation(messages, template), template_variables(request, template)
        text = self.engine.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            chat_template_kwargs=variables,
        )
        if not text:
            raise PromptError("the chat template renders these messages as an empty text")
        return text
