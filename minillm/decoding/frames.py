"""Prompts that are sound: frames for an encoder that reads these in place of token ids."""

import numpy as np

from ..config import ModelConfig
from ..encoder_input import FRAMES_PER_POSITION, AudioFeatures, EncoderInput
from ..errors import ParameterError, PromptError, shown
from .prompts import Prompt
from .settings import Settings


def check_frames(prompt: Prompt, config: ModelConfig) -> AudioFeatures:
    """The frames of a prompt for a model whose encoder reads sound.

    Raises:
        PromptError: it is something else, or its frames are not as many or as wide as the model reads, or not finite.
    """
    if not isinstance(prompt, AudioFeatures):
        raise PromptError(
            f"this model's encoder reads sound, found {shown(prompt)}: give its samples to Engine.transcribe, or "
            "AudioFeatures as a prompt"
        )
    frames, most = np.asarray(prompt.frames), FRAMES_PER_POSITION * config.max_source_positions
    even = frames.ndim == 2 and 0 < len(frames) <= most and not len(frames) % FRAMES_PER_POSITION
    if not even or frames.shape[1] != config.frame_width or frames.dtype.kind != "f":
        raise PromptError(
            f"frames should be an array of floats [frames, {config.frame_width}], their number even and at most "
            f"{most}, found {frames.dtype} {frames.shape}"
        )
    if not np.isfinite(frames).all():
        raise PromptError("frames should be finite, found NaN or infinity among them")
    return AudioFeatures(np.ascontiguousarray(frames, np.float32))


def sound_of(prompt: Prompt, config: ModelConfig) -> EncoderInput:
    """The source that a prompt of frames is; errors as of `check_frames`."""
    sound = check_frames(prompt, config)
    return EncoderInput([0] * sound.positions, sound.frames)


def refuse_source_fields(settings: Settings) -> None:
    """Refuse fields about the tokens of a source.

    Raises:
        ParameterError: one is set.
    """
    if settings.encoder_repetition_penalty != 1 or settings.encoder_no_repeat_ngram_size:
        raise ParameterError(
            "encoder_repetition_penalty and encoder_no_repeat_ngram_size have no effect: this model's encoder reads "
            "sound, not tokens; leave them out"
        )
