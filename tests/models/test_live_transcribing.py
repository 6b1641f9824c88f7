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


def measured(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What transformers' fallback measures of each text, as it runs."""
    measures: dict[str, list[float]] = {"compression_ratio": [], "avg_logprob": [], "no_speech_prob": [], "skipped": []}
    ratio, logprob, judge = model._retrieve_compression_ratio, model._retrieve_avg_logprobs, model._need_fallback

    def watched_judge(*arguments: Any) -> Any:
        verdict = judge(*arguments)
        detectors = [one for one in arguments[3] if hasattr(one, "no_speech_prob")]
        measures["no_speech_prob"] += [float(one.no_speech_prob[0]) for one in detectors]
        measures["skipped"].append(verdict[1])
        return verdict

    def recorded(name: str, compute: Any) -> Any:
        def call(*arguments: Any) -> Any:
            measures[name].append(float(compute(*arguments)))
            return compute(*arguments)

        return call

    monkeypatch.setattr(model, "_retrieve_compression_ratio", recorded("compression_ratio", ratio))
    monkeypatch.setattr(model, "_retrieve_avg_logprobs", recorded("avg_logprob", logprob))
    monkeypatch.setattr(model, "_need_fallback", watched_judge)
    return measures


THRESHOLDS: dict[str, Any] = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0}


@pytest.mark.parametrize("prompt", [None, "w3 w4"])
def test_measures_of_a_doubtful_text(
    pair: tuple[Any, Engine], prompt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every window is doubtful, and silence is never likely enough: all are decoded twice."""
    model, engine = pair
    measures = measured(model, monkeypatch)
    thresholds = {**THRESHOLDS, "no_speech_threshold": 1.0, "logprob_threshold": 0.0}
    given = {} if prompt is None else {"prompt_ids": torch.tensor([PREVIOUS, 3, 4])}
    theirs = theirs_of(model, LONG, language="en", task="transcribe", temperature=(0.0, 0.0), **thresholds, **given)
    ours = engine.transcribe(
        LONG, language="en", max_new_tokens=LIMIT, temperatures=(0.0, 0.0), prompt=prompt, **thresholds
    )
    assert_same_segments(ours, theirs)
    for name in ("compression_ratio", "avg_logprob", "no_speech_prob"):
        assert len(set(measures[name])) > 1
        values = list(dict.fromkeys(getattr(segment, name) for segment in ours.segments))
        np.testing.assert_allclose(values, list(dict.fromkeys(measures[name])), atol=2e-4)


def test_windows_of_silence_are_left_out(pair: tuple[Any, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = pair
    measures = measured(model, monkeypatch)
    options: dict[str, Any] = {"language": "en", "task": "transcribe"}
    theirs_of(model, LONG, **options, temperature=0.0, logprob_threshold=0.0, no_speech_threshold=1.0)
    likely = sorted(set(measures["no_speech_prob"]))
    assert len(likely) > 1
    thresholds = {"logprob_threshold": 0.0, "no_speech_threshold": (likely[0] + likely[-1]) / 2}
    measures["skipped"].clear()
    theirs = theirs_of(model, LONG, **options, temperature=0.0, **thresholds)
    assert any(measures["skipped"])
    ours = engine.transcribe(LONG, **options, max_new_tokens=LIMIT, temperatures=[0], **thresholds)
    if theirs["segments"][0]:
        assert_same_segments(ours, theirs)
    assert len(ours.segments) == len(theirs["segments"][0])


@pytest.mark.parametrize("prompt", [None, "w3 w4"])
def test_windows_that_are_told_of_those_before_them(pair: tuple[Any, Engine], prompt: str | None) -> None:
    model, engine = pair
    given = {} if prompt is None else {"prompt_ids": torch.tensor([PREVIOUS, 3, 4])}
    ours = engine.transcribe(LONG, language="en", max_new_tokens=8, prompt=prompt, condition_on_prev_tokens=True)
    features = torch.tensor(log_mel(LONG, SPEECH["num_mel_bins"]).T[None])
    options: dict[str, Any] = {"language": "en", "task": "transcribe", "condition_on_prev_tokens": True}
    theirs = model.generate(features, return_segments=True, max_new_tokens=8, temperature=0.0, **options, **given)
    assert_same_segments(ours, theirs)
    alone = engine.transcribe(LONG, language="en", max_new_tokens=8, prompt=prompt)
    assert alone.token_ids != ours.token_ids


@pytest.mark.parametrize("fields", [{}, {"num_beams": 3}], ids=str)
def test_times_of_tokens(pair: tuple[Any, Engine], fields: dict[str, Any]) -> None:
    model, engine = pair
    ours = engine.transcribe(LONG, language="en", timestamps="word", max_new_tokens=LIMIT, **fields)
    options: dict[str, Any] = {"language": "en", "task": "transcribe", "return_token_timestamps": True}
    mask = torch.ones(1, len(LONG) // 160, dtype=torch.long)
    theirs = theirs_of(model, LONG, **options, attention_mask=mask, **fields)
    assert_same_segments(ours, theirs)
    times = [one["token_timestamps"].tolist() for one in theirs["segments"][0]]
    assert len({time for line in times for time in line}) > 5
    for segment, expected in zip(ours.segments, times, strict=True):
        np.testing.assert_allclose(segment.token_times, expected, atol=1e-6)
    words = [word for segment in ours.segments for word in segment.words]
    assert [word.text for word in words] and all(word.start <= word.end for word in words if word.start)


def test_the_cheapest_path_and_the_medians() -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

    from minillm.tasks.word_times import dynamic_time_warping, median_filter

    draw = np.random.default_rng(0)
    for rows, columns in [(1, 1), (1, 7), (7, 1), (5, 9), (9, 5), (12, 40)]:
        for matrix in (draw.normal(size=(rows, columns)), draw.integers(0, 3, (rows, columns)).astype(float)):
            for ours, theirs in zip(dynamic_time_warping(matrix), _dynamic_time_warping(matrix), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        weights = draw.normal(size=(2, rows, columns)).astype(np.float32)
        expected = _median_filter(torch.tensor(weights), 7).numpy()
        np.testing.assert_array_equal(median_filter(weights, 7), expected)


@pytest.mark.parametrize("language", ["en", "ja"])
def test_tokens_are_joined_to_words(language: str) -> None:
    """Of a tokenizer of single bytes, and pairs of them."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    from minillm.tasks.word_times import words_of

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(
        models.BPE(
            {letter: i for i, letter in enumerate([*letters, "Ġt", "he", "Ġ("])}, [("Ġ", "t"), ("h", "e"), ("Ġ", "(")]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()

    class Theirs:
        eos_token_id = 300

        def decode(self, ids: list[int], **_: Any) -> str:
            return backend.decode(ids)

    for text in (' Hello, the "best" one (of two)! No - "never".', " ¿Qué? ... ünï 日本語、です。", "- a  b", "'"):
        ids = backend.encode(text).ids
        spans = [(float(i), float(i + 1)) for i in range(len(ids))]
        ours = words_of(ids, spans, Theirs(), language)
        name = {"en": "english", "ja": "japanese"}[language]
        words, _, places = _combine_tokens_into_words(Theirs(), ids, name)
        assert [(word.text, word.start, word.end) for word in ours] == [
            (word, float(at[0]), float(at[-1] + 1)) for word, at in zip(words, places, strict=True)
        ]


def test_chunks_overlap_as_those_of_transformers_pipeline() -> None:
    from transformers.pipelines.automatic_speech_recognition import chunk_iter

    from minillm.tasks.overlapping_chunks import chunks_of

    class Extractor:
        sampling_rate = 16000

        def __call__(self, samples: np.ndarray, **_: Any) -> dict[str, Any]:
            return {"samples": samples}

    for count in (1, 9, 10, 11, 16, 17, 18, 25, 100):
        for lengths in ((10, 2, 2), (10, 0, 3), (10, 4, 0), (7, 3, 3)):
            ours = chunks_of(count, *lengths)
            theirs = list(chunk_iter(np.arange(count), Extractor(), *lengths))
            assert [(c.length, c.left, c.right) for c in ours] == [one["stride"] for one in theirs]
            assert [list(range(c.start, c.start + c.length)) for c in ours] == [list(one["samples"]) for one in theirs]


@pytest.mark.parametrize("timestamps", [False, True, "word"])
def test_texts_of_chunks_are_joined_as_by_transformers_tokenizer(timestamps: Any) -> None:
    """Random texts that repeat what they share, with mistakes, and times in and out of order."""
    from types import SimpleNamespace

    from transformers.models.whisper.tokenization_whisper import _decode_asr

    from minillm.tasks.overlapping_chunks import ChunkTokens, joined
    from minillm.tasks.word_times import words_of

    zero = NO_TIMESTAMPS + 1
    special = {"<|notimestamps|>": NO_TIMESTAMPS, "<|startofprev|>": PREVIOUS, "<|startoftranscript|>": EOS + 1}
    tokenizer = SimpleNamespace(
        convert_tokens_to_ids=special.get,
        all_special_ids=list(range(EOS, zero)),
        eos_token_id=EOS,
        language=None,
        _strip_prompt=lambda ids, *_: ids,
        decode=lambda ids, **_: "".join(f" w{token}" for token in ids),
    )
    draw = np.random.default_rng(4)
    ends = 0
    for _ in range(150):
        parts, outputs = [], []
        spoken = draw.integers(0, 12, 60).tolist()
        for number in range(int(draw.integers(1, 5))):
            text = [int(draw.integers(12)) if draw.random() < 0.1 else t for t in spoken[9 * number : 9 * number + 14]]
            if timestamps:
                where = sorted(draw.choice(len(text) + 1, int(draw.integers(0, 6)), replace=False), reverse=True)
                times = np.sort(draw.integers(0, 51, len(where)))[::-1]
                for place, time in zip(where, times if draw.random() < 0.8 else draw.permutation(times), strict=True):
                    text[place:place] = [zero + int(time)] * int(draw.integers(1, 3))
            left, right = 0.2 * (number > 0), 0.16 * bool(draw.random() < 0.8)
            token_times = np.sort(draw.integers(0, 51, len(text)) * 0.02).tolist() if timestamps == "word" else []
            parts.append(ChunkTokens(1.0, left, right, text, token_times))
            outputs.append({"tokens": np.array([text]), "stride": (1.0, left, right)})
            if token_times:
                outputs[-1]["token_timestamps"] = np.array([token_times])
        whole, more = _decode_asr(
            tokenizer,
            outputs,
            return_timestamps=timestamps,
            return_language=False,
            time_precision=0.02,
            segment_size=50,
        )
        passages = joined(parts, zero, 50)
        assert "".join(tokenizer.decode(passage.token_ids) for passage in passages) == whole
        if timestamps == "word":
            words = [word for p in passages for word in words_of(p.token_ids, p.times, tokenizer, "en")]
            expected = [(chunk["text"], *chunk["timestamp"]) for chunk in more["chunks"]]
            assert [(word.text, word.start, word.end) for word in words] == expected
        elif timestamps:
            ours = [((p.start, p.end), tokenizer.decode(p.token_ids)) for p in passages]
            assert ours == [(chunk["timestamp"], chunk["text"]) for chunk in more["chunks"]]
            ends += sum(passage.end is not None for passage in passages)
    assert ends > 50 or timestamps is not True


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
