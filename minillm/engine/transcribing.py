"""`Engine.transcribe`: the requests that make a transcript of a sound."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..decoding.prompts import need_tokenizer
from ..decoding.timestamps import TimestampRules
from ..encoder_input import FRAMES_PER_POSITION, AudioFeatures
from ..errors import ParameterError, shown
from ..tasks.log_mel import HOP, SAMPLING_RATE, checked_samples, log_mel
from ..tasks.speech_tokens import SpeechTokens
from ..tasks.transcription import Segment, Transcript, segments_of, text_tokens, window_of

OWN_FIELDS = ("decoder_start_token_id", "decoder_prompt", "logprobs", "top_logprobs", "watch")
"""Fields that a transcript gives itself, or has no place for"""


def transcribe(
    engine: Any,
    samples: ArrayLike,
    *,
    language: str | None,
    task: str,
    timestamps: bool | None,
    prompt: str | None,
    progress: bool,
    fields: dict[str, Any],
) -> Transcript:
    """The transcript of a sound by an `Engine`; arguments and errors as of its `transcribe`."""
    config = engine.config
    tokens = SpeechTokens.of(config, engine.generation_defaults, engine.tokenizer)
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
    timed = is_long if timestamps is None else timestamps
    frames = log_mel(sound, config.frame_width, None if is_long else length)  # [F, M]
    code = None if language is None else tokens.code(language)
    if code is None and tokens.languages:
        code = detect(engine, window_of(frames, 0, length), tokens, progress=progress)
    beginning = tokens.beginning(code, task, timestamps=timed)
    before = [] if prompt is None else _said_before(engine, prompt, tokens)
    given = [*before, *beginning]
    limit = {} if fields.get("max_length") is not None else {"max_new_tokens": config.max_positions - len(given)}
    options: dict[str, Any] = {**limit, **fields}
    options |= {"decoder_start_token_id": given[0], "decoder_prompt": given}
    if timed:
        assert tokens.no_timestamps is not None
        rules = TimestampRules(len(given), tokens.eos, tokens.no_timestamps, tokens.latest_start)
        options["logits_processor"] = [rules, *(fields.get("logits_processor") or [])]
    segments: list[Segment] = []
    seek = 0
    while seek < len(frames):
        window = AudioFeatures(window_of(frames, seek, length))
        answer = engine.generate(window, progress=progress, **options)
        token_ids = answer.completions[0].token_ids
        while token_ids and token_ids[-1] in engine.eos_token_ids:
            token_ids = token_ids[:-1]
        count = min(length, len(frames) - seek)
        if tokens.no_timestamps is None:
            segments.append(Segment(0.0, 0.0, token_ids=token_ids))
            break
        more, further = segments_of(token_ids, tokens, seek, count)
        segments += more
        seek += further or count
    if not timed and len(segments) == 1:  # more, if times were said though none were asked for
        segments[0].end = len(sound) / SAMPLING_RATE
    for segment in segments:
        segment.text = tokenizer.decode(text_tokens(segment.token_ids, tokens))
    ids = text_tokens([token for segment in segments for token in segment.token_ids], tokens)
    return Transcript(tokenizer.decode(ids), segments, code, len(sound) / SAMPLING_RATE)


def detect(engine: Any, window: NDArray[np.float32], tokens: SpeechTokens, *, progress: bool = False) -> str:
    """The code of the likeliest language of a window: the first token after the beginning, among the languages'."""
    logits = engine.forward([tokens.start], source=AudioFeatures(window), progress=progress)[-1]  # [1, V] -> [V]
    return max(tokens.languages, key=lambda code: float(logits[tokens.languages[code]]))


def _check(timestamps: object, fields: dict[str, Any]) -> None:
    """Refuse arguments that are impossible, or have no effect in a transcript."""
    if not isinstance(timestamps, bool | None):
        raise ParameterError(f"timestamps should be True or False, of segments, found {shown(timestamps)}")
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
