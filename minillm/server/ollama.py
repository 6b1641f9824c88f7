"""Ollama's API: /api/generate, /api/chat, /api/tags, /api/ps, /api/show, /api/version.

Source: docs/api.md of the Ollama repository. Streams, the default, are lines of JSON; durations are in nanoseconds.
`options` that change a result are done or refused by name; those about how Ollama loads and runs a model (`RUNNING`,
and the field `keep_alive`) are accepted without effect: a model here stays loaded as the server started it. Sampling
that a request leaves open is as in Ollama (`DEFAULTS`), but for its repetition penalty, which is off here.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..chat import Answer, CallParser, ToolCall
from ..errors import printable, shown
from .exchange import Exchange, json_of
from .protocol import ApiError, ChatRequest
from .streaming import AnswerWriter, StreamResponse, encode
from .tools import ToolUse
from .translate import CHAT, Translated, translate

if TYPE_CHECKING:
    from ..results import Event
    from .app import Server
    from .served import Served

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}

OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta")},
}
"""Options -> the fields of /v1/chat/completions that take their values as they are"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_predict": (-1, -2),
    "min_p": (0,),
    "typical_p": (1,),
    "repeat_penalty": (1,),
    "mirostat": (0,),
    "tfs_z": (1,),
}
"""Options -> values that ask for nothing; num_predict of -1 and -2 goes up to the end of the context, as none does"""
RUNNING = frozenset(
    {"num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "vocab_only"}
    | {"use_mmap", "use_mlock", "logits_all", "embedding_only", "penalize_newline"}
)
"""Options without effect here"""

FIELDS = {
    "generate": {"prompt", "system", "raw", "suffix", "template", "context", "images"},
    "chat": {"messages", "tools"},
}
COMMON = {"model", "stream", "format", "options", "keep_alive", "think", "logprobs", "top_logprobs"}
REFUSED = {
    "suffix": "minillm does not insert text",
    "template": "the model's own template is used; raw takes a prompt as it is",
    "context": "use /api/chat, and give the messages",
    "images": "minillm reads text only",
    "logprobs": "/v1/chat/completions has it",
    "top_logprobs": "/v1/chat/completions has it",
}
"""Fields that are not offered -> the reason; empty and false values ask for nothing"""


CAPABILITIES = {"completion": "/v1/completions", "embedding": "/v1/embeddings"}
"""Ollama's words -> the endpoint of a model that can do it"""


def routes() -> list[Route]:
    """The paths of the API."""
    return [
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/version", version),
    ]


async def generate(request: Request) -> Response:
    """Answer POST /api/generate."""
    return await _answered(request, "generate")


async def chat(request: Request) -> Response:
    """Answer POST /api/chat."""
    return await _answered(request, "chat")


async def tags(request: Request) -> Response:
    """Answer GET /api/tags: the models."""
    server: Server = request.app.state.server
    return JSONResponse({"models": [_card(served) for served in server.models.values()]})


async def running(request: Request) -> Response:
    """Answer GET /api/ps: the models, all of which are loaded."""
    server: Server = request.app.state.server
    forever = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
    cards = [_card(served) | forever | {"context_length": served.context} for served in server.models.values()]
    return JSONResponse({"models": cards})


async def show(request: Request) -> Response:
    """Answer POST /api/show: about one model."""
    server: Server = request.app.state.server
    try:
        body = await json_of(request, server)
        served = server.model(_name(server, body.get("model", body.get("name"))))
    except ApiError as error:
        return refusal(error)
    engine, card = served.engine, _card(served)
    template = "" if engine.chat_template is None else engine.chat_template.source
    capabilities = [name for name, path in CAPABILITIES.items() if path in served.endpoints]
    capabilities += ["tools"] if engine.chat_template is not None else []
    family = card["details"]["family"]
    info = {"general.architecture": family, f"{family}.context_length": served.context}
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": card["details"],
            "model_info": info,
            "capabilities": capabilities,
            "modified_at": card["modified_at"],
        }
    )


async def version(request: Request) -> Response:
    """Answer GET /api/version."""
    return JSONResponse({"version": __version__})


def _card(served: "Served") -> dict[str, Any]:
    family = type(served.engine.config).__name__.removesuffix("Config").lower()
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": _moment(served.created),
        "size": 0,
        "digest": "",
        "details": {
            "parent_model": served.parent or "",
            "format": "",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _moment(seconds: float | None = None) -> str:
    """A time as Ollama writes it."""
    found = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")


def refusal(error: ApiError) -> Response:
    """An error in Ollama's form."""
    return JSONResponse({"error": str(error)}, status_code=error.status, headers=error.headers)


def _name(server: "Server", name: Any) -> str:
    """A model's name; clients add ":latest" to one without a tag."""
    if not isinstance(name, str):
        raise ApiError(f"model: expected a name, found {shown(name)}")
    return name if name in server.models else name.removesuffix(":latest")


# --- reading ----------------------------------------------------------------------------------------------------------


async def _answered(request: Request, kind: str) -> Response:
    """The answer of either endpoint."""
    server: Server = request.app.state.server
    try:
        body = await json_of(request, server)
        served = server.model(_name(server, body.get("model")))
        _check(body, kind)
        if body.get("prompt" if kind == "generate" else "messages") in (None, "", []) and not body.get("system"):
            _options(body.get("options"), served)
            load = {"model": served.name, "created_at": _moment(), **_said(kind, ""), "done": True}
            return JSONResponse(load | {"done_reason": "load"})  # a client asks to load the model, which it is
        asked = _translated(body, kind, served)
        exchange = Exchange(server, served, asked, "ollama", request)
        use = exchange.tool_use()
        answer = _Answer(exchange, kind, use)
        await exchange.submit(partial(_prompt, exchange, body, kind, use), 1, None)
        if body.get("stream") is not False:
            return StreamResponse(exchange, answer, media_type="application/x-ndjson")
        return exchange.json(await answer.whole())
    except ApiError as error:
        return refusal(error)


def _check(body: Mapping[str, Any], kind: str) -> None:
    """Refuse a body with a field that is unknown, not offered, or of the wrong type.

    Raises:
        ApiError: it has one.
    """
    for name, value in body.items():
        if name in REFUSED and value:
            raise ApiError(f"{name} is not offered: {REFUSED[name]}")
        if name not in COMMON | FIELDS[kind]:
            raise ApiError(f"unknown field {shown(name)}: known are {', '.join(sorted(COMMON | FIELDS[kind]))}")
    for expected, kind_of, names in (("true or false", bool, ("stream", "raw")), ("text", str, ("prompt", "system"))):
        for name in names:
            if not isinstance(body.get(name), kind_of | None):
                raise ApiError(f"{name}: expected {expected}, found {shown(body[name])}")


def _translated(body: Mapping[str, Any], kind: str, served: "Served") -> Translated[ChatRequest]:
    """A request as the chat that it stands for.

    Raises:
        ApiError: an option is unknown, not offered, or malformed.
    """
    given: dict[str, Any] = {"messages": _messages(body, kind)}
    given |= {"tools": body.get("tools")} if kind == "chat" else {}
    given |= _thinking(body.get("think"), served)
    form = body.get("format")
    if form == "json":
        given["guided_json"] = {"type": "object"}
    elif isinstance(form, dict):
        given["guided_json"] = form
    elif form not in (None, ""):
        raise ApiError(f'format={shown(form)}: expected "json" or a JSON schema')
    back = {field: f"options.{option}" for option, field in OPTIONS.items()} | {"guided_json": "format"}
    asked = translate(given | _options(body.get("options"), served), CHAT, back)
    return replace(asked, names={field: back.get(name, name) for field, name in asked.names.items()})


def _options(options: Any, served: "Served") -> dict[str, Any]:
    """Options as fields of /v1/chat/completions, with Ollama's defaults."""
    if not isinstance(options, dict | None):
        raise ApiError(f"options: expected an object, found {shown(options)}")
    found = {name: value for name, value in (options or {}).items() if value is not None and name not in RUNNING}
    context = found.pop("num_ctx", 0)
    if isinstance(context, bool) or not isinstance(context, int) or not 0 <= context <= served.context:
        raise ApiError(f"options.num_ctx={shown(context)}: the context of this model is {served.context}")
    last = found.pop("repeat_last_n", -1)
    if last != -1 and found.get("repeat_penalty", 1) != 1:
        raise ApiError("options.repeat_last_n is not offered: repeat_penalty counts the whole text: set it to -1")
    kept = {name: value for name, value in found.items() if value not in _NEUTRAL.get(name, ())}
    for name in kept:
        if name not in OPTIONS:
            raise ApiError(f"options.{printable(name)} is not offered; known are {', '.join(sorted(OPTIONS))}")
    fields = {OPTIONS[name]: value for name, value in kept.items()}
    if "mirostat" in fields:
        return fields  # it replaces the filters
    for name in ("mirostat_tau", "mirostat_eta"):  # clients send them with every request
        fields.pop(name, None)
    return DEFAULTS | fields


def _thinking(think: Any, served: "Served") -> dict[str, Any]:
    """The template's variable for `think: false`."""
    if think not in (None, False):
        raise ApiError("think is not offered: thoughts are not told from the answer")
    template = served.engine.chat_template
    if think is None or template is None or "enable_thinking" not in template.source:
        return {}
    return {"chat_template_kwargs": {"enable_thinking": False}}


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
        raise ApiError(f"images is not offered: {REFUSED['images']}")
    found = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
    if "tool_name" in message:
        found["name"] = message["tool_name"]
    return found


def _prompt(
    exchange: Exchange[ChatRequest], body: Mapping[str, Any], kind: str, use: ToolUse | None
) -> list[list[int]]:
    """Token ids of the prompt; of /api/generate without a template the text as it is, if raw or if there is none."""
    template = exchange.served.engine.chat_template
    if kind == "generate" and (body.get("raw") or template is None):
        if body.get("system"):
            why = "raw takes the prompt as it is" if body.get("raw") else "this model has no chat template"
            raise ApiError(f"system has no effect: {why}")
        return exchange.served.encode([body.get("prompt") or ""])
    return exchange.render(exchange.asked.request, None if use is None else use.offered)


# --- answering --------------------------------------------------------------------------------------------------------


def _said(kind: str, text: str, calls: list[ToolCall] | None = None) -> dict[str, Any]:
    """The part of an answer that holds text and calls."""
    if kind == "generate":
        return {"response": text}
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": _arguments(call)}} for call in calls
        ]
    return {"message": message}


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object; text of the model's that is none is the value of an empty key."""
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"": call.arguments}


class _Answer(AnswerWriter):
    """The answer to one request, as a whole or as lines: one for each event with text or a complete call, then one with
    the counts.
    """

    silence = b" "
    """Before a line of JSON; clients that read lines of JSON take no empty ones"""

    def __init__(self, exchange: Exchange[ChatRequest], kind: str, use: ToolUse | None) -> None:
        self._exchange, self._kind = exchange, kind
        self._began = time.monotonic_ns()
        self._reading = _Reading(use)
        self._last: Event | None = None

    def write(self, prompt: int, event: "Event") -> bytes:
        """The line of an event."""
        self._last = event
        text, calls = self._reading.add(event.text, last=event.finish_reason is not None)
        return self._line(_said(self._kind, text, calls) | {"done": False}) if text or calls else b""

    def end(self) -> bytes:
        """The last line."""
        last = self._last
        assert last is not None
        end = self._end(last.finish_reason, last.prefill_seconds or 0.0, last.decode_seconds or 0.0)
        return self._line(_said(self._kind, "") | end)

    def failed(self, error: ApiError) -> bytes:
        """A line with the error."""
        return encode({"error": str(error)}) + b"\n"

    async def whole(self) -> dict[str, Any]:
        """The answer in one object.

        Raises:
            ApiError: the request failed.
        """
        [generation] = await self._exchange.results()
        [completion] = generation.completions
        text, calls = self._reading.add(completion.text, last=True)
        end = self._end(completion.finish_reason, generation.prefill_seconds, generation.decode_seconds)
        return self._head() | _said(self._kind, text, calls) | end

    def _line(self, answer: dict[str, Any]) -> bytes:
        return encode(self._head() | answer) + b"\n"

    def _head(self) -> dict[str, Any]:
        return {"model": self._exchange.served.name, "created_at": _moment()}

    def _end(self, reason: str | None, prefill: float, decode: float) -> dict[str, Any]:
        """The reason of the end, counts and durations; `prefill` and `decode` are in seconds."""
        usage = self._exchange.usage()
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
    """Text and complete calls of an answer that comes in pieces."""

    def __init__(self, use: ToolUse | None) -> None:
        self._parser: CallParser | None = None if use is None else use.parser()
        self._answer = Answer()
        self._given = 0

    def add(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        """Add text; returns new content, and the calls that it completed."""
        if self._parser is None:
            return text, []
        deltas = self._parser.push(text) + (self._parser.finish() if last else [])
        before = len(self._answer.content)
        self._answer.add(deltas)
        complete = max(self._given, len(self._answer.calls) - (not last))  # more of the newest may come
        calls = self._answer.calls[self._given : complete]
        self._given = complete
        return self._answer.content[before:], calls
