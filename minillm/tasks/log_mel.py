"""The log-mel spectrogram of a sound, as Whisper's encoder reads it (Radford et al., arXiv 2212.04356, section 2.2).

    power[t, f] = |FFT(hann * samples around 160 t)|^2           400 samples: 25 ms, every 10 ms
    mel = power filters
    x = log10(max(mel, 1e-10));  x = max(x, largest x - 8);  (x + 4) / 4

The filters are triangles in the frequency, of area 1 in Hz, whose corners are equidistant in mel: Slaney's scale
("Auditory Toolbox", Interval Research Technical Report 1998-010), linear up to 1000 Hz, 200/3 Hz a mel, and then
logarithmic, 27 mel for a factor of 6.4.
"""

from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..decoding.arrays import as_numpy
from ..errors import PromptError

SAMPLING_RATE = 16000
"""Samples per second"""
HOP = 160
"""Samples from one frame to the next"""
WINDOW = 400
"""Samples of a frame"""
LOUDEST = 16.0
"""Beyond it samples are no numbers between -1 and 1, of which some may be a little louder"""
HIGHEST = 8000.0
"""Hz, the upper corner of the last filter"""

_LINEAR, _LOGARITHMIC = 200 / 3, np.log(6.4) / 27
"""Hz for each mel up to 1000 Hz; above, the logarithm of the ratio of two frequencies a mel apart"""
_BREAK = 1000.0


def checked_samples(samples: ArrayLike) -> NDArray[np.float32]:
    """The samples of a sound, float32. [n]

    Raises:
        PromptError: they are not one channel of finite numbers between -1 and 1.
    """
    try:
        array = as_numpy(samples) if hasattr(samples, "__dlpack__") else np.asarray(samples)
    except (TypeError, ValueError) as error:
        raise PromptError(f"a sound should be an array [n] of floats between -1 and 1, found {error}") from None
    if array.ndim != 1 or array.dtype.kind != "f" or not array.size:
        raise PromptError(
            "a sound should be one channel of samples, an array [n] of floats between -1 and 1, found "
            f"{array.dtype} {array.shape}"
        )
    if not np.isfinite(array).all():
        raise PromptError("samples should be finite, found NaN or infinity among them")
    loudest = float(np.abs(array).max())
    if loudest > LOUDEST:
        raise PromptError(
            f"samples should be between -1 and 1, found {loudest:g}: divide those of whole numbers of 16 bits by 32768"
        )
    return array.astype(np.float32, copy=False)


def hertz(mel: ArrayLike) -> NDArray[np.float64]:
    """The frequency of a place on Slaney's scale."""
    mel = np.asarray(mel, np.float64)
    beyond = mel - _BREAK / _LINEAR
    return np.where(beyond < 0, _LINEAR * mel, _BREAK * np.exp(_LOGARITHMIC * np.maximum(beyond, 0)))


@cache
def mel_filters(count: int) -> NDArray[np.float64]:
    """The filters' weights of each frequency of the FFT. [WINDOW / 2 + 1, count]"""
    top = _BREAK / _LINEAR + np.log(HIGHEST / _BREAK) / _LOGARITHMIC
    corners = hertz(np.linspace(0, top, count + 2))  # [count + 2]
    f = np.linspace(0, SAMPLING_RATE / 2, WINDOW // 2 + 1)[:, None]  # [F, 1]
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    triangles = np.minimum((f - low) / (middle - low), (high - f) / (high - middle))  # [F, count]
    filters: NDArray[np.float64] = np.maximum(triangles, 0) * (2 / (high - low))
    return filters


def log_mel(samples: NDArray[np.float32], bins: int, frames: int | None = None) -> NDArray[np.float32]:
    """The log-mel spectrogram of a sound.

    Args:
        samples: [n], 16,000 per second
        bins: M, the number of filters
        frames: of the result: zeros follow the sound, or it is cut off; None: n / 160, rounded down, at least one

    Returns:
        [frames, M]
    """
    length = max(HOP, len(samples)) if frames is None else frames * HOP
    sound = np.zeros(length, np.float64)
    sound[: len(samples)] = samples[:length]
    half = WINDOW // 2
    padded = np.pad(sound, half, mode="reflect" if length > half else "edge")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    count, filters = length // HOP, mel_filters(bins)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: count * HOP : HOP]  # [frames, 400]
    mel = np.empty((count, bins))
    for first in range(0, count, 1000):  # of an hour's sound all windows are 1.2 GB
        spectrum = np.fft.rfft(windows[first : first + 1000] * hann)  # [rows, 400] -> [rows, 201]
        mel[first : first + 1000] = (spectrum.real**2 + spectrum.imag**2) @ filters  # [rows, 201] -> [rows, M]
    x = np.log10(np.maximum(mel, 1e-10))
    scaled: NDArray[np.float64] = (np.maximum(x, x.max() - 8) + 4) / 4
    return scaled.astype(np.float32)
