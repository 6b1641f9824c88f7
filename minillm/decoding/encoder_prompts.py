"""Prompts of encoder-decoders: what the encoder reads, tokens or frames of sound, and how the decoder's text begins."""

from typing import TYPE_CHECKING

import numpy as np

from ..config import ModelConfig
from ..encoder_input import FRAMES_PER_POSITION, AudioFeatures, EncoderInput
from ..errors import ParameterError, PromptError, shown
from .prompts import Prompt, encode_prompt, encode_text, source_config
from .settings import GenerationConfig, Settings

if TYPE_CHECKING:
    from .request import RequestMaker


def source_of(prompt: Prompt, maker: "RequestMaker", *, begin: bool = True) -> EncoderInput:
    """The source that a prompt is; with `begin` an empty one becomes a beginning-of-sequence token.

    Raises:
        PromptError: as `encode_prompt`, or `check_frames` if the encoder reads sound.
    """
    if maker.config.frame_width:
        sound = check_frames(prompt, maker.config)
        return EncoderInput([0] * sound.positions, sound.frames)
    return EncoderInput(encode_prompt(prompt, maker.tokenizer, source_config(maker.config), begin=begin))


def decoder_ids(maker: "RequestMaker", generation_config: GenerationConfig, room: int) -> list[int]:
    """The beginning of the decoder's text: its start token, then the user's text unless that begins with it."""
    settings, config = maker.resolve_fields(generation_config), maker.config
    start, prompt = settings.decoder_start_token_id, settings.decoder_prompt or ()
    start = config.bos_token_id if start is None else start
    if start is None:
        raise ParameterError("the checkpoint has no decoder_start_token_id: set it")
    if isinstance(prompt, str):
        ids = encode_text(prompt, maker.tokenizer, config, room=room, add_special_tokens=False)
    else:
        ids = [*prompt]
    return encode_prompt(ids if ids[:1] == [start] else [start, *ids], maker.tokenizer, config, room=room)


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
