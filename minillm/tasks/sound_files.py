"""Sounds in WAV files, read by the standard library: whole numbers, one channel or several, 16,000 samples a second."""

import io
import os
import wave
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import PromptError
from .log_mel import SAMPLING_RATE

ADVICE = "convert it first: ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le sound.wav"


def read_wav(file: str | os.PathLike[str] | BinaryIO | bytes) -> NDArray[np.float32]:
    """The samples of a WAV file, the mean of its channels. [n], between -1 and 1

    Args:
        file: a path, an open file, or the file's bytes

    Raises:
        PromptError: it cannot be read, is no WAV file of whole numbers, has another sampling rate, or no samples.
    """
    is_path = isinstance(file, str | os.PathLike)
    name = str(file) if is_path else "the sound"
    opened: Any = io.BytesIO(file) if isinstance(file, bytes) else str(file) if is_path else file
    try:
        with wave.open(opened, "rb") as sound:
            rate, channels, width = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
            data = sound.readframes(sound.getnframes())
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends too early"
        raise PromptError(f"{name} should be a WAV file of whole numbers (PCM), found: {reason}; {ADVICE}") from None
    except OSError as error:
        raise PromptError(f"{name} cannot be read: {error.strerror or error}") from None
    if rate != SAMPLING_RATE:
        raise PromptError(f"{name} should have {SAMPLING_RATE} samples a second, found {rate}; {ADVICE}")
    samples = _numbers(data[: len(data) // (width * channels) * width * channels], width)  # [n channels]
    if not len(samples):
        raise PromptError(f"{name} holds no samples")
    mono: NDArray[np.float32] = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)  # [n channels] -> [n]
    return mono


def _numbers(data: bytes, width: int) -> NDArray[np.float32]:
    """Whole numbers of `width` bytes as numbers between -1 and 1; those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:
        raised = np.zeros((len(data) // 3, 4), np.uint8)
        raised[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = raised.tobytes(), 4
    return np.frombuffer(data, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))
