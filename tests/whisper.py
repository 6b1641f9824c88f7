"""Tiny models of Whisper, and sounds for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

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
