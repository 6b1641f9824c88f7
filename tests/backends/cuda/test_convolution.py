"""The convolution kernel, run by the emulator, against the reference."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.rows import convolve

from .launchers import ON_GPU

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
BEFORE = np.array([-1, 0, 1, -2 - 4, 3, 4, -2, 6, 6, 7], np.int32)
"""A text that begins, one that goes on from slot 4, and one from slot 0 that branches"""
AFTER = np.array([-1, 3, 1, -1, -1, 6, -1, 5, -1, -1], np.int32)


@pytest.mark.parametrize(("gated", "activation"), [(True, None), (False, "silu")])
@pytest.mark.parametrize(("k", "C"), [(2, 1), (3, 64), (4, 300), (64, 20)])
@pytest.mark.parametrize("storage", STORAGE)
def test_results_and_states_are_the_references(
    emulator: Emulator, storage: str, k: int, C: int, gated: bool, activation: str | None
) -> None:
    rng, width = np.random.default_rng(k), 3 * C if gated else C
    x = rng.standard_normal((10, width + 5)).astype(STORAGE[storage])[:, :width]
    taps, states, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((k, C), (7, k - 1, C), C))
    variant: dict[str, Any] = {"gated": gated, "activation": activation}
    plain = x.astype(np.float32), taps, bias, states.copy(), BEFORE, AFTER
    expected = reference.convolve(*plain, np, np.empty((10, C), np.float32), **variant)
    out = np.zeros((10, C), STORAGE[storage])
    kernels = Kernels(emulator, storage, debug=True)
    convolve(kernels, x, taps.ravel(), bias, states, (BEFORE, AFTER), out, **variant)
    atol = UNIT[storage] * k * max(1, np.abs(expected).max())
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=atol)
    np.testing.assert_allclose(states, plain[3], rtol=0, atol=1e-7)


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
def test_a_debug_build_refuses_a_slot_that_is_not_there(emulator: Emulator) -> None:
    kernels, x, states = Kernels(emulator, "float32", debug=True), np.ones((1, 8), np.float32), np.ones((2, 1, 8))
    taps, out, variant = np.ones(16, np.float32), np.empty((1, 8), np.float32), {"gated": False, "activation": None}
    states = states.astype(np.float32)
    for before, after in ((-4, -1), (-1, 2)):
        places = np.array([before], np.int32), np.array([after], np.int32)
        with pytest.raises(LaunchError, match=r"convolution\.cu:\d+: .* is 2, should be from 0 to below 2"):
            convolve(kernels, x, taps, None, states, places, out, **variant)


def test_no_tokens_are_no_launch(emulator: Emulator) -> None:
    nothing = np.empty((0, 8), np.float32)
    places = np.empty(0, np.int32), np.empty(0, np.int32)
    convolve(
        Kernels(emulator, "float32"), nothing, np.ones(16, np.float32), None, np.ones((1, 1, 8), np.float32), places,
        nothing, gated=False, activation=None,
    )  # fmt: skip
