"""Whisper base with its real weights on speech that eSpeak NG makes, against transformers.

The first run fetches both (145 MB and 10 MB).
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine, pipeline
from minillm.errors import ModelNotFoundError, ParameterError
from minillm.tasks.log_mel import log_mel

from .speech import speak

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fetch_whisper import fetch

pytestmark = pytest.mark.real

ENGLISH = "Good morning. Yesterday it was raining, and nobody went outside. Today the sun is shining."
GERMAN = "Guten Morgen. Die Kinder spielen heute im Garten, und die Sonne scheint."


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch()
    except ModelNotFoundError as error:
        pytest.skip(f"Whisper's weights cannot be had: {error}")


@pytest.fixture(scope="module")
def sounds() -> dict[str, np.ndarray]:
    try:
        return {"en": speak(ENGLISH), "de": speak(GERMAN, "de")}
    except ModelNotFoundError as error:
        pytest.skip(f"eSpeak NG cannot be had: {error}")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, dtype="float32", max_batch_size=8, progress=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """transformers' pipeline."""
    torch = pytest.importorskip("torch", reason="needs the reference extra")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    return transformers.pipeline(
        "automatic-speech-recognition",
        model=transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).eval(),
        tokenizer=transformers.WhisperTokenizer.from_pretrained(folder),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=80),
    )


def test_the_spectrogram_of_speech_is_that_of_transformers(sounds: dict[str, np.ndarray], reference: Any) -> None:
    for sound in sounds.values():
        theirs = reference.feature_extractor(sound, sampling_rate=16000, return_tensors="np").input_features[0]
        np.testing.assert_allclose(log_mel(sound, 80, 3000), theirs.T, rtol=0, atol=1e-4)


def test_english_is_written_down_as_by_transformers_pipeline(
    engine: Engine, sounds: dict[str, np.ndarray], reference: Any
) -> None:
    """With its five beams, and times."""
    ours = pipeline("automatic-speech-recognition", engine)(sounds["en"], return_timestamps=True)
    theirs = reference(sounds["en"], return_timestamps=True)
    assert ours["text"] == theirs["text"]
    assert [chunk["text"] for chunk in ours["chunks"]] == [chunk["text"] for chunk in theirs["chunks"]]
    times = [[chunk["timestamp"] for chunk in result["chunks"]] for result in (ours, theirs)]
    np.testing.assert_allclose(*times, atol=1e-6)
    assert len(times[0]) > 1
    assert ours["text"].split() == ENGLISH.split()


def test_words_have_the_times_of_transformers(engine: Engine, sounds: dict[str, np.ndarray], reference: Any) -> None:
    options: dict[str, Any] = {"return_timestamps": "word", "generate_kwargs": {"num_beams": 1, "max_new_tokens": 60}}
    ours = pipeline("automatic-speech-recognition", engine)(sounds["en"], **options)["chunks"]
    theirs = reference(sounds["en"], **options)["chunks"]
    assert [word["text"] for word in ours] == [word["text"] for word in theirs]
    times = [[word["timestamp"] for word in words] for words in (ours, theirs)]
    np.testing.assert_allclose(*times, atol=0.021)  # a position is 0.02 seconds
    assert [word["text"] for word in ours][-5:] == [" Today", " the", " sun", " is", " shining."]
    starts = [start for start, _ in times[0]]
    assert starts == sorted(starts)
    assert 4 < starts[-5] < 5.5  # after the pause


def test_chunks_that_overlap_are_joined_as_by_transformers(
    engine: Engine, sounds: dict[str, np.ndarray], reference: Any
) -> None:
    """Two of five seconds, the second from two before the first one's end."""
    options: dict[str, Any] = {"chunk_length_s": 5, "stride_length_s": 1, "return_timestamps": True}
    options["generate_kwargs"] = {"num_beams": 1, "max_new_tokens": 60}
    ours = pipeline("automatic-speech-recognition", engine)(sounds["en"], **options)
    assert ours == reference(sounds["en"], **options)
    assert ours["text"].split()[-5:] == ["Today", "the", "sun", "is", "shining."]


def test_german_is_heard_and_written_down_as_by_transformers_generate(
    engine: Engine, sounds: dict[str, np.ndarray], reference: Any
) -> None:
    ours = engine.transcribe(sounds["de"], timestamps=True)
    features = reference.feature_extractor(sounds["de"], sampling_rate=16000, return_tensors="pt").input_features
    [theirs] = reference.model.generate(features, return_timestamps=True, return_segments=True)["segments"]
    assert ours.language == "de"
    assert [segment.token_ids for segment in ours.segments] == [one["tokens"].tolist() for one in theirs]
    times = [(float(one["start"]), float(one["end"])) for one in theirs]
    np.testing.assert_allclose([(segment.start, segment.end) for segment in ours.segments], times, atol=1e-6)
    assert ours.text.startswith(" Guten Morgen")


def test_a_language_that_the_model_does_not_know_is_named(engine: Engine, sounds: dict[str, np.ndarray]) -> None:
    with pytest.raises(ParameterError, match="language 'Klingon' is not known: expected one of en, zh, de, es"):
        engine.transcribe(sounds["en"], language="Klingon")
