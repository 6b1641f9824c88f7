"""`minillm transcribe`, and the pipeline automatic-speech-recognition, on a tiny model of speech."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine, pipeline
from minillm.cli.main import run
from minillm.errors import ParameterError, PromptError, TaskError
from minillm.tasks.subtitles import srt, vtt
from minillm.tasks.transcription import Segment, Transcript

from ..whisper import speech_tensors, tone, wav_of, write_speech

SOUND, LONG = tone(0.3, seed=1), tone(0.7, seed=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_speech(tmp_path_factory.mktemp("speech"), speech_tensors())
    for name, sound in {"short": SOUND, "long": LONG}.items():
        (folder / f"{name}.wav").write_bytes(wav_of(sound))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, backend="numpy", progress=False)


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, file: str = "long") -> str:
    assert (
        run(
            [
                "transcribe",
                "-m",
                str(folder),
                "--backend",
                "numpy",
                "--max-new-tokens",
                "8",
                *words,
                str(folder / f"{file}.wav"),
            ]
        )
        == 0
    )
    return capsys.readouterr().out


@pytest.mark.longer
def test_the_text_of_a_file(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(folder, capsys, "--language", "German", "--num-beams", "2", file="short")
    read = pipeline("automatic-speech-recognition", engine)
    options = {"language": "de", "num_beams": 2, "max_new_tokens": 8}
    assert text == read(folder / "short.wav", generate_kwargs=options)["text"].strip() + "\n"


@pytest.mark.longer
def test_segments_with_times(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(folder, capsys, "--timestamps").splitlines()
    assert len(lines) > 1
    assert all(re.fullmatch(r"\[\d+\.\d\d --> \d+\.\d\d\] [w\d ]*", line) for line in lines)
    [record] = map(json.loads, printed(folder, capsys, "--format", "json").splitlines())
    assert [f"[{s['start']:.2f} --> {s['end']:.2f}] {s['text']}" for s in record["segments"]] == lines
    assert record["file"].endswith("long.wav")
    subtitles = printed(folder, capsys, "--format", "srt")
    assert subtitles.count(" --> ") == len(lines)


@pytest.mark.longer
def test_words_with_times(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(folder, capsys, "--words", "--language", "de").splitlines()
    [record] = map(json.loads, printed(folder, capsys, "--words", "--language", "de", "--format", "json").splitlines())
    assert [f"[{word['start']:.2f} --> {word['end']:.2f}] {word['word']}" for word in record["words"]] == lines
    read = pipeline("automatic-speech-recognition", engine)
    options = {"language": "de", "num_beams": 1, "max_new_tokens": 8}
    chunks = read(folder / "long.wav", return_timestamps="word", generate_kwargs=options)["chunks"]
    assert [chunk["text"].strip() for chunk in chunks] == [word["word"] for word in record["words"]]
    assert printed(folder, capsys, "--words", "--format", "vtt").count(" --> ") == len(lines)


@pytest.mark.longer
def test_doubtful_windows_are_decoded_again(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--temperatures", "0,0.4", "--logprob-threshold", "0", "--seed", "3", "--language", "de"]
    [record] = map(json.loads, printed(folder, capsys, *words, "--format", "json").splitlines())
    assert {segment["temperature"] for segment in record["segments"]} == {0.4}
    assert all(segment["avg_logprob"] < 0 for segment in record["segments"])
    [record] = map(json.loads, printed(folder, capsys, *words[:3], "-99", *words[4:], "--format", "json").splitlines())
    assert {segment["temperature"] for segment in record["segments"]} == {0}
    options = {"temperature": (0.0, 0.4), "logprob_threshold": 0, "seed": 3, "max_new_tokens": 8, "language": "de"}
    drawn = pipeline("automatic-speech-recognition", engine)(folder / "long.wav", generate_kwargs=options)
    assert drawn["text"].strip() == printed(folder, capsys, *words).strip()


def test_subtitles() -> None:
    segments = [Segment(0, 1.5, " Hi --> there "), Segment(61.25, 3723.0, "you")]
    transcript = Transcript("Hi you", segments, "en", 3723.0)
    assert srt(transcript) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHi -> there\n\n2\n00:01:01,250 --> 01:02:03,000\nyou\n"
    )
    assert vtt(transcript) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHi -> there\n\n00:01:01.250 --> 01:02:03.000\nyou\n"
    )


@pytest.mark.longer
def test_sounds_of_every_form_give_one_transcript(folder: Path, engine: Engine) -> None:
    read = pipeline("automatic-speech-recognition", engine, generate_kwargs={"max_new_tokens": 8})
    content = wav_of(SOUND)
    expected = read(str(folder / "short.wav"), return_timestamps=True)
    samples = np.frombuffer(content[44:], "<i2").astype(np.float32) / 2**15
    others: list[Any] = [content, samples, {"array": samples, "sampling_rate": 16000}]
    assert read([*others, {"raw": samples, "sampling_rate": 16000}], return_timestamps=True) == [expected] * 4
    assert expected["text"].split() == " ".join(chunk["text"] for chunk in expected["chunks"]).split()


@pytest.mark.longer
def test_chunks_are_transcribed_apart_and_joined(engine: Engine) -> None:
    read = pipeline("automatic-speech-recognition", engine, generate_kwargs={"max_new_tokens": 8, "language": "de"})
    alone = read(SOUND, return_timestamps="word")
    assert read(SOUND, return_timestamps="word", chunk_length_s=0.4) == alone
    half = LONG[:6400], LONG[4800:]
    texts = [read(part)["text"].split() for part in half]
    joined = read(LONG, chunk_length_s=0.4, stride_length_s=(0.1, 0))["text"].split()
    assert joined[: len(joined) // 2] == texts[0][: len(joined) // 2]
    assert joined[-2:] == texts[1][-2:]


@pytest.mark.parametrize(
    ("sound", "options", "message"),
    [
        (3, {}, "a sound should be a path, bytes, an array or a dict, found 3"),
        ({"array": SOUND, "sampling_rate": 8000}, {}, "a .sampling_rate. of 16000, found 8000"),
        (
            SOUND,
            {"return_timestamps": "char"},
            "return_timestamps should be True or False, .* or \"word\", found 'char'",
        ),
        (SOUND, {"chunk_length_s": 30}, "chunk_length_s should be a number of seconds up to 0.4, found 30"),
        (SOUND, {"chunk_length_s": "1"}, "chunk_length_s should be a number of seconds up to 0.4, found '1'"),
        (SOUND, {"stride_length_s": 1}, "stride_length_s has no effect without chunk_length_s"),
        (SOUND, {"chunk_length_s": 0.4, "stride_length_s": 0.2}, "one number of seconds or two, less than 0.4"),
        (SOUND, {"top_k": 3}, "there is no argument 'top_k' of this task"),
        (SOUND, {"generate_kwargs": {"max_tokens": 3}}, "max_tokens"),
    ],
    ids=str,
)
def test_what_is_refused(engine: Engine, sound: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ParameterError, PromptError), match=message):
        pipeline("automatic-speech-recognition", engine)(sound, **options)


def test_tasks_and_models_that_do_not_fit(engine: Engine) -> None:
    with pytest.raises(TaskError, match="does not fit the task summarization: its tasks are automatic-speech-recog"):
        pipeline("summarization", engine)
    with pytest.raises(TaskError, match="does not fit the task automatic-speech-recognition"):
        pipeline("automatic-speech-recognition", Engine(progress=False))


def test_a_file_that_is_no_sound_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["transcribe", "-m", str(folder), str(folder / "config.json")]) == 2
    assert "config.json should be a WAV file" in capsys.readouterr().err
