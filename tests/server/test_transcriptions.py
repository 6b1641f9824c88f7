"""/v1/audio/transcriptions and /v1/audio/translations: forms of answers, fields, and what is refused."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.cli.serve import _example
from minillm.server import Limits, make_app
from minillm.server.transcriptions import read_form
from minillm.tasks.sound_files import read_wav

from ..whisper import speech_tensors, tone, wav_of, write_speech
from .client import error_of, post, talk

SOUND = tone(0.3, seed=1)
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_speech(tmp_path_factory.mktemp("speech"), speech_tensors())
    with Engine(folder, backend="numpy", progress=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    return make_app({"speech": engine}, limits=Limits(max_body_bytes=20000))


def sent(app: Starlette, path: str = PATH, content: bytes | None = None, **fields: Any) -> httpx.Response:
    """A form with a file and fields."""
    headers = fields.pop("headers", {})
    files = {} if content == b"" else {"file": ("a.wav", wav_of(SOUND) if content is None else content, "audio/wav")}
    data = {name.replace("__", "[]"): value for name, value in fields.items()}
    return talk(
        app, lambda client: client.post(path, data=data, files=files or {"user": (None, "me")}, headers=headers)
    )


@pytest.mark.longer
def test_every_form_of_answer_has_the_words_of_the_engine(app: Starlette, engine: Engine) -> None:
    sound = read_wav(wav_of(SOUND))
    greedy: dict[str, Any] = {"language": "de", "do_sample": False}  # the server's engine samples by default
    text, timed = engine.transcribe(sound, **greedy).text, engine.transcribe(sound, **greedy, timestamps=True)
    options = {"model": "speech", "language": "de"}
    assert sent(app, **options).json() == {"text": text}
    assert sent(app, **options, response_format="text").text == f"{text}\n"
    verbose = sent(app, **options, response_format="verbose_json", timestamp_granularities__="segment").json()
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "german", 0.3)
    assert [segment["tokens"] for segment in verbose["segments"]] == [one.token_ids for one in timed.segments]
    assert verbose["text"] == timed.text
    timed = sent(app, **options, response_format="verbose_json", timestamp_granularities__="word").json()
    spoken = engine.transcribe(sound, **greedy, timestamps="word").words
    assert spoken
    assert [(word["word"], word["start"], word["end"]) for word in timed["words"]] == [
        (word.text.strip(), word.start, word.end) for word in spoken
    ]
    assert sent(app, **options, response_format="srt").text.startswith("1\n00:00:00,")
    assert sent(app, **options, response_format="vtt").text.startswith("WEBVTT\n\n00:00:00.")
    assert sent(app, "/v1/audio/translations", **options).json() == {
        "text": engine.transcribe(sound, **greedy, task="translate").text
    }
    assert sent(app, temperature="0.5", prompt="w3 w4", user="me").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"language": "xx"}, "language", "language 'xx' is not known"),
        ({"response_format": "xml"}, "response_format", "expected one of json, text, verbose_json, srt, vtt"),
        ({"temperature": "hot"}, "temperature", "expected a number from 0 to 1, found 'hot'"),
        ({"temperature": "2"}, "temperature", "expected a number from 0 to 1, found '2'"),
        ({"stream": "true"}, "stream", "transcripts are not streamed"),
        ({"timestamp_granularities__": ["segment", "letter"]}, "timestamp_granularities", "expected segment or word"),
        ({"timestamp_granularities__": "word"}, "timestamp_granularities", "needs the response_format verbose_json"),
        ({"beams": "3"}, "beams", "there is no field of this name"),
        ({"content": b""}, "file", "file: it is required"),
        ({"content": b"ID3"}, "file", "should be a WAV file of whole numbers"),
        ({"content": wav_of(SOUND, rate=8000)}, "file", "should have 16000 samples a second, found 8000"),
    ],
    ids=str,
)
def test_other_fields_are_refused(app: Starlette, fields: dict[str, Any], param: str, message: str) -> None:
    error = error_of(sent(app, **fields))
    assert error["param"] == param
    assert message in error["message"]


def test_other_bodies_are_refused(app: Starlette) -> None:
    assert "should be multipart/form-data" in error_of(post(app, PATH, {"model": "speech"}), 415)["message"]
    of_page = sent(app, headers={"origin": "http://elsewhere"})
    assert "of a browser" in error_of(of_page, 415)["message"]
    assert error_of(sent(app, content=wav_of(tone(1.0))), 413)["code"] == "request_too_large"
    missing = error_of(sent(app, model="other"), 404)
    assert missing["code"] == "model_not_found"


@pytest.mark.parametrize("names", [("file", "file"), ("file", "")], ids=["two files", "a part without a name"])
def test_a_form_with_a_second_file_or_a_nameless_part_is_refused(app: Starlette, names: tuple[str, str]) -> None:
    parts = [(name, ("a.wav", wav_of(SOUND), "audio/wav")) for name in names]
    response = talk(app, lambda client: client.post(PATH, files=parts))
    assert response.status_code == 400
    assert "one of them be the file" in error_of(response)["message"]


def test_models_have_their_endpoints(app: Starlette) -> None:
    assert (
        "which has /v1/audio/transcriptions" in error_of(post(app, "/v1/completions", {"prompt": "a"}), 404)["message"]
    )
    texts = make_app({"text": Engine(progress=False)})
    assert "is not for the model 'text'" in error_of(sent(texts), 404)["message"]


@pytest.mark.longer
def test_a_file_in_a_form_is_the_file() -> None:
    """Whatever bytes it has: ends of lines, and what looks like a boundary."""
    draw = random.Random(0)
    for length in (0, 1, 2, 50, 400):
        for _ in range(20):
            content = bytes(draw.choice(b"\r\n-ab\x00\xff\x80") for _ in range(length)) + os.urandom(length)
            head = b'--ab\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            body = head + content.replace(b"--ab", b"") + b"\r\n--ab--\r\n"
            assert read_form("multipart/form-data; boundary=ab", body).file == content.replace(b"--ab", b"")


def test_a_folder_of_speech_is_served(tmp_path: Path) -> None:
    folder = write_speech(tmp_path / "m", speech_tensors())
    app = make_app({"m": Engine(folder, progress=False)})
    assert sent(app).json()["text"]


def test_serve_shows_a_form_to_try() -> None:
    line = _example("http://localhost:8000", PATH, "my model", keyed=False, tls=False)
    assert line == f"try: curl http://localhost:8000{PATH} -F file=@sound.wav -F model='my model'"
