"""The kernels in the sizes of real models, for `gpu.py`: each against float32 by the array module there.

The tests' tiny shapes have no tile of 128 x 256, no second wave of blocks and no context of thousands. What is compared
is the largest difference from a sum in float32, over the size of the numbers, beside what rounding allows.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from gpu_figures import Figure, Sizes
from gpu_kernels import LOGITS_STD, PAGE, Bench, Clock, NormedHeads

from minillm.backends.cuda import attention, linear, rows, sampling
from minillm.backends.cuda.attention import Trees
from minillm.backends.cuda.batches import fill_tree, tree_words
from minillm.backends.cuda.deferring import defer
from minillm.backends.cuda.fusing import HEADS_ROWS, fuse
from minillm.backends.cuda.integers import IntegerShape, interleave
from minillm.backends.cuda.linear import Product, Products
from minillm.backends.cuda.memory import StepScratch
from minillm.backends.cuda.random import fill_bits
from minillm.backends.weights import Weight
from minillm.batch import Span, ancestors
from minillm.models import published_config
from minillm.models.opt import NORM_EPSILON
from minillm.reference.attention import AttentionSpec
from minillm.reference.quantize import Quantized, dequantize
from minillm.reference.rotary import Rotation

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding"""
ROUNDINGS = 4
"""Roundings that a result may be off by: its own, one of a part of it, and as much again"""
RIGHT, WRONG = "right", "WRONG"
KINDS = {
    "int8": (8, 32, 0), "int4": (4, 32, 0), "int8 by 16": (8, 16, 0), "int8 and offsets": (8, 32, 16),
    "int4 and zero points": (4, 64, 8), "int4 and offsets": (4, 32, 16),
}  # fmt: skip
"""Bits, group and bits of offsets of matrices of few bits"""
EVERYWHERE = "int8", "int4"
"""Kinds that are compared in all numbers of rows"""


def verify(sizes: Sizes, shapes: list[str]) -> Iterator[Figure]:
    """Compare every kernel of a forward pass in the sizes of each shape, in both types of 16 bits."""
    for storage in ROUNDING:
        clock = Clock(sizes, storage)
        yield Figure("verify", "", f"a planted error, {storage}", note=_planted(clock, storage))
        for shape in shapes:
            check = Check(Bench(clock, published_config(shape)), storage)
            integers = [check.integers] if storage == "float16" else []  # whose builds are enough of one type
            products, others = (check.products, check.deferred), (check.rows, check.heads, check.choosing)
            for compare in (*products, check.attention, check.masks, *others, *integers):
                try:
                    for figure in compare():
                        yield figure._replace(part="verify", shape=shape, what=f"{figure.what}, {storage}")
                except Exception as error:  # a kernel that fails must not end the others
                    note = f"{WRONG}, failed: {type(error).__name__}: {str(error)[:200]}"
                    yield Figure("verify", shape, f"{compare.__name__}, {storage}", note=note)


def _tma_shape(T: int, outputs: int) -> linear.TmaShape:
    """Wide tiles for clusters that share W, narrow ones for those that share x: two builds have all code."""
    if T > linear.SPLIT_ROWS:
        return linear.TmaShape(256, 0, -(-T // 256) * -(-outputs // 256))
    return linear.TmaShape(128, 1, -(-outputs // 256))


def _planted(clock: Clock, storage: str) -> str:
    """Whether one wrong number among many is seen."""
    xp = clock.xp
    good = xp.asarray(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    bad = good.copy()
    bad[17, 3] += 0.1
    seen = judged(xp, bad, good, storage).startswith(WRONG) and judged(xp, good, good, storage).startswith(RIGHT)
    return f"{RIGHT}: it is seen" if seen else f"{WRONG}: it is not seen"


def judged(xp: Any, result: Any, expected: Any, storage: str) -> str:
    """The verdict on a result: "right", or "WRONG", and its largest error in roundings.

    A number's error is measured against its size plus the root mean square of all, since sums cancel.
    """
    values, truth = result.astype(np.float32), expected.astype(np.float32)
    size = float(xp.sqrt((truth * truth).mean()))
    error = float((xp.abs(values - truth) / (xp.abs(truth) + size)).max()) / ROUNDING[storage]
    verdict = RIGHT if error <= ROUNDINGS else WRONG  # of NaN nothing is less
    return f"{verdict}: at most {error:.2f} roundings of {ROUNDINGS}"


class Check:
    """The kernels of one shape."""

    def __init__(self, bench: Bench, storage: str) -> None:
        self.bench, self.storage = bench, storage
        self.clock, self.kernels, self.xp, self.sizes = bench.clock, bench.kernels, bench.xp, bench.sizes
        self.scratch = StepScratch(self.clock.device, np.dtype(bench.dtype))
        self.engines = Products(self.kernels, self.clock.device.multiply, self._empty)

    def _empty(self, numbers: int) -> Any:
        return self.xp.empty(numbers, self.bench.dtype)

    def _figure(self, what: str, result: Any, expected: Any) -> Figure:
        return Figure("", "", what, note=judged(self.xp, result, expected, self.storage))

    def products(self) -> Iterator[Figure]:
        """Each projection, by the kernel that the engine takes for so many rows; and ours where it is the library."""
        for name, weight in self.bench.linears.items():
            outputs, inputs = weight.shape
            matrix = self.bench.normal(outputs, inputs)
            truth = matrix.astype(np.float32)
            for T in self.sizes.checked_rows:
                x, residual = self.bench.normal(T, inputs, std=1.0), self.bench.normal(T, outputs, std=1.0)
                expected = self.xp.matmul(x.astype(np.float32), truth.T) + residual.astype(np.float32)
                out = self.xp.empty((T, outputs), self.bench.dtype)
                product = Product(x, matrix, None, out, None, residual, self.scratch.splits)
                self.engines.linear(product)
                yield self._figure(f"{name}, {T} rows", out, expected)
                if linear.LIBRARY_ROWS[self.storage] <= T:
                    out[...] = np.nan
                    linear.linear(self.kernels, product)
                    yield self._figure(f"{name}, {T} rows, ours", out, expected)
                out[...] = np.nan
                fed = linear.MOST_ROWS[self.storage] < T and self.kernels.has("gemm_tma")
                if fed and linear.gemm_tma(self.kernels, product, self.clock.maps, _tma_shape(T, outputs)):
                    yield self._figure(f"{name}, {T} rows, by gemm_tma", out, expected)

    def deferred(self) -> Iterator[Figure]:
        """Products that take on the norm before them: alone, with a gate, and with rotation and store after them."""
        for name, T, after in (("qkv", 1, ""), ("up", 4, ""), ("up", 1, "gate"), ("qkv", 4, "store")):
            heads = NormedHeads(self.bench, T)
            outputs, inputs = self.bench.linears[name].shape
            if after:  # of a gated MLP both halves; of attention all heads
                outputs = 2 * self.bench.config.intermediate_size if after == "gate" else heads.qkv[0].size
            x, matrix = self.bench.normal(T, inputs, std=1.0), self.bench.normal(outputs, inputs)
            gain = self.xp.asarray(np.linspace(0.5, 1.5, inputs, dtype=np.float32))
            out = heads.qkv.reshape(T, -1) if after == "store" else self.xp.empty((T, outputs), self.bench.dtype)
            gated = self.xp.empty((T, outputs // 2), self.bench.dtype)
            found = {"": out, "gate": gated, "store": heads.q}[after]
            self._with_norm(x, gain, matrix, out, gated, heads, after)
            truth = x.astype(np.float32)
            scale = self.xp.sqrt((truth * truth).mean(axis=-1, keepdims=True) + np.float32(1e-5))
            expected = self.xp.matmul(truth / scale * gain, matrix.astype(np.float32).T)
            if after == "gate":
                gate, up = expected[:, : outputs // 2], expected[:, outputs // 2 :]
                expected = gate / (1 + self.xp.exp(-gate)) * up
            elif after == "store":
                angles = heads.positions[:, None].astype(np.float64) * heads.rotation.frequencies.data[None]
                expected = self._turned(expected.reshape(heads.qkv.shape)[:, : heads.H], angles)
            yield self._figure(f"{name} with its norm{after and f' and {after}'}, {T} rows", found, expected)

    def _with_norm(self, x: Any, gain: Any, matrix: Any, out: Any, gated: Any, heads: NormedHeads, after: str) -> None:
        """A norm, a product and what comes after it in one launch."""
        normed, H, K = self.xp.empty(x.shape, self.bench.dtype), heads.H, heads.K

        def run() -> None:
            rows.rms_norm(self.kernels, x, gain, 1e-5, normed)
            linear.linear(self.kernels, Product(normed, matrix, None, out))
            if after == "gate":
                rows.glu(self.kernels, out, "silu", gated)
            elif after == "store":
                q, k, v = heads.qkv[:, :H], heads.qkv[:, H : H + K], heads.qkv[:, H + K :]
                rows.rotary(self.kernels, q, k, heads, heads.rotation, heads.q, heads.k)
                attention.store_kv(self.kernels, heads.k, v, heads.keys, heads.values, heads.slots)

        address, results = self.clock.device.address, [{"": out, "gate": gated, "store": heads.q}[after]]
        launches = fuse(self.kernels, self.kernels.collect(run), results, address)
        (launch,) = defer(self.kernels, launches, results, address)
        launch()

    def integers(self) -> Iterator[Figure]:
        """The projections of the MLP in 8 and 4 bits, expanded and by warpgroups; other kinds as they are compiled."""
        turn = linear.INTEGER_ROWS
        for name, (words, kind) in itertools.product(("up", "down"), KINDS.items()):
            if name == "up" and words not in EVERYWHERE:
                continue
            outputs, inputs = self.bench.linears[name].shape
            matrix = self._matrix(outputs, inputs, *kind)
            truth = dequantize(matrix)[:, :inputs]
            interleave(self.kernels, matrix)
            rows = self.sizes.checked_rows
            if words not in EVERYWHERE:
                rows = max(T for T in rows if turn >= T), min(T for T in rows if turn < T)
            for T in rows:
                x, out = self.bench.normal(T, inputs, std=1.0), self.xp.empty((T, outputs), self.bench.dtype)
                expected = self.xp.matmul(x.astype(np.float32), truth.T)
                product = Product(x, matrix, None, out, None, None, self.scratch.splits)
                for way, multiply in self._ways(product, words in EVERYWHERE):
                    out[...] = np.nan
                    multiply()
                    yield self._figure(f"{name}, {T} rows, {words}{way}", out, expected)

    def _ways(self, product: Product, by_shape: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        """How such a product is computed; unless `by_shape` by the builds that the tests have of every kind."""
        T, outputs = product.out.shape
        if by_shape:
            yield "", partial(self.engines.linear, product)
        elif linear.INTEGER_ROWS >= T:
            yield "", partial(linear.integer_gemv, self.kernels, product, IntegerShape(32, 128, 2, 2))
        if linear.INTEGER_ROWS < T and self.kernels.has("gemm_wgmma_integers"):
            shape = None if by_shape else (256, -(-T // 128) * -(-outputs // 256))
            yield ", by warpgroups", partial(linear.gemm_wgmma_integers, self.kernels, product, shape)

    def _matrix(self, outputs: int, inputs: int, bits: int, group: int, offset_bits: int) -> Quantized:
        """Random integers, with scales and offsets that differ from group to group."""
        groups, rng = -(-inputs // group), np.random.default_rng((outputs, bits, group, offset_bits))
        values = self.xp.empty((outputs, groups * group * bits // 8), np.int8 if bits == 8 else np.uint8)
        fill_bits(self.kernels, values, group)
        scales = (rng.uniform(0.025, 0.075, (outputs, groups)) / 2 ** (bits - 1)).astype(np.float16)
        offsets: Any = None
        if offset_bits == 8:
            offsets = self.xp.asarray(rng.integers(0, 16, scales.shape).astype(np.uint8))
        elif offset_bits == 16:
            offsets = self.xp.asarray((0.05 * rng.standard_normal(scales.shape)).astype(np.float16))
        return Quantized(values, self.xp.asarray(scales), inputs, offsets)

    def attention(self) -> Iterator[Figure]:
        """Decode steps and chunks of prompts, at contexts short and long, whole and through a window."""
        for S in self.sizes.checked_contexts:
            for counts in ([1], [1] * 8, [min(S, self.sizes.checked_queries)], [min(S, 70), 1, 1]):
                for window in (None, self.sizes.window):
                    words = "" if window is None else f", window {window}"
                    what = f"attention, {max(counts)} new of {S}, batch {len(counts)}{words}"
                    spec = AttentionSpec(self.bench.heads[2] ** -0.5, window=window)
                    yield self._figure(what, *self._attend(S, counts, spec))

    def masks(self) -> Iterator[Figure]:
        """Attention in which a query sees more or less than the text before it."""
        (H, _, D), S = self.bench.heads, self.sizes.checked_contexts[0]
        bias = self.xp.asarray(np.random.default_rng(0).standard_normal((H, 2 * (S // 3) + 1)).astype(np.float32))
        counts, some = [min(S, self.sizes.checked_queries)], [min(S, 70), 1]
        both: Any = {"causal": False}
        for what, news, terms, tree in (
            ("a tree", [min(S, 40), 1], {}, True),
            ("a tree, a window", [min(S, 40), 1], {"window": S // 2}, True),
            ("both ways", counts, both, False),
            ("both ways, a window", counts, both | {"window": S // 3}, False),
            ("both ways, by distance", counts, both | {"bias": bias}, False),
            ("by distance", some, {"bias": bias}, False),
            ("by distance, a decode step", [1] * 8, {"bias": bias}, False),
            ("over a source", some, both | {"cross": True}, False),
        ):
            spec = AttentionSpec(D**-0.5, **terms)
            yield self._figure(f"attention, {what}, {max(news)} new of {S}", *self._attend(S, news, spec, tree=tree))

    def _attend(self, S: int, counts: list[int], spec: AttentionSpec, *, tree: bool = False) -> tuple[Any, Any]:
        """Attention by the kernels, and by the reference; `tree`: the first sequence's new tokens are one."""
        (H, K, D), N, T, B = self.bench.heads, len(counts), sum(counts), -(-S // PAGE)
        keys, values = (self.bench.normal(N * B, K, PAGE, D, std=1.0) for _ in "kv")
        q = self.bench.normal(T, (H + 2 * K) * D, std=1.0)[:, : H * D].reshape(T, H, D)
        starts = np.cumsum([0, *counts])
        table = np.random.default_rng(S).permutation(N * B).reshape(N, B)
        batch: Any = SimpleNamespace(
            query_starts=self.bench.integers(starts),
            context_lens=self.bench.integers([S] * N),
            block_table=self.bench.integers(table),
            spans=[Span(int(starts[n]), int(starts[n + 1]), S, S, tuple(table[n].tolist())) for n in range(N)],
        )
        trees = self._trees(batch, T) if tree else None
        positions = self.bench.integers(np.concatenate([span.positions() for span in batch.spans]))
        out, expected = (self.xp.empty((T, H, D), self.bench.dtype) for _ in range(2))
        workspace = self.scratch.attention(N, H, D, B * PAGE)
        more: Any = {"max_queries": max(counts), "positions": positions, "trees": trees}
        attention.attend(self.kernels, q, keys, values, batch, out, workspace, spec, **more)
        attention.attend_by_reference(q, keys, values, batch, spec, self.xp, expected)
        return out, expected

    def _trees(self, batch: Any, T: int) -> Trees:
        """A tree of all new tokens of the first sequence, which its span gets too."""
        span, rng = batch.spans[0], np.random.default_rng(0)
        m = span.stop - span.start
        batch.spans[0] = span._replace(tree=ancestors([int(rng.integers(-1, i)) if i else -1 for i in range(m)]))
        seen = np.zeros((T, tree_words(batch.spans)), np.uint32)
        fill_tree(seen[:m], batch.spans[0].tree)
        sizes = self.bench.integers([m] + [0] * (len(batch.spans) - 1))
        return Trees(self.xp.asarray(seen), sizes)

    def rows(self) -> Iterator[Figure]:
        """A norm, a gate and the rotation."""
        (H, K, D), E, F = self.bench.heads, self.bench.config.hidden_size, self.bench.config.intermediate_size
        for T in self.sizes.checked_rows[:1] + self.sizes.checked_rows[-1:]:
            x, gain = self.bench.normal(T, E, std=1.0), self.xp.asarray(np.linspace(0.5, 1.5, E, dtype=np.float32))
            truth, out = x.astype(np.float32), self.xp.empty((T, E), self.bench.dtype)
            rows.rms_norm(self.kernels, x, gain, 1e-5, out)
            norm = self.xp.sqrt((truth * truth).mean(axis=-1, keepdims=True) + np.float32(1e-5))
            yield self._figure(f"RMS norm, {T} rows", out, truth / norm * gain)
            both, out = self.bench.normal(T, 2 * F, std=1.0), self.xp.empty((T, F), self.bench.dtype)
            rows.glu(self.kernels, both, "silu", out)
            gate, up = both[:, :F].astype(np.float32), both[:, F:].astype(np.float32)
            yield self._figure(f"gate, {T} rows", out, gate / (1 + self.xp.exp(-gate)) * up)
            q, k = self.bench.normal(T, H, D, std=1.0), self.bench.normal(T, K, D, std=1.0)
            positions = np.arange(T, dtype=np.int32) + 5000
            frequencies = (10_000.0 ** (-np.arange(0, D, 2) / D)).astype(np.float32)
            batch: Any = SimpleNamespace(
                positions=self.bench.integers(positions), query_starts=self.bench.integers([0, T])
            )
            outs = self.xp.empty((T, H, D), self.bench.dtype), self.xp.empty((T, K, D), self.bench.dtype)
            rotation = Rotation(frequencies=Weight("", self.xp.asarray(frequencies)))
            rows.rotary(self.kernels, q, k, batch, rotation, *outs)
            angles = self.xp.asarray(positions[:, None] * frequencies[None].astype(np.float64))
            yield self._figure(f"rotary, {T} tokens", outs[0], self._turned(q.astype(np.float32), angles))

    def heads(self) -> Iterator[Figure]:
        """Norms of heads or of all as one row, rotation and store in one launch: its bits are to be those of four."""
        for T, by_rows in ((1, False), (HEADS_ROWS, False), (1, True), (HEADS_ROWS, True)):
            heads = NormedHeads(self.bench, T, by_rows=by_rows)
            what = f"norms of {'rows' if by_rows else 'heads'}, rotary, store, {T} tokens"
            heads.fused()()
            fused = [array.copy() for array in (heads.q, heads.keys, heads.values)]
            x = heads.qkv[:, : heads.H].astype(np.float32)
            squares = (x * x).mean(axis=(1, 2) if by_rows else 2, keepdims=True)
            norm = self.xp.sqrt(squares + np.float32(NORM_EPSILON))
            angles = heads.positions[:, None].astype(np.float64) * heads.rotation.frequencies.data[None]
            yield self._figure(what, fused[0], self._turned(x / norm * heads.gain, angles))
            heads.run()
            plain = heads.q, heads.keys, heads.values
            other = sum(int((a.view(np.uint16) != b.view(np.uint16)).sum()) for a, b in zip(fused, plain, strict=True))
            note = f"{WRONG}: {other} numbers have other bits" if other else f"{RIGHT}: the bits of four launches"
            yield Figure("", "", f"{what}, bits", note=note)

    def _turned(self, x: Any, angles: Any) -> Any:
        """Rotation of all numbers of each head. [T, heads, D], [T, D / 2] -> [T, heads, D]"""
        cosines, sines = (f(angles).astype(np.float32)[:, None] for f in (self.xp.cos, self.xp.sin))
        half = x.shape[-1] // 2
        low, high = x[..., :half], x[..., half:]
        return self.xp.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)

    def choosing(self) -> Iterator[Figure]:
        """The likeliest token of rows of logits."""
        V, R = self.bench.config.vocab_size, max(self.sizes.batches)
        logits = self.bench.normal(R, V, std=LOGITS_STD).astype(np.float32)
        logits += self.xp.asarray(np.arange(V, dtype=np.float32) * 1e-7)  # ties of 16-bit numbers are the first one's
        workspace = sampling.Workspace.allocate(self.xp, R, V)
        ids, flags = self.xp.zeros(R, np.int32), self.xp.zeros(R, np.int32)
        sampling.argmax(self.kernels, logits, workspace, ids, flags)
        wrong = int((ids != logits.argmax(axis=-1)).sum()) + int(flags.sum())
        note = f"{WRONG}: {wrong} of {R}" if wrong else f"{RIGHT}: all {R}"
        yield Figure("", "", f"likeliest of {R} rows", note=note)
