"""The rotary kernel against its formula in float64, on queries and keys that are views of one fused projection."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import STORAGE, Kernels
from minillm.backends.cuda.rows import rotary
from minillm.backends.weights import Weight
from minillm.reference.rotary import Rotation, Stretch
from minillm.reference.rotary import angles as plain_angles

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNTOUCHED = 77.0
POWER = 1e-6
"""By how much two powers of float32 may differ, of 1; the angle is that times the position."""


class Case:
    """Ragged texts: tokens of the first sequence, then of the second ..., each at a position of its own."""

    def __init__(
        self,
        storage: str,
        *,
        counts: tuple[int, ...] = (2, 1, 4),
        H: int = 4,
        K: int = 2,
        D: int = 16,
        half: int = 8,
        text_lens: tuple[int, ...] = (),
        longest: int = 5000,
        **rotation: Any,
    ) -> None:
        rng = np.random.default_rng((H, D, half))
        T, dtype = sum(counts), DTYPES[storage]
        self.storage, self.counts, self.half = storage, counts, half
        self.fused = np.full((T, (H + 2 * K) * D + 8), np.nan, dtype)  # rows lie 8 numbers further apart than they are
        self.fused[:, : (H + K) * D] = 2 * rng.standard_normal((T, (H + K) * D))
        self.q = self.fused[:, : H * D].reshape(T, H, D)
        self.k = self.fused[:, H * D : (H + K) * D].reshape(T, K, D)
        self.positions = rng.integers(0, longest, T).astype(np.int32)
        self.query_starts = np.cumsum([0, *counts], dtype=np.int32)
        self.text_lens = np.asarray(text_lens, np.int32)
        frequencies = (500.0 ** -(np.arange(half) / half)).astype(np.float32)
        self.rotation = Rotation(frequencies=Weight("frequencies", frequencies), **rotation)

    def run(self, emulator: Emulator) -> list[np.ndarray]:
        """q and k, turned. Around the results lie numbers that must still be there."""
        before, results, wholes = self.fused.copy(), [], []
        for x in (self.q, self.k):
            wholes.append(np.full(x.size + 16, UNTOUCHED, x.dtype))
            results.append(wholes[-1][8:-8].reshape(x.shape))
        rotary(Kernels(emulator, self.storage), self.q, self.k, self, self.rotation, *results)
        assert all((whole[:8] == UNTOUCHED).all() and (whole[-8:] == UNTOUCHED).all() for whole in wholes)
        assert self.fused.tobytes() == before.tobytes()
        return results

    def angles(self) -> Any:
        """As every family takes them, in float32: [T, half]."""
        growth = None
        if len(self.text_lens):
            texts = self.text_lens.tolist()
            spans = [SimpleNamespace(start=0, stop=n, text_len=S) for n, S in zip(self.counts, texts, strict=True)]
            batch: Any = SimpleNamespace(spans=spans)
            growth = self.rotation.growth(batch)
        return plain_angles(self.positions, self.rotation.frequencies.data, growth, np)

    def check(self, results: list[np.ndarray], slack: float = 0.0) -> None:
        """At most twice the error of the plain computation; `slack` is what the angles may differ by."""
        angles = self.angles()
        for x, ours in zip((self.q, self.k), results, strict=True):
            exact = self._turned(x.astype(np.float64), angles.astype(np.float64))
            plain = self._turned(x.astype(np.float32), angles).astype(x.dtype)
            allowed = 2 * np.abs(plain - exact).max() + (np.finfo(np.float32).eps + slack) * np.abs(exact).max()
            assert np.abs(ours - exact).max() <= allowed
            np.testing.assert_array_equal(ours[..., 2 * self.half :], x[..., 2 * self.half :])

    def _turned(self, x: Any, angles: Any) -> Any:
        cosines, sines = (f(angles) * x.dtype.type(self.rotation.scale) for f in (np.cos, np.sin))
        return reference.rotary(x, cosines, sines, np, np.empty_like(x))


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(
    ("D", "half"),
    [(16, 8), (64, 32), (128, 64), (80, 10), (64, 8), (2, 1), (6, 2), (20, 8)],
    ids=lambda n: str(n),
)
def test_queries_and_keys_turn_by_their_positions(emulator: Emulator, storage: str, D: int, half: int) -> None:
    case = Case(storage, D=D, half=half)
    case.check(case.run(emulator))


@pytest.mark.parametrize("storage", STORAGE)
def test_in_any_order_of_threads(any_emulator: Emulator, storage: str) -> None:
    for D, half in ((64, 32), (20, 6)):
        stretch = Stretch(factor=4.0, original=32)
        case = Case(storage, D=D, half=half, text_lens=(40, 90, 7), longest=90, stretch=stretch)
        case.check(case.run(any_emulator), slack=90 * POWER)


@pytest.mark.parametrize(("H", "K"), [(1, 1), (40, 8), (3, 1)])
def test_any_number_of_heads(emulator: Emulator, H: int, K: int) -> None:
    case = Case("float16", H=H, K=K, D=128, half=64)
    case.check(case.run(emulator))


def test_queries_and_keys_may_be_arrays_of_their_own(emulator: Emulator) -> None:
    """As the norms of heads leave them: their rows lie differently far apart."""
    case = Case("float16", H=6, K=2)
    case.q, case.k = case.q.copy(), case.k.copy()
    case.check(case.run(emulator))


def test_cosines_and_sines_are_scaled_and_the_rest_is_not(emulator: Emulator) -> None:
    case = Case("float32", D=32, half=8, scale=1.25)
    case.check(case.run(emulator))


def test_far_positions_have_exact_sines(emulator: Emulator) -> None:
    """Up to 131,072, the longest of Llama 3.1: an angle is the float32 product, and its sine has all its digits."""
    case = Case("float32", counts=(64,), D=128, half=64, longest=131_072)
    case.check(case.run(emulator))


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_frequencies_sink_with_the_length_of_the_text(emulator: Emulator, factor: float) -> None:
    """A text at the length of training, one token beyond, far beyond; and a padded sequence, whose length is 0."""
    stretch = Stretch(factor=factor, original=64)
    case = Case("float32", counts=(2, 3, 4, 1), text_lens=(64, 65, 600, 0), longest=600, stretch=stretch, D=32, half=16)
    results = case.run(emulator)
    case.check(results, slack=600 * POWER)
    case.rotation = Rotation(frequencies=case.rotation.frequencies)
    plain = case.run(emulator)
    for ours, theirs in zip(results, plain, strict=True):
        np.testing.assert_array_equal(ours[[0, 1, -1]], theirs[[0, 1, -1]])
        assert factor == 1.0 or (ours[5:9] != theirs[5:9]).any(axis=(1, 2)).all()


def test_texts_beyond_a_length_have_the_second_row_of_frequencies(emulator: Emulator) -> None:
    case = Case("float32", counts=(2, 3, 4, 1), text_lens=(64, 65, 600, 0), longest=600, D=32, half=16)
    frequencies = np.stack([case.rotation.frequencies.data, case.rotation.frequencies.data / 3])
    case.rotation = Rotation(frequencies=Weight("frequencies", frequencies), short=64)
    results = case.run(emulator)
    case.check(results)
    case.rotation = Rotation(frequencies=Weight("frequencies", frequencies[0]))
    for ours, theirs in zip(results, case.run(emulator), strict=True):
        np.testing.assert_array_equal(ours[[0, 1, -1]], theirs[[0, 1, -1]])
        assert (ours[2:9] != theirs[2:9]).any(axis=(1, 2)).all()


def test_no_tokens_are_no_launch(emulator: Emulator) -> None:
    assert [x.shape for x in Case("float32", counts=()).run(emulator)] == [(0, 4, 16), (0, 2, 16)]
