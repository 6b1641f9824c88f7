"""/v1/audio/transcriptions and /v1/audio/translations: sounds as text, in OpenAI's form.

The body is a form (RFC 7578), whose parts the standard library's `email` reads; the sound is a WAV file of 16,000
samples a second. Source: OpenAI's API reference, "Create transcription".
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from email.parser import BytesParser
from email.policy import HTTP
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..errors import MinillmError, shown
from ..tasks.sound_files import read_wav
from ..tasks.subtitles import srt, verbose_json, vtt
from ..tasks.transcription import Transcript
from .http_json import ApiError, json_response, read_body, shutting_down
from .limits import queue_full
from .state import Server
from .text_requests import TextsServerRequest

PATH = "/v1/audio/transcriptions"
FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
IGNORED = ("user", "include[]", "chunking_strategy")
"""Fields without effect"""
FIELDS = ("model", "language", "prompt", "response_format", "temperature", "timestamp_granularities[]", "stream")


class Form(NamedTuple):
    """The parts of a form."""

    file: bytes | None
    fields: Mapping[str, str]
    """The last of each name; of timestamp_granularities[] all, with commas between"""


def read_form(content_type: str, body: bytes) -> Form:
    """The parts of a body.

    Raises:
        ApiError: it is no form of several parts, or one has no name, or there are two files.
    """
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: %b\r\n\r\n%b" % (content_type.encode("latin-1"), body)
    )
    if not message.is_multipart():
        raise ApiError("the body should be a form: multipart/form-data with a boundary, and its parts")
    file, fields = None, dict[str, str]()
    for part in message.iter_parts():
        name = str(part.get_param("name", "", header="content-disposition"))
        content: Any = part.get_payload(decode=True) or b""
        if not name or (name == "file" and file is not None):
            raise ApiError("each part of the form should have a name, and one of them be the file", param=name or None)
        if name == "file":
            file = content
        elif name.endswith("[]") and name in fields:
            fields[name] += f",{content.decode('utf-8', 'replace')}"
        else:
            fields[name] = content.decode("utf-8", "replace")
    return Form(file, fields)


async def transcriptions(http: Request) -> Response:
    """Answer POST /v1/audio/transcriptions."""
    return await _answer(http, "transcribe")


async def translations(http: Request) -> Response:
    """Answer POST /v1/audio/translations: into English."""
    return await _answer(http, "translate")


async def _answer(http: Request, task: str) -> Response:
    server = Server.of(http)
    body = await read_body(http, server.limits.max_body_bytes, server.limits.send_timeout, kind="multipart/form-data")
    form = await asyncio.to_thread(read_form, http.headers["content-type"], body)
    options, form_of_answer = _options(form)
    model = await server.take(http, form.fields.get("model"))
    model.need(PATH, http.url.path)
    if form.file is None:
        raise ApiError("file: it is required", param="file")
    try:
        sound = await asyncio.to_thread(read_wav, form.file)
    except MinillmError as error:
        raise ApiError(f"file: {error}", param="file") from None
    request = TranscriptionRequest(server, model, "trsc", http)
    transcript = await request.transcribe(partial(model.engine.transcribe, sound, task=task, **options))
    if form_of_answer == "json":
        return json_response({"text": transcript.text.strip()})
    if form_of_answer == "verbose_json":
        return json_response(verbose_json(transcript, task))
    if form_of_answer == "text":
        return PlainTextResponse(f"{transcript.text.strip()}\n")
    return PlainTextResponse(srt(transcript) if form_of_answer == "srt" else vtt(transcript))


def _options(form: Form) -> tuple[dict[str, Any], str]:
    """The arguments of `Engine.transcribe`, and the form of the answer.

    Raises:
        ApiError: a field is unknown, impossible or not offered.
    """
    fields = {name: value for name, value in form.fields.items() if name not in IGNORED}
    for name in fields:
        if name not in FIELDS:
            raise ApiError(f"{name}: there is no field of this name; expected file, {', '.join(FIELDS)}", param=name)
    answer = fields.get("response_format", "json")
    if answer not in FORMATS:
        message = f"response_format: expected one of {', '.join(FORMATS)}, found {shown(answer)}"
        raise ApiError(message, param="response_format")
    if fields.get("stream", "false").lower() not in ("false", "0", ""):
        raise ApiError("stream: transcripts are not streamed; leave it out", param="stream")
    words = _words(fields.get("timestamp_granularities[]", "segment").split(","), answer)
    try:
        temperature = float(fields.get("temperature") or 0)
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature <= 1:
        message = f"temperature: expected a number from 0 to 1, found {shown(fields['temperature'])}"
        raise ApiError(message, param="temperature")
    sampled = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    options: dict[str, Any] = {name: fields[name] for name in ("language", "prompt") if fields.get(name)}
    return {
        **options,
        **sampled,
        "timestamps": words or (True if answer in ("verbose_json", "srt", "vtt") else None),
    }, answer


def _words(granularities: Sequence[str], answer: str) -> str | None:
    """The word "word" if words are to have times.

    Raises:
        ApiError: a granularity is unknown, or has no place in the answer.
    """
    for granularity in granularities:
        if granularity not in ("segment", "word"):
            message = f"timestamp_granularities: expected segment or word, found {shown(granularity)}"
            raise ApiError(message, param="timestamp_granularities")
    if "word" not in granularities:
        return None
    if answer != "verbose_json":
        message = f"timestamp_granularities: word needs the response_format verbose_json, found {answer}"
        raise ApiError(message, param="timestamp_granularities")
    return "word"


class TranscriptionRequest(TextsServerRequest):
    """A request for a transcript, computed by a thread beside the steps, to its end even if the client leaves."""

    async def transcribe(self, compute: Callable[[], Transcript]) -> Transcript:
        """Compute the transcript.

        Raises:
            ApiError: too many run, the server is draining, an argument is impossible, it failed or took too long.
            ClientDisconnect: the client has left.
        """
        if self._server.draining:
            raise shutting_down("the engine is draining: it takes no new requests")
        if self.model.transcribing >= self.model.max_waiting:
            count = self.model.transcribing
            raise queue_full(f"{count} requests run, as many as may: try again later", count, 1, 1.0)
        self._http.scope["minillm.request"] = self

        def blamed(message: str) -> str | None:
            name = message.partition(" ")[0]
            return name if name in FIELDS else None

        return await self.result_of(self._counted(compute), blamed)

    async def _counted(self, compute: Callable[[], Transcript]) -> Transcript:
        self.model.transcribing += 1
        try:
            return await self.model.aio.run(compute)
        finally:
            self.model.transcribing -= 1
