"""automatic-speech-recognition: transcripts of sounds."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decoding.prompts import need_tokenizer
from ..decoding.settings import refuse_unknown
from ..engine.engine import Engine
from ..errors import ParameterError, PromptError, shown
from ..tasks.fallback import THRESHOLDS
from ..tasks.log_mel import SAMPLING_RATE, checked_samples
from ..tasks.overlapping_chunks import Chunk, ChunkTokens, chunks_of, joined
from ..tasks.sound_files import ADVICE, read_wav
from ..tasks.speech_tokens import SECONDS_PER_POSITION, SpeechTokens
from ..tasks.transcription import Transcript
from ..tasks.word_times import words_of
from .base import Pipeline

ARGUMENTS = ("language", "task", "prompt", "condition_on_prev_tokens", *THRESHOLDS)
"""Arguments of `Engine.transcribe` that a call takes among `generate_kwargs`"""
SIDE_BY_SIDE = 4
"""Chunks that are transcribed at once"""
DEFAULTS = {"num_beams": 5, "max_new_tokens": 256}
"""Generation fields that neither the call nor the checkpoint sets, as of transformers' pipeline"""


class SpeechRecognition(Pipeline):
    """automatic-speech-recognition: {"text": ...}, with `return_timestamps=True` also "chunks" with their times.

    With `return_timestamps="word"` the chunks are words.

    A sound is a path or the bytes of a WAV file, an array of samples, or a dict of "array" (or "raw") and
    "sampling_rate", which should be 16,000. One longer than the model reads at once is read in windows one after the
    other; with `chunk_length_s` in chunks of so many seconds side by side, which overlap at both ends by
    `stride_length_s` (one number, or two; a sixth of the chunk) and are joined where their texts agree.

    A transcript is the likeliest of five beams unless `generate_kwargs` or the checkpoint say otherwise.

    Arguments of a call: return_timestamps, chunk_length_s, stride_length_s, generate_kwargs (language, task, prompt,
    thresholds and `temperature` of `Engine.transcribe`, one or several, and generation fields).
    """

    OPTIONS = frozenset({"return_timestamps", "generate_kwargs", "chunk_length_s", "stride_length_s"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Models whose encoder reads sound do."""
        return engine.config.frame_width > 0

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """The transcript of one sound, or of each of a list.

        Raises:
            ParameterError: an option is unknown, impossible or not offered.
            PromptError: an input is no sound, or has another sampling rate.
        """
        self.check(options)
        options = self.options | options
        timestamps = options.get("return_timestamps")
        if not isinstance(timestamps, bool | None) and timestamps != "word":
            raise ParameterError(
                f'return_timestamps should be True or False, of segments, or "word", found {shown(timestamps)}'
            )
        lengths = self._lengths(options.get("chunk_length_s"), options.get("stride_length_s"))
        given = options.get("generate_kwargs") or {}
        if not isinstance(given, Mapping):
            raise ParameterError(f"generate_kwargs should be a dict, found {shown(given)}")
        fields = dict(given)
        arguments = {name: fields.pop(name) for name in ARGUMENTS if name in fields}
        if isinstance(fields.get("temperature"), list | tuple):
            arguments["temperatures"] = fields.pop("temperature")
        refuse_unknown(fields)
        fields = self._defaults(fields) | fields
        sounds = inputs if isinstance(inputs, list | tuple) else [inputs]
        arguments |= {"timestamps": timestamps or None, **fields}
        outputs = []
        for sound in [samples_of(sound) for sound in sounds]:
            if lengths is not None:
                outputs.append(self._in_chunks(checked_samples(sound), lengths, arguments))
                continue
            transcript = self.engine.transcribe(sound, progress=progress, **arguments)
            record: dict[str, Any] = {"text": transcript.text}
            if timestamps:
                record["chunks"] = [
                    {"timestamp": (round(cue.start, 2), round(cue.end, 2)), "text": cue.text}
                    for cue in (transcript.words if timestamps == "word" else transcript.segments)
                ]
            outputs.append(record)
        return outputs if isinstance(inputs, list | tuple) else outputs[0]

    def _in_chunks(
        self, sound: NDArray[np.float32], lengths: tuple[int, int, int], arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """The transcript of a sound in chunks that overlap, of so many samples, and of those that they share."""
        engine = self.engine
        tokens = SpeechTokens.of(engine.config, engine.generation_defaults, engine.tokenizer)
        chunks = chunks_of(len(sound), *lengths)

        def heard(chunk: Chunk) -> Transcript:
            return engine.transcribe(sound[chunk.start : chunk.start + chunk.length], progress=False, **arguments)

        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:  # their steps share batches
            transcripts = list(threads.map(heard, chunks))
        parts = []
        for chunk, transcript in zip(chunks, transcripts, strict=True):
            length, left, right = (samples / SAMPLING_RATE for samples in (chunk.length, chunk.left, chunk.right))
            times = [time for segment in transcript.segments for time in segment.token_times]
            parts.append(ChunkTokens(length, left, right, transcript.token_ids, times))
        zero = engine.config.vocab_size if tokens.no_timestamps is None else tokens.first_timestamp
        passages = joined(parts, zero, engine.config.max_source_positions)
        tokenizer, language = need_tokenizer(engine.tokenizer), transcripts[0].language
        texts = [tokenizer.decode(passage.token_ids) for passage in passages]
        record: dict[str, Any] = {"text": "".join(texts)}
        if arguments["timestamps"] == "word":
            words = [word for p in passages for word in words_of(p.token_ids, p.times, tokenizer, language)]
            record["chunks"] = [{"timestamp": (word.start, word.end), "text": word.text} for word in words]
        elif arguments["timestamps"]:
            record["chunks"] = [
                {"timestamp": (passage.start, passage.end), "text": text}
                for passage, text in zip(passages, texts, strict=True)
            ]
        return record

    def _lengths(self, chunk: Any, stride: Any) -> tuple[int, int, int] | None:
        """A chunk's length and what it shares on both sides, in samples; None: the sound is not divided.

        Raises:
            ParameterError: one is no number, a chunk is longer than the model reads at once, or shares all of itself.
        """
        if not chunk:
            if stride is not None:
                raise ParameterError("stride_length_s has no effect without chunk_length_s: set both")
            return None
        sides = [chunk / 6] * 2 if stride is None and _is_number(chunk) else stride
        sides = list(sides) if isinstance(sides, list | tuple) else [sides, sides]
        longest = self.engine.config.max_source_positions * SECONDS_PER_POSITION
        if not _is_number(chunk) or not 0 < chunk <= longest + 1e-9:
            raise ParameterError(
                f"chunk_length_s should be a number of seconds up to {longest:g}, found {shown(chunk)}"
            )
        if len(sides) != 2 or not all(_is_number(side) and side >= 0 for side in sides) or sum(sides) >= chunk:
            raise ParameterError(
                f"stride_length_s should be one number of seconds or two, less than {chunk:g} together, "
                f"found {shown(stride)}"
            )
        length, left, right = (round(seconds * SAMPLING_RATE) for seconds in (chunk, *sides))
        return length, left, right

    def _defaults(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """`DEFAULTS` without what the call or the checkpoint decides."""
        given = {name for name, value in {**self.engine.generation_defaults, **fields}.items() if value is not None}
        if given & {"do_sample", "temperature"}:
            given.add("num_beams")
        if given & {"max_length"}:
            given.add("max_new_tokens")
        return {name: value for name, value in DEFAULTS.items() if name not in given}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def samples_of(sound: Any) -> NDArray[np.float32]:
    """The samples of an input.

    Raises:
        PromptError: it is no sound, or has another sampling rate.
    """
    if isinstance(sound, str | bytes | os.PathLike):
        return read_wav(sound)
    if isinstance(sound, Mapping):
        samples = sound.get("array", sound.get("raw"))
        if samples is None or sound.get("sampling_rate") != SAMPLING_RATE:
            raise PromptError(
                f'a dict should have "array" and a "sampling_rate" of {SAMPLING_RATE}, found '
                f"{shown(sound.get('sampling_rate'))}; {ADVICE}"
            )
        return checked_samples(samples)
    if isinstance(sound, np.ndarray):
        return sound
    raise PromptError(f"a sound should be a path, bytes, an array or a dict, found {shown(sound)}")
