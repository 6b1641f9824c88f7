"""Histories for the tests of processors."""

import itertools

import numpy as np

from minillm.decoding.processors import History


def history(*sequences: tuple[list[int], list[int]]) -> History:
    """A history from (prompt, generated) of each sequence."""
    ids = [prompt + generated for prompt, generated in sequences]
    return History(
        token_ids=np.array(list(itertools.chain(*ids)), np.int64),
        starts=np.cumsum([0, *map(len, ids)]),
        prompt_lengths=np.array([len(prompt) for prompt, _ in sequences]),
    )


def random_history(rng: np.random.Generator, rows: int, vocab_size: int) -> History:
    """Sequences of different lengths whose tokens often occur again."""
    return history(
        *(
            (
                rng.integers(vocab_size // 2, size=rng.integers(1, 9)).tolist(),
                rng.integers(vocab_size // 2, size=rng.integers(0, 9)).tolist(),
            )
            for _ in range(rows)
        )
    )
