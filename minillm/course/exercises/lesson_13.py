"""Exercises of lesson 13: what a warp asks of memory."""

import numpy as np

from ...errors import UsageError
from ..launching import run_gemv
from . import Answer, compare

EXERCISES = ("sectors", "transposed")


def sectors(answer: Answer) -> str | None:
    """Pieces of 32 bytes that a warp touches."""
    neighbours = [4 * lane for lane in range(32)]
    problem = compare("sectors([0, 4, 8, ..., 124], 4)", answer(neighbours, 4), 4)
    if problem is None and answer([0] * 32, 4) == 32:
        return "32 threads that read the same address need one sector between them, not one each."
    problem = problem or compare("sectors([0, 0, ..., 0], 4)", answer([0] * 32, 4), 1)
    problem = problem or compare("sectors([0, 1024, 2048, ...], 4)", answer([1024 * i for i in range(32)], 4), 32)
    problem = problem or compare("sectors([16, 20, ..., 140], 4)", answer([16 + a for a in neighbours], 4), 5)
    problem = problem or compare("sectors([0, 16, 32, ..., 496], 16)", answer([4 * a for a in neighbours], 16), 16)
    return problem or compare("sectors([24], 16), which crosses a border,", answer([24], 16), 2)


def transposed(answer: Answer) -> str | None:
    """A product whose threads have neighbouring columns."""
    source = answer()
    if source is None:
        return "It returns None: return the kernel's source."
    if not isinstance(source, str):
        return f"It should return a text, found {source!r}."
    if "KERNEL" in source and "define KERNEL" not in source:
        return "KERNEL is not defined: the source should begin with HEAD."
    W, x = np.random.default_rng(1).standard_normal((48, 200)), np.random.default_rng(2).standard_normal(48)
    try:
        run = run_gemv(source, W, x, size=200)
    except UsageError as error:
        return f"It cannot be tried here: {error}."
    if np.isnan(run.y).any():
        return f"{np.isnan(run.y).sum()} of the 200 numbers of y are not written."
    if not np.allclose(run.y, x @ W, atol=1e-4):
        column = int(np.argmax(np.abs(run.y - x @ W)))
        return f"y[{column}] should be {(x @ W)[column]:.4f}, found {run.y[column]:.4f}."
    sectors = run.weight.sectors / run.weight.requests
    return None if sectors <= 5 else f"It is right, but a request for W takes {sectors:.0f} sectors: read neighbours."
