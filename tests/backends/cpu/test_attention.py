"""Storing in the paged cache and attention over it, against a plain masked softmax in float64."""

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cpu import compiling
from minillm.backends.formats import CACHE_FORMATS
from minillm.backends.stored_vectors import StoredVectors
from minillm.batch import Batch, Span, TokenSequence
from minillm.reference.attention import AttentionSpec

from . import kernels
from .kernels import fill, integer, loaded, run

BLOCK, TILE, FEW, STRIP = 256, 48, 16, 64
DISTANCES = 30
"""From here on all have the same bias."""
TREE = (-1, 0, 0, 2, 1, -1, 5, 6, 3)
LENGTHS = {  # cached positions and new tokens of each sequence
    "decode": [(20, 1), (0, 1), (BLOCK - 1, 1), (2 * BLOCK + 3, 1)],
    "prefill": [(0, TILE + 3), (STRIP - 1, 2 * STRIP), (0, 7)],
    "long": [(BLOCK - 7, 40), (2 * BLOCK, 9)],
    "mixed": [(5, 1), (0, 30), (31, 2), (70, 9), (3, FEW), (300, 3)],
}
SOON = [pytest.param(LENGTHS[n], marks=[] if n == "mixed" else [pytest.mark.slow], id=n) for n in LENGTHS]
"""The mixed batch has each kind of sequence, but for several blocks of keys."""


def store_kv(k: Any, v: Any, keys: StoredVectors, values: StoredVectors, batch: Batch, shares: int = 1) -> None:
    _, K, P, D = keys.shape
    arguments = fill(
        kernels.StoreKVArguments, k=k, v=v, keys=keys.data, values=values.data, key_scales=keys.scales,
        value_scales=values.scales, slot_pages=batch.slot_pages, slot_offsets=batch.slot_offsets, T=len(k), K=K, P=P,
        D=D, V=D, k_stride=k.strides[0] // 4, v_stride=v.strides[0] // 4, format=format_of(keys),
    )  # fmt: skip
    run("store_kv", arguments, shares)


def format_of(stored: StoredVectors) -> int:
    return kernels.FORMATS[
        {"float32": "float32", "uint16": "bfloat16", "int8": "int8", "uint8": "int4"}[stored.data.dtype.name]
    ]


def attend(
    q: Any, keys: StoredVectors, values: StoredVectors, batch: Batch, scale: float, *, window: int | None = None,
    slopes: Any = None, causal: bool = True, softcap: float | None = None, bias: np.ndarray | None = None,
    sinks: np.ndarray | None = None, shares: int = 1, workers: int = 1,
) -> np.ndarray:  # fmt: skip
    _, H, D = q.shape
    _, K, P, _ = keys.shape
    spans, masks, seen = [], [np.zeros(0, np.bool_)], 0
    for span in batch.spans:
        m = 0 if span.tree is None else len(span.tree)
        spans.append((span.start, span.stop - span.start, span.context_len, m, seen))
        if span.tree is not None:
            masks.append(span.tree.reshape(-1))
            seen += m * m
    tables = np.full((len(spans), max((len(s.pages) for s in batch.spans), default=0)), -(10**9))
    for row, span in zip(tables, batch.spans, strict=True):
        row[: len(span.pages)] = span.pages
    lib, out, done = loaded(), np.full(q.shape, np.nan, np.float32), np.zeros((len(spans), K), np.int64)
    scratch = np.full((workers, lib.attention_scratch(integer(D))), np.nan, np.float32)
    arguments = fill(
        kernels.AttentionArguments, q=q, out=out, keys=keys.data, values=values.data, key_scales=keys.scales,
        value_scales=values.scales, slopes=slopes, spans=np.array(spans, np.int64).reshape(-1, 5), tables=tables,
        positions=batch.positions, seen=np.concatenate(masks), scratch=scratch, done=done, N=len(spans), H=H, K=K, P=P,
        D=D, V=D, stride=q.strides[0] // 4, out_stride=H * D, table_stride=tables.shape[1], format=format_of(keys),
        window=window or 0, scale=scale, causal=causal, cap=softcap or 0,
        bias=bias, distances=0 if bias is None else bias.shape[1] // 2, sinks=sinks,
    )  # fmt: skip
    parts = np.full(lib.attention_parts(kernels.ctypes.byref(arguments)), np.nan, np.float32)
    arguments.parts = parts.ctypes.data
    arguments.kept.append(parts)
    run("attention", arguments, shares, workers)
    assert not done.any()
    return out


class Case:
    """A ragged batch, queries, keys and values, and a cache of shuffled pages that holds what came before."""

    def __init__(
        self, lengths: list[tuple[int, int]], H: int = 4, K: int = 2, D: int = 20, P: int = 48,
        dtype: str = "float32", tree: tuple[int, ...] = (), seed: int = 0, *, window: int | None = None,
        sloped: bool = False, biased: bool = False, causal: bool = True, softcap: float | None = None,
        sunk: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        slopes = rng.uniform(0.01, 0.5, H).astype(np.float32) if sloped else None
        contexts = [cached + new for cached, new in lengths]
        bias = rng.standard_normal((H, 2 * DISTANCES + 1), np.float32) if biased else None
        self.looks: dict[str, Any] = {
            "window": window, "slopes": slopes, "causal": causal, "softcap": softcap, "bias": bias,
            "sinks": np.linspace(3, -3, H, dtype=np.float32) if sunk else None,
        }  # fmt: skip
        needed = [-(-S // P) for S in contexts]
        shuffled = rng.permutation(sum(needed)).tolist()
        sequences = [
            TokenSequence([0] * S, cached, tree=tree) for S, (cached, _) in zip(contexts, lengths, strict=True)
        ]
        for sequence, count in zip(sequences, needed, strict=True):
            sequence.pages = [shuffled.pop() for _ in range(count)]
        self.batch = Batch.of(sequences, [new for _, new in lengths], P)
        # Q, K and V are parts of one product, as in the model: their rows lie apart.
        qkv = rng.standard_normal((self.batch.num_tokens, (H + 2 * K) * D)).astype(np.float32)
        self.q, self.k, self.v = (
            part.reshape(len(part), -1, D) for part in np.split(qkv, [H * D, (H + K) * D], axis=1)
        )
        self.keys, self.values = (StoredVectors.empty((sum(needed), K, P, D), CACHE_FORMATS[dtype]) for _ in range(2))
        for pages in (self.keys, self.values):  # what nobody stored must not be read
            pages.data[...] = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": 99, "int4": 99}[dtype]
            if pages.scales is not None:
                pages.scales[...] = np.nan
            for span, (cached, _) in zip(self.batch.spans, lengths, strict=True):
                for i in range(cached):
                    pages[span.pages[i // P], :, i % P] = rng.standard_normal((K, D)).astype(np.float32)
        store_kv(self.k, self.v, self.keys, self.values, self.batch)

    def attend(self, scale: float = 0.4, **how: int) -> np.ndarray:
        return attend(self.q, self.keys, self.values, self.batch, scale, **self.looks, **how)

    def plain(self, scale: float = 0.4) -> np.ndarray:
        """The reference operation on the same stored numbers."""
        out = np.full_like(self.q, np.nan)
        spec = AttentionSpec(scale, **self.looks)
        return reference.attend(self.q, self.keys, self.values, self.batch, spec, np, out)

    def expected(self, scale: float = 0.4) -> np.ndarray:
        """The same in float64, one query and head at a time."""
        result = np.empty(self.q.shape)
        group = self.q.shape[1] // self.keys.shape[1]
        causal, window, slopes, cap, bias, sinks = (
            self.looks[name] for name in ("causal", "window", "slopes", "softcap", "bias", "sinks")
        )
        for span in self.batch.spans:
            k, v = (np.concatenate([pages[p] for p in span.pages], axis=1) for pages in (self.keys, self.values))
            m = 0 if span.tree is None else len(span.tree)
            places = positions_of(span)  # [S]
            for row in range(span.start, span.stop):
                own = span.context_len - span.stop + row
                S = own + 1 if causal else span.context_len
                seen = np.ones(S, bool)
                branch = row - (span.stop - m)
                if branch >= 0:
                    seen[span.context_len - m :] = span.tree[branch, : branch + 1]
                distances = np.clip(places[:S] - places[own], -DISTANCES, DISTANCES)
                back = np.abs(places[own] - places[:S])
                if window is not None:
                    seen &= back < window
                for h in range(self.q.shape[1]):
                    scores = k[h // group, :S][seen].astype(np.float64) @ self.q[row, h].astype(np.float64) * scale
                    if cap is not None:
                        scores = cap * np.tanh(scores / cap)
                    if bias is not None:
                        scores += bias[h, DISTANCES + distances][seen]
                    if slopes is not None:
                        scores -= np.float64(slopes[h]) * back[seen]
                    weights = np.exp(scores - scores.max())
                    total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - scores.max()))
                    result[row, h] = weights @ v[h // group, :S][seen].astype(np.float64) / total
        return result


def positions_of(span: Span) -> np.ndarray:
    """The position of each cached token; one of a tree stands one behind its deepest ancestor. [S]"""
    m = 0 if span.tree is None else len(span.tree)
    line = span.context_len - m
    places = list(range(line))
    for i in range(m):
        above = [places[line + j] for j in range(i) if span.tree[i, j]]
        places.append(max(above, default=line - 1) + 1)
    return np.array(places)


def assert_as_good_as_plain(case: Case) -> None:
    """The error is at most twice the reference's, as the root of the mean square: the largest one is chance.

    Or half a rounding of the values, which are near 1: sums of many, nearly equal weights have an order of their own.
    """
    expected = case.expected()
    error, plain = (float(np.sqrt(np.square(x - expected).mean())) for x in (case.attend(), case.plain()))
    assert error <= max(2 * plain, 2.0**-25), f"error {error:.1e}, the plain one's is {plain:.1e}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", CACHE_FORMATS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("D", [20, 64])
def test_attention_is_a_masked_softmax(lengths: list[tuple[int, int]], dtype: str, D: int) -> None:
    assert_as_good_as_plain(Case(lengths, D=D, dtype=dtype))


@pytest.mark.parametrize(
    ("H", "K", "D"),
    [
        (4, 4, 64),
        (12, 1, 7),
        *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((5, 5, 1), (70, 1, 16), (3, 1, 80), (8, 2, 128))),
    ],
)
@pytest.mark.parametrize("P", [5, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (1, 256))])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_any_heads_widths_and_pages(H: int, K: int, D: int, P: int, dtype: str) -> None:
    assert_as_good_as_plain(Case([(9, 1), (0, 23), (60, 8)], H, K, D, P, dtype))


@pytest.mark.parametrize("lengths", [[(50, 9), (1, 9)], [(40, 12)], [(BLOCK - 5, 9), (BLOCK - 5, 40)]])
@pytest.mark.parametrize(("H", "K"), [(2, 2), (1, 1)])
def test_branches_of_a_tree_do_not_see_each_other(lengths: list[tuple[int, int]], H: int, K: int) -> None:
    assert_as_good_as_plain(Case(lengths, H, K, P=64, tree=TREE))
    assert_as_good_as_plain(Case([(BLOCK - 3, 5)], 8, 8, P=64, tree=(-1, 0, 0, -1, 3)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize(
    "looks", [{"window": 1}, {"window": 13}, {"window": STRIP + 1}, {"window": BLOCK}, {"sloped": True}], ids=str
)
@pytest.mark.parametrize("lengths", SOON)
def test_windows_and_slopes(lengths: list[tuple[int, int]], looks: dict[str, Any], dtype: str) -> None:
    assert_as_good_as_plain(Case(lengths, dtype=dtype, **looks))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("looks", [{"window": 2}, {"window": 30}, {"sloped": True}], ids=str)
@pytest.mark.parametrize("lengths", [[(50, 9), (1, 9)], [(40, 12)], [(BLOCK - 5, 9), (BLOCK - 5, 40)]])
@pytest.mark.parametrize(("H", "K"), [(4, 2), (1, 1)])
def test_a_tree_looks_back_from_its_own_positions(
    lengths: list[tuple[int, int]], H: int, K: int, looks: dict[str, Any]
) -> None:
    assert_as_good_as_plain(Case(lengths, H, K, P=64, tree=TREE, **looks))
    assert_as_good_as_plain(Case([(BLOCK - 3, 5)], 8, 8, P=64, tree=(-1, 0, 0, -1, 3), **looks))


def test_windows_and_slopes_together() -> None:
    assert_as_good_as_plain(Case(LENGTHS["mixed"] + LENGTHS["decode"], window=20, sloped=True))


ALL_OF_THEM = {"window": 20, "sloped": True, "softcap": 0.5, "biased": True, "sunk": True}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize(
    "looks",
    [{"softcap": 0.7}, {"biased": True}, {"causal": False}, {"causal": False, "window": 13}, {"sunk": True},
     {"sunk": True, "window": 13}, ALL_OF_THEM, ALL_OF_THEM | {"causal": False}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("lengths", SOON)
def test_caps_biases_sinks_and_both_ways(lengths: list[tuple[int, int]], looks: dict[str, Any], dtype: str) -> None:
    """Gemma 2 bounds its scores, T5 adds a bias, gpt-oss has sinks, encoders see both ways."""
    assert_as_good_as_plain(Case(lengths, dtype=dtype, **looks))


def test_more_queries_than_keys_as_from_a_decoder_to_its_encoder() -> None:
    case = Case([(0, 90)], causal=False)
    (span,) = case.batch.spans
    batch = replace(case.batch, spans=(span._replace(context_len=30),))
    spec = AttentionSpec(0.4, **case.looks)
    expected = reference.attend(case.q, case.keys, case.values, batch, spec, np, np.empty_like(case.q))
    np.testing.assert_allclose(attend(case.q, case.keys, case.values, batch, 0.4, **case.looks), expected, atol=1e-5)


TANH = """
#include "activation.h"
void hyperbolic_tangents(const float *x, float *y, long n) {
    for (long i = 0; i < n; i += LANES) store(y + i, hyperbolic_tangent(load(x + i)));
}
"""


@pytest.mark.slow
def test_the_hyperbolic_tangent_is_within_one_and_a_half_ulp(tmp_path: Path) -> None:
    (tmp_path / "tanh.c").write_text(TANH)
    compiler = compiling.compilers()[0]
    assert compiler
    command = [*compiler, *compiling._flags(compiler), f"-I{compiling.SOURCES}", "-shared", "tanh.c", "-o", "tanh.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    x = np.concatenate([np.linspace(-12, 12, 300_000), np.geomspace(1e-38, 1, 99_988)]).astype(np.float32)
    x = np.append(x, np.float32([0, -0.0, 1e9, -1e9, np.inf, -np.inf, 1e-45, np.nan, 0.625, -0.625, 88.8, -89]))
    y = np.empty_like(x)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, y)]
    ctypes.CDLL(str(tmp_path / "tanh.so")).hyperbolic_tangents(*pointers, ctypes.c_long(len(x)))
    expected = np.tanh(x.astype(np.float64))
    ulp = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    assert np.nanmax(np.abs(y - expected) / ulp) < 1.5
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    np.testing.assert_array_equal(np.signbit(y), np.signbit(x))


@pytest.mark.parametrize("new", [1, 3, 40])
@pytest.mark.parametrize("window", [7, BLOCK])
def test_pages_before_the_window_are_not_touched(new: int, window: int) -> None:
    """Their pages do not exist any more, and the kernel would fail or give NaN."""
    P = 16
    case = Case([(3 * BLOCK, new)], P=P, window=window)
    expected, (span,) = case.attend(), case.batch.spans
    begin = 3 * BLOCK - window + 1
    for page in span.pages[: begin // P]:
        case.keys.data[page] = case.values.data[page] = np.nan
    page, inside = span.pages[begin // P], begin % P
    case.keys.data[page, :, :inside] = case.values.data[page, :, :inside] = np.nan
    np.testing.assert_array_equal(case.attend(), expected)
    assert np.isfinite(expected).all()


def test_no_tokens_are_no_work() -> None:
    case = Case([(3, 1)])
    empty = Batch.of([TokenSequence([0, 0], 2, [0])], [0], 48)
    assert attend(case.q[:0], case.keys, case.values, empty, 1.0).shape == (0, 4, 20)
    none = Batch.of([], [], 48)
    assert attend(case.q[:0], case.keys, case.values, none, 1.0, shares=3).shape == (0, 4, 20)


@pytest.mark.parametrize("dtype", CACHE_FORMATS)
def test_a_batch_changes_no_bit(dtype: str) -> None:
    lengths = [(BLOCK + 9, 1), (3, 1), (700, 1), (0, 90), (20, 40)]
    case = Case(lengths, P=64, dtype=dtype)
    together = case.attend()
    for span, (cached, new) in zip(case.batch.spans, lengths, strict=True):
        alone = Batch.of([TokenSequence([0] * (cached + new), cached, list(span.pages))], [new], 64)
        out = attend(case.q[span.start : span.stop], case.keys, case.values, alone, 0.4)
        np.testing.assert_array_equal(out, together[span.start : span.stop])


@pytest.mark.parametrize("looks", [{}, {"window": 100}, {"sloped": True}, {"softcap": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", CACHE_FORMATS)
@pytest.mark.parametrize(
    ("H", "K", "D"), [(4, 2, 20), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((3, 3, 64), (8, 1, 80)))]
)
def test_a_query_alone_has_the_bits_of_a_prefill(H: int, K: int, D: int, dtype: str, looks: dict[str, Any]) -> None:
    """Decoded one by one, and in guesses of any number, over more than one block."""
    S, P = 2 * BLOCK + 70, 64
    case = Case([(0, S)], H, K, D, P, dtype, **looks)
    prefill, pages = case.attend(), list(case.batch.spans[0].pages)
    for first, count in [(0, 1), (5, 1), (63, 1), (BLOCK - 1, 1), (BLOCK, 1), (S - 1, 1), (200, 3), (BLOCK - 2, 5),
                         (S - 30, 30), (2 * BLOCK - 3, 4)]:  # fmt: skip
        batch = Batch.of([TokenSequence([0] * (first + count), first, pages)], [count], P)
        rows = slice(first, first + count)
        out = attend(case.q[rows], case.keys, case.values, batch, 0.4, **case.looks)
        np.testing.assert_array_equal(out, prefill[rows], f"queries {first} : {first + count}")


@pytest.mark.longer
@pytest.mark.parametrize("dtype", CACHE_FORMATS)
def test_the_number_of_threads_and_shares_changes_no_bit(dtype: str) -> None:
    case = Case(LENGTHS["mixed"] + LENGTHS["decode"], dtype=dtype)
    alone = case.attend()
    for shares, workers in [(4, 2), (7, 3), (40, 2), (1000, 4)]:
        np.testing.assert_array_equal(case.attend(shares=shares, workers=workers), alone)


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(new: int, bad: float) -> None:
    case = Case([(30, new)], 2, 2, P=64)
    page = case.batch.spans[0].pages[0]
    case.values[page, 0, 3] = np.full(20, bad, np.float32)
    case.keys[page, 1, 4] = np.full(20, np.nan, np.float32)
    assert not np.isfinite(case.attend()[-1]).any()


@pytest.mark.parametrize("new", [1, 40])
def test_keys_that_are_all_nan_give_nan(new: int) -> None:
    case = Case([(2 * BLOCK, new)], 2, 2, P=64)
    case.keys[:] = np.full(case.keys.shape, np.nan, np.float32)
    assert np.isnan(case.attend()).all()


@pytest.mark.parametrize("new", [1, 40])
def test_scores_of_any_size_do_not_overflow(new: int) -> None:
    case = Case([(BLOCK, new)], 2, 2)
    out = case.attend(1e4)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, case.expected(1e4), rtol=1e-3, atol=1e-3)


# --- storing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CACHE_FORMATS)
@pytest.mark.parametrize("D", [19, 64, 4, 1])
def test_the_kernel_stores_what_numpy_rounds_to(dtype: str, D: int) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((5, 3, D)) * 10.0 ** rng.integers(-6, 6, (2, 5, 3, 1))).astype(np.float32)
    k[1, 2], k[1, 1], k[2, 0, D // 4], v[3, 1, 0] = 0, 1e-40, np.nan, np.inf
    v[0, 0] = np.float32(127) * np.resize([1, 0.5 / 127, 1.5 / 127, -2.5 / 127, -1], D)  # ties
    ours, plain = ([StoredVectors.empty((3, 3, 4, D), CACHE_FORMATS[dtype]) for _ in range(2)] for _ in range(2))
    for pages in (*ours, *plain):
        pages.data[...] = 7
        if pages.scales is not None:
            pages.scales[...] = 7
    batch = Batch.of([TokenSequence([0] * 9, 4, [1, 2, 0])], [5], 4)
    store_kv(k, v, *ours, batch, shares=3)
    reference.store_kv(k, v, *plain, batch)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a.data, b.data)
        np.testing.assert_array_equal(a.scales, b.scales)
