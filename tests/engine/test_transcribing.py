"""Transcripts of a tiny model of speech: texts, languages, windows, and what is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import MinillmError, ParameterError, PromptError, TaskError
from minillm.tasks.sound_files import read_wav
from minillm.tasks.speech_tokens import SpeechTokens
from minillm.tasks.transcription import segments_of
from minillm.text.languages import CODES, LANGUAGES

from ..whisper import DE, EN, FIELDS, NO_TIMESTAMPS, START, TRANSCRIBE, speech_tensors, tone, wav_of, write_speech

SOUND, LONG = tone(0.3, seed=1), tone(1.1, seed=2)
FIRST = NO_TIMESTAMPS + 1


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_speech(tmp_path_factory.mktemp("speech"), speech_tensors()), backend="numpy", progress=False)


@pytest.mark.longer
def test_a_transcript_has_the_words_without_times(engine: Engine) -> None:
    transcript = engine.transcribe(LONG, language="German", max_new_tokens=10)
    words = [token for token in transcript.token_ids if token < 60]
    assert transcript.text == " ".join(f"w{token}" for token in words)
    assert transcript.language == "de"
    assert transcript.duration == pytest.approx(1.1)
    assert len(transcript.segments) > 1
    starts = [segment.start for segment in transcript.segments]
    assert starts == sorted(starts)
    assert str(transcript) == transcript.text


def test_the_language_is_the_likeliest_of_the_first_token(engine: Engine) -> None:
    from minillm.encoder_input import AudioFeatures
    from minillm.tasks.log_mel import log_mel

    row = engine.forward([START], source=AudioFeatures(log_mel(SOUND, 12, 40)))[-1]
    expected = ["en", "de", "fr"][int(np.argmax(row[EN : EN + 3]))]
    assert engine.transcribe(SOUND, max_new_tokens=2).language == expected


def tokens_of(**fields: Any) -> SpeechTokens:
    from minillm.models import config_of
    from tests.whisper import SPEECH

    return SpeechTokens.of(config_of(SPEECH), FIELDS | fields, None)


def test_what_a_text_begins_with() -> None:
    tokens = tokens_of()
    assert tokens.beginning("de", "transcribe", timestamps=False) == [START, DE, TRANSCRIBE, NO_TIMESTAMPS]
    assert tokens.beginning("de", "transcribe", timestamps=True) == [START, DE, TRANSCRIBE]
    alone = tokens_of(is_multilingual=False)
    assert alone.beginning(None, "transcribe", timestamps=False) == [START, NO_TIMESTAMPS]
    with pytest.raises(ParameterError, match="language has no effect: the model knows one language"):
        alone.code("en")
    with pytest.raises(ParameterError, match="task translate is not offered by a model of one language"):
        alone.beginning(None, "translate", timestamps=False)


@pytest.mark.parametrize(
    ("said", "expected", "further"),
    [
        ([FIRST, 5, 6, FIRST + 4, FIRST + 4, 7, FIRST + 9, FIRST + 9], [(1.0, 1.08), (1.08, 1.18)], 18),
        ([FIRST, 5, FIRST + 4, FIRST + 4, 7], [(1.0, 1.08)], 8),  # the second is unfinished: it is read again
        ([FIRST, 5, FIRST + 4, FIRST + 4, 7, FIRST + 9], [(1.0, 1.08), (1.08, 1.18)], 36),
        ([FIRST + 1, 5, 6], [(1.0, 1.02)], 36),
        ([5, 6], [(1.0, 1.36)], 36),
    ],
    ids=["two pairs", "cut off", "ends with a time", "one time", "no times"],
)
def test_a_window_is_divided_where_two_times_meet(said: list[int], expected: list[Any], further: int) -> None:
    segments, step = segments_of(said, tokens_of(), 100, 36)
    np.testing.assert_allclose([(segment.start, segment.end) for segment in segments], expected)
    assert step == further
    joined = [token for segment in segments for token in segment.token_ids]
    assert joined == said[: len(joined)]


@pytest.mark.parametrize(
    ("samples", "options", "error", "message"),
    [
        (
            LONG,
            {"timestamps": False},
            ParameterError,
            "1.1 seconds is longer than the 0.4 that the model",
        ),
        (SOUND, {"language": "xx"}, ParameterError, "language 'xx' is not known: expected one of en, de, fr"),
        (SOUND, {"language": 3}, ParameterError, "language 3 is not known"),
        (SOUND, {"task": "sing"}, ParameterError, "task should be one of transcribe, translate, found 'sing'"),
        (SOUND, {"no_speech_threshold": 0.5}, ParameterError, "has no effect without logprob_threshold"),
        (SOUND, {"logprob_threshold": "low"}, ParameterError, "logprob_threshold should be a number, found 'low'"),
        (
            SOUND,
            {"temperatures": [0], "do_sample": True},
            ParameterError,
            "do_sample has no effect beside temperatures",
        ),
        (SOUND, {"temperatures": [0], "seed": 3}, ParameterError, "seed"),
        (SOUND, {"temperatures": (0, -1)}, ParameterError, "temperatures should be numbers from 0 on"),
        (SOUND, {"temperatures": (0, 1)}, ParameterError, "after the first have no effect without compression_ratio"),
        (SOUND, {"condition_on_prev_tokens": 3}, ParameterError, "condition_on_prev_tokens should be True or False"),
        (SOUND, {"timestamps": "char"}, ParameterError, "or \"word\", found 'char'"),
        (SOUND, {"prompt": 3}, ParameterError, "prompt should be text, found 3"),
        (SOUND[None], {}, PromptError, "one channel of samples"),
        ([1, 2], {}, PromptError, "array .n. of floats between -1 and 1, found int64"),
        (SOUND * np.nan, {}, PromptError, "samples should be finite"),
        (SOUND[:0], {}, PromptError, "found float32 .0,"),
    ],
    ids=str,
)
def test_other_arguments_are_refused(
    engine: Engine, samples: Any, options: dict[str, Any], error: type[MinillmError], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.transcribe(samples, **options)


def test_a_model_of_text_does_not_transcribe() -> None:
    with pytest.raises(TaskError, match="this model does not read sound"):
        Engine(progress=False).transcribe(SOUND)


def test_languages_have_a_code_and_a_name() -> None:
    assert len(LANGUAGES) == 100
    assert (LANGUAGES["de"], CODES["german"], CODES["haitian creole"], CODES["castilian"]) == (
        "german",
        "de",
        "ht",
        "es",
    )


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_has_the_samples(width: int, channels: int, tmp_path: Path) -> None:
    content = wav_of(SOUND, width=width, channels=channels)
    (tmp_path / "a.wav").write_bytes(content)
    for file in (tmp_path / "a.wav", str(tmp_path / "a.wav"), content, io.BytesIO(content)):
        np.testing.assert_allclose(read_wav(file), SOUND, rtol=0, atol=2 / 2 ** (8 * width - 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (wav_of(SOUND, rate=22050), "should have 16000 samples a second, found 22050; convert it first: ffmpeg"),
        (b"ID3 and more", "should be a WAV file of whole numbers .PCM., found"),
        (b"", "should be a WAV file of whole numbers .PCM., found"),
        (wav_of(SOUND).replace(b"\x01\x00\x01\x00", b"\x03\x00\x01\x00", 1), "found: unknown format: 3"),
        (wav_of(SOUND[:0]), "holds no samples"),
    ],
    ids=["rate", "mp3", "empty", "floats", "no samples"],
)
def test_other_files_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_wav(content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"none\.wav cannot be read: No such file"):
        read_wav(tmp_path / "none.wav")


@pytest.mark.parametrize(
    ("samples", "options", "error", "message"),
    [
        ([[1.0], [1.0, 2.0]], {}, PromptError, "array .n. of floats between -1 and 1, found setting an array element"),
        (SOUND * 20000, {}, PromptError, "between -1 and 1, found .*: divide those of whole numbers of 16 bits by"),
        (LONG, {"logits_processor": 3}, ParameterError, "logits_processor should be a list of functions, found 3"),
        (SOUND, {"num_return_sequences": 3}, ParameterError, "num_return_sequences is not offered: there is one"),
        (SOUND, {"decoder_prompt": [3]}, ParameterError, "decoder_prompt is not offered: the transcript has its own"),
        (SOUND, {"logprobs": True}, ParameterError, "logprobs is not offered"),
        (SOUND, {"progress": 3}, ParameterError, "progress should be True or False, found 3"),
        (SOUND, {"prompt": "<|endoftext|> w1"}, ParameterError, "prompt should hold no special tokens"),
    ],
    ids=str,
)
def test_what_would_break_a_transcript_or_have_no_effect_is_refused(
    engine: Engine, samples: Any, options: dict[str, Any], error: type[MinillmError], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.transcribe(samples, **options)


def test_max_length_alone_limits_a_transcript(engine: Engine) -> None:
    assert len(engine.transcribe(SOUND, language="de", max_length=6).token_ids) <= 2  # after four that it begins with


def test_a_model_of_text_says_so_before_it_looks_at_the_sound() -> None:
    with pytest.raises(TaskError, match="this model does not read sound"):
        Engine(progress=False).transcribe(b"no sound")


def cut(content: bytes, place: int, value: bytes) -> bytes:
    """A file with other bytes at a place."""
    return content[:place] + value + content[place + len(value) :]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (cut(wav_of(SOUND), 34, b"\x30\x00"), "should have samples of 32 bits at most, found 48"),
        (cut(wav_of(SOUND), 16, b"\xff\xff\xff\x7f"), "should be a WAV file of whole numbers .PCM., found"),
        (wav_of(SOUND)[:1000], "the sound is cut off: it has 478 of the 4800 samples that it names"),
        (None, "a sound should be a path, the bytes of a file or an open file, found None"),
        ("a\0b.wav", "cannot be read: embedded null byte"),
    ],
    ids=["48 bits", "a part beyond the end", "cut off", "none", "no name"],
)
def test_broken_files_are_refused_in_one_line(content: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_wav(content)


def test_a_file_from_a_pipe_does_not_know_its_length() -> None:
    content = cut(wav_of(SOUND), 40, b"\xff\xff\xff\xff")
    np.testing.assert_allclose(read_wav(bytearray(content)), SOUND, rtol=0, atol=1e-4)
