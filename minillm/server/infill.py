"""llama.cpp's /infill, which editors ask to complete code at the cursor (llama.vim, llama.vscode).

Source: tools/server/README.md of llama.cpp. The prompt is `input_prefix`, and `prompt`, which the answer continues,
before the cursor; `input_suffix` after it; `input_extra`, other files that matter. A request for no token (`n_predict`
0) computes the prompt, so that the next one finds it in the prefix cache.
"""

from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ..decoding import foreign
from ..decoding.event import Event
from ..engine.results import Completion, Generation
from ..errors import PromptError
from .generation_request import NAMES, CompletionRequest, Endpoint
from .http_json import ApiError, encode, json_response
from .server_request import ServerRequest
from .streaming import AnswerWriter, StreamResponse

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's"""
STOP_TYPES = {"length": "limit", "timeout": "limit"}
"""Reasons of an end -> llama.cpp's words; for "stop" see `_Answer._end`"""


class File(Struct):
    """Another file that matters."""

    text: str
    filename: str = "tmp"


class InfillRequest(CompletionRequest, kw_only=True):
    """/infill."""

    prompt: Any = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[File] | None = None


INFILL = Endpoint(InfillRequest, foreign.INFILL, NAMES | {"max_new_tokens": "n_predict"})


async def infill(http: Request) -> Response:
    """Answer POST /infill."""
    request = await ServerRequest.read(http, INFILL, "infill")
    fields, body = request.asked.fields, request.body
    for name, value in DEFAULTS.items():
        if "temperature" not in fields and fields.get("do_sample", True):
            fields.setdefault(name, value)
    warms = fields.get("max_new_tokens") == 0
    if warms:
        fields["max_new_tokens"] = 1
    elif fields.get("max_new_tokens") == -1:  # as many as fit
        del fields["max_new_tokens"]
    if not isinstance(body.prompt, str):
        raise ApiError("prompt: expected the text before the cursor in its line", param="prompt")
    await request.submit(partial(_prompt, request), 1, None)
    answer = _Answer(request, silent=warms)
    if body.stream:
        return StreamResponse(request, answer)
    return json_response(answer.whole(*await request.results()))


def _prompt(request: ServerRequest[InfillRequest]) -> list[list[int]]:
    """Token ids of the prompt; the tokens that end the text are set."""
    body = request.body
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    try:
        made = request.model.infill(body.input_prefix + body.prompt, body.input_suffix, files)
    except PromptError as error:
        raise ApiError(str(error), param="input_prefix") from None
    body.stop_token_ids = [*(body.stop_token_ids or ()), *made.end_ids]
    return [made.token_ids]


class _Answer(AnswerWriter):
    """The answer in llama.cpp's form: whole, or an event for each piece of text and one with the counts."""

    def __init__(self, request: ServerRequest[InfillRequest], *, silent: bool) -> None:
        """`silent`: no text was asked for."""
        self._request, self._silent = request, silent
        self._last: Event | None = None

    def write(self, prompt: int, event: Event) -> bytes:
        """The event of new text."""
        self._last = event
        if self._silent or not event.text:
            return b""
        return b"data: " + encode({"index": 0, "content": event.text, "stop": False}) + b"\n\n"

    def end(self) -> bytes:
        """The last event."""
        last = self._last
        assert last is not None
        return b"data: " + encode(self._end("", last, last.prefill_seconds, last.decode_seconds)) + b"\n\n"

    def failed(self, error: ApiError) -> bytes:
        """An event with the error."""
        return b"data: " + error.body() + b"\n\n"

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one object."""
        [completion] = generation.completions
        text = "" if self._silent else completion.text
        return self._end(text, completion, generation.prefill_seconds, generation.decode_seconds)

    def _end(self, text: str, end: Completion | Event, prefill: float | None, decode: float | None) -> dict[str, Any]:
        """The answer's end, with counts and durations; `prefill` and `decode` are in seconds."""
        request, usage = self._request, self._request.usage()
        word = end.stop_reason if isinstance(end.stop_reason, str) else ""
        kind = STOP_TYPES.get(end.finish_reason or "", "word" if word else "eos")
        computed = usage.prompt_tokens - usage.cached_tokens
        timings = _timings("prompt", computed, prefill) | _timings("predicted", usage.completion_tokens, decode)
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "id_slot": 0,
            "model": request.model.name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "has_new_line": "\n" in text,
            "stop_type": kind,
            "stopping_word": word,
            "generation_settings": {"n_ctx": request.model.engine.context},
            "timings": timings,
        }


def _timings(name: str, count: int, seconds: float | None) -> dict[str, float]:
    """Tokens and durations of a phase, under llama.cpp's names."""
    milliseconds = 1000 * (seconds or 0.0)
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(1, count),
        f"{name}_per_second": 1000 * count / milliseconds if milliseconds else 0.0,
    }
