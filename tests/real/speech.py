"""Sounds that eSpeak NG speaks: the library of the package `espeakng-loader`, downloaded by pip, not installed.

python tests/real/speech.py "Good morning." en-us talk.wav
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import wave
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fetch_smollm2 import download

from minillm.backends.cpu.compiling import cache_folder
from minillm.tasks.log_mel import SAMPLING_RATE
from minillm.tasks.sound_files import read_wav

PACKAGE = "espeakng-loader==0.2.4"
RETRIEVAL, UTF8, WORDS_PER_MINUTE = 1, 1, 1
"""espeak-ng/speak_lib.h: AUDIO_OUTPUT_RETRIEVAL, espeakCHARS_UTF8, espeakRATE"""
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def fetch_espeak() -> Path:
    """The unpacked package in the user's cache folder, downloaded unless it is there (10 MB).

    Raises:
        ModelNotFoundError: pip cannot download it.
    """
    target = cache_folder().with_name("espeak-ng-0.2.4")
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as folder:
            made = Path(folder) / "made"
            with zipfile.ZipFile(download(PACKAGE, 10, Path(folder))) as wheel:
                wheel.extractall(made)
            made.rename(target)
    return target / "espeakng_loader"


def speak(text: str, voice: str = "en-us") -> NDArray[np.float32]:
    """What a voice says, the same samples each time: in a process of its own. [n], 16,000 samples a second

    Raises:
        ModelNotFoundError: pip cannot download the library.
    """
    fetch_espeak()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        subprocess.run([sys.executable, __file__, text, voice, str(path)], check=True)
        return read_wav(path)


def synthesise(text: str, voice: str) -> tuple[NDArray[np.float64], int]:
    """The samples, between -1 and 1, and how many are a second. The library's noise depends on what it said before."""
    folder = fetch_espeak()
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate = library.espeak_Initialize(RETRIEVAL, 0, os.fsencode(folder / "espeak-ng-data"), 0)
    assert rate > 0, "eSpeak NG finds its data"
    blocks: list[NDArray[np.int16]] = []

    def receive(samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: object) -> int:
        if samples and count:
            blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = CALLBACK(receive)
    library.espeak_SetSynthCallback(callback)
    assert library.espeak_SetVoiceByName(voice.encode()) == 0, f"eSpeak NG has the voice {voice}"
    library.espeak_SetParameter(WORDS_PER_MINUTE, 150, 0)
    spoken = text.encode() + b"\0"
    library.espeak_Synth(spoken, ctypes.c_size_t(len(spoken)), 0, 1, 0, UTF8, None, None)
    library.espeak_Synchronize()
    return np.concatenate(blocks) / np.float64(2**15), rate


def resampled(samples: NDArray[np.float64], rate: int) -> NDArray[np.float64]:
    """A sound at 16,000 samples a second, without the frequencies that these have no room for."""
    count = len(samples) * SAMPLING_RATE // rate
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    sound: NDArray[np.float64] = np.fft.irfft(spectrum, count) * (count / len(samples))
    return sound


def main(text: str, voice: str, path: str) -> None:
    """Write a WAV file."""
    sound = resampled(*synthesise(text, voice))
    with wave.open(path, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLING_RATE)
        file.writeframes(np.round(np.clip(sound, -1, 1) * (2**15 - 1)).astype("<i2").tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
