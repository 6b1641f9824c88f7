"""/v1/completions: the continuation of texts or token ids."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ..decoding.prompt_scores import TopLogProbs
from ..engine.results import Generation
from ..errors import PromptError, UsageError
from .exchange import Exchange, exchange_of
from .logprobs import LegacyWriter
from .protocol import ApiError, CompletionChoice, CompletionRequest, CompletionResponse, LegacyLogprobs
from .streaming import ChunkWriter, StreamResponse, encode
from .texts import listed_texts
from .translate import COMPLETIONS

if TYPE_CHECKING:
    from ..decoding.event import Event
    from ..engine.results import Completion

MAX_TOKENS = 16
"""OpenAI's default."""


async def completions(request: Request) -> Response:
    """Answer POST /v1/completions."""
    exchange = await exchange_of(request, COMPLETIONS, "cmpl")
    asked = exchange.asked.request
    prompts = read_prompts(exchange, asked)
    await exchange.submit(partial(_encode, exchange, asked, prompts), len(prompts), MAX_TOKENS)
    if asked.stream:
        return StreamResponse(exchange, _Writer(exchange, asked))
    return exchange.json(_response(exchange, asked, await exchange.results()))


def read_prompts(exchange: Exchange[CompletionRequest], asked: CompletionRequest) -> list[str | list[int]]:
    """The field `prompt`: a text, token ids, or a list of either.

    Raises:
        ApiError: it is of another form, or has too many prompts.
    """
    prompts = listed_texts(asked.prompt, "prompt")
    if len(prompts) > exchange.limits.max_prompts:
        most = exchange.limits.max_prompts
        raise ApiError(f"prompt: {len(prompts)} prompts, and this server allows {most}", param="prompt")
    return prompts


def _encode(
    exchange: Exchange[CompletionRequest], asked: CompletionRequest, prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    try:
        return exchange.served.encode(prompts, add_special_tokens=asked.add_special_tokens is not False)
    except PromptError as error:
        raise ApiError(f"prompt: {error}", param="prompt", code=_code(error)) from None


def _code(error: UsageError) -> str | None:
    return "context_length_exceeded" if "the context holds" in str(error) else None


def _response(
    exchange: Exchange[CompletionRequest], asked: CompletionRequest, results: Sequence[Generation]
) -> CompletionResponse:
    choices = [
        _choice(exchange, asked, generation, completion)
        for generation in results
        for completion in _best(generation, asked, exchange.asked.n)
    ]
    for index, choice in enumerate(choices):
        choice.index = index
    return CompletionResponse(choices=choices, usage=exchange.usage(), **exchange.head("text_completion"))


def _best(generation: Generation, asked: CompletionRequest, n: int) -> "Sequence[Completion]":
    """The n of best_of with the highest log-probability per token."""
    if asked.best_of is None:
        return generation.completions

    def score(completion: "Completion") -> float:
        return math.fsum(completion.logprobs or ()) / max(1, len(completion.token_ids))

    return sorted(generation.completions, key=score, reverse=True)[:n]


def _choice(
    exchange: Exchange[CompletionRequest], asked: CompletionRequest, generation: Generation, completion: "Completion"
) -> CompletionChoice:
    logprobs = None
    if asked.logprobs is not None:
        ids = completion.token_ids
        values: list[float | None] = [*(completion.logprobs or ())]
        top: list[TopLogProbs | None] = [*(completion.top_logprobs or ())]
        if generation.prompt_logprobs is not None:
            ids = [*generation.prompt_token_ids, *ids]
            values = [*generation.prompt_logprobs, *values]
            top = [*(generation.prompt_top_logprobs or ()), *top]
        logprobs = _legacy_writer(exchange, asked).write(ids, values, top)
    return CompletionChoice(
        index=0,
        text=completion.text,
        logprobs=logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=exchange.stop_reason(completion.stop_reason),
        token_ids=completion.token_ids if asked.return_token_ids else UNSET,
        prompt_token_ids=generation.prompt_token_ids if asked.return_token_ids else UNSET,
    )


class _Writer(ChunkWriter):
    """A chunk for each event, all prompts interleaved."""

    def __init__(self, exchange: Exchange[CompletionRequest], asked: CompletionRequest) -> None:
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        super().__init__(exchange.head("text_completion"), exchange.usage if with_usage else None)
        self._exchange, self._asked = exchange, asked
        self._writers: dict[int, LegacyWriter] = {}
        self._prompts: dict[int, tuple[list[float | None], list[TopLogProbs | None]]] = {}
        """By prompt: the log-probabilities of its tokens, which come once for all its results."""
        self._detailed = asked.logprobs is not None or bool(asked.return_token_ids)
        """True if a chunk without text matters"""

    def write(self, prompt: int, event: "Event") -> bytes:
        """The chunk of an event; none if it brings nothing that is wanted."""
        index = prompt * self._exchange.asked.n + event.index
        if self._detailed or event.finish_reason is not None:
            details = index, encode(event.text), *self._details(prompt, index, event)
            return self.chunk(b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % details)
        return self.text_chunk(index, event.text) if event.text else b""

    def _text_choice(self, index: int) -> bytes:
        return b'{"index":%d,"text":TEXT,"logprobs":null,"finish_reason":null}' % index

    def _details(self, prompt: int, index: int, event: "Event") -> tuple[bytes, bytes, bytes]:
        """Log-probabilities, the reason of the end, and further fields, as JSON. `index`: of the choice."""
        first = index not in self._writers
        if first:
            self._writers[index] = _legacy_writer(self._exchange, self._asked)
        more = b""
        if event.finish_reason is not None:
            more = b',"stop_reason":' + encode(self._exchange.stop_reason(event.stop_reason))
        if self._asked.return_token_ids:
            more += b',"token_ids":' + encode(event.token_ids)
            if first:
                more += b',"prompt_token_ids":' + encode(self._exchange.prompts[prompt])
        logprobs = b"null"
        if self._asked.logprobs is not None:
            logprobs = encode(self._logprobs(prompt, index, event, first))
        return logprobs, encode(event.finish_reason), more

    def _logprobs(self, prompt: int, index: int, event: "Event", first: bool) -> LegacyLogprobs | None:
        if event.prompt_logprobs is not None:
            self._prompts[prompt] = event.prompt_logprobs, event.prompt_top_logprobs or []
        ids: Sequence[int] = event.token_ids
        values: Sequence[float | None] = event.logprobs
        top: Sequence[TopLogProbs | None] = event.top_logprobs
        if first and prompt in self._prompts:
            of_prompt, top_of_prompt = self._prompts[prompt]
            ids, values = [*self._exchange.prompts[prompt], *ids], [*of_prompt, *values]
            top = [*top_of_prompt, *top]
        return self._writers[index].write(ids, values, top) if ids else None


def _legacy_writer(exchange: Exchange[CompletionRequest], asked: CompletionRequest) -> LegacyWriter:
    return LegacyWriter(exchange.served.texts, asked.logprobs or 0, as_ids=bool(asked.return_tokens_as_token_ids))
