"""automatic-speech-recognition: transcripts of sounds."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decoding.settings import refuse_unknown
from ..engine.engine import Engine
from ..errors import ParameterError, PromptError, shown
from ..tasks.fallback import THRESHOLDS
from ..tasks.log_mel import SAMPLING_RATE, checked_samples
from ..tasks.sound_files import ADVICE, read_wav
from .base import Pipeline

ARGUMENTS = ("language", "task", "prompt", "condition_on_prev_tokens", *THRESHOLDS)
"""Arguments of `Engine.transcribe` that a call takes among `generate_kwargs`"""
DEFAULTS = {"num_beams": 5, "max_new_tokens": 256}
"""Generation fields that neither the call nor the checkpoint sets, as of transformers' pipeline"""


class SpeechRecognition(Pipeline):
    """automatic-speech-recognition: {"text": ...}, with `return_timestamps=True` also "chunks" with their times.

    With `return_timestamps="word"` the chunks are words.

    A sound is a path or the bytes of a WAV file, an array of samples, or a dict of "array" (or "raw") and
    "sampling_rate", which should be 16,000. One longer than the model reads at once is read in windows one after the
    other, as transformers does it without `chunk_length_s`.

    A transcript is the likeliest of five beams unless `generate_kwargs` or the checkpoint say otherwise.

    Arguments of a call: return_timestamps, generate_kwargs (language, task, prompt, thresholds and `temperature`
    of `Engine.transcribe`, one or several, and generation fields).
    """

    OPTIONS = frozenset({"return_timestamps", "generate_kwargs", "chunk_length_s"})

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
        if options.get("chunk_length_s"):
            raise ParameterError("chunk_length_s is not offered: long sounds are read in windows one after the other")
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
        outputs = []
        for sound in [samples_of(sound) for sound in sounds]:
            transcript = self.engine.transcribe(
                sound, timestamps=timestamps or None, progress=progress, **arguments, **fields
            )
            record: dict[str, Any] = {"text": transcript.text}
            if timestamps:
                record["chunks"] = [
                    {"timestamp": (round(chunk.start, 2), round(chunk.end, 2)), "text": chunk.text}
                    for chunk in (transcript.words if timestamps == "word" else transcript.segments)
                ]
            outputs.append(record)
        return outputs if isinstance(inputs, list | tuple) else outputs[0]

    def _defaults(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """`DEFAULTS` without what the call or the checkpoint decides."""
        given = {name for name, value in {**self.engine.generation_defaults, **fields}.items() if value is not None}
        if given & {"do_sample", "temperature"}:
            given.add("num_beams")
        if given & {"max_length"}:
            given.add("max_new_tokens")
        return {name: value for name, value in DEFAULTS.items() if name not in given}


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
