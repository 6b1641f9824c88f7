"""Transcripts against transformers' `generate` of Whisper as it runs: languages, tasks, timestamps, long sounds."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from minillm import Engine  # noqa: E402
from minillm.decoding.history import History  # noqa: E402
from minillm.decoding.timestamps import TimestampRules  # noqa: E402
from minillm.tasks.log_mel import log_mel  # noqa: E402
from minillm.text.languages import CODES, LANGUAGES  # noqa: E402

from .. import huggingface  # noqa: E402
from ..whisper import EOS, FIELDS, NO_TIMESTAMPS, PREVIOUS, SPEECH, tone, write_speech  # noqa: E402

pytestmark = pytest.mark.reference

SHORT = tone(0.3, (300, 1200), seed=1)
LONG = np.concatenate([tone(0.4, (200, 900), seed=i) * (0.2 + 0.2 * i) for i in range(3)])
"""1.2 seconds, three of the model's windows"""
LIMIT = 12
"""Tokens of a window"""


@pytest.fixture(scope="module", params=[0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in (1, 2))])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    """A model in transformers, and the engine of its folder."""
    model = huggingface.build_model(SPEECH, seed=request.param)
    model.generation_config = transformers.GenerationConfig(**FIELDS)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "proj_out.weight"}
    folder = write_speech(tmp_path_factory.mktemp("speech"), tensors)
    return model, Engine(folder, backend="numpy", progress=False)


def theirs_of(model: Any, samples: np.ndarray, **options: Any) -> Any:
    """The result of transformers' generate."""
    frames = None if len(samples) > 6400 else 40
    features = torch.tensor(log_mel(samples, SPEECH["num_mel_bins"], frames).T[None])
    return model.generate(features, return_segments=True, max_new_tokens=LIMIT, **options)


def assert_same_segments(ours: Any, theirs: Any) -> None:
    assert [segment.token_ids for segment in ours.segments] == [one["tokens"].tolist() for one in theirs["segments"][0]]
    times = [(float(one["start"]), float(one["end"])) for one in theirs["segments"][0]]
    np.testing.assert_allclose([(segment.start, segment.end) for segment in ours.segments], times, atol=1e-6)


@pytest.mark.parametrize("timestamps", [False, True], ids=["text", "timestamps"])
@pytest.mark.parametrize("language", ["de", "French", None])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_short_sounds(pair: tuple[Any, Engine], timestamps: bool, language: str | None, task: str) -> None:
    model, engine = pair
    ours = engine.transcribe(SHORT, language=language, task=task, timestamps=timestamps, max_new_tokens=LIMIT)
    spoken = {} if language is None else {"language": language}
    theirs = theirs_of(model, SHORT, task=task, return_timestamps=timestamps, **spoken)
    if timestamps:
        assert_same_segments(ours, theirs)
    else:
        said = [token for one in theirs["segments"][0] for token in one["tokens"].tolist()]
        assert ours.token_ids == said


@pytest.mark.parametrize("fields", [{}, {"num_beams": 3}, {"no_repeat_ngram_size": 3}], ids=" ".join)
def test_long_sounds(pair: tuple[Any, Engine], fields: dict[str, Any]) -> None:
    model, engine = pair
    ours = engine.transcribe(LONG, language="en", max_new_tokens=LIMIT, **fields)
    theirs = theirs_of(model, LONG, language="en", task="transcribe", **fields)
    assert len(ours.segments) > 1
    assert_same_segments(ours, theirs)


def test_a_long_sounds_language_is_that_of_its_beginning(pair: tuple[Any, Engine]) -> None:
    model, engine = pair
    assert_same_segments(engine.transcribe(LONG, max_new_tokens=LIMIT), theirs_of(model, LONG, task="transcribe"))


def test_what_was_said_before(pair: tuple[Any, Engine]) -> None:
    model, engine = pair
    ours = engine.transcribe(SHORT, language="en", timestamps=True, prompt="w3 w4", max_new_tokens=LIMIT)
    given = torch.tensor([PREVIOUS, 3, 4])
    theirs = theirs_of(model, SHORT, language="en", task="transcribe", return_timestamps=True, prompt_ids=given)
    assert_same_segments(ours, theirs)


def test_the_rules_of_timestamps() -> None:
    """On random scores after random beginnings of all kinds."""
    config = transformers.GenerationConfig(**FIELDS)
    draw, first = np.random.default_rng(0), NO_TIMESTAMPS + 1
    for latest in (None, 5):
        config.max_initial_timestamp_index = latest
        theirs = transformers.WhisperTimeStampLogitsProcessor(config, begin_index=3)
        rules = TimestampRules(3, EOS, NO_TIMESTAMPS, latest)
        for length in range(8):
            lines = np.where(draw.random((40, length)) < 0.5, first + draw.integers(0, 20, (40, length)), 5)
            lines = np.concatenate([np.full((40, 3), 61), lines], axis=1)
            scores = draw.normal(0, 3, (40, 96)).astype(np.float32)
            expected = theirs(torch.tensor(lines), torch.tensor(scores)).numpy()
            history = History([*lines], *(np.zeros(40, np.int64) for _ in range(4)))
            np.testing.assert_array_equal(rules(history, scores.copy(), np), expected)


def test_languages_are_those_of_transformers() -> None:
    from transformers.models.whisper import tokenization_whisper

    assert tokenization_whisper.LANGUAGES == LANGUAGES
    assert tokenization_whisper.TO_LANGUAGE_CODE == CODES
