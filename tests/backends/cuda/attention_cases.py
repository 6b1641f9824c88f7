"""Cases of the attention kernels: a ragged batch with a cache whose every unused number is NaN, and the reference."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda.attention import (
    Trees,
    Workspace,
    attend,
    partials_size,
)
from minillm.backends.cuda.batches import fill_tree, tree_words
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels
from minillm.batch import Span, ancestors
from minillm.reference.attention import AttentionSpec

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PADDED = (0, 0)  # a sequence that only fills up a bucket

Lengths = list[tuple[int, int]]  # cached positions and new tokens of each sequence


class Case:
    """A ragged batch on the device, its queries inside a fused Q/K/V projection, and shuffled pages."""

    def __init__(
        self,
        storage: str,
        lengths: Lengths,
        *,
        H: int = 2,
        K: int = 2,
        D: int = 64,
        P: int = 16,
        rows: int = 0,
        window: int | None = None,
        biased: bool = False,
        softcap: float | None = None,
        sunk: bool = False,
        V: int | None = None,
        parents: Mapping[int, Sequence[int]] = MappingProxyType({}),
        most: int | None = None,
        causal: bool = True,
        beyond: Mapping[int, int] = MappingProxyType({}),
        queries: Mapping[int, int] | None = None,
    ) -> None:
        """Masks by name; slopes, sinks and the bias of distances up to `most` are made up.

        `rows`: rows of each padded sequence. `V`: values are the last V numbers of the keys. `parents`: of the nodes of
        trees that sequences end in. `beyond`: as of `Span`, of some sequences. `queries`: of each sequence, whose
        context is then a source.
        """
        rng = np.random.default_rng(len(lengths) + D + P)
        self.window, self.softcap, self.causal, self.cross = window, softcap, causal, queries is not None
        self.bias = None if most is None else rng.standard_normal((H, 2 * most + 1)).astype(np.float32)
        self.slopes = np.geomspace(0.5, 0.02, H).astype(np.float32) if biased else None
        self.sinks = np.linspace(3, -1, H).astype(np.float32) if sunk else None
        self.storage, self.scale = storage, D**-0.5
        dtype = STORAGE[storage]
        counts = [new if cached + new else rows for cached, new in lengths]
        if queries is not None:
            counts = [queries[n] for n in range(len(lengths))]
        needed = [-(-(cached + new) // P) for cached, new in lengths]
        pages = sum(needed) + 1  # the last belongs to nobody
        T, N, B = sum(counts), len(lengths), max(needed) + 1
        shuffled = rng.permutation(pages - 1).tolist()
        self.keys, self.values = np.full((2, pages, K, P, D), np.nan, dtype)
        if V is not None:
            self.values = self.keys[..., D - V :]
        self.cache = self.keys, self.values
        self.query_starts = np.cumsum([0, *counts], dtype=np.int32)
        self.context_lens = np.asarray([cached + new for cached, new in lengths], np.int32)
        self.block_table = np.full((N, B), pages - 1, np.int32)
        self.spans = []
        for n, (S, count) in enumerate(zip(self.context_lens.tolist(), needed, strict=True)):
            own = [shuffled.pop() for _ in range(count)]
            self.block_table[n, :count] = own
            tree = ancestors(parents[n]) if n in parents else None
            start, stop = self.query_starts[n : n + 2].tolist()
            self.spans.append(Span(start, stop, S, S, tuple(own), tree, beyond.get(n, 0)))
            for position in range(S):
                place = own[position // P], slice(None), position % P
                self.keys[place], own_values = rng.standard_normal((2, K, D)).astype(dtype)
                if V is None:
                    self.values[place] = own_values
        fused = (2 * rng.standard_normal((T, (H + 2 * K) * D))).astype(dtype)
        self.q = fused[:, : H * D].reshape(T, H, D)
        assert T < 2 or not self.q.flags.c_contiguous
        self.positions = np.concatenate([span.positions() for span in self.spans]).astype(np.int32)
        self.trees = self._trees() if parents else None

    def _trees(self) -> Trees:
        """With bits set wherever none may be read."""
        words = tree_words(self.spans)
        seen = np.full((len(self.q), words), 0xFFFFFFFF, np.uint32)
        for span in self.spans:
            if span.tree is not None:
                fill_tree(seen[span.start : span.stop], span.tree)
        sizes = np.array([0 if span.tree is None else len(span.tree) for span in self.spans], np.int32)
        return Trees(seen, sizes)

    @property
    def spec(self) -> AttentionSpec:
        terms: Any = {"slopes": self.slopes, "softcap": self.softcap, "sinks": self.sinks, "bias": self.bias}
        return AttentionSpec(self.scale, window=self.window, causal=self.causal, cross=self.cross, **terms)

    def run(
        self, emulator: Emulator, max_queries: int | None = None, arrived: int = 0, singles: int = 0, **options: bool
    ) -> np.ndarray:
        """`arrived`: as many blocks have already arrived everywhere, as none but a wrong launch leaves it."""
        (T, H, _), V = self.q.shape, self.values.shape[3]
        N, B = self.block_table.shape
        out = np.full((T, H, V), np.nan, self.q.dtype)
        positions = B * self.keys.shape[2]
        size = partials_size(N, H, V, min(positions, self.window or positions))
        self.workspace = workspace = Workspace(np.full(size, np.nan, np.float32), np.full(N * H, arrived, np.int32))
        kernels = Kernels(emulator, self.storage, **options)
        most = int(np.diff(self.query_starts).max()) if max_queries is None else max_queries
        more: Any = {"max_queries": most, "singles": singles, "positions": self.positions, "trees": self.trees}
        attend(kernels, self.q, *self.cache, self, out, workspace, self.spec, **more)
        assert (workspace.arrived == arrived).all()
        return out

    def exact(self) -> np.ndarray:
        """`reference.attend` in float64; zeros for padded sequences."""
        out = np.zeros((*self.q.shape[:2], self.values.shape[3]))
        cache = self.keys.astype(np.float64), self.values.astype(np.float64)
        batch = SimpleNamespace(spans=[span for span in self.spans if span.context_len])
        return reference.attend(self.q.astype(np.float64), *cache, batch, self.spec, np, out)

    def plain(self) -> np.ndarray:
        """The formula as it stands: float32, each sum taken term by term, the result stored in the storage type."""
        out = np.zeros((*self.q.shape[:2], self.values.shape[3]), np.float32)
        for span in self.spans:
            S, count, pages = span.context_len, span.stop - span.start, list(span.pages)
            back = span.positions()[:, None] - span.key_positions()  # steps from a query back to a key
            later = np.arange(S) > S - count + np.arange(count)[:, None]
            distance = back if self.causal else np.abs(back)
            hidden = (later & self.causal) | (distance >= (self.window or S + count))
            if span.tree is not None:
                m = len(span.tree)
                hidden[-m:, -m:] |= ~span.tree
            for h in range(self.q.shape[1] if S else 0):
                k = h * self.keys.shape[1] // self.q.shape[1]
                key, value = (a[pages, k].reshape(-1, a.shape[-1])[:S].astype(np.float32) for a in self.cache)
                scores = _sum_of_products(self.q[span.start : span.stop, h].astype(np.float32), key.T)
                scores *= np.float32(self.scale)
                if self.softcap is not None:
                    scores = np.float32(self.softcap) * np.tanh(scores / np.float32(self.softcap))
                if self.bias is not None:
                    M = self.bias.shape[1] // 2
                    scores += self.bias[h, M + np.clip(-back, -M, M)]
                if self.slopes is not None:
                    scores -= self.slopes[h] * distance.astype(np.float32)
                scores = np.where(hidden, -np.inf, scores)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                total = _sum_of_products(weights, np.ones((S, 1), np.float32))
                if self.sinks is not None:
                    total += np.exp(self.sinks[h] - scores.max(axis=1, keepdims=True))
                out[span.start : span.stop, h] = _sum_of_products(weights, value) / total
        return out.astype(self.q.dtype)

    def check(self, out: np.ndarray) -> None:
        """At most twice as far from float64 as the plain computation; a single number, which is chance, four times."""
        exact, plain = self.exact(), self.plain()
        assert np.isfinite(out.astype(np.float64)).all()
        ours, theirs = np.abs(out - exact), np.abs(plain - exact)
        assert (ours**2).mean() <= 2**2 * (theirs**2).mean()
        assert ours.max() <= 4 * theirs.max()
        for span in self.spans:
            if span.context_len == 0:
                assert (out[span.start : span.stop] == 0).all()


def _sum_of_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, one term after the other."""
    result = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for i in range(a.shape[1]):
        result += a[:, i, None] * b[i]
    return result
