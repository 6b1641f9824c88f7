"""The two ceilings, and each kernel alone in the shapes of a model, for `gpu.py`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from gpu_figures import COPY, PREFILL_ATTENTION, PRODUCT, Figure, Sizes, median_and_best

from minillm.backends.cuda import attention, linear, rows, sampling
from minillm.backends.cuda.attention import Trees
from minillm.backends.cuda.batches import fill_tree, tree_words
from minillm.backends.cuda.compiling import CupyLauncher
from minillm.backends.cuda.device import CupyDevice
from minillm.backends.cuda.fusing import HEADS_ROWS, fuse
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.memory import StepScratch
from minillm.backends.cuda.random import fill_bits, fill_normal
from minillm.backends.cuda.tensor_maps import TensorMaps
from minillm.backends.cuda.weights import number_type
from minillm.backends.formats import INT4, INT8, Format
from minillm.backends.shapes import ShapeBackend
from minillm.backends.weights import Weight
from minillm.batch import Span, ancestors
from minillm.config import ModelConfig
from minillm.layers.block import Sublayer
from minillm.layers.convolution import ConvolutionBlock
from minillm.layers.delta_net import DeltaNetBlock
from minillm.layers.embedding import LMHead
from minillm.layers.mamba import MambaBlock
from minillm.layers.mlp import MLP
from minillm.measure.accounting import Part
from minillm.models import published_config, shape_model
from minillm.models.opt import NORM_EPSILON
from minillm.reference.attention import AttentionSpec
from minillm.reference.quantize import Quantized
from minillm.reference.rotary import Rotation

PAGE = 16
NUMBER = 2
"""Bytes of a float16"""

LOGITS_STD = 3.0
"""About that of a trained model: nearly equal logits would all fall into a few bins of the draw"""

LIBRARY_FROM = 16
"""Products of more rows are timed by the library too"""

VERIFIED = 8
"""Nodes of a tree of guesses in a timed verify pass"""

Call = Callable[[], object]


class Clock:
    """Times calls on the GPU between two events, of a captured graph where host calls would be in the way."""

    def __init__(self, sizes: Sizes, storage: str = "float16") -> None:
        self.sizes, self.storage = sizes, storage
        self.device = CupyDevice()
        self.device.activate()
        self.xp = self.device.xp
        self.kernels = Kernels(CupyLauncher(), storage)
        self.maps = TensorMaps(self.device.address)

    def singly(self, call: Call) -> list[float]:
        """Seconds of each call, host included; for calls that take much longer than their launch."""
        call()
        return [self._time(call) for _ in range(self.sizes.repeats)]

    def captured(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of one of `calls`, each one launch or a few, captured one after the other in one graph.

        The calls should read different memory, as a forward pass does; the same memory would come from a cache.
        """
        calls[0]()  # compiles

        def launch() -> None:
            for call in calls:
                call()

        replay = self.device.record(launch)
        replay()
        return [self._time(replay) / len(calls) for _ in range(self.sizes.repeats)]

    def copies(self, size: int, least: int = 2) -> int:
        """Number of calls, each reading `size` bytes, that together read more than a cache holds."""
        return max(least, min(64, -(-self.sizes.cold // max(1, size))))

    def _time(self, call: Call) -> float:
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record(self.device.stream)
        call()
        stop.record(self.device.stream)
        self.device.wait()
        return float(1e-3 * self.xp.cuda.get_elapsed_time(start, stop))


def ceilings(sizes: Sizes) -> Iterator[Figure]:
    """Measure a large copy, and large products of each type."""
    clock = Clock(sizes)
    yield _copy(clock)
    n = sizes.product
    for storage in ("float16", "bfloat16", "float32"):
        what = PRODUCT.format(storage)
        try:
            a, b = (clock.xp.empty((n, n), number_type(storage)) for _ in range(2))
            for seed, array in enumerate((a, b)):
                fill_normal(Kernels(CupyLauncher(), storage), array, seed, 1.0)
            out = clock.xp.empty((n, n), a.dtype)
            seconds = clock.singly(lambda a=a, b=b, out=out: clock.xp.matmul(a, b, out=out))  # type: ignore[misc]
        except Exception as error:  # a type that the library does not support must not end the others
            yield Figure("ceilings", "", what, note=f"failed: {type(error).__name__}: {error}")
            continue
        yield Figure("ceilings", "", what, **median_and_best(seconds), flops=2 * n**3)


def _copy(clock: Clock) -> Figure:
    source, target = (clock.xp.zeros(clock.sizes.copy // 4, np.float32) for _ in range(2))

    def copy() -> None:
        target[...] = source

    return Figure("ceilings", "", COPY, **median_and_best(clock.singly(copy)), bytes=2 * source.nbytes)


def kernels(sizes: Sizes, shapes: list[str]) -> Iterator[Figure]:
    """Measure every kernel in the sizes of a forward pass of each shape."""
    clock = Clock(sizes)
    for shape in shapes:
        bench = Bench(clock, published_config(shape))
        for measure in (
            bench.products, bench.attention, bench.masks, bench.caches, bench.norms, bench.turning, bench.normed_heads,
            bench.gates, bench.looking_up, bench.choosing,
        ):  # fmt: skip
            try:
                for figure in measure():
                    yield figure._replace(part="kernels", shape=shape)
            except Exception as error:  # a kernel that fails must not end the others
                yield Figure("kernels", shape, measure.__name__, note=f"failed: {type(error).__name__}: {error}")


class Bench:
    """The kernels of one shape. Weights and K/V cache are read from memory; activations may come from a cache."""

    def __init__(self, clock: Clock, config: ModelConfig) -> None:
        self.clock, self.config, self.sizes = clock, config, clock.sizes
        self.kernels, self.xp, self.dtype = clock.kernels, clock.xp, number_type(clock.storage)
        self.scratch = StepScratch(clock.device, self.dtype)
        self.model = shape_model(config, ShapeBackend())
        self._seed = 0

    def normal(self, *shape: int, std: float = 0.05) -> Any:
        """Random numbers, not zeros: power, and so the clock rate, depends on the numbers."""
        out = self.xp.empty(shape, self.dtype)
        self._seed += 1
        fill_normal(self.kernels, out, self._seed, std)
        return out

    def figure(self, what: str, calls: list[Callable[[], object]], **amounts: Any) -> Figure:
        """Time captured calls."""
        return Figure("", "", what, **median_and_best(self.clock.captured(calls)), **amounts)

    @property
    def linears(self) -> dict[str, Weight]:
        """The projections of a layer and the head, on shapes alone."""
        block = self.model.layers[0]
        unlike = ConvolutionBlock | DeltaNetBlock | MambaBlock | Sublayer
        assert isinstance(self.model.head, LMHead) and not isinstance(block, unlike)
        attention, mlp = block.attention, block.mlp
        return {
            "qkv": attention.qkv,
            "out": attention.out,
            "up": mlp.up if isinstance(mlp, MLP) else mlp.gate_up,
            "down": mlp.down,
            "head": self.model.head.weight,
        }

    def products(self) -> Iterator[Figure]:
        """Each projection, with as many rows as a step has; for many rows also by the library."""
        mlp = self.model.layers[0].mlp  # type: ignore[union-attr]  # as `linears` asserts
        for name, weight in self.linears.items():
            (outputs, inputs), is_head = weight.shape, name == "head"
            weights = [self.normal(outputs, inputs) for _ in range(self.clock.copies(NUMBER * outputs * inputs))]
            bias = None if weight.bias is None else self.xp.zeros(outputs, np.float32)
            activation = mlp.activation if name == "up" and isinstance(mlp, MLP) else None
            for T in (*self.sizes.batches, *([] if is_head else [self.sizes.prefill])):
                out = self.xp.empty((T, outputs), np.float32 if is_head else self.dtype)
                residual = self.normal(T, outputs) if name in ("out", "down") else None
                yield from self._product(name, self.normal(T, inputs), weights, bias, out, activation, residual)
            if not is_head:
                yield from self._integer_products(name, outputs, inputs)

    def _integer_products(self, name: str, outputs: int, inputs: int) -> Iterator[Figure]:
        """A projection in 8 and in 4 bits, for as many rows as a step has, as the engine computes them; many rows also
        by warpgroups, and those of a prompt expanded by the library's product.
        """
        empty = partial(self.xp.empty, dtype=self.dtype)
        expanding = linear.Products(self.kernels, None, empty)
        library = linear.Products(self.kernels, self.clock.device.multiply, empty)
        for form in (INT8, INT4):
            size = outputs * form.row_bytes(inputs)
            weights = [self.quantized(outputs, inputs, form) for _ in range(self.clock.copies(size))]
            for T in (*self.sizes.batches, self.sizes.prefill):
                x, out = self.normal(T, inputs), self.xp.empty((T, outputs), self.dtype)
                some = weights if max(self.sizes.batches) >= T else weights[:4]
                room = self.scratch.splits
                products = [linear.Product(x, weight, None, out, None, None, room) for weight in some]
                amounts: dict[str, Any] = {"bytes": size + x.nbytes + out.nbytes, "flops": 2 * T * outputs * inputs}
                what = f"{name}, {T} rows, {form.name}"
                if self.sizes.prefill > T:
                    yield self.figure(what, [partial(expanding.linear, product) for product in products], **amounts)
                else:
                    seconds = self.clock.singly(partial(library.linear, products[0]))
                    yield Figure("", "", what, **median_and_best(seconds), **amounts)
                if linear.INTEGER_ROWS < T and self.kernels.has("gemm_wgmma_integers"):
                    ours = [partial(linear.gemm_wgmma_integers, self.kernels, product) for product in products]
                    yield self.figure(f"{what}, by warpgroups", [*ours], **amounts)

    def quantized(self, outputs: int, inputs: int, form: Format) -> Quantized:
        """Random integers, with scales of the usual size."""
        groups = -(-inputs // form.group)
        values = self.xp.empty((outputs, groups * form.group * form.bits // 8), form.dtype)
        self._seed += 1
        fill_bits(self.kernels, values, self._seed)
        scales = self.xp.empty((outputs, groups), np.float16)
        scales[...] = 0.05 / 2 ** (form.bits - 1)
        return Quantized(values, scales, inputs)

    def _product(
        self, name: str, x: Any, weights: list[Any], bias: Any, out: Any, activation: str | None, residual: Any
    ) -> Iterator[Figure]:
        (T, inputs), outputs = x.shape, out.shape[1]
        some = weights if max(self.sizes.batches) >= T else weights[:4]

        room = self.scratch.splits  # as the engine has it: several blocks share a tile
        products = [linear.Product(x, weight, bias, out, activation, residual, room) for weight in some]
        moved = NUMBER * (outputs * inputs + T * inputs) + out.nbytes + (0 if residual is None else residual.nbytes)
        amounts: dict[str, Any] = {"bytes": moved, "flops": 2 * T * outputs * inputs}
        ours: list[Callable[[], object]] = [partial(linear.linear, self.kernels, product) for product in products]
        yield self.figure(f"{name}, {T} rows", ours, **amounts)
        if linear.MOST_ROWS[self.kernels.storage] < T <= linear.SPLIT_ROWS and self.kernels.has("gemm_wgmma"):
            before = linear.powers_of_two(outputs, inputs, self.kernels.processors)
            split = [partial(linear.gemm_wgmma, self.kernels, product, before) for product in products]
            yield self.figure(f"{name}, {T} rows, 1, 2, 4 ... blocks for each tile", [*split], **amounts)
        if linear.MOST_ROWS[self.kernels.storage] < T and self.kernels.has("gemm_tma"):
            how = linear.tma_shape(T, outputs, inputs, self.kernels.processors)
            alone = linear.TmaShape(how.TILE_OUTS, 0, -(-T // 128) * -(-outputs // how.TILE_OUTS), CLUSTER=1)
            for shape, words in ((how, ""), *([(alone, " without clusters")] if out.dtype == x.dtype else [])):
                fed = [partial(linear.gemm_tma, self.kernels, product, self.clock.maps, shape) for product in products]
                if fed[0]():  # else it cannot read the matrix
                    yield self.figure(f"{name}, {T} rows, by gemm_tma{words}", [*fed], **amounts)
        if T <= LIBRARY_FROM or out.dtype != x.dtype:
            return

        def library() -> None:
            for weight in some:
                self.xp.matmul(x, weight.T, out=out)

        seconds = [each / len(some) for each in self.clock.singly(library)]
        note = "call by call: below 30 us it is CuPy's host; the peers' torch.mm runs in a graph"
        yield Figure("", "", f"{name}, {T} rows, by the library", **median_and_best(seconds), **amounts, note=note)
        if bias is not None or residual is not None or activation is not None:
            finish: list[Callable[[], object]] = [partial(linear.finish_product, self.kernels, products[0])]
            read = 2 * out.nbytes + (0 if residual is None else residual.nbytes)
            yield self.figure(f"{name}, {T} rows, what the library leaves", 4 * finish, bytes=read)

    def attention(self) -> Iterator[Figure]:
        """One layer's attention: a decode step, full or with a window, and a prefill."""
        (H, K, D), S = self.heads, self.sizes.context
        short = self.sizes.prompt + self.sizes.steps // 2  # where whole decode steps are timed
        for S, window in ((short, None), (S, None), (S, self.sizes.window)):  # noqa: B020
            seen = S if window is None else window
            words = f", context {S}" if window is None else f", window {window}"
            for N in self.sizes.batches:
                moved = 2 * NUMBER * N * seen * K * D + 2 * NUMBER * N * H * D
                flops = 4 * N * seen * H * D
                yield self._attend(f"attention, decode, batch {N}{words}", [1] * N, S, moved, flops, window)
        for T in (self.sizes.prefill, self.sizes.long_prefill):
            what, flops = PREFILL_ATTENTION.format(T), 4 * D * H * Part(T, T).pairs()
            moved = 2 * NUMBER * T * (H + K) * D
            yield self._attend(what, [T], T, moved, flops)
            if attention.has_warpgroups(self.kernels, D, D, AttentionSpec(1.0)):
                yield self._attend(f"{what}, by warps alone", [T], T, moved, flops, by_warps=True)

    def masks(self) -> Iterator[Figure]:
        """A layer's attention of a verify pass with a tree for each sequence, and of an encoder: by the kernel, and by
        the reference that it replaces.
        """
        (H, K, D), rng = self.heads, np.random.default_rng(0)
        S = VERIFIED + self.sizes.prompt + self.sizes.steps // 2
        tree = ancestors([int(rng.integers(-1, i)) if i else -1 for i in range(VERIFIED)])
        few, many = self.sizes.batches[1], self.sizes.short_prefill
        for what, N, count, length, causal in (
            (f"attention, trees of {VERIFIED}, batch {few}", few, VERIFIED, S, True),
            ("attention, both ways", 1, many, many, False),
        ):
            B = -(-length // PAGE)
            keys, values = (self.normal(N * B, K, PAGE, D) for _ in "kv")
            q = self.normal(N * count, (H + 2 * K) * D)[:, : H * D].reshape(N * count, H, D)
            table, last = np.arange(N * B).reshape(N, B), tree if causal else None
            spans = [
                Span(n * count, (n + 1) * count, length, length, tuple(pages), last)
                for n, pages in enumerate(table.tolist())
            ]
            seen = np.zeros((N * count, tree_words(spans) or 1), np.uint32)
            for n in range(N if last is not None else 0):
                fill_tree(seen[n * count : (n + 1) * count], tree)
            batch: Any = SimpleNamespace(
                query_starts=self.integers(np.arange(N + 1) * count),
                context_lens=self.integers([length] * N),
                block_table=self.integers(table),
                spans=spans,
            )
            more: dict[str, Any] = {"positions": self.integers(np.concatenate([span.positions() for span in spans]))}
            if last is not None:
                more["trees"] = Trees(self.xp.asarray(seen), self.integers([VERIFIED] * N))
            out, workspace = self.xp.empty((N * count, H, D), self.dtype), self.scratch.attention(N, H, D, B * PAGE)
            given = q, keys, values, batch
            variant = AttentionSpec(D**-0.5, causal=causal)
            by_kernel = partial(
                attention.attend, self.kernels, *given, out, workspace, variant, max_queries=count, **more
            )
            moved = 2 * NUMBER * N * length * K * D + 2 * NUMBER * N * count * H * D
            yield self.figure(what, [by_kernel] * 4, bytes=moved, flops=4 * N * count * length * H * D)
            by_reference = partial(attention.attend_by_reference, *given, variant, self.xp, out)
            seconds = median_and_best(self.clock.singly(by_reference))
            yield Figure("", "", f"{what}, by the reference", **seconds, bytes=moved, note="call by call")

    @property
    def heads(self) -> tuple[int, int, int]:
        """H, K, D"""
        return self.config.num_heads, self.config.num_kv_heads, self.config.head_dim

    def _attend(
        self,
        what: str,
        counts: list[int],
        S: int,
        moved: int,
        flops: int,
        window: int | None = None,
        by_warps: bool = False,
    ) -> Figure:
        (H, K, D), N, T = self.heads, len(counts), sum(counts)
        B = -(-S // PAGE)
        caches = [
            [self.normal(N * B, K, PAGE, D) for _ in "kv"] for _ in range(self.clock.copies(moved, 1 if T > N else 2))
        ]
        q = self.normal(T, (H + 2 * K) * D)[:, : H * D].reshape(T, H, D)
        batch: Any = SimpleNamespace(
            query_starts=self.integers(np.cumsum([0, *counts])),
            context_lens=self.integers([S] * N),
            block_table=self.integers(np.arange(N * B).reshape(N, B)),
        )
        out = self.xp.empty((T, H, D), self.dtype)
        partials = self.xp.zeros(attention.partials_size(N, H, D, B * PAGE), np.float32)
        workspace = attention.Workspace(partials, self.xp.zeros(N * H, np.int32))

        spec = AttentionSpec(D**-0.5, window=window)

        def attend(keys: Any, values: Any) -> Callable[[], object]:
            if by_warps:
                mask = attention.Mask.of(spec, B * PAGE)
                return lambda: attention.prefill(self.kernels, q, keys, values, batch, out, mask)
            return lambda: attention.attend(
                self.kernels, q, keys, values, batch, out, workspace, spec, max_queries=max(counts)
            )

        return self.figure(what, [attend(*cache) for cache in caches], bytes=moved, flops=flops)

    def caches(self) -> Iterator[Figure]:
        """Storing keys and values, and copying a page for a fork."""
        (H, K, D), L = self.heads, self.config.num_layers
        for T in (*self.sizes.batches, self.sizes.prefill):
            qkv = self.normal(T, H + 2 * K, D)
            keys, values = (self.normal(-(-T // PAGE), K, PAGE, D) for _ in "kv")
            slots = self.integers(np.arange(T))

            def store(qkv: Any = qkv, keys: Any = keys, values: Any = values, slots: Any = slots) -> None:
                attention.store_kv(self.kernels, qkv[:, H : H + K], qkv[:, H + K :], keys, values, slots)

            yield self.figure(f"store K and V, {T} tokens", [store] * 8, bytes=4 * NUMBER * T * K * D)
        keys, values = (self.normal(L, 2, K, PAGE, D) for _ in "kv")

        def copy() -> None:
            attention.copy_positions(self.kernels, keys, values, 0, 1, 0, PAGE)

        yield self.figure("copy a page of all layers", [copy] * 8, bytes=4 * NUMBER * L * K * PAGE * D)

    def norms(self) -> Iterator[Figure]:
        """Both norms."""
        E = self.config.hidden_size
        gain, bias = (self.xp.zeros(E, np.float32) for _ in range(2))
        for T in (*self.sizes.batches, self.sizes.prefill):
            x, out = self.normal(T, E), self.xp.empty((T, E), self.dtype)

            def layer_norm(x: Any = x, out: Any = out) -> None:
                rows.layer_norm(self.kernels, x, gain, bias, NORM_EPSILON, out)

            def rms_norm(x: Any = x, out: Any = out) -> None:
                rows.rms_norm(self.kernels, x, gain, NORM_EPSILON, out)

            yield self.figure(f"layer norm, {T} rows", [layer_norm] * 8, bytes=2 * x.nbytes + 8 * E)
            yield self.figure(f"RMS norm, {T} rows", [rms_norm] * 8, bytes=2 * x.nbytes + 4 * E)

    def turning(self) -> Iterator[Figure]:
        """Rotary position embedding of queries and keys, even if the shape has none."""
        H, K, D = self.heads
        powers = -np.arange(0, D, 2) / D
        rotation = Rotation(frequencies=Weight("", self.xp.asarray((10_000.0**powers).astype(np.float32))))
        for T in (*self.sizes.batches, self.sizes.prefill):
            qkv = self.normal(T, H + 2 * K, D)
            batch: Any = SimpleNamespace(positions=self.integers(np.arange(T)), query_starts=self.integers([0, T]))
            outs = self.xp.empty((T, H, D), self.dtype), self.xp.empty((T, K, D), self.dtype)

            def turn(qkv: Any = qkv, batch: Any = batch, outs: Any = outs) -> None:
                rows.rotary(self.kernels, qkv[:, :H], qkv[:, H : H + K], batch, rotation, *outs)

            moved = 2 * NUMBER * T * (H + K) * D + 4 * T
            yield self.figure(f"rotary, {T} tokens", [turn] * 8, bytes=moved)

    def normed_heads(self) -> Iterator[Figure]:
        """Norms of query and key heads, rotation and store, by four launches and by one, even if the shape has none."""
        H, K, D = self.heads
        for T in (batch for batch in self.sizes.batches if batch <= HEADS_ROWS):
            heads = NormedHeads(self, T)
            moved = 2 * NUMBER * T * (H + 2 * K) * D
            for how, call in (("four launches", heads.run), ("one launch", heads.fused())):
                yield self.figure(f"norms of heads, rotary, store, {T} tokens, {how}", [call] * 8, bytes=moved)

    def gates(self) -> Iterator[Figure]:
        """The gate of a gated MLP of the shape's width, even if its own has none."""
        F = self.config.intermediate_size
        for T in (*self.sizes.batches, self.sizes.prefill):
            x, out = self.normal(T, 2 * F), self.xp.empty((T, F), self.dtype)

            def glu(x: Any = x, out: Any = out) -> None:
                rows.glu(self.kernels, x, "silu", out)

            yield self.figure(f"gate, {T} rows", [glu] * 8, bytes=3 * out.nbytes)

    def looking_up(self) -> Iterator[Figure]:
        """Embedding, and the selection of rows."""
        E, V = self.config.hidden_size, self.config.vocab_size
        learned = self.model.embedding.positions is not None
        table, places = self.normal(V, E), self.normal(self.config.max_positions, E) if learned else None
        for T in (*self.sizes.batches, self.sizes.prefill):
            ids, positions, out = self.integers(np.arange(T) % V), self.integers(np.arange(T)), self.normal(T, E)

            def embed(ids: Any = ids, positions: Any = positions, out: Any = out) -> None:
                rows.embed(self.kernels, table, ids, out, position_table=places, positions=positions)

            moved = (3 * out.nbytes + 8 * T) if learned else (2 * out.nbytes + 4 * T)
            yield self.figure(f"embedding, {T} tokens", [embed] * 8, bytes=moved)

    def choosing(self) -> Iterator[Figure]:
        """Argmax and sampling; each takes several launches."""
        V = self.config.vocab_size
        for R in self.sizes.batches:
            logits = self.normal(R, V, std=LOGITS_STD).astype(np.float32)
            workspace = sampling.Workspace.allocate(self.xp, R, V)
            ids, flags = self.xp.zeros(R, np.int32), self.xp.zeros(R, np.int32)
            settings = {"temperatures": 0.8, "top_ks": 50, "top_ps": 0.9, "min_ps": 0.0, "seeds": 1, "sequences": 0}
            types = {"top_ks": np.int32, "top_ps": np.float64, "seeds": np.uint64, "sequences": np.int32}
            columns = {name: np.full(R, value, types.get(name, np.float32)) for name, value in settings.items()}
            columns["positions"] = np.arange(R, dtype=np.int32)
            draws = sampling.Draws(**{name: self.xp.asarray(column) for name, column in columns.items()})

            def argmax(
                logits: Any = logits, workspace: Any = workspace, ids: Any = ids, flags: Any = flags
            ) -> None:  # fmt: skip
                sampling.argmax(self.kernels, logits, workspace, ids, flags)

            def draw(
                logits: Any = logits, workspace: Any = workspace, ids: Any = ids, flags: Any = flags, draws: Any = draws
            ) -> None:
                sampling.sample(self.kernels, logits, draws, workspace, ids, flags)

            yield self.figure(f"likeliest of {R} rows", [argmax] * 8, bytes=4 * R * V, launches=2)
            yield self.figure(f"draw for {R} rows", [draw] * 8, bytes=3 * 4 * R * V, launches=3)

    def integers(self, values: Any) -> Any:
        """int32 on the device."""
        return self.xp.asarray(np.asarray(values, np.int32))


class NormedHeads:
    """Queries and keys of a decode step's tokens, normed, rotated and stored with the values."""

    def __init__(self, bench: Bench, T: int, *, by_rows: bool = False) -> None:
        """T tokens, far on in their texts; all memory for results is zero. `by_rows`: all heads are normed as one."""
        (self.H, self.K, D), xp = bench.heads, bench.xp
        self.bench, self.qkv = bench, bench.normal(T, self.H + 2 * self.K, D, std=1.0)
        self.by_rows, self.gain = by_rows, xp.asarray(np.linspace(0.5, 1.5, D, dtype=np.float32))
        frequencies = (10_000.0 ** (-np.arange(0, D, 2) / D)).astype(np.float32)
        self.rotation = Rotation(frequencies=Weight("", xp.asarray(frequencies)))
        self.positions, self.query_starts = bench.integers(np.arange(T) + 5000), bench.integers(np.arange(T + 1))
        self.gains = [xp.tile(self.gain, heads) if by_rows else self.gain for heads in (self.H, self.K)]
        self.text_lens, self.slots = self.positions + 1, bench.integers(np.arange(T)[::-1])
        normed = [xp.zeros((T, heads, D), bench.dtype) for heads in (self.H, self.K) * 2]
        self.q_normed, self.k_normed, self.q, self.k = normed
        self.keys, self.values = (xp.zeros((-(-T // PAGE), self.K, PAGE, D), bench.dtype) for _ in "kv")

    def run(self) -> None:
        """Four launches."""
        kernels, stored = self.bench.kernels, self.H + self.K
        both = (self.qkv[:, : self.H], self.q_normed), (self.qkv[:, self.H : stored], self.k_normed)
        for (x, out), gain in zip(both, self.gains, strict=True):
            shape = (len(x), -1) if self.by_rows else x.shape
            rows.rms_norm(kernels, x.reshape(shape), gain, NORM_EPSILON, out.reshape(shape))
        rows.rotary(kernels, self.q_normed, self.k_normed, self, self.rotation, self.q, self.k)
        attention.store_kv(kernels, self.k, self.qkv[:, stored:], self.keys, self.values, self.slots)

    def fused(self) -> Call:
        """A call that does the same by one launch."""
        kernels = self.bench.kernels
        (launch,) = fuse(kernels, kernels.collect(self.run), [self.q], self.bench.clock.device.address)
        return launch.__call__
