"""Exercises of lesson 5: intensity and the roofline."""

import math

from . import Answer

EXERCISES = ("intensity", "least_seconds")


def intensity(answer: Answer) -> str | None:
    """FLOPs over bytes of a product."""
    for T in (1, 64):
        value, expected = answer(T, 512, 2048, 2), 2 * T * 512 * 2048 / (2 * 512 * 2048 + 4 * T * (512 + 2048))
        if value is None:
            return "It returns None: write the function's body."
        if math.isclose(2 * value, expected):
            return "A multiplication with its addition is two FLOPs: it is half of what it should be."
        if not math.isclose(value, expected):
            return f"intensity({T}, 512, 2048, 2) should be {expected:.3f}, found {value:.3f}: what moves?"
    return None


def least_seconds(answer: Answer) -> str | None:
    """The larger of arithmetic and traffic."""
    for flops, moved, expected in ((10e9, 1e6, 0.1), (1e6, 2e9, 0.04)):
        value = answer(flops, moved, 100e9, 50e9)
        if value is None:
            return "It returns None: write the function's body."
        if math.isclose(value, flops / 100e9 + moved / 50e9):
            return "Arithmetic and memory work at the same time: take the larger, not the sum."
        if not math.isclose(value, expected):
            return f"{flops:g} FLOPs and {moved:g} bytes should take {expected} seconds, found {value:.4f}."
    return None
