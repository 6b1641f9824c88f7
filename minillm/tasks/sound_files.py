"""Sounds in WAV files, read by the standard library: whole numbers, one channel or several, 16,000 samples a second."""

import io
import os
import wave
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import PromptError, shown
from .log_mel import SAMPLING_RATE

ADVICE = "convert it first: ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le sound.wav"
WIDEST = 4
"""Bytes of a sample at most"""
UNKNOWN_LENGTH = 0x7FFF0000
"""Programs that write to a pipe give a length of so many bytes or more, as they do not know it"""


def read_wav(file: str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview) -> NDArray[np.float32]:
    """The samples of a WAV file, the mean of its channels. [n], between -1 and 1

    Args:
        file: a path, an open file, or the file's bytes

    Raises:
        PromptError: it cannot be read, is no WAV file of whole numbers of at most 32 bits, ends before its samples do,
            has another sampling rate, or no samples.
    """
    is_path = isinstance(file, str | os.PathLike)
    name = str(file) if is_path else "the sound"
    is_content = isinstance(file, bytes | bytearray | memoryview)
    if not (is_path or is_content or hasattr(file, "read")):
        raise PromptError(f"a sound should be a path, the bytes of a file or an open file, found {shown(file)}")
    opened: Any = io.BytesIO(file) if is_content else str(file) if is_path else file  # type: ignore[arg-type]
    try:
        with wave.open(opened, "rb") as sound:
            rate, channels, width = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
            count = sound.getnframes()
            data = sound.readframes(count) if width <= WIDEST else b""
    except (wave.Error, EOFError, RuntimeError) as error:  # the last of a part longer than the file
        reason = str(error) or "it ends too early"
        raise PromptError(f"{name} should be a WAV file of whole numbers (PCM), found: {reason}; {ADVICE}") from None
    except (OSError, ValueError) as error:  # the second of a closed file, or of a name with a zero byte
        raise PromptError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if width > WIDEST:
        raise PromptError(f"{name} should have samples of {8 * WIDEST} bits at most, found {8 * width}; {ADVICE}")
    if rate != SAMPLING_RATE:
        raise PromptError(f"{name} should have {SAMPLING_RATE} samples a second, found {rate}; {ADVICE}")
    size = count * width * channels
    if len(data) < size < UNKNOWN_LENGTH:
        raise PromptError(
            f"{name} is cut off: it has {len(data) // (width * channels)} of the {count} samples that it names; copy "
            "it again, or convert what there is: ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le sound.wav"
        )
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
