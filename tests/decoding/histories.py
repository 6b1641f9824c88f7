"""Histories for the tests of processors."""

import numpy as np

from minillm.decoding.history import History


def history(*sequences: tuple[list[int], list[int]], max_new_tokens: int = 20) -> History:
    """A history from (prompt, generated) of each sequence, each of a request of its own."""
    ids = [prompt + generated for prompt, generated in sequences]
    prompt_lengths = np.array([len(prompt) for prompt, _ in sequences], np.int64)
    return History(
        lines=[np.asarray(line, np.int64) for line in ids],
        prompt_lengths=prompt_lengths,
        max_lengths=prompt_lengths + max_new_tokens,
        requests=np.arange(len(ids)),
        batch_ids=np.arange(len(ids)),
        keys=(np.zeros(len(ids), np.uint64), np.arange(len(ids))),
    )


def random_history(rng: np.random.Generator, rows: int, vocab_size: int, *, max_new_tokens: int = 20) -> History:
    """Sequences of different lengths whose tokens often occur again; in the first ones little was said."""
    beginnings = [([3], []), ([4], [5]), ([1, 2], [])][:rows]
    return history(
        *beginnings,
        *(
            (
                rng.integers(vocab_size // 2, size=rng.integers(1, 9)).tolist(),
                rng.integers(vocab_size // 2, size=rng.integers(0, 9)).tolist(),
            )
            for _ in range(rows - len(beginnings))
        ),
        max_new_tokens=max_new_tokens,
    )
