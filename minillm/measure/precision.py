"""Accuracy loss of a dtype: perplexity of a text, and relative error of logits."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..decoding.prompts import need_tokenizer
from ..engine.engine import Engine
from ..errors import PromptError
from ..models.base import weights_of
from ..progress import showing, work

HELD_OUT = Path(__file__).parents[1] / "assets" / "demo-opt" / "held_out.txt"
"""Texts that the demo model was not trained on; `scripts/demo_corpus.py` draws them."""


def windows(engine: Engine, text: str) -> Iterator[list[int]]:
    """Split a text into adjacent windows of the context length; each begins with the BOS token ("</s>").

    Raises:
        PromptError: the text is empty, or the engine has no tokenizer.
    """
    tokenizer = need_tokenizer(engine.tokenizer)
    start = tokenizer.encode("")
    ids = tokenizer.encode(text)[len(start) :]
    if len(start) + len(ids) < 2:
        raise PromptError("perplexity needs a text of at least two tokens")
    length = engine.config.max_positions - len(start)
    for first in range(0, len(ids), length):
        yield start + ids[first : first + length]


def perplexity(engine: Engine, text: str, *, progress: bool = True) -> float:
    """exp of the mean negative log-likelihood per token. Windows are independent: the text before one is not seen.

    `progress` shows a bar on a terminal or in a notebook.

    Raises:
        PromptError: as `windows`.
    """
    pieces = list(windows(engine, text))
    with showing(progress), work("scoring", sum(map(len, pieces)), "tokens"):  # `score` adds to it
        scores = [engine.score(ids) for ids in pieces]
    tokens = sum(len(score.token_ids) - 1 for score in scores)
    return math.exp(-math.fsum(score.total for score in scores) / tokens)


def sample_logits(engine: Engine, tokens: int = 64, seed: int = 0) -> NDArray[np.float32]:
    """Logits of a sequence of random tokens. [T, V]"""
    ids = np.random.default_rng(seed).integers(3, engine.config.vocab_size, min(tokens, engine.config.max_positions))
    return engine.forward(ids.tolist())


def relative_error(values: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Norm of the difference divided by the norm of `exact`."""
    return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))


def weight_bytes(engine: Engine) -> int:
    """Bytes of all weights in memory, of all ranks together; tied embeddings count once."""
    if engine.ranks is not None:
        return sum(share.bytes for share in engine.ranks.weights)
    return sum(weight.nbytes for weight in weights_of(engine.runner.model))
