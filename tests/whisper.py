"""Tiny models of Whisper, and sounds for them."""

import io
import json
import wave
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from minillm.batch import TokenSequence
from minillm.decoding.strategy import Request
from minillm.encoder_input import EncoderInput
from minillm.runner.runner import Runner

from . import tiny
from .models.test_whisper import CONFIGS
from .tiny import loop_of, run, runner_of

CASES = list(CONFIGS)


def frames_for(raw: dict[str, Any], seed: int = 0) -> np.ndarray:
    """Random frames, as many as the model reads. [2 T, M]"""
    shape = 2 * raw["max_source_positions"], raw["num_mel_bins"]
    return np.random.default_rng(seed).normal(0, 0.7, shape).astype(np.float32)


def source_of(frames: np.ndarray) -> EncoderInput:
    """Frames as an encoder reads them."""
    return EncoderInput([0] * (len(frames) // 2), frames)


def logits_of(runner: Runner, frames: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """The logits of every position of the decoder's tokens, in one pass with a cache of its own. [T] -> [T, V]"""
    P, source = runner.cache.page_size, source_of(frames)
    pages = -(-len(source.token_ids) // P) + -(-len(tokens) // P)
    apart = runner_of(runner.model, backend=runner.backend, pages=pages, page_size=P)
    sequence = TokenSequence(list(tokens), encoder_input=source, private=True)
    return apart.forward([sequence], [len(tokens)], rows=range(len(tokens))).logits.copy()


def request_for(runner: Runner, frames: np.ndarray, **fields: Any) -> Request:
    """A request without text."""
    config = runner.model.config
    request = tiny.request_for([config.decoder_start_token_id], vocab_size=config.vocab_size, **fields)
    source = source_of(frames)
    return replace(request, source_ids=source.token_ids, frames=source.frames)


def generate(runner: Runner, sounds: Sequence[np.ndarray], *, chunk: int = 512, **fields: Any) -> list[list[int]]:
    """The first continuation's tokens of each sound, all run side by side."""
    requests = [request_for(runner, frames, **fields) for frames in sounds]
    return [results[0].token_ids for results in run(loop_of(target=runner, chunk=chunk), requests)]


def tone(seconds: float, hertz: Sequence[float] = (440.0,), seed: int | None = None) -> np.ndarray:
    """A sound of some frequencies, at half of the loudest, and noise if there is a seed. [16000 seconds]"""
    t = np.arange(int(16000 * seconds)) / 16000
    samples = sum(np.sin(2 * np.pi * f * t) for f in hertz) / (2 * len(hertz))
    if seed is not None:
        samples = samples + np.random.default_rng(seed).normal(0, 0.1, len(t))
    return np.asarray(samples, np.float32)


TEXTS = 60
EOS, START, EN, DE, FR, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(TEXTS, TEXTS + 10)
FIELDS: dict[str, Any] = {
    "decoder_start_token_id": START,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "pad_token_id": EOS,
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE, "<|fr|>": FR},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": PREVIOUS,
    "is_multilingual": True,
    "max_initial_timestamp_index": 5,
    "suppress_tokens": [7, 8, *range(START, NO_TIMESTAMPS)],
    "begin_suppress_tokens": [9, EOS],
    "alignment_heads": [[0, 1], [1, 0], [1, 1]],
    "max_length": 24,
}
"""generation_config.json of a tiny model of speech"""

SPEECH: dict[str, Any] = (
    CONFIGS["base"]
    | {"max_target_positions": 24}
    | {name: FIELDS[name] for name in ("decoder_start_token_id", "eos_token_id", "bos_token_id", "pad_token_id")}
)
"""config.json of one; its times are of 0.02 seconds up to 0.4, and then 5 tokens that are no times"""


def write_speech(folder: Path, tensors: dict[str, np.ndarray], **fields: Any) -> Path:
    """A folder of a tiny model of speech, whose tokens are words "w0" to "w59", special tokens and times."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SPEECH), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(FIELDS | fields), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    special = ["endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startofprev", "nospeech"]
    names = [f"<|{name}|>" for name in (*special, "notimestamps")]
    times = [f"<|{0.02 * i:.2f}|>" for i in range(SPEECH["vocab_size"] - NO_TIMESTAMPS - 1)]
    words = {text: i for i, text in enumerate([*(f"w{i}" for i in range(TEXTS)), *names, *times])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(names)
    tokenizer.add_tokens(times)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def speech_tensors(seed: int = 7) -> dict[str, np.ndarray]:
    """Random weights of a tiny model of speech."""
    tensors = {name: tensor.load() for name, tensor in tiny.tiny_tensors(SPEECH, seed).items()}
    for name in ("encoder.conv1.weight", "encoder.conv2.weight"):
        E = len(tensors[name])
        tensors[name] = np.ascontiguousarray(tensors[name].reshape(E, 3, -1).transpose(0, 2, 1))  # -> [E, C, 3]
    return tensors


def wav_of(samples: np.ndarray, *, width: int = 2, channels: int = 1, rate: int = 16000) -> bytes:
    """A WAV file of whole numbers of so many bytes, with the same sound in each channel."""
    numbers = np.round(samples.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    numbers = np.repeat(numbers + (128 if width == 1 else 0), channels)
    data = numbers.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(data)
    return file.getvalue()
