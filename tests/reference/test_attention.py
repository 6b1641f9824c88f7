"""Attention over pages against a plain masked softmax in float64, one sequence and one head at a time."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.attention_maps import attention_map
from minillm.batch import Batch, TokenSequence
from minillm.reference.attention import QUERY_TILE, AttentionSpec, attend, attention_cost, kv_cost, store_kv

D = 8
LENGTHS = {  # cached positions and new tokens of each sequence
    "prefill": [(0, 9)],
    "decode": [(20, 1)],
    "ragged": [(0, 5), (12, 1), (3, 4), (31, 1), (0, 1)],
    "longer than a tile": [(5, QUERY_TILE + 7), (0, 3), (2, 2 * QUERY_TILE)],
}


class Case:
    """A ragged batch, its queries, and a cache of shuffled pages that holds every key and value."""

    def __init__(self, lengths: list[tuple[int, int]], H: int, K: int, P: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        contexts = [cached + new for cached, new in lengths]
        needed = [-(-S // P) for S in contexts]
        shuffled = rng.permutation(sum(needed)).tolist()
        sequences = [TokenSequence([0] * S, cached) for S, (cached, _) in zip(contexts, lengths, strict=True)]
        for sequence, count in zip(sequences, needed, strict=True):
            sequence.pages = [shuffled.pop() for _ in range(count)]
        self.lengths = lengths
        self.batch = Batch.of(sequences, [new for _, new in lengths], P)
        self.q = rng.standard_normal((self.batch.num_tokens, H, D)).astype(np.float32)
        self.keys, self.values = np.full((2, sum(needed), K, P, D), np.nan, np.float32)
        self.k = [rng.standard_normal((S, K, D)).astype(np.float32) for S in contexts]
        self.v = [rng.standard_normal((S, K, D)).astype(np.float32) for S in contexts]
        everything = Batch.of([TokenSequence([0] * len(s.token_ids), 0, s.pages) for s in sequences], contexts, P)
        store_kv(np.concatenate(self.k), np.concatenate(self.v), self.keys, self.values, everything)

    def attend(self, scale: float, **how) -> np.ndarray:
        out, spec = np.full_like(self.q, np.nan), AttentionSpec(scale, **how)
        return attend(self.q, self.keys, self.values, self.batch, spec, np, out)

    def bias(self) -> np.ndarray:
        """A bias by distance, which is the same from 4 on. [H, 9]"""
        return np.random.default_rng(1).standard_normal((self.q.shape[1], 9)).astype(np.float32)

    def expected(
        self,
        scale: float,
        window: int | None = None,
        slopes: np.ndarray | None = None,
        *,
        causal: bool = True,
        bias: np.ndarray | None = None,
        softcap: float | None = None,
        sinks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The result [T, H, D], and each sequence's weights [H, n, S]."""
        results, weights = [], []
        for (cached, new), span, k, v in zip(self.lengths, self.batch.spans, self.k, self.v, strict=True):
            H, group = self.q.shape[1], self.q.shape[1] // k.shape[1]
            q = self.q[span.start : span.stop].astype(np.float64)
            back = cached + np.arange(new)[:, None] - np.arange(cached + new)  # [n, S]
            seen = (back >= 0) & (back < (window or cached + new))
            if not causal:
                seen = np.abs(back) < (window or cached + new)
            maps = np.empty((H, new, cached + new))
            for h in range(H):
                score = q[:, h] @ k[:, h // group].T * scale
                if softcap is not None:
                    score = softcap * np.tanh(score / softcap)
                if bias is not None:
                    score = score + np.array([[bias[h, 4 + max(-4, min(4, -d))] for d in row] for row in back])
                if slopes is not None:
                    score = score - slopes[h] * np.abs(back)
                weight = np.exp(score) * seen
                total = weight.sum(axis=-1, keepdims=True)
                maps[h] = weight / (total if sinks is None else total + np.exp(sinks[h]))
            weights.append(maps)
            results.append(np.stack([maps[h] @ v[:, h // group] for h in range(H)], axis=1))
        return np.concatenate(results), weights


@pytest.mark.sampled(8)
@pytest.mark.parametrize("P", [1, 3, 16, 512])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attention_is_a_masked_softmax(lengths: list[tuple[int, int]], H: int, K: int, P: int) -> None:
    case = Case(lengths, H, K, P)
    np.testing.assert_allclose(case.attend(D**-0.5), case.expected(D**-0.5)[0], rtol=1e-5, atol=1e-5)


SLOPES = np.array([0.5, 0.25, 0.0, 0.125], np.float32)
SINKS = np.array([1.5, -2.0, 0.0, 4.0], np.float32)
LOOKS = [(1, None), (4, None), (200, None), (None, SLOPES), (7, SLOPES)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("P", [1, 3, 512])
@pytest.mark.parametrize(("window", "slopes"), LOOKS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_windows_and_slopes(
    lengths: list[tuple[int, int]], window: int | None, slopes: np.ndarray | None, P: int
) -> None:
    case = Case(lengths, 4, 2, P)
    ours = case.attend(0.3, window=window, slopes=slopes)
    np.testing.assert_allclose(ours, case.expected(0.3, window, slopes)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "biased"),
    [
        ({"causal": False}, False),
        ({"causal": False, "window": 4, "slopes": SLOPES}, False),
        ({"causal": False}, True),
        ({}, True),
        ({"softcap": 0.7}, False),
        ({"sinks": SINKS, "window": 5}, False),
        ({"softcap": 0.7, "window": 5, "slopes": SLOPES, "sinks": SINKS}, True),
    ],
    ids=["both ways", "window and slopes both ways", "both ways with a bias", "bias", "soft cap", "sinks", "all"],
)
@pytest.mark.parametrize("P", [3, pytest.param(512, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "lengths",
    [pytest.param(LENGTHS[n], marks=[pytest.mark.slow] if "longer" in n else []) for n in LENGTHS],
    ids=LENGTHS,
)
def test_encoders_biases_soft_caps_and_sinks(
    lengths: list[tuple[int, int]], how: dict[str, Any], biased: bool, P: int
) -> None:
    """Encoders see both ways, T5 adds a bias, Gemma 2 bounds its scores, gpt-oss has sinks."""
    case = Case(lengths, 4, 2, P)
    how = how | ({"bias": case.bias()} if biased else {})
    expected, maps = case.expected(0.9, **how)
    np.testing.assert_allclose(case.attend(0.9, **how), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        attention_map(case.q, case.keys, case.batch, AttentionSpec(0.9, **how), np), maps, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_cost_of_attention_both_ways_is_a_count_of_what_is_seen(window: int | None) -> None:
    case = Case(LENGTHS["ragged"], 4, 2, 4)
    pairs = keys = 0
    for cached, new in case.lengths:
        shown = [
            {j for j in range(cached + new) if window is None or abs(i - j) < window}
            for i in range(cached, cached + new)
        ]
        pairs += sum(map(len, shown))
        keys += len(set().union(*shown))
    assert case.batch.visible_pairs(window, causal=False) == pairs
    cost = attention_cost(case.batch, 4, D, 100, AttentionSpec(1.0, causal=False, window=window, bias=case.bias()))
    assert cost.bytes_read == case.q.nbytes + 100 * keys + case.bias().nbytes


@pytest.mark.parametrize("window", [1, 3, 6])
def test_cost_of_a_window_is_a_count_of_what_it_shows(window: int) -> None:
    case = Case(LENGTHS["ragged"], 4, 2, 4)
    pairs = keys = 0
    for cached, new in case.lengths:
        seen: set[int] = set()
        for i in range(cached, cached + new):
            shown = range(max(0, i - window + 1), i + 1)
            pairs += len(shown)
            seen |= set(shown)
        keys += len(seen)
    assert case.batch.visible_pairs(window) == pairs
    position_bytes, T = 2 * 2 * D * 4, case.batch.num_tokens
    cost = attention_cost(case.batch, 4, D, position_bytes, AttentionSpec(1.0, window=window, slopes=SLOPES))
    flops = pairs * 4 * (4 * D + 6) + T * 4 * D
    assert cost == (flops, case.q.nbytes + keys * position_bytes + SLOPES.nbytes, case.q.nbytes, 4 * pairs * 4 * 6)


@pytest.mark.parametrize(("window", "slopes"), [(None, None), *LOOKS])
@pytest.mark.parametrize("P", [3, 16])
def test_the_map_is_the_weights(P: int, window: int | None, slopes: np.ndarray | None) -> None:
    case = Case(LENGTHS["ragged"], 4, 2, P)
    maps = attention_map(case.q, case.keys, case.batch, AttentionSpec(0.7, window=window, slopes=slopes), np)
    for ours, expected in zip(maps, case.expected(0.7, window, slopes)[1], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_scores_of_any_size_do_not_overflow() -> None:
    case = Case(LENGTHS["ragged"], 4, 4, 4)
    assert np.isfinite(case.attend(1e4)).all()


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_of_any_size_takes_nothing_or_all(sink: float) -> None:
    case = Case(LENGTHS["ragged"], 4, 4, 4)
    ours = case.attend(1.0, sinks=np.full(4, sink, np.float32))
    np.testing.assert_allclose(ours, case.attend(1.0) if sink < 0 else 0, atol=1e-6)


def test_no_query_sees_what_comes_after_it() -> None:
    case = Case([(2, 6)], 2, 2, 4)
    before = case.attend(1.0).copy()
    page = case.batch.spans[0].pages[1]
    case.keys[page, :, 3], case.values[page, :, 3] = 1e3, 1e3  # position 7, the last
    after = case.attend(1.0)
    np.testing.assert_array_equal(after[:5], before[:5])
    assert (after[5] != before[5]).all()


def test_storing_touches_the_new_slots_only() -> None:
    keys, values = np.zeros((2, 4, 2, 3, D), np.float32)
    batch = Batch.of([TokenSequence([0] * 5, 2, [3, 1])], [3], 3)
    k, v = np.random.default_rng(0).standard_normal((2, 3, 2, D)).astype(np.float32)
    store_kv(k, v, keys, values, batch)
    for stored, new in ((keys, k), (values, v)):
        np.testing.assert_array_equal(stored[3, :, 2], new[0])
        np.testing.assert_array_equal(stored[1, :, 0], new[1])
        np.testing.assert_array_equal(stored[1, :, 1], new[2])
        assert np.count_nonzero(stored.any(axis=(1, 3))) == 3


@pytest.mark.parametrize("name", ["prefill", "decode", "ragged"])
def test_cost_is_a_count_of_the_operations(name: str) -> None:
    H, K = 4, 2
    case = Case(LENGTHS[name], H, K, 4)
    pairs = flops = 0
    for (cached, new), _ in zip(case.lengths, case.k, strict=True):
        for i in range(new):
            flops += H * D  # Q is scaled
            for _ in range(cached + i + 1):
                pairs += 1
                flops += H * (2 * D + 4 + 2 * D)
    read = case.q.nbytes + sum(array.nbytes for array in case.k + case.v)
    assert case.batch.visible_pairs() == pairs
    cost = attention_cost(case.batch, H, D, 2 * K * D * 4, AttentionSpec(D**-0.5))
    assert cost == (flops, read, case.q.nbytes, 4 * pairs * H * 4)


def test_cost_of_storing_is_the_bytes_of_the_arrays() -> None:
    k = np.zeros((5, 2, D), np.float32)
    assert kv_cost(5, 2, D, 2 * 2 * D * 4) == (0, 2 * k.nbytes, 2 * k.nbytes, 0)
