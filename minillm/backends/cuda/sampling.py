"""Launches argmax and sampling of each row's next token (`kernels/cuda/sampling.cu`).

The token is that of `reference.sample` with the uniform of `reference.philox.uniform(seed, sequence, position)`, except
where rounding decides: if the uniform lies within 1e-5 of the boundary between two candidates, or the threshold of
top-p or min-p within a relative 1e-6 of keeping one more. All settings are read from the device, row by row, so one
launch serves requests with any settings. Only the ids need to leave the device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import DeviceError
from .kernels import NULL, Kernels, row_stride

CHUNK = 2048
"""Logits that one block searches: CHUNK of `sampling.cu`."""
BINS = 2048
"""BINS of `candidates.cuh`."""
MOST_TOKENS = 1 << 19
"""The largest vocabulary: the masses of all tokens, 2**44 each, must fit into 64 bits."""
COUNTING = 512
"""Blocks that count scores, over all rows: each adds its bins to the row's, so more than are needed cost time."""
COUNTING_THREADS = 512
THREADS = 256
MOST_THREADS = 1024


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch memory passed between the kernels; not for use across calls, nor by two streams at once."""

    best: Any
    """[R, chunks of V], uint64: the best candidate of each chunk"""
    masses: Any
    """[R, BINS + 2], uint64: of the bins, of all candidates, of what min-p keeps"""
    counts: Any
    """[R, BINS], uint32: of the bins"""

    @classmethod
    def allocate(cls, xp: Any, rows: int, V: int) -> "Workspace":
        """For up to `rows` rows of V logits, by the array module `xp`.

        Raises:
            DeviceError: the vocabulary is too large for the kernels.
        """
        if V > MOST_TOKENS:
            raise DeviceError(f"the sampling kernels take vocabularies of up to {MOST_TOKENS:,} tokens, not {V:,}")
        return cls(
            xp.empty((rows, _chunks(V)), xp.uint64),
            xp.empty((rows, BINS + 2), xp.uint64),
            xp.empty((rows, BINS), xp.uint32),
        )


@dataclass(frozen=True, eq=False)
class Draws:
    """Sampling settings and random keys of each row: arrays [R] on the device."""

    temperatures: Any
    """float32, > 0; 0 for a row that takes its argmax"""
    top_ks: Any
    """int32; 0 keeps all"""
    top_ps: Any
    """float64, in (0, 1]; 1 keeps all"""
    min_ps: Any
    """float32, in [0, 1]; 0 keeps all"""
    seeds: Any
    """uint64, of the request"""
    sequences: Any
    """int32: index of the sequence within its request"""
    positions: Any
    """int32: index of the token to be drawn within its sequence, prompt included"""


def argmax(kernels: Kernels, logits: Any, workspace: Workspace, ids: Any, not_finite: Any) -> None:
    """The most likely token of each row, the smallest id among equals.

    Args:
        kernels: of any storage type.
        logits: [R, V] float32
        workspace: for at least R rows and this V.
        ids: [R] int32, written.
        not_finite: [R] int32, written: 1 where the row holds NaN or +inf, else 0. The id is then that of the first NaN,
            or else of the first +inf.
    """
    R, V = logits.shape
    if R == 0:
        return
    _best_of_chunks(kernels, logits, workspace, NULL, NULL)
    kernels.get("sampling", "take_best")((R,), (32,), (ids, not_finite, workspace.best, np.int32(_chunks(V))))


def sample(kernels: Kernels, logits: Any, draws: Draws, workspace: Workspace, ids: Any, no_distribution: Any) -> None:
    """Sample one token per row from its filtered distribution.

    Args:
        kernels: of any storage type.
        logits: [R, V] float32; -inf marks what must not be drawn.
        draws: the rows' settings and the keys of their random numbers.
        workspace: for at least R rows and this V.
        ids: [R] int32, written.
        no_distribution: [R] int32, written: 1 where the row holds NaN or +inf, or nothing but -inf, or where the best
            logit over the temperature overflows, else 0. The id is then 0.
    """
    R, V = logits.shape
    if R == 0:
        return
    best, masses, counts = workspace.best, workspace.masses, workspace.counts
    sizes = np.int32(V), row_stride(logits)
    _best_of_chunks(kernels, logits, workspace, masses, counts)
    chunks = _chunks(V)
    kernels.get("sampling", "count_scores")(
        (R, min(chunks, max(COUNTING // R, 1))),
        (COUNTING_THREADS,),
        (masses, counts, logits, best, draws.temperatures, draws.min_ps, *sizes, np.int32(chunks)),
    )
    kernels.get("sampling", "draw")(
        (R,),
        (_draw_threads(V),),
        (
            ids,
            no_distribution,
            logits,
            best,
            masses,
            counts,
            draws.temperatures,
            draws.top_ks,
            draws.top_ps,
            draws.seeds,
            draws.sequences,
            draws.positions,
            *sizes,
            np.int32(chunks),
        ),
    )


def _best_of_chunks(kernels: Kernels, logits: Any, workspace: Workspace, masses: Any, counts: Any) -> None:
    R, V = logits.shape
    assert workspace.best.shape[0] >= R and workspace.best.shape[1] == _chunks(V), "the workspace is of another shape"
    args = (workspace.best, masses, counts, logits, np.int32(V), row_stride(logits))
    kernels.get("sampling", "best_of_chunks")((R, _chunks(V)), (THREADS,), args)


def _chunks(V: int) -> int:
    return -(-V // CHUNK)


def _draw_threads(V: int) -> int:
    """One thread for every 32 logits, a power of two as the search requires."""
    threads = 32
    while threads < MOST_THREADS and threads * 32 < V:
        threads *= 2
    return threads
