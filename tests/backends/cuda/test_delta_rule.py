"""The kernel of the gated delta rule, run by the emulator, against the reference."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.rows import delta_rule

from .launchers import ON_GPU

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8}
BEFORE = np.array([-1, 0, 1, -2 - 4, 3, 4, -2, 6, 6, 7], np.int32)
"""A text that begins, one that goes on from slot 4, and one from slot 0 that branches"""
AFTER = np.array([-1, 3, 1, -1, -1, 6, -1, 5, -1, -1], np.int32)


def drawn(storage: str, K: int, V: int, dk: int, dv: int) -> tuple[Any, ...]:
    """Projections and gates, each some columns of wider rows; rates and biases; states."""
    rng, width = np.random.default_rng(dk), 2 * K * dk + V * dv
    x, gates = (rng.standard_normal((10, n)).astype(STORAGE[storage]) for n in (width + 5, 2 * V + 3))
    weight = tuple(rng.standard_normal(V).astype(np.float32) for _ in range(2))
    return x[:, :width], gates[:, 1 : 1 + 2 * V], weight, rng.standard_normal((7, V, dk, dv)).astype(np.float32)


@pytest.mark.parametrize(
    ("storage", "K", "V", "dk", "dv"),
    [("float32", 2, 4, 37, 33), ("float32", 1, 1, 1, 1), ("float16", 2, 2, 16, 40), ("bfloat16", 1, 2, 130, 8)],
)
def test_results_and_states_are_the_references(
    emulator: Emulator, storage: str, K: int, V: int, dk: int, dv: int
) -> None:
    x, gates, weight, states = drawn(storage, K, V, dk, dv)
    plain = x.astype(np.float32), gates.astype(np.float32), *weight, states.copy(), BEFORE, AFTER
    expected = reference.delta_rule(*plain, np, np.empty((10, V * dv), np.float32), key_heads=K)
    out = np.zeros((10, V * dv), STORAGE[storage])
    delta_rule(Kernels(emulator, storage, debug=True), x, gates, weight, states, (BEFORE, AFTER), out, keys=(K, dk))
    atol = UNIT[storage] * max(1, np.abs(expected).max())
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=atol)
    np.testing.assert_allclose(states, plain[4], rtol=0, atol=4e-6 * np.abs(plain[4]).max())


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
def test_a_debug_build_refuses_a_slot_that_is_not_there(emulator: Emulator) -> None:
    kernels, (x, gates, weight, states) = Kernels(emulator, "float32", debug=True), drawn("float32", 1, 1, 4, 4)
    for before, after in ((-2 - 7, -1), (-1, 7)):
        places, out = (np.array([before], np.int32), np.array([after], np.int32)), np.empty((1, 4), np.float32)
        with pytest.raises(LaunchError, match=r"delta_rule\.cu:\d+: .* is 7, should be from 0 to below 7"):
            delta_rule(kernels, x[:1], gates[:1], weight, states, places, out, keys=(1, 4))


def test_no_tokens_are_no_launch(emulator: Emulator) -> None:
    x, gates, weight, states = drawn("float32", 1, 1, 4, 4)
    places = np.empty(0, np.int32), np.empty(0, np.int32)
    delta_rule(
        Kernels(emulator, "float32"), x[:0], gates[:0], weight, states, places, np.empty((0, 4), np.float32),
        keys=(1, 4),
    )  # fmt: skip
