"""Ollama's API: /api/generate and /api/chat; about models see `ollama_models`, about vectors `embeddings`.

Source: docs/api.md and docs/modelfile.md of the Ollama repository. Streams, the default, are lines of JSON; durations
are in nanoseconds. All options of its documentation are taken: those about how Ollama loads and runs a model
have no effect, nor has `keep_alive` for a model that stays loaded (`--model`); what can only be done
otherwise is said once in the log (`_log_once`). Sampling that a request leaves open is as in Ollama
(`DEFAULTS`), but for its repetition penalty, which is off here.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..decoding.event import Event
from ..decoding.foreign import OLLAMA, OLLAMA_OPTIONS, WORDS, ignored, refused, renamed
from ..decoding.searches import NO_FILTER
from ..engine.results import Completion, Generation
from ..errors import printable, shown
from ..text.chat import Answer, AnswerParser, ToolCall
from .embeddings import embed, embed_one
from .generation_request import CHAT, ChatRequest, Translated, translate
from .http_json import ApiError, encode, json_response
from .logprobs import chat_logprobs
from .ollama_models import model_name, moment, running, show, tags, version
from .served_model import ServedModel
from .server_request import ServerRequest
from .state import Server
from .streaming import AnswerWriter, StreamResponse
from .tools import ToolUse, arguments_of, is_cut

logger = logging.getLogger("minillm.server")

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}

FIELDS = {
    "generate": {"prompt", "system", "raw", "suffix", "template", "context", "images", "width", "height", "steps"},
    "chat": {"messages", "tools"},
}
COMMON = {"model", "stream", "format", "options", "think", "logprobs", "top_logprobs"} | ignored(OLLAMA)


def routes() -> list[Route]:
    """The paths of the API."""
    return [
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/embeddings", embed_one, methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/version", version),
    ]


async def generate(http: Request) -> Response:
    """Answer POST /api/generate."""
    return await _answered(http, "generate")


async def chat(http: Request) -> Response:
    """Answer POST /api/chat."""
    return await _answered(http, "chat")


# --- reading ----------------------------------------------------------------------------------------------------------


async def _answered(http: Request, kind: str) -> Response:
    """The answer of either endpoint."""
    server, began = Server.of(http), time.monotonic_ns()
    body = await server.read_json(http)
    model = await server.take(http, model_name(body.get("model")))
    _check(body, kind)
    keep_alive = server.set_keep_alive(model, body.get("keep_alive"))
    if body.get("prompt" if kind == "generate" else "messages") in (None, "", []) and not body.get("system"):
        _options(body.get("options"))  # a client asks to load the model, which it is now, or to unload it
        load = {"model": model.name, "created_at": moment(), **_said(kind, ""), "done": True}
        return JSONResponse(load | {"done_reason": "unload" if keep_alive == 0 else "load"})
    request = ServerRequest(server, model, _translated(body, kind, model), "ollama", http)
    use = request.tool_use()
    await request.submit(partial(_prompt, request, body, kind, use), 1, _length(body.get("options"), model))
    answer = _Answer(request, kind, began)
    if body.get("stream") is not False:
        return StreamResponse(request, answer, media_type="application/x-ndjson")
    return json_response(answer.whole(*await request.results()))


def _check(body: Mapping[str, Any], kind: str) -> None:
    """Refuse a body with a field that is unknown, not offered, or of the wrong type.

    Raises:
        ApiError: it has one.
    """
    for name, value in body.items():
        if value and name in refused(OLLAMA):
            raise ApiError(f"{name} is not offered: {refused(OLLAMA)[name]}")
        if name not in COMMON | FIELDS[kind]:
            raise ApiError(f"unknown field {shown(name)}: known are {', '.join(sorted(COMMON | FIELDS[kind]))}")
    flags = ("stream", "raw", "logprobs")
    for expected, kind_of, names in (("true or false", bool, flags), ("text", str, ("prompt", "suffix", "system"))):
        for name in names:
            if not isinstance(body.get(name), kind_of | None):
                raise ApiError(f"{name}: expected {expected}, found {shown(body[name])}")


def _translated(body: Mapping[str, Any], kind: str, model: ServedModel) -> Translated[ChatRequest]:
    """A request as the chat that it stands for.

    Raises:
        ApiError: an option is unknown, not offered, or malformed.
    """
    given: dict[str, Any] = {"messages": _messages(body, kind)}
    given |= {"tools": body.get("tools")} if kind == "chat" else {}
    given |= _thinking(body.get("think"), model)
    if body.get("logprobs") or body.get("top_logprobs"):
        given |= {"logprobs": True, "top_logprobs": body.get("top_logprobs")}
    form = body.get("format")
    if form == "json":
        given["guided_json"] = {"type": "object"}
    elif isinstance(form, dict):
        given["guided_json"] = form
    elif form not in (None, ""):
        raise ApiError(f'format={shown(form)}: expected "json" or a JSON schema')
    back = {field: f"options.{option}" for option, field in renamed(OLLAMA_OPTIONS).items()} | {"guided_json": "format"}
    asked = translate(given | _options(body.get("options")), CHAT, back)
    return replace(asked, names={field: back.get(name, name) for field, name in asked.names.items()})


def _options(options: Any) -> dict[str, Any]:
    """Options as fields of /v1/chat/completions, with Ollama's defaults; without the length."""
    if not isinstance(options, dict | None):
        raise ApiError(f"options: expected an object, found {shown(options)}")
    given = {name: value for name, value in (options or {}).items() if value is not None}
    for name in ("num_ctx", "num_predict"):
        given.pop(name, None)
    last = given.pop("repeat_last_n", -1)
    if last == 0:
        given.pop("repeat_penalty", None)
    elif last != -1 and given.get("repeat_penalty", 1) != 1:
        _log_once("options.repeat_last_n: repeat_penalty counts the whole text")
    if given.get("mirostat") == 1:
        _log_once("options.mirostat: 1 is done as 2, the later version")
        given["mirostat"] = 2
    fields = _renamed(given)
    if "mirostat" in fields:  # it replaces the filters
        return {name: value for name, value in fields.items() if name not in NO_FILTER}
    for name in ("mirostat_tau", "mirostat_eta"):  # clients send them with every request
        fields.pop(name, None)
    return DEFAULTS | fields


def _renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names of /v1/chat/completions; without those that ask for nothing."""
    words, fields = WORDS[OLLAMA_OPTIONS], {}
    for name, value in options.items():
        if name not in words:
            known = ", ".join(sorted({*words, "num_ctx", "num_predict", "repeat_last_n"}))
            raise ApiError(f"options.{printable(name)} is not offered; known are {known}")
        ours = words[name].ours
        if ours is not None and value not in words[name].neutral:
            fields[ours] = value
    return fields


def _length(options: Mapping[str, Any] | None, model: ServedModel) -> int | None:
    """The new tokens that the options allow, as far as they fit; None: as many as fit, as Ollama does it for 0, -1, -2.

    A context beyond the model's is cut to the model's.
    """
    lengths = {}
    for name in ("num_predict", "num_ctx"):
        value = (options or {}).get(name)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise ApiError(f"options.{name}={shown(value)}: expected a whole number")
        lengths[name] = value or 0
    if lengths["num_ctx"] > model.engine.context:
        _log_once(f"options.num_ctx is above the context of {model.name}, {model.engine.context}, which counts")
    return lengths["num_predict"] if lengths["num_predict"] > 0 else None


@lru_cache(64)
def _log_once(message: str) -> None:
    """Say once how an option is done."""
    logger.warning("Ollama's API: %s", message)


def _thinking(think: Any, model: ServedModel) -> dict[str, Any]:
    """The template's variables for `think`, which may be a level.

    Raises:
        ApiError: it is none of its values, or asks a model to think that does not.
    """
    if think not in (None, True, False, "low", "medium", "high"):
        raise ApiError(f'think={shown(think)}: expected true, false, "low", "medium" or "high"')
    if think and model.reasoning_format is None:
        raise ApiError(f"think: {shown(model.name)} does not support thinking: leave it out")
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {} if think is None else {"enable_thinking": bool(think)} | effort


def _messages(body: Mapping[str, Any], kind: str) -> Any:
    """The conversation in OpenAI's form."""
    if kind == "generate":
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        return [*system, {"role": "user", "content": body.get("prompt") or ""}]
    messages = body.get("messages")
    return [_message(message) for message in messages] if isinstance(messages, list) else messages


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("images"):
        raise ApiError(f"images is not offered: {refused(OLLAMA)['images']}")
    read = {key: value for key, value in message.items() if key not in ("images", "tool_name")}
    if message.get("tool_name") is not None:
        read["name"] = message["tool_name"]
    return read


def _prompt(
    request: ServerRequest[ChatRequest], body: Mapping[str, Any], kind: str, use: ToolUse | None
) -> list[list[int]]:
    """Token ids of the prompt; /api/generate takes the text as it is if raw or without a template."""
    template = request.model.engine.chat_template
    if kind == "generate" and body.get("suffix"):
        infill = request.model.infill(body.get("prompt") or "", body["suffix"])
        request.body.stop_token_ids = infill.end_ids
        return [infill.token_ids]
    if kind == "generate" and (body.get("raw") or template is None):
        if body.get("system"):
            why = "raw takes the prompt as it is" if body.get("raw") else "this model has no chat template"
            raise ApiError(f"system has no effect: {why}")
        return request.model.encode([body.get("prompt") or ""])
    return request.render(use)


# --- answering --------------------------------------------------------------------------------------------------------


def _said(kind: str, text: str, calls: list[ToolCall] | None = None, thinking: str = "") -> dict[str, Any]:
    """The part of an answer that holds text, thoughts and calls."""
    thoughts = {"thinking": thinking} if thinking else {}
    if kind == "generate":
        return {"response": text, **thoughts}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thoughts}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": arguments_of(call.arguments)}}
            for call in calls
        ]
    return {"message": message}


class _Answer(AnswerWriter):
    """The answer to one request, as a whole or as lines: one for each event with text or a complete call, then one with
    the counts.
    """

    silence = b" "
    """Before a line of JSON; clients that read lines of JSON take no empty ones"""

    def __init__(self, request: ServerRequest[ChatRequest], kind: str, began: int) -> None:
        """`began`: when the request came, in nanoseconds of `time.monotonic_ns`."""
        self._request, self._kind = request, kind
        self._began = began
        self._reading = _Reading(request.parser())
        self._last: Event | None = None

    def write(self, prompt: int, event: Event) -> bytes:
        """The line of an event."""
        self._last = event
        new = self._reading.add(event.text, last=event.finish_reason is not None, cut=is_cut(event))
        logprobs = self._logprobs(event)
        if not (any(new) or logprobs):
            return b""
        return self._line(_said(self._kind, *new) | logprobs | {"done": False})

    def end(self) -> bytes:
        """The last line."""
        last = self._last
        assert last is not None
        end = self._end(last.finish_reason, last.prefill_seconds or 0.0, last.decode_seconds or 0.0)
        return self._line(_said(self._kind, "") | end)

    def failed(self, error: ApiError) -> bytes:
        """A line with the error."""
        return encode({"error": str(error)}) + b"\n"

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one object."""
        [completion] = generation.completions
        new = self._reading.add(completion.text, last=True, cut=is_cut(completion))
        end = self._end(completion.finish_reason, generation.prefill_seconds, generation.decode_seconds)
        return self._head() | _said(self._kind, *new) | self._logprobs(completion) | end

    def _logprobs(self, piece: Event | Completion) -> dict[str, Any]:
        """The log-probabilities of new tokens, if they are asked for."""
        if not piece.logprobs:
            return {}
        return {"logprobs": chat_logprobs(self._request.model.texts, piece)}

    def _line(self, answer: dict[str, Any]) -> bytes:
        return encode(self._head() | answer) + b"\n"

    def _head(self) -> dict[str, Any]:
        return {"model": self._request.model.name, "created_at": moment()}

    def _end(self, reason: str | None, prefill: float, decode: float) -> dict[str, Any]:
        """The reason of the end, counts and durations; `prefill` and `decode` are in seconds."""
        usage = self._request.usage()
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(1e9 * prefill),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(1e9 * decode),
        }


class _Reading:
    """Text, complete calls and thoughts of an answer that comes in pieces."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._answer = Answer()
        self._given = 0

    def add(self, text: str, *, last: bool, cut: bool = False) -> tuple[str, list[ToolCall], str]:
        """Add text; returns new content, the calls that it completed, and new thoughts."""
        deltas = self._parser.push(text) + (self._parser.finish(cut=cut) if last else [])
        before, thought = len(self._answer.content), len(self._answer.reasoning)
        self._answer.add(deltas)
        complete = max(self._given, len(self._answer.calls) - (not last))  # more of the newest may come
        calls = self._answer.calls[self._given : complete]
        self._given = complete
        return self._answer.content[before:], calls, self._answer.reasoning[thought:]
