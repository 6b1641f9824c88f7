"""/v1/chat/completions and /v1/completions: a request's way from HTTP to the bytes of its answer.

    chat_completions, completions      one of the endpoints below
      ServerRequest.read               the body as fields            server_request.py, generation_request.py
      request.submit                   prompts into the engine       server_request.py, served_model.py
      request.results                  a whole answer: `whole`       below
      StreamResponse                   or one in chunks: `write`     streaming.py, below

`responses` and `ollama` are translations around the same way.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ..decoding.event import Event
from ..decoding.prompt_scores import TopLogProbs
from ..engine.results import Completion, Generation
from ..errors import PromptError
from ..text.chat.calls import ReasoningDelta
from .generation_request import CHAT, COMPLETIONS, ChatRequest, CompletionRequest, R
from .http_json import ApiError, encode, json_response
from .logprobs import LegacyLogprobs, chat_logprobs
from .server_request import ServerRequest
from .streaming import AnswerWriter, StreamResponse
from .text_requests import listed_texts
from .tools import delta_of, ended, is_cut, message_calls, thoughts

MAX_TOKENS = 16
"""New tokens of a completion by default: OpenAI's"""
DONE = b"data: [DONE]\n\n"


async def chat_completions(http: Request) -> Response:
    """Answer POST /v1/chat/completions."""
    request = await ServerRequest.read(http, CHAT, "chatcmpl")
    use = request.tool_use()
    await request.submit(partial(request.render, use), 1, None)
    answer = ChatAnswer(request)
    if request.body.stream:
        return StreamResponse(request, answer)
    return json_response(answer.whole(await request.results()))


async def completions(http: Request) -> Response:
    """Answer POST /v1/completions."""
    request = await ServerRequest.read(http, COMPLETIONS, "cmpl")
    prompts = read_prompts(request)
    encode = _encode_infill if request.body.suffix else _encode
    await request.submit(partial(encode, request, prompts), len(prompts), MAX_TOKENS)
    answer = CompletionAnswer(request)
    if request.body.stream:
        return StreamResponse(request, answer)
    return json_response(answer.whole(await request.results()))


def read_prompts(request: ServerRequest[CompletionRequest]) -> list[str | list[int]]:
    """The field `prompt`: a text, token ids, or a list of either.

    Raises:
        ApiError: it is of another form, or has too many prompts.
    """
    prompts, most = listed_texts(request.body.prompt, "prompt"), request.limits.max_prompts
    if len(prompts) > most:
        raise ApiError(f"prompt: {len(prompts)} prompts, and this server allows {most}", param="prompt")
    return prompts


def _encode(request: ServerRequest[CompletionRequest], prompts: Sequence[str | list[int]]) -> list[list[int]]:
    try:
        return request.model.encode(prompts, add_special_tokens=request.body.add_special_tokens is not False)
    except PromptError as error:
        code = "context_length_exceeded" if "the context holds" in str(error) else None
        raise ApiError(f"prompt: {error}", param="prompt", code=code) from None


def _encode_infill(request: ServerRequest[CompletionRequest], prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Prompts for what stands between each text and the suffix; the tokens after it end the answer."""
    if request.asked.fields.get("echo"):
        raise ApiError("echo: a prompt with a suffix cannot be part of the answer: leave one of them out", param="echo")
    infills = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ApiError("suffix goes with a prompt that is text, found token ids", param="suffix")
        try:
            infills.append(request.model.infill(prompt, request.body.suffix or ""))
        except PromptError as error:
            raise ApiError(f"suffix: {error}", param="suffix") from None
    request.body.stop_token_ids = [*(request.body.stop_token_ids or ()), *infills[0].end_ids]
    return [infill.token_ids for infill in infills]


class ChoicesAnswer(AnswerWriter, Generic[R]):
    """An answer with choices: whole, or as a stream of chunks with one choice each.

    What does not change from chunk to chunk is encoded once.
    """

    def __init__(self, request: ServerRequest[R], kind: str) -> None:
        """`kind`: the "object" of a chunk."""
        self._request, self._body = request, request.body
        options = request.body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._head = b"data: " + encode(request.head(kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """By the index of a choice: what is before and after its text in a chunk without anything else"""

    @abstractmethod
    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        """The answer in one object."""

    @abstractmethod
    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk with a text and nothing else, as most are."""

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """The chunk of one choice."""
        return self._head + encode(choice) + self._tail

    def text_chunk(self, index: int, text: str) -> bytes:
        """The chunk of a text and nothing else. `index`: its choice's."""
        if index not in self._around:
            before, after = encode(self.text_choice(index, "TEXT")).split(b'"TEXT"')
            self._around[index] = self._head + before, after + self._tail
        before, after = self._around[index]
        return before + encode(text) + after

    def end(self) -> bytes:
        """The chunk with the usage and no choice, if it is asked for, and the last line."""
        if not self._with_usage:
            return DONE
        return self._head + b'],"usage":' + encode(self._request.usage()) + b"}\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        """An event with the error, as in OpenAI's API, and the last line."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def _token_ids(self, piece: Completion | Event) -> dict[str, Any]:
        return {"token_ids": piece.token_ids} if self._body.return_token_ids else {}


def _choice(index: int, content: dict[str, Any], logprobs: Any, reason: str | None, **more: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **more}


class ChatAnswer(ChoicesAnswer[ChatRequest]):
    """Messages; as a stream the role, then a chunk for each event, or each change of content and calls, and the end."""

    def __init__(self, request: ServerRequest[ChatRequest]) -> None:
        super().__init__(request, "chat.completion.chunk")
        self._begun: set[int] = set()
        self._parsers = [request.parser() for _ in range(request.asked.n)] if request.reads_answers else None
        self._with_thoughts = self._body.include_reasoning is not False and self._body.reasoning_format != "hidden"

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        """The answer in one object."""
        [generation] = results
        choices = []
        for index, completion in enumerate(generation.completions):
            answer = self._request.parser().read(completion.text, cut=is_cut(completion))
            content = None if answer.calls and not answer.content else answer.content
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if answer.reasoning and self._with_thoughts:
                message |= thoughts(answer.reasoning)
            if answer.calls:
                message["tool_calls"] = message_calls(answer)
            reason = ended(completion.finish_reason, called=bool(answer.calls))
            more = {"stop_reason": self._request.stop_reason(completion.stop_reason)} | self._token_ids(completion)
            choices.append(_choice(index, {"message": message}, self._logprobs(completion), reason, **more))
        prompt = {"prompt_token_ids": generation.prompt_token_ids} if self._body.return_token_ids else {}
        return {**self._request.head("chat.completion"), "choices": choices, "usage": self._request.usage(), **prompt}

    def write(self, prompt: int, event: Event) -> bytes:
        """The chunks of an event."""
        index = event.index
        reason: str | None = event.finish_reason
        chunks = b"" if index in self._begun else self._begin(index)
        if self._parsers is None:
            if event.text and not (reason or event.logprobs or self._body.return_token_ids):
                return chunks + self.text_chunk(index, event.text)
            deltas: list[dict[str, Any]] = [{"content": event.text}] if event.text else []
        else:
            parser = self._parsers[index]
            changes = parser.push(event.text)
            if reason is not None:
                changes += parser.finish(cut=is_cut(event))
                reason = ended(reason, called=parser.called)
            deltas = [
                delta_of(change) for change in changes if self._with_thoughts or not isinstance(change, ReasoningDelta)
            ]
        logprobs, ids = self._logprobs(event), self._token_ids(event)
        if not deltas and (logprobs or ids.get("token_ids")):
            deltas = [{"content": ""}]
        for delta in deltas:
            chunks += self.chunk(_choice(index, {"delta": delta}, logprobs, None, **ids))
            logprobs, ids = None, {}  # once for each event
        if reason is not None:
            stop_reason = self._request.stop_reason(event.stop_reason)
            chunks += self.chunk(_choice(index, {"delta": {}}, None, reason, stop_reason=stop_reason))
        return chunks

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk with a text and nothing else."""
        return _choice(index, {"delta": {"content": text}}, None, None)

    def _begin(self, index: int) -> bytes:
        """The first chunk of a choice."""
        first = not self._begun
        self._begun.add(index)
        ids = {"prompt_token_ids": self._request.prompts[0]} if first and self._body.return_token_ids else {}
        return self.chunk(_choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None, **ids))

    def _logprobs(self, piece: Completion | Event) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return {"content": chat_logprobs(self._request.model.texts, piece, as_ids=as_ids), "refusal": None}


class _ScoredPrompt(NamedTuple):
    """A prompt with the log-probabilities of its tokens."""

    ids: Sequence[int]
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[TopLogProbs | None]


def _scored(generation: Generation) -> _ScoredPrompt | None:
    if generation.prompt_logprobs is None:
        return None
    top = generation.prompt_top_logprobs or ()
    return _ScoredPrompt(generation.prompt_token_ids, generation.prompt_logprobs, top)


class CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    """Texts; as a stream a chunk for each event, all prompts interleaved."""

    def __init__(self, request: ServerRequest[CompletionRequest]) -> None:
        super().__init__(request, "text_completion")
        self._begun: dict[int, LegacyLogprobs] = {}
        """By the index of a choice that has begun"""
        self._scored_prompts: dict[int, _ScoredPrompt] = {}
        """By prompt: the log-probabilities of its tokens, which come once for all its results"""
        self._detailed = self._body.logprobs is not None or bool(self._body.return_token_ids)
        """True if a chunk without text matters"""

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        """The answer in one object."""
        choices: list[dict[str, Any]] = []
        for generation in results:
            for completion in self._best(generation):
                more = {"stop_reason": self._request.stop_reason(completion.stop_reason)} | self._token_ids(completion)
                if self._body.return_token_ids:
                    more["prompt_token_ids"] = generation.prompt_token_ids
                logprobs = self._logprobs(self._legacy_logprobs(), completion, _scored(generation))
                content, reason = {"text": completion.text}, completion.finish_reason
                choices.append(_choice(len(choices), content, logprobs, reason, **more))
        return {**self._request.head("text_completion"), "choices": choices, "usage": self._request.usage()}

    def _best(self, generation: Generation) -> Sequence[Completion]:
        """The n of best_of with the highest log-probability per token."""
        if self._body.best_of is None:
            return generation.completions
        return generation.ranked()[: self._request.asked.n]

    def write(self, prompt: int, event: Event) -> bytes:
        """The chunk of an event; none if it brings nothing that is asked for."""
        index = prompt * self._request.asked.n + event.index
        if not self._detailed and event.finish_reason is None:
            return self.text_chunk(index, event.text) if event.text else b""
        first = index not in self._begun
        logprobs = self._begun.setdefault(index, self._legacy_logprobs())
        if event.prompt_logprobs is not None:
            prompt_ids, top = self._request.prompts[prompt], event.prompt_top_logprobs or []
            self._scored_prompts[prompt] = _ScoredPrompt(prompt_ids, event.prompt_logprobs, top)
        scored = self._scored_prompts.get(prompt) if first else None
        more: dict[str, Any] = {}
        if event.finish_reason is not None:
            more["stop_reason"] = self._request.stop_reason(event.stop_reason)
        more |= self._token_ids(event)
        if first and self._body.return_token_ids:
            more["prompt_token_ids"] = self._request.prompts[prompt]
        new = self._logprobs(logprobs, event, scored)
        return self.chunk(_choice(index, {"text": event.text}, new, event.finish_reason, **more))

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk with a text and nothing else."""
        return _choice(index, {"text": text}, None, None)

    def _logprobs(
        self, logprobs: LegacyLogprobs, piece: Completion | Event, prompt: _ScoredPrompt | None
    ) -> dict[str, Any] | None:
        """The log-probabilities of new tokens, after the prompt's."""
        if self._body.logprobs is None:
            return None
        ids: Sequence[int] = piece.token_ids
        values: Sequence[float | None] = piece.logprobs or ()
        top: Sequence[TopLogProbs | None] = piece.top_logprobs or ()
        if prompt is not None:
            ids, values, top = [*prompt.ids, *ids], [*prompt.logprobs, *values], [*prompt.top_logprobs, *top]
        return logprobs.next(ids, values, top) if ids or isinstance(piece, Completion) else None

    def _legacy_logprobs(self) -> LegacyLogprobs:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return LegacyLogprobs(self._request.model.texts, self._body.logprobs or 0, as_ids=as_ids)
