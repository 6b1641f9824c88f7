"""The best few of many scores against sorting them all."""

import numpy as np
import pytest

from minillm.reference.top import top_indices


@pytest.mark.parametrize("size", [1, 2, 9, 100, 1000, 5003])
@pytest.mark.parametrize("kind", ["distinct", "many equal", "mostly forbidden"])
def test_the_best_come_first_and_of_equals_the_lower_index(size: int, kind: str) -> None:
    rng = np.random.default_rng(size)
    for n in {0, 1, min(size, 8), size // 2, size}:
        scores = rng.normal(size=size).astype(np.float32)
        if kind == "many equal":
            scores = np.round(scores)
        if kind == "mostly forbidden":
            scores[rng.random(size) < 0.99] = -np.inf
        expected = np.argsort(-scores, kind="stable")[:n]
        np.testing.assert_array_equal(top_indices(scores, n, np), expected)
