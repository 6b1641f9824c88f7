"""Attention without a kernel, on an array module that refuses what CuPy refuses, against the reference on the host."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda.attention import attend_by_reference
from minillm.batch import Batch, TokenSequence
from minillm.reference.attention import AttentionSpec

from .strict import Module, OnDevice, fetch

xp = Module()
P = 4


def ragged(trees: bool) -> Batch:
    """A chunk, a single token, and a line that ends in a tree of guesses (or in a line)."""
    tree = (-1, 0, -1, 2, 0) if trees else ()
    lines = [(9, 14, ()), (6, 7, ()), (0, 12, tree), (8, 13, tree)]
    sequences, page = [], 0
    for cached, length, parents in lines:
        pages = list(range(page, page - (-length // P)))
        page += len(pages)
        sequences.append(TokenSequence(list(range(3, 3 + length)), cached, pages, parents))
    return Batch.of(sequences, [sequence.pending for sequence in sequences], P)


@pytest.mark.parametrize("trees", [False, True], ids=["lines", "trees"])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_reference_and_keeps_host_and_device_apart(trees: bool, window: int | None, biased: bool) -> None:
    batch, rng = ragged(trees), np.random.default_rng(1)
    H, K, D, pages = 4, 2, 8, 1 + max(page for span in batch.spans for page in span.pages)
    q = rng.standard_normal((batch.num_tokens, H, D)).astype(np.float32)
    cache = rng.standard_normal((2, pages, K, P, D)).astype(np.float32)
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32) if biased else None
    expected = reference.attend(
        q, *cache, batch, AttentionSpec(0.3, window=window, slopes=slopes), np, np.empty_like(q)
    )
    out = xp.asarray(np.full_like(q, np.nan))
    device: list[Any] = [xp.asarray(array) for array in (q, *cache)]
    there = None if slopes is None else xp.asarray(slopes)
    assert attend_by_reference(*device, batch, AttentionSpec(0.3, window=window, slopes=there), xp, out) is out
    np.testing.assert_allclose(fetch(out), expected, atol=1e-6)


@pytest.mark.parametrize(
    "variant", [{"causal": False, "window": 5}, {"softcap": 0.5}, {"bias": True}, {"sinks": True}], ids=str
)
def test_variants_are_the_references_and_keep_host_and_device_apart(variant: dict[str, Any]) -> None:
    batch, rng = ragged(trees=False), np.random.default_rng(1)
    H, K, D, pages = 4, 2, 8, 1 + max(page for span in batch.spans for page in span.pages)
    q = rng.standard_normal((batch.num_tokens, H, D)).astype(np.float32)
    cache = rng.standard_normal((2, pages, K, P, D)).astype(np.float32)
    here, there = dict(variant), dict(variant)
    if "bias" in variant:
        here["bias"] = rng.standard_normal((H, 2 * 7 + 1)).astype(np.float32)  # up to 7 positions back and ahead
        there["bias"] = xp.asarray(here["bias"])
    if "sinks" in variant:
        here["sinks"] = rng.standard_normal(H).astype(np.float32)
        there["sinks"] = xp.asarray(here["sinks"])
    expected = reference.attend(q, *cache, batch, AttentionSpec(0.3, **here), np, np.empty_like(q))
    out = xp.asarray(np.full_like(q, np.nan))
    device: list[Any] = [xp.asarray(array) for array in (q, *cache)]
    attend_by_reference(*device, batch, AttentionSpec(0.3, **there), xp, out)
    np.testing.assert_allclose(fetch(out), expected, atol=1e-6)


def test_the_wall_holds() -> None:
    """What the test above rests on: every way to mix host and device is refused."""
    here, there = np.ones(3), xp.asarray(np.ones(3))

    def assign_here() -> None:
        here[:] = there

    def assign_there() -> None:
        there[:] = here

    for mix in (
        lambda: here + there,
        lambda: there * here,
        lambda: xp.where(here > 0, there, 0),
        lambda: np.asarray(there),
        lambda: there[here > 0],
        lambda: xp.matmul(there, here),
        lambda: xp.add(there, 1, out=here),
        assign_here,
        assign_there,
    ):
        with pytest.raises(TypeError, match="device"):
            mix()
    assert isinstance(there + 1, OnDevice)
    assert fetch(there + there).tolist() == [2, 2, 2]
