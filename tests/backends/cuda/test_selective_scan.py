"""The kernel of Mamba-2's recurrence, run by the emulator, against the reference."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.rows import rms_norm, selective_scan

from .launchers import ON_GPU

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8}
BEFORE = np.array([-1, 0, 1, -2 - 4, 3, 4, -2, 6, 6, 7], np.int32)
"""A text that begins, one that goes on from slot 4, and one from slot 0 that branches"""
AFTER = np.array([-1, 3, 1, -1, -1, 6, -1, 5, -1, -1], np.int32)
LIMITS = 0.2, 1.5


def drawn(H: int, P: int, G: int, N: int) -> tuple[Any, ...]:
    """Values and steps, each some columns of wider rows; rates, biases, states."""
    rng, width = np.random.default_rng(P), H * P + 2 * G * N
    shapes = (10, width + 3), (10, H + 1), (2 * H,), (H,), (7, H, P, N)
    x, steps, rates, bias, states = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x[:, :width], steps[:, 1:], rates, bias, states


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("H", "P", "G", "N"), [(1, 1, 1, 1), (4, 5, 2, 33), (2, 6, 1, 128), (3, 3, 3, 256)])
def test_results_and_states_are_the_references(
    emulator: Emulator, storage: str, H: int, P: int, G: int, N: int
) -> None:
    x, steps, rates, bias, states = drawn(H, P, G, N)
    x, steps = (array.astype(STORAGE[storage]) for array in (x, steps))
    plain = states.copy()
    given = x.astype(np.float32), steps.astype(np.float32), *rates.reshape(2, H), bias, plain, BEFORE, AFTER
    expected = reference.selective_scan(*given, np, np.empty((10, H * P), np.float32), groups=G, limits=LIMITS)
    out = np.zeros((10, H * P), STORAGE[storage])
    kernels = Kernels(emulator, storage, debug=True)
    selective_scan(kernels, x, steps, rates, bias, states, (BEFORE, AFTER), out, groups=G, limits=LIMITS)
    atol = UNIT[storage] * max(1, np.abs(expected).max())
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=atol)
    np.testing.assert_allclose(states, plain, rtol=0, atol=2e-6 * np.abs(plain).max())


def test_a_norm_by_groups_has_gains_of_each(emulator: Emulator) -> None:
    rng = np.random.default_rng(0)
    x, gain = rng.standard_normal((5, 3, 40)).astype(np.float32), rng.standard_normal(120).astype(np.float32)
    out = np.empty_like(x)
    rms_norm(Kernels(emulator, "float32"), x, gain, 1e-5, out)
    expected = x / np.sqrt((x * x).mean(axis=2, keepdims=True) + 1e-5) * gain.reshape(3, 40)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
def test_a_debug_build_refuses_a_slot_that_is_not_there(emulator: Emulator) -> None:
    kernels, (x, steps, rates, bias, states) = Kernels(emulator, "float32", debug=True), drawn(2, 4, 1, 8)
    out = np.empty((1, 8), np.float32)
    for before, after in ((-9, -1), (-1, 7)):
        places = np.array([before], np.int32), np.array([after], np.int32)
        given = x[:1], steps[:1], rates, bias, states, places, out
        with pytest.raises(LaunchError, match=r"selective_scan\.cu:\d+: .* is 7, should be from 0 to below 7"):
            selective_scan(kernels, *given, groups=1, limits=LIMITS)


def test_no_tokens_are_no_launch(emulator: Emulator) -> None:
    x, steps, rates, bias, states = drawn(2, 4, 1, 8)
    places = np.empty(0, np.int32), np.empty(0, np.int32)
    given = x[:0], steps[:0], rates, bias, states, places, np.empty((0, 8), np.float32)
    selective_scan(Kernels(emulator, "float32"), *given, groups=1, limits=LIMITS)
