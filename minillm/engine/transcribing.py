"""`Engine.transcribe`: the requests that make a transcript of a sound."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..decoding.fields import FIELDS
from ..decoding.hooks import Watched
from ..decoding.prompts import need_tokenizer
from ..decoding.timestamps import TimestampRules
from ..encoder_input import FRAMES_PER_POSITION, AudioFeatures
from ..errors import ParameterError, shown
from ..reference.softmax import softmax
from ..tasks.fallback import Fallback, TextLogProbs, compression_ratio
from ..tasks.log_mel import HOP, SAMPLING_RATE, checked_samples, log_mel
from ..tasks.speech_tokens import SECONDS_PER_POSITION, SpeechTokens
from ..tasks.transcription import Segment, Transcript, segments_of, text_tokens, window_of
from ..tasks.word_times import token_times, words_of
from ..text.tokenizer import Tokenizer

OWN_FIELDS = ("decoder_start_token_id", "decoder_prompt", "logprobs", "top_logprobs", "watch")
"""Fields that a transcript gives itself, or has no place for"""
LOW_TEMPERATURE = 0.5
"""A text drawn at a higher one is not what later windows are told was said before"""


@dataclass(frozen=True)
class Plan:
    """Settings that all windows of a sound share."""

    tokens: SpeechTokens
    beginning: list[int]
    """The tokens that the decoder's text begins with, after what was said before"""
    given: list[int]
    """The text before the sound, with the token that begins it; empty: none"""
    timed: bool
    """Whether times are said"""
    words: bool
    """Whether the times of tokens are looked for"""
    conditioned: bool
    """Whether each window is told the text of those before it"""
    fallback: Fallback
    fields: dict[str, Any]
    """Generation fields"""
    progress: bool


@dataclass(frozen=True)
class WindowText:
    """A window's text."""

    token_ids: list[int]
    """Without what it was begun with, and without the end"""
    measures: dict[str, Any]
    """Fields of its segments, such as `no_speech_prob`; those that were asked for"""
    silent: bool = False
    """It is left out"""
    times: list[float] = field(default_factory=list)
    """When each token was said, in seconds from the window's beginning"""


def transcribe(
    engine: Any,
    samples: ArrayLike,
    *,
    language: str | None,
    task: str,
    timestamps: bool | Literal["word"] | None,
    prompt: str | None,
    condition_on_prev_tokens: bool | None,
    fallback: dict[str, Any],
    progress: bool,
    fields: dict[str, Any],
) -> Transcript:
    """The transcript of a sound by an `Engine`; arguments and errors as of its `transcribe`."""
    config, defaults = engine.config, engine.generation_defaults
    tokens = SpeechTokens.of(config, defaults, engine.tokenizer)
    sound = checked_samples(samples)
    _check(timestamps, fields)
    tokenizer = need_tokenizer(engine.tokenizer)
    length = FRAMES_PER_POSITION * config.max_source_positions
    is_long = len(sound) > length * HOP
    if is_long and timestamps is False:
        raise ParameterError(
            f"a sound of {len(sound) / SAMPLING_RATE:.1f} seconds is longer than the {length * HOP / SAMPLING_RATE:g} "
            "that the model reads at once, and is continued where a timestamp ends: leave timestamps=False out"
        )
    timed, words = is_long if timestamps is None else bool(timestamps), timestamps == "word"
    if words and not tokens.alignment_heads:
        raise ParameterError('times of words need alignment_heads in generation_config.json: leave "word" out')
    conditioned = _is_conditioned(condition_on_prev_tokens, defaults, tokens)
    for name in ("do_sample", "temperature"):
        if fallback["temperatures"] is not None and fields.get(name) is not None:
            raise ParameterError(f"{name} has no effect beside temperatures: leave it out")
    judged = Fallback.of(**{name: defaults.get(name) if value is None else value for name, value in fallback.items()})
    given = [] if prompt is None else _said_before(engine, prompt, tokens)
    frames = log_mel(sound, config.frame_width, None if is_long else length)  # [F, M]
    code = None if language is None else tokens.code(language)
    if code is None and tokens.languages:
        code = detect(engine, window_of(frames, 0, length), tokens, progress=progress)
    beginning = tokens.beginning(code, task, timestamps=timed)
    plan = Plan(tokens, beginning, given, timed, words, conditioned, judged, fields, progress)
    segments = transcribe_windows(engine, frames, len(frames) if is_long else -(-len(sound) // HOP), plan)
    if not timed and len(segments) == 1:  # more, if times were said though none were asked for
        segments[0].end = len(sound) / SAMPLING_RATE
    for segment in segments:
        segment.text = tokenizer.decode(text_tokens(segment.token_ids, tokens))
    if words:
        _find_words(segments, tokens, tokenizer, code)
    ids = text_tokens([token for segment in segments for token in segment.token_ids], tokens)
    return Transcript(tokenizer.decode(ids), segments, code, len(sound) / SAMPLING_RATE)


def transcribe_windows(engine: Any, frames: NDArray[np.float32], spoken: int, plan: Plan) -> list[Segment]:
    """The segments of a sound, without their texts: window after window.

    Args:
        engine: an `Engine`
        frames: [F, M]
        spoken: of these, the frames of the sound; zeros follow
        plan: settings that all windows share
    """
    tokens, length = plan.tokens, FRAMES_PER_POSITION * engine.config.max_source_positions
    conditioned, said = plan.conditioned, [plan.given[1:]] if plan.given else []
    segments: list[Segment] = []
    seek = 0
    while seek < len(frames):
        before = previous_tokens(said, tokens, engine.config.max_positions) if conditioned and said else plan.given
        count, positions = min(length, len(frames) - seek), max(1, (spoken - seek) // FRAMES_PER_POSITION)
        text = decode(engine, AudioFeatures(window_of(frames, seek, length)), before, positions, plan)
        conditioned = plan.conditioned and text.measures.get("temperature", 0) < LOW_TEMPERATURE
        if text.silent:
            seek += count
            continue
        if tokens.no_timestamps is None:
            return [Segment(0.0, 0.0, token_ids=text.token_ids, **text.measures)]
        more, further = segments_of(text.token_ids, tokens, seek, count)
        said += [segment.token_ids for segment in more]
        first = 0
        for segment in more:
            stop = first + len(segment.token_ids)
            times = [seek / FRAMES_PER_POSITION * SECONDS_PER_POSITION + time for time in text.times[first:stop]]
            segments.append(replace(segment, token_times=times, **text.measures))
            first = stop
        seek += further or count
    return segments


def decode(engine: Any, window: AudioFeatures, before: list[int], positions: int, plan: Plan) -> WindowText:
    """The text of a window, at the first temperature at which it is not doubtful, or else the last.

    Words are looked for in the window's first `positions`.
    """
    tokens, fallback = plan.tokens, plan.fallback
    given = [*before, *plan.beginning]
    room = engine.config.max_positions - len(given)
    limit = {} if plan.fields.get("max_length") is not None else {"max_new_tokens": room}
    processors = list(plan.fields.get("logits_processor") or [])
    if plan.timed:
        assert tokens.no_timestamps is not None
        processors.insert(0, TimestampRules(len(given), tokens.eos, tokens.no_timestamps, tokens.latest_start))
    silence = None if fallback.no_speech is None else no_speech(engine, window, before, tokens, plan.progress)
    text = WindowText([], {})
    for temperature in fallback.temperatures:
        sums = TextLogProbs(len(given), tokens.eos)
        options = {**limit, **drawing(temperature, fallback, plan.fields)}
        options |= {"decoder_start_token_id": given[0], "decoder_prompt": given}
        if looking := [*processors, *([] if fallback.logprob is None else [sums])]:
            options["logits_processor"] = looking
        if plan.words:
            options["watch"] = sorted({_pattern(layer) for layer, _ in tokens.alignment_heads})
        answer = engine.generate(window, progress=plan.progress, **options)
        token_ids = answer.completions[0].token_ids
        ratio = compression_ratio(token_ids, engine.config.vocab_size) if token_ids else 0.0
        logprob = None if fallback.logprob is None else sums.mean(token_ids)
        again, silent = fallback.judge(ratio, logprob, silence)
        times = _times(engine, answer.completions[0].watched, len(given), positions, tokens) if plan.words else []
        while token_ids and token_ids[-1] in engine.eos_token_ids:
            token_ids = token_ids[:-1]
        measures = {"temperature": temperature, "avg_logprob": logprob, "no_speech_prob": silence}
        if fallback.compression_ratio is not None:
            measures["compression_ratio"] = ratio
        text = WindowText(
            token_ids, {name: value for name, value in measures.items() if value is not None}, silent, times
        )
        if not again:
            break
    return text


def _pattern(layer: int) -> str:
    """The name of a layer's cross-attention weights."""
    return f"blocks.{layer}.cross.pattern"


def _times(engine: Any, watched: Watched, begun: int, positions: int, tokens: SpeechTokens) -> list[float]:
    """When each token was said, of a text that began with so many; of the last, which no pass has read: as before."""
    heads = [watched[_pattern(layer)][begun:, head, :positions] for layer, head in tokens.alignment_heads]
    times = token_times(np.stack(heads), engine.config.median_filter_width)  # [heads, T - 1, S] -> [T - 1]
    return [*times, times[-1] if times else 0.0]


def _find_words(segments: list[Segment], tokens: SpeechTokens, tokenizer: Tokenizer, language: str | None) -> None:
    """Give segments their words: a token lasts from when the one before it was said."""
    before = 0.0
    for segment in segments:
        spans = []
        for token, time in zip(segment.token_ids, segment.token_times, strict=True):
            if text_tokens([token], tokens):
                spans.append((round(before, 2), round(time, 2)))
            before = time
        segment.words = words_of(text_tokens(segment.token_ids, tokens), spans, tokenizer, language)


def drawing(temperature: float | None, fallback: Fallback, fields: dict[str, Any]) -> dict[str, Any]:
    """The generation fields at a temperature: one text is drawn, or at 0 the likeliest is looked for.

    Fields that one temperature reads and another does not are left out where they have no effect.
    """
    if temperature is None:
        return fields
    idle = "num_beams" if temperature else "do_sample" if any(fallback.temperatures) else None
    without = {name for name, setting in FIELDS.items() if idle is not None and setting.needs == idle}
    rest = {name: value for name, value in fields.items() if name not in without}
    if temperature:
        return {**rest, "do_sample": True, "temperature": temperature, "num_beams": 1}
    return {**rest, "do_sample": False}


def no_speech(engine: Any, window: AudioFeatures, before: list[int], tokens: SpeechTokens, progress: bool) -> float:
    """The probability that nothing is said in a window: of the token before <|notimestamps|> as a text's first."""
    if tokens.no_timestamps is None:
        raise ParameterError("no_speech_threshold needs a checkpoint with no_timestamps_token_id: leave it out")
    logits = engine.forward([*before, tokens.start], source=window, progress=progress)[-1]  # [T, V] -> [V]
    return float(softmax(logits, np)[tokens.no_timestamps - 1])


def previous_tokens(said: list[list[int]], tokens: SpeechTokens, max_positions: int) -> list[int]:
    """The tokens by which a text is told of those before it: the last ones, at most half of what the decoder reads.

    `said` has the tokens of segments; of two times that end one, the second is left out.
    """
    ids: list[int] = []
    for segment in said:
        doubled = tokens.no_timestamps is not None and len(segment) > 2 and segment[-2] > tokens.no_timestamps
        ids += segment[:-1] if doubled else segment
    assert tokens.previous is not None
    return [tokens.previous, *ids[-(max_positions // 2 - 1) :]]


def detect(engine: Any, window: NDArray[np.float32], tokens: SpeechTokens, *, progress: bool = False) -> str:
    """The code of the likeliest language of a window: the first token after the beginning, among the languages'."""
    logits = engine.forward([tokens.start], source=AudioFeatures(window), progress=progress)[-1]  # [1, V] -> [V]
    return max(tokens.languages, key=lambda code: float(logits[tokens.languages[code]]))


def _is_conditioned(argument: bool | None, defaults: Mapping[str, Any], tokens: SpeechTokens) -> bool:
    """Whether each window is told the text of those before it: by the argument, else by the checkpoint."""
    value = defaults.get("condition_on_prev_tokens") if argument is None else argument
    if not isinstance(value, bool | None):
        raise ParameterError(f"condition_on_prev_tokens should be True or False, found {shown(value)}")
    if value and tokens.previous is None:
        raise ParameterError("the checkpoint has no token <|startofprev|>: leave condition_on_prev_tokens out")
    return bool(value)


def _check(timestamps: object, fields: dict[str, Any]) -> None:
    """Refuse arguments that are impossible, or have no effect in a transcript."""
    if not isinstance(timestamps, bool | None) and timestamps != "word":
        raise ParameterError(f'timestamps should be True or False, of segments, or "word", found {shown(timestamps)}')
    for name in OWN_FIELDS:
        if fields.get(name) is not None:
            raise ParameterError(f"{name} is not offered: the transcript has its own; leave it out")
    if (fields.get("num_return_sequences") or 1) != 1:
        raise ParameterError("num_return_sequences is not offered: there is one transcript; leave it out")
    if not isinstance(fields.get("logits_processor"), list | tuple | None):
        raise ParameterError(
            f"logits_processor should be a list of functions, found {shown(fields['logits_processor'])}"
        )


def _said_before(engine: Any, prompt: str, tokens: SpeechTokens) -> list[int]:
    """A text that the transcript is to continue: its last tokens, at most half of what the decoder reads."""
    if not isinstance(prompt, str):
        raise ParameterError(f"prompt should be text, found {shown(prompt)}")
    if tokens.previous is None:
        raise ParameterError("the checkpoint has no token <|startofprev|>: leave prompt out")
    ids = need_tokenizer(engine.tokenizer).encode(f" {prompt.strip()}", add_special_tokens=False)
    if any(token >= tokens.eos for token in ids):
        raise ParameterError(f"prompt should hold no special tokens, such as <|endoftext|>, found {shown(prompt)}")
    return [tokens.previous, *ids[-(engine.config.max_positions // 2 - 1) :]]
