"""Attention by content and relative position, and the rows that a convolution reads, against plain formulas; costs."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.batch import Batch, Span, TokenSequence
from minillm.models.disentangled import DisentangledConfig, rows_of
from minillm.reference.attention import AttentionSpec, attention_cost
from minillm.reference.convolution import unfold, unfold_cost
from minillm.reference.disentangled import RelativePositions

from .test_attention import Case, D
from .test_cost import XP, Number, empty, numbers

R, M = 6, 300


def relative_positions(H: int, *, keys: bool = True, queries: bool = True) -> RelativePositions:
    """Random ones, of six positions for distances up to M."""
    rng = np.random.default_rng(3)
    terms = [rng.standard_normal((H, R, D)).astype(np.float32) if there else None for there in (keys, queries)]
    return RelativePositions(*terms, np.clip(np.arange(-M, M + 1) + R // 2, 0, R - 1))


@pytest.mark.parametrize("P", [3, 512])
@pytest.mark.parametrize("terms", [(True, True), (True, False), (False, True)])
def test_scores_are_the_sum_of_three_products(terms: tuple[bool, bool], P: int) -> None:
    H, scale, lengths = 4, 0.3, [(0, 9), (0, 140), (0, 1)]
    case, relative = Case(lengths, H, H, P), relative_positions(H, keys=terms[0], queries=terms[1])
    for span, k, v in zip(case.batch.spans, case.k, case.v, strict=True):
        out = case.attend(scale, causal=False, relative=relative)[span.start : span.stop]
        q, n = case.q[span.start : span.stop].astype(np.float64), span.stop - span.start
        rows = np.array([[min(max(i - j + R // 2, 0), R - 1) for j in range(n)] for i in range(n)])
        for h in range(H):
            scores = scale * (q[:, h] @ k[:, h].T)
            if relative.keys is not None:
                scores += scale * np.einsum("id,ijd->ij", q[:, h], relative.keys[h][rows])
            if relative.queries is not None:
                scores += np.einsum("jd,ijd->ij", k[:, h], relative.queries[h][rows])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected = weights @ v[:, h] / weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(out[:, h], expected, rtol=1e-4, atol=1e-4)


def test_each_position_meets_each_query_and_each_key_once() -> None:
    H, S = 2, 7
    batch = Batch.of([TokenSequence([0] * S, 0, [0])], [S], 8)
    relative = RelativePositions(numbers(H, R, 3), numbers(H, R, 3), relative_positions(H).rows)
    cache, spec = numbers(1, H, 8, 3), AttentionSpec(0.5, causal=False, relative=relative)
    Number.arithmetic = 0
    reference.attend(numbers(S, H, 3), cache, cache, batch, spec, XP, empty(S, H, 3))
    sums = H * S * (S + 1 + 3) + 2 * H * R * S  # scores, denominators, results; products with positions
    assert attention_cost(batch, H, 3, 0, _bytes_of(spec)).flops == Number.arithmetic + sums


def _bytes_of(spec: AttentionSpec) -> AttentionSpec:
    """The same with arrays of numbers that have a size."""
    return spec.with_arrays(lambda term: np.zeros(term.shape, np.float32))


def test_positions_are_read_once_beside_keys_and_values() -> None:
    batch = Batch.of([TokenSequence([0] * 7, 0, [0])], [7], 8)
    plain = attention_cost(batch, 4, D, 10, AttentionSpec(0.5, causal=False))
    cost = attention_cost(batch, 4, D, 10, AttentionSpec(0.5, causal=False, relative=relative_positions(4)))
    assert cost.bytes_read - plain.bytes_read == 2 * 4 * 4 * R * D


def config_of(**fields: Any) -> DisentangledConfig:
    """The fields that say which row a distance has."""
    config = object.__new__(DisentangledConfig)
    vars(config).update({"buckets": 0} | fields)
    return config


def test_distances_beyond_the_table_share_its_ends() -> None:
    rows = rows_of(np.array([-9, -4, -3, 0, 3, 4, 9]), config_of(most_relative=4))
    assert rows.tolist() == [0, 0, 1, 4, 7, 7, 7]


def test_small_distances_have_rows_of_their_own_and_large_ones_share_them_by_logarithm() -> None:
    rows = rows_of(np.arange(-512, 513), config_of(most_relative=512, buckets=256))
    at = dict(zip(range(-512, 513), rows.tolist(), strict=True))
    assert [at[d] for d in range(-128, 129)] == list(range(128, 385))
    assert (at[511], at[512], at[-511]) == (511, 511, 1)
    assert (np.diff(rows) >= 0).all()
    expected = 256 + 128 + int(np.ceil(np.log(200 / 128) / np.log(511 / 128) * 127))
    assert at[200] == expected
    assert at[-200] == 512 - expected


def test_neighbours_of_other_texts_are_zeros() -> None:
    x = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    spans = [Span(0, 3, 3, 3, (0,)), Span(3, 4, 1, 1, (1,)), Span(4, 5, 1, 1, (2,))]
    rows = unfold(x, 3, spans, np.full((5, 6), np.nan, np.float32))
    assert rows.tolist() == [
        [0, 0, 1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
        [3, 4, 5, 6, 0, 0],
        [0, 0, 7, 8, 0, 0],
        [0, 0, 9, 10, 0, 0],
    ]
    assert unfold_cost(5, 2, 3)[:3] == (0, 40, 120)
