"""Attention kernels, against a plain masked softmax in float64."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="these kernels are compiled by Numba")

from minillm import reference
from minillm.backends.formats import CACHE_FORMATS
from minillm.backends.numba.attention import MOST_ROWS, Attention, _Plan, chunks_in_reach, store_kv
from minillm.backends.numba.attention_rows import CHUNK
from minillm.backends.numba.attention_tiles import BLOCK, LANES
from minillm.backends.numba.compiling import num_threads, set_threads
from minillm.backends.numba.elementary import with_whole_rows
from minillm.backends.pages import StoredVectors
from minillm.batch import Batch, Span, TokenSequence

TREE = (-1, 0, 0, 2, 1, -1, 5, 6, 3)
LENGTHS = {  # cached positions and new tokens of each sequence
    "decode": [(20, 1), (0, 1), (CHUNK - 1, 1), (2 * CHUNK + 3, 1)],
    "prefill": [(0, LANES + 3), (BLOCK - 1, 2 * BLOCK), (0, 7)],
    "mixed": [(5, 1), (0, 30), (31, 2), (70, 9), (3, MOST_ROWS)],
}


class Case:
    """A ragged batch, queries, keys and values, and a cache of shuffled pages that holds what came before."""

    def __init__(
        self, lengths: list[tuple[int, int]], H: int = 4, K: int = 2, D: int = 20, P: int = 48,
        dtype: str = "float32", tree: tuple[int, ...] = (), seed: int = 0, *, window: int | None = None,
        biased: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        slopes = rng.uniform(0.01, 0.5, H).astype(np.float32) if biased else None
        self.looks: dict[str, Any] = {"window": window, "slopes": slopes}
        contexts = [cached + new for cached, new in lengths]
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
            pages.data[...] = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": 99}[dtype]
            if pages.scales is not None:
                pages.scales[...] = np.nan
            for span, (cached, _) in zip(self.batch.spans, lengths, strict=True):
                for i in range(cached):
                    pages[span.pages[i // P], :, i % P] = rng.standard_normal((K, D)).astype(np.float32)
        store_kv(self.k, self.v, self.keys, self.values, self.batch)

    def attend(self, scale: float = 0.4) -> np.ndarray:
        out = np.full_like(self.q, np.nan)
        return Attention().attend(self.q, self.keys, self.values, self.batch, scale, out, **self.looks)

    def plain(self, scale: float = 0.4) -> np.ndarray:
        """What the reference operation makes of the same stored numbers."""
        out = np.full_like(self.q, np.nan)
        return reference.attend(self.q, self.keys, self.values, self.batch, scale, np, out, **self.looks)

    def expected(self, scale: float = 0.4) -> np.ndarray:
        """The same in float64, one query and head at a time."""
        result = np.empty(self.q.shape)
        group = self.q.shape[1] // self.keys.shape[1]
        for span in self.batch.spans:
            k, v = (np.concatenate([pages[p] for p in span.pages], axis=1) for pages in (self.keys, self.values))
            m = 0 if span.tree is None else len(span.tree)
            places = positions_of(span)  # [S]
            for row in range(span.start, span.stop):
                S = span.context_len - span.stop + row + 1
                seen = np.ones(S, bool)
                branch = row - (span.stop - m)
                if branch >= 0:
                    seen[span.context_len - m :] = span.tree[branch, : branch + 1]
                back = places[S - 1] - places[:S]
                if self.looks["window"] is not None:
                    seen &= back < self.looks["window"]
                for h in range(self.q.shape[1]):
                    scores = k[h // group, :S][seen].astype(np.float64) @ self.q[row, h].astype(np.float64) * scale
                    if self.looks["slopes"] is not None:
                        scores -= np.float64(self.looks["slopes"][h]) * back[seen]
                    weights = np.exp(scores - scores.max())
                    result[row, h] = weights @ v[h // group, :S][seen].astype(np.float64) / weights.sum()
        return result


def positions_of(span: Span) -> np.ndarray:
    """Of every cached token; one of a tree stands one behind the ancestor that has the most of its own. [S]"""
    m = 0 if span.tree is None else len(span.tree)
    line = span.context_len - m
    places = list(range(line))
    for i in range(m):
        above = [places[line + j] for j in range(i) if span.tree[i, j]]
        places.append(max(above, default=line - 1) + 1)
    return np.array(places)


def assert_as_good_as_plain(case: Case) -> None:
    """The error is at most twice the reference's, as the root of the mean square: the largest one is chance."""
    expected = case.expected()
    error, plain = (float(np.sqrt(np.square(x - expected).mean())) for x in (case.attend(), case.plain()))
    assert error <= 2 * plain, f"error {error:.1e}, the plain one's is {plain:.1e}"


@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("bfloat16", marks=pytest.mark.slow)])  # to compile
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attention_is_a_masked_softmax(lengths: list[tuple[int, int]], dtype: str) -> None:
    assert_as_good_as_plain(Case(lengths, dtype=dtype))


@pytest.mark.parametrize(("H", "K", "D"), [(4, 4, 64), (12, 1, 7), (5, 5, 1), (70, 1, 16)])
@pytest.mark.parametrize("P", [1, 5, 256])
def test_any_heads_widths_and_pages(H: int, K: int, D: int, P: int) -> None:
    assert_as_good_as_plain(Case([(9, 1), (0, 23), (60, 8)], H, K, D, P))


@pytest.mark.parametrize("lengths", [[(50, 9), (1, 9)], [(40, 12)], [(CHUNK - 5, 9), (CHUNK - 5, 40)]])
@pytest.mark.parametrize(("H", "K"), [(2, 2), (1, 1)])
def test_branches_of_a_tree_do_not_see_each_other(lengths: list[tuple[int, int]], H: int, K: int) -> None:
    assert_as_good_as_plain(Case(lengths, H, K, P=64, tree=TREE))


def test_a_small_tree_takes_the_kernel_for_few_rows() -> None:
    case = Case([(CHUNK - 3, 5)], 8, 8, P=64, tree=(-1, 0, 0, -1, 3))
    assert_as_good_as_plain(case)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])  # to compile
@pytest.mark.parametrize(
    "looks", [{"window": 1}, {"window": 13}, {"window": BLOCK + 1}, {"window": CHUNK}, {"biased": True}], ids=str
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_windows_and_slopes(lengths: list[tuple[int, int]], looks: dict[str, Any], dtype: str) -> None:
    assert_as_good_as_plain(Case(lengths, dtype=dtype, **looks))


@pytest.mark.parametrize("looks", [{"window": 2}, {"window": 30}, {"biased": True}], ids=str)
@pytest.mark.parametrize("lengths", [[(50, 9), (1, 9)], [(40, 12)], [(CHUNK - 5, 9), (CHUNK - 5, 40)]])
@pytest.mark.parametrize(("H", "K"), [(4, 2), (1, 1)])
def test_a_tree_looks_back_from_its_own_positions(
    lengths: list[tuple[int, int]], H: int, K: int, looks: dict[str, Any]
) -> None:
    assert_as_good_as_plain(Case(lengths, H, K, P=64, tree=TREE, **looks))
    assert_as_good_as_plain(Case([(CHUNK - 3, 5)], 8, 8, P=64, tree=(-1, 0, 0, -1, 3), **looks))


@pytest.mark.slow  # compiles kernels that no family asks for
def test_windows_and_slopes_together() -> None:
    assert_as_good_as_plain(Case(LENGTHS["mixed"] + LENGTHS["decode"], window=20, biased=True))


@pytest.mark.parametrize("new", [1, 3, 40])
@pytest.mark.parametrize("window", [7, CHUNK])
def test_pages_before_the_window_are_not_touched(new: int, window: int) -> None:
    """Their pages do not exist any more, and the kernel would fail or give NaN."""
    P = 16
    case = Case([(3 * CHUNK, new)], P=P, window=window)
    expected, (span,) = case.attend(), case.batch.spans
    begin = 3 * CHUNK - window + 1
    gone = begin // BLOCK * BLOCK // P if new == 40 else begin // P  # tiles begin at whole blocks
    for page in span.pages[:gone]:
        case.keys.data[page] = case.values.data[page] = np.nan
    if new != 40:
        page, inside = span.pages[gone], begin % P
        case.keys.data[page, :, :inside] = case.values.data[page, :, :inside] = np.nan
    np.testing.assert_array_equal(case.attend(), expected)
    assert np.isfinite(expected).all()


def test_a_window_takes_as_many_chunks_as_it_reaches() -> None:
    def span(cached: int, new: int) -> Span:
        return Span(0, new, cached + new, cached + new, ())

    last = 128 * CHUNK - 1
    assert chunks_in_reach(span(last, 1), None) == range(128)
    assert chunks_in_reach(span(last, 1), 16 * CHUNK) == range(112, 128)
    assert chunks_in_reach(span(last, 1), 16 * CHUNK + 1) == range(111, 128)
    assert chunks_in_reach(span(last - 3, 4), 16 * CHUNK) == range(111, 128)
    assert chunks_in_reach(span(5, 1), 16 * CHUNK) == range(1)


def test_layers_with_and_without_a_window_take_turns() -> None:
    case, shared = Case(LENGTHS["mixed"] + LENGTHS["decode"]), Attention()
    for window in (9, None, 40, 9, None):
        out = shared.attend(
            case.q, case.keys, case.values, case.batch, 0.4, np.full_like(case.q, np.nan), window=window
        )
        case.looks["window"] = window
        np.testing.assert_array_equal(out, case.attend())


def test_an_empty_batch_is_no_work() -> None:
    case = Case([(3, 1)])
    empty = Batch.of([TokenSequence([0, 0], 2, [0])], [0], 48)
    out = Attention().attend(
        case.q[:0], case.keys, case.values, empty, 1.0, np.empty((0, *case.q.shape[1:]), np.float32)
    )
    assert out.shape == (0, 4, 20)


def test_a_batch_changes_no_bit() -> None:
    lengths = [(CHUNK + 9, 1), (3, 1), (700, 1), (0, 90), (20, 40)]
    case = Case(lengths, P=64)
    together = case.attend()
    for span, (cached, new) in zip(case.batch.spans, lengths, strict=True):
        alone = Batch.of([TokenSequence([0] * (cached + new), cached, list(span.pages))], [new], 64)
        q = case.q[span.start : span.stop]
        out = Attention().attend(q, case.keys, case.values, alone, 0.4, np.empty(q.shape, np.float32))
        np.testing.assert_array_equal(out, together[span.start : span.stop])


def test_the_number_of_threads_changes_no_bit() -> None:

    case = Case(LENGTHS["mixed"] + LENGTHS["decode"])
    before = num_threads()
    several = case.attend()
    try:
        set_threads(1)
        np.testing.assert_array_equal(case.attend(), several)
    finally:
        set_threads(before)


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(new: int, bad: float) -> None:
    case = Case([(30, new)], 2, 2, P=64)
    page = case.batch.spans[0].pages[0]
    case.values[page, 0, 3] = np.full(20, bad, np.float32)
    case.keys[page, 1, 4] = np.full(20, np.nan, np.float32)
    out = case.attend()
    assert not np.isfinite(out[-1]).any()


@pytest.mark.parametrize("new", [1, 40])
def test_scores_of_any_size_do_not_overflow(new: int) -> None:
    case = Case([(CHUNK, new)], 2, 2)
    out = case.attend(1e4)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, case.expected(1e4), rtol=1e-3, atol=1e-3)


def test_rows_that_are_not_contiguous_are_copied() -> None:
    x = np.zeros((3, 4, 8), np.float32)
    assert with_whole_rows(x[:, :2]) is not None and np.shares_memory(with_whole_rows(x[:, :2]), x)
    assert np.shares_memory(with_whole_rows(x[::2]), x)
    assert not np.shares_memory(with_whole_rows(x[:, :, :4]), x)
    assert not np.shares_memory(with_whole_rows(x.swapaxes(1, 2)), x)


def test_a_plan_has_room_for_what_its_pieces_leave() -> None:
    """More pieces of the sequence that brings more rows: no other array of the plan needs to grow."""
    plan = _Plan(4, 8, 2, None)
    for lengths, slots in [((3 * CHUNK, CHUNK), 3 + 4), ((CHUNK, 5 * CHUNK), 1 + 5 * 4)]:
        spans = (Span(0, 1, lengths[0], lengths[0], (0,) * 5), Span(1, 5, lengths[1], lengths[1], (0,) * 5))
        batch: Any = SimpleNamespace(spans=spans, num_tokens=5, positions=np.zeros(5, np.int64))
        plan.fill(batch)
        assert len(plan._parts) >= slots * 4
        assert plan.state[16] == plan._parts.ctypes.data and plan.state[17] == len(plan._parts)
