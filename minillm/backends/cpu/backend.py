"""The CPU backend: runs every operation of a step in kernels in C.

Weights keep their stored format, 32, 16, 8 or 4 bits or blocks, and each is read from memory once for up to 16 rows.
Operations that are not overridden here run as in the reference.
"""

import ctypes
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...reference.attention import AttentionSpec
from ...reference.experts import SOFTMAX, RouterSpec, Routing
from ...reference.rotary import Rotation
from ...reference.selective_scan import UNLIMITED
from ..formats import COMPUTE_FORMATS, FLOAT32, Format, WeightFormats, chosen
from ..group import Group
from ..loader import HugePages, Loader
from ..operations import Backend
from ..pages import Pages
from ..recording import Recordable, recorded
from ..storage import Experts, Joined, some_rows
from ..weights import Weight
from .launching import (
    AddChanges,
    Attention,
    Combine,
    Convolve,
    DeltaRule,
    Embed,
    Gate,
    Glu,
    Linear,
    LinearExperts,
    LinearParts,
    MoveHeads,
    Multiply,
    Norm,
    Rotary,
    Route,
    ScaleLogits,
    SelectiveScan,
    StoreKV,
    TakeRows,
    address,
    call,
    filled,
    kernels,
    launch,
    most_shares,
    not_recorded,
    shares_of,
)
from .matrices import BFLOAT16, ROUNDING, ExpertTable, cached_layer, contiguous, rounded_sizes, stored_matrix, table_of
from .memory import FEW_ROWS, PIECE, CpuMemory
from .sampling import CpuSampler

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_new": 3, "silu": 4, "relu2": 6}
"""Codes of `kernels/cpu/activation.h`"""
GATES = ACTIVATIONS | {"swiglu_oai": 5}
"""Codes of gates of a gated MLP, likewise"""
MOST_TAPS = 64
"""The most inputs of a convolution in `kernels/cpu/convolution.c`"""
MOST_STATE, STATE_ROWS = 256, 16
"""The largest N of `kernels/cpu/selective_scan.c`, and the rows of a head that are one piece of its work"""
MOST_KEYS, COLUMNS = 256, 32
"""The largest dk of `kernels/cpu/delta_rule.c`, and the columns of a head that are one piece of its work"""


class CpuBackend(Recordable, Backend):
    """Runs on a CPU with the kernels of `kernels/cpu`."""

    name = "cpu"
    memory: CpuMemory

    def __init__(
        self,
        *,
        weights: str | WeightFormats = "auto",
        cache: str | Format = "float32",
        compute: str | Format = "float32",
        deterministic: bool = False,
    ) -> None:
        """Set the formats of weights and of the K/V cache, or their names; activations are float32.

        Args:
            weights: a name in `WEIGHT_FORMATS`
            cache: a name in `CACHE_FORMATS`
            compute: a name in `COMPUTE_FORMATS`: that of activations while they meet matrices of bfloat16
            deterministic: whether a row of a product has the same bits whatever other rows there are, also with AVX2

        Raises:
            DeviceError: the kernels cannot be compiled.
        """
        kernels()
        self.deterministic = deterministic
        self.compute = chosen(COMPUTE_FORMATS, compute)
        memory = CpuMemory(cache)
        pages = HugePages()
        super().__init__(Loader(weights, empty=pages.empty, copies=pages.copies), memory, CpuSampler(memory))
        self._experts: WeakKeyDictionary[Weight, ExpertTable] = WeakKeyDictionary()

    @recorded
    def embed(
        self,
        ids: Any,
        table: Weight,
        positions: Any = None,
        position_table: Weight | None = None,
        scale: float = 1.0,
        types: Any = None,
        type_table: Weight | None = None,
    ) -> Any:
        """scale * table[ids], plus position_table[positions], plus type_table[types]. 3 x [T] -> [T, E]"""
        T, E = len(ids), table.shape[1]
        out = self.memory.arena.take((T, E))
        words, places, kinds = (
            table_of(None if weight is None else weight.data) for weight in (table, position_table, type_table)
        )
        arguments = filled(
            Embed, ids=ids, words=words, positions=positions, places=places, types=types, kinds=kinds, out=out, T=T,
            E=E, first=table.first, stop=table.stop, scale=float(scale),
        )  # fmt: skip
        launch("embed", arguments, shares_of(T))
        return out

    @recorded
    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual. [T, in] -> [T, out]"""
        if activation not in ACTIVATIONS:
            not_recorded()
            return super().linear(x, weight, activation=activation, residual=residual)
        out, many = self.memory.arena.take((len(x), weight.shape[0])), len(x) > FEW_ROWS
        x, residual = contiguous(x), contiguous(residual)
        if isinstance(weight.data, Joined):
            self._join_products(x, weight, out, many=many, residual=residual, activation=ACTIVATIONS[activation])
            return out
        arguments = self._product(
            x, weight.data, out, rows=len(x), bias=weight.bias, residual=residual, activation=ACTIVATIONS[activation]
        )
        if arguments.x_rounded:
            launch("round_rows", arguments, shares_of(len(x)))
        launch("linear_many" if many else "linear_few", arguments, shares_of(-(-out.shape[1] // 4)))
        return out

    def _join_products(self, x: Any, weight: Weight, out: Any, *, many: bool, residual: Any, activation: int) -> None:
        """The products of matrices below one another, each of which writes its columns of `out`, in one launch."""
        products, first = [], 0
        for matrix in weight.data.parts:
            columns = slice(first, first + matrix.shape[0])
            added = None if residual is None else residual[:, columns]
            bias = None if weight.bias is None else weight.bias[columns]
            products.append(
                self._product(x, matrix, out[:, columns], rows=len(x), bias=bias, residual=added, activation=activation)
            )
            first = columns.stop
        array = (Linear * len(products))(*products)
        arguments = filled(LinearParts, parts=ctypes.addressof(array), count=len(products), many=many)
        arguments.kept = [array, *products]
        arguments.workers = min((product.workers for product in products if product.workers), default=None)
        if any(product.x_rounded for product in products):
            launch("round_parts", arguments, shares_of(len(x)))
        launch("linear_parts", arguments, shares_of(-(-out.shape[1] // 4)))

    def _product(self, x: Any, matrix: Any, out: Any, *, rows: int, **fields: Any) -> Any:
        """The arguments of a product of all rows of x, which are to be rounded first if there is `x_rounded`.

        Args:
            x: [T, in], C-contiguous
            matrix: [out, in]
            out: [T, out], whole rows or some of their columns
            rows: those that meet the matrix, about
            fields: bias, residual, activation
        """
        (T, inputs), scratch = x.shape, self.memory.workspace.scratch
        stored = stored_matrix(matrix)
        arguments = filled(
            Linear, weight=stored.values, scales=stored.scales, offsets=stored.offsets, x=x, out=out, rows=T,
            inputs=inputs, outputs=out.shape[1], format=stored.code, group=stored.group, zeros=stored.has_zeros,
            one_order=self.deterministic, stride=out.strides[0] // 4 if T > 1 else out.shape[1], **fields,
        )  # fmt: skip
        if stored.code in ROUNDING:
            arguments.wide = 0 < kernels().wide_rows(stored.code) <= rows
            groups, stride, sums = rounded_sizes(arguments)
            kind = f"{stored.code} {stored.group}"  # products of one format share what is rounded
            arguments.x_rounded = address(scratch.take(f"integers {kind}", 2 * T * groups * 32 + 64, np.int8))
            arguments.x_scales = address(scratch.take(f"x scales {kind}", T * stride))
            arguments.x_sums = address(scratch.take(f"x sums {kind}", T * sums))
        elif stored.code == BFLOAT16 and self.compute != FLOAT32:
            arguments.x_rounded = address(scratch.take("bfloat16", T * inputs))
        if rows > FEW_ROWS or stored.code in ROUNDING:
            scratch.serve(arguments, "panels", kernels().linear_scratch(), np.uint8)
        arguments.kept += scratch.buffers()
        return arguments

    @recorded
    def linear_heads(self, x: Any, weight: Weight) -> Any:
        """The last numbers of each head times its own matrix, as experts of which each computes one head.

        [T, H, r + in] -> [T, H, r + out]
        """
        (T, H, D), (rows, inputs), scratch = x.shape, weight.shape, self.memory.workspace.scratch
        outputs, copied = rows // H, D - inputs
        out = self.memory.arena.take((T, H, copied + outputs))
        x = contiguous(x)
        if weight not in self._experts:
            matrices = (some_rows(weight.data, slice(h * outputs, (h + 1) * outputs)) for h in range(H))
            self._experts[weight] = ExpertTable(Experts(tuple(matrices)))
        by_head = scratch.take("by head", H * T * inputs).reshape(H, T, inputs)
        products = scratch.take("products by head", H * T * outputs).reshape(H, T, outputs)
        starts = np.arange(H + 1, dtype=np.int64) * T
        self._move_heads(x[:, :, copied:], by_head.transpose(1, 0, 2))  # [T, H, in] -> [H, T, in]
        table = self._experts[weight]
        self._multiply_experts(by_head.reshape(H * T, inputs), table, starts, products.reshape(H * T, outputs))
        self._move_heads(products.transpose(1, 0, 2), out[:, :, copied:])  # [H, T, out] -> [T, H, out]
        if copied:
            self._move_heads(x[:, :, :copied], out[:, :, :copied])
        return out

    def _move_heads(self, x: Any, out: Any) -> None:
        """Copy heads [T, H, width] whose numbers are contiguous."""
        (T, H, width), strides = x.shape, [stride // 4 for array in (x, out) for stride in array.strides[:2]]
        sizes = dict(zip(("stride", "head_stride", "out_stride", "out_head_stride"), strides, strict=True))
        launch("move_heads", filled(MoveHeads, x=x, out=out, T=T, H=H, width=width, **sizes), shares_of(T * H))

    @recorded
    def add_low_rank(self, y: Any, x: Any, parts: Any, *, activation: str | None = None, residual: Any = None) -> Any:
        """activation(y + (x A^T) B^T) + residual; `parts`: rows and `LowRankWeight`s. [T, out], [T, in] -> [T, out]"""
        if activation not in ACTIVATIONS:
            not_recorded()
            return super().add_low_rank(y, x, parts, activation=activation, residual=residual)
        T, width = y.shape
        changes, products = np.zeros(T, np.uint64), []
        for rows, change in parts:
            some = x if len(rows) == T else self.take_rows(x, rows)  # [T, in] -> [n, in]
            products.append(self.linear(self.linear(some, change.down), change.up))  # -> [n, r] -> [n, out]
            changes[rows] = address(products[-1]) + 4 * width * np.arange(len(rows))
        out = self.memory.arena.take(y.shape)  # last: the arena keeps a layer's last result
        arguments = filled(
            AddChanges, y=y, changes=changes, residual=contiguous(residual), out=out, T=T, width=width,
            activation=ACTIVATIONS[activation],
        )  # fmt: skip
        arguments.kept += products
        launch("add_changes", arguments, shares_of(T))
        return out

    @recorded
    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean 0 and variance 1, then apply gain and bias. [T, E] -> [T, E]"""
        return self._norm("layer_norm", x[:, None], weight, epsilon).reshape(x.shape)

    @recorded
    def rms_norm(self, x: Any, weight: Weight, epsilon: float, *, residual: Any | None = None) -> Any:
        """Normalise rows to mean square 1, apply gain, add the residual. [T, E] -> [T, E]

        By head without a residual: [T, heads, D] -> [T, heads, D], with a gain [D] or [heads D].
        """
        by_head = x if x.ndim == 3 else x[:, None]
        return self._norm("rms_norm", by_head, weight, epsilon, residual).reshape(x.shape)

    def _norm(self, kernel: str, x: Any, weight: Weight, epsilon: float, residual: Any | None = None) -> Any:
        T, heads, width = x.shape
        x, stride = _rows(x)
        out = self.memory.arena.take(x.shape)
        arguments = filled(
            Norm, x=x, gain=weight.data, bias=weight.bias, residual=contiguous(residual), out=out, T=T, heads=heads,
            width=width, stride=stride, epsilon=epsilon,
            gain_stride=0 if weight.data is None or weight.data.size == width else width,
        )  # fmt: skip
        launch(kernel, arguments, shares_of(T))
        return out

    @recorded
    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """Rotate queries and keys by their positions. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        cosines, sines = self.memory.workspace.angles(rotation, batch)
        T = len(q)
        arguments = filled(Rotary, cosines=cosines, sines=sines, T=T, half=cosines.shape[1])
        outs = []
        for operand, x in ((arguments.q, q), (arguments.k, k)):
            x, stride = _rows(x)
            out = self.memory.arena.take(x.shape)
            operand.x, operand.out, operand.heads, operand.stride = address(x), address(out), x.shape[1], stride
            operand.D, operand.out_stride = x.shape[2], x.shape[1] * x.shape[2]
            arguments.kept += [x, out]
            outs.append(out)
        launch("rotary", arguments, shares_of(T))
        return outs[0], outs[1]

    @recorded
    def glu(self, x: Any, activation: str, *, alone: bool = False) -> Any:
        """activation(gate) * up, of the two halves of each row. [T, 2 F] -> [T, F]

        With `alone` each row is both. [T, F] -> [T, F]
        """
        if activation not in GATES:
            not_recorded()
            return super().glu(x, activation, alone=alone)
        T, F = len(x), x.shape[1] if alone else x.shape[1] // 2
        out = self.memory.arena.take((T, F))
        arguments = filled(Glu, x=contiguous(x), out=out, T=T, F=F, activation=GATES[activation], alone=alone)
        launch("glu", arguments, shares_of(T))
        return out

    @recorded
    def gate(self, x: Any, logits: Any, *, silu: bool = False) -> Any:
        """x * sigmoid(logits), each of n parts of a row by a logit of its own; or SiLU. [T, F], [T, n] -> [T, F]"""
        (T, F), n = x.shape, logits.shape[1]
        logits, stride = _rows(logits[:, None])
        out = self.memory.arena.take((T, F))
        arguments = filled(Gate, x=contiguous(x), logits=logits, out=out, T=T, F=F, n=n, stride=stride, silu=silu)
        launch("gate", arguments, shares_of(T))
        return out

    @recorded
    def multiply(self, x: Any, others: Any = None, *, factor: Weight | None = None) -> Any:
        """x * others, or times a weight of one number or of one a column, or both. [T, F], [T, F] -> [T, F]"""
        T, F = x.shape
        out, stride = self.memory.arena.take((T, F)), 0
        if others is not None:
            by_head, stride = _rows(others[:, None])
            others = by_head[:, 0]
        numbers = None if factor is None else factor.data
        sizes = {"T": T, "F": F, "stride": stride, "by_column": numbers is not None and len(numbers) > 1}
        arguments = filled(Multiply, x=contiguous(x), others=others, factor=numbers, out=out, **sizes)
        launch("multiply", arguments, shares_of(T))
        return out

    @recorded
    def route(
        self,
        logits: Any,
        k: int,
        *,
        normalised: bool,
        bias: Weight | None = None,
        spec: RouterSpec = SOFTMAX,
        factors: Weight | None = None,
    ) -> Routing:
        """The k experts of each token. [T, X] -> [T, k]"""
        T, X = logits.shape
        routing = Routing(  # not of the arena: observers read a layer's routing when the pass has ended
            np.empty((T, k), np.int64), np.empty((T, k), np.float32), np.empty((T, k), np.int64),
            np.empty(T * k, np.int64), np.empty(X + 1, np.int64),
        )  # fmt: skip
        arguments = filled(
            Route, logits=contiguous(logits), bias=None if bias is None else bias.data, **routing._asdict(),
            factors=None if factors is None else factors.data, T=T, X=X, k=k, normalised=normalised,
            sigmoid=spec.sigmoid, groups=spec.groups, chosen_groups=spec.chosen_groups,
            group_best=spec.group_best, scale=spec.scale,
        )  # fmt: skip
        launch("route", arguments)
        return routing

    @recorded
    def linear_experts(self, x: Any, weight: Weight, routing: Routing) -> Any:
        """Each row's product with its expert's matrix; the others are not read. [T k, in] -> [T k, out]"""
        out = self.memory.arena.take((len(x), weight.shape[1]))
        if weight not in self._experts:
            self._experts[weight] = ExpertTable(weight.data)
        self._multiply_experts(contiguous(x), self._experts[weight], routing.starts, out, biases=weight.bias)
        return out

    def _multiply_experts(self, x: Any, table: "ExpertTable", starts: Any, out: Any, *, biases: Any = None) -> None:
        """The rows starts[e] : starts[e + 1] of x times the matrix of expert e. [rows, in] -> [rows, out]"""
        X = len(starts) - 1
        product = self._product(x, table.first, out, rows=-(-len(x) // X))
        groups, stride, sums = rounded_sizes(product)
        if product.x_rounded:
            launch("round_rows", product, shares_of(len(x)))
        arguments = filled(
            LinearExperts, all=product, matrices=table.addresses, starts=starts, biases=biases, X=X,
            many=len(x) > FEW_ROWS * X, row_bytes=groups * 32 * (1 + product.wide), scale_stride=stride,
            sum_stride=sums,
        )  # fmt: skip
        arguments.kept.append(table)
        launch("linear_experts", arguments, shares_of(-(-out.shape[1] // 4)))

    @recorded
    def combine(self, y: Any, routing: Routing, residual: Any | None = None) -> Any:
        """Each token's weighted sum of its experts' results, + residual. [T k, E] -> [T, E]"""
        (T, k), E = routing.weights.shape, y.shape[1]
        out = self.memory.arena.take((T, E))
        arguments = filled(
            Combine, y=contiguous(y), weights=routing.weights, rows=routing.rows, residual=contiguous(residual),
            out=out, T=T, E=E, k=k,
        )  # fmt: skip
        launch("combine", arguments, shares_of(T))
        return out

    @recorded
    def convolve(
        self,
        x: Any,
        weight: Weight,
        cache: Pages,
        layer: int,
        batch: Batch,
        *,
        gated: bool = False,
        activation: str | None = None,
    ) -> Any:
        """Causal convolution of each channel, with its last inputs in the cache. [T, C] or gated [T, 3 C] -> [T, C]"""
        states, *_ = cache.states_of(layer)
        T, k, C = len(x), states.shape[1] + 1, states.shape[2]
        if activation not in ACTIVATIONS or k > MOST_TAPS:
            not_recorded()
            return super().convolve(x, weight, cache, layer, batch, gated=gated, activation=activation)
        x, stride = _rows(x[:, None])
        out = self.memory.arena.take((T, C))
        arguments = filled(
            Convolve, x=x, taps=weight.data, bias=weight.bias, states=states, before=batch.state_before,
            after=batch.state_after, out=out, T=T, C=C, k=k, gated=gated, activation=ACTIVATIONS[activation],
            stride=stride,
        )  # fmt: skip
        launch("convolve", arguments, shares_of(T))
        return out

    @recorded
    def delta_rule(
        self, x: Any, gates: Any, weight: Weight, cache: Pages, layer: int, batch: Batch, *, keys: tuple[int, int]
    ) -> Any:
        """The gated delta rule, its states in the cache. [T, 2 K dk + V dv], [T, 2 V] -> [T, V dv]"""
        _, states = cache.states_of(layer)
        (T, _), (_, V, dk, dv) = x.shape, states.shape
        if dk > MOST_KEYS:
            not_recorded()
            return super().delta_rule(x, gates, weight, cache, layer, batch, keys=keys)
        (x, stride), (gates, gate_stride) = _rows(x[:, None]), _rows(gates[:, None])
        out = self.memory.arena.take((T, V * dv))
        arguments = filled(
            DeltaRule, x=x, gates=gates, decay=weight.data, step_bias=weight.bias, states=states,
            before=batch.state_before, after=batch.state_after, out=out, T=T, K=keys[0], V=V, dk=dk, dv=dv,
            stride=stride, gate_stride=gate_stride,
        )  # fmt: skip
        launch("delta_rule", arguments, shares_of(V * -(-dv // COLUMNS)))
        return out

    @recorded
    def selective_scan(
        self,
        x: Any,
        steps: Any,
        weight: Weight,
        cache: Pages,
        layer: int,
        batch: Batch,
        *,
        groups: tuple[int, int],
        limits: tuple[float, float] = UNLIMITED,
    ) -> Any:
        """Mamba-2's recurrence, its states in the cache. [T, H P + 2 G N], [T, H] -> [T, H P]"""
        _, states = cache.states_of(layer)
        T, (_, H, P, N) = len(x), states.shape
        if N > MOST_STATE:
            not_recorded()
            return super().selective_scan(x, steps, weight, cache, layer, batch, groups=groups, limits=limits)
        (x, stride), (steps, step_stride) = _rows(x[:, None]), _rows(steps[:, None])
        out = self.memory.arena.take((T, H * P))
        arguments = filled(
            SelectiveScan, x=x, steps=steps, rates=weight.data, step_bias=weight.bias, states=states,
            before=batch.state_before, after=batch.state_after, out=out, T=T, H=H, P=P, G=groups[0], N=N, stride=stride,
            step_stride=step_stride, least=limits[0], most=limits[1],
        )  # fmt: skip
        launch("selective_scan", arguments, shares_of(H * -(-P // STATE_ROWS)))
        return out

    @recorded
    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """Round the new tokens' keys and values to the cache's dtype and write them to their slots. k, v: [T, K, D]"""
        T, K, _ = k.shape
        (k, k_stride), (v, v_stride) = _rows(k), _rows(v)
        keys, values = cache.layers[layer]
        D = keys.shape[3]
        joined = self.memory.workspace.scratch.take("joined", shares_of(T) * D) if cache.value_dim else None
        arguments = filled(
            StoreKV, k=k, v=v, **cached_layer(keys, values), slot_pages=batch.slot_pages, joined=joined,
            slot_offsets=batch.slot_offsets, T=T, K=K, D=D, V=v.shape[2], k_stride=k_stride, v_stride=v_stride,
        )  # fmt: skip
        launch("store_kv", arguments, shares_of(T))

    @recorded
    def attend(self, q: Any, cache: Pages, layer: int, batch: Batch, spec: AttentionSpec) -> Any:
        """Attention over the cache, sequence by sequence, or over their sources. [T, H, D] -> [T, H, V]"""
        sequences = self.memory.workspace.sequences
        if batch.group:
            sequences = self.memory.workspace.of_group(batch.group)
        if spec.cross:
            batch, sequences = batch.by_source, self.memory.workspace.sources
        if spec.relative is not None or (not spec.causal and batch.has_tree):  # no kernel; no model has the latter
            not_recorded()
            return super().attend(q, cache, layer, batch, spec)
        (T, H, D), (keys, values) = q.shape, cache.layers[layer]
        V = values.shape[3]
        out = self.memory.arena.take((T, H, V))
        q, stride = _rows(q)
        arguments = filled(
            Attention, q=q, out=out, **cached_layer(keys, values), N=len(batch.spans), H=H, K=cache.heads, D=D, V=V,
            stride=stride, out_stride=H * V, window=spec.window or 0, causal=spec.causal, scale=float(spec.scale),
            cap=spec.softcap or 0.0, slopes=None if spec.slopes is None else spec.slopes.data,
            bias=None if spec.bias is None else spec.bias.data,
            distances=0 if spec.bias is None else spec.bias.shape[1] // 2,
            sinks=None if spec.sinks is None else spec.sinks.data,
        )  # fmt: skip
        sequences.add(batch, arguments)
        launch("attention", arguments, most_shares())  # of blocks, which become more from step to step
        return out

    @recorded
    def take_rows(self, x: Any, rows: Any) -> Any:
        """The rows whose logits are wanted. [T, E] -> [R, E]"""
        R, E = len(rows), x.shape[1]
        out = self.memory.arena.take((R, E))
        rows = np.ascontiguousarray(rows, np.int64)
        launch("take_rows", filled(TakeRows, x=contiguous(x), rows=rows, out=out, R=R, E=E), shares_of(R))
        return out

    @recorded
    def scale_logits(self, logits: Any, scale: float, cap: float | None) -> Any:
        """cap * tanh(scale * logits / cap), or scale * logits without a soft cap, in place. [R, V] -> [R, V]"""
        arguments = filled(ScaleLogits, logits=logits, count=logits.size, scale=float(scale), cap=float(cap or 0))
        launch("scale_logits", arguments, shares_of(-(-logits.size // PIECE)))
        return logits

    @recorded
    def reduce(self, x: Any) -> Any:
        """The sum of x over all ranks, on each of them; between the launches of a recorded pass. [T, E] -> [T, E]"""
        if self.group is not None and self.ranks > 1:
            call(partial(self.group.all_reduce, x))
        return x

    def join(self, group: Group) -> None:
        """Share each layer with the processes of a group; passes are still replayed."""
        super().join(group)
        self.replays = True


def _rows(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """Heads [T, heads, D] with contiguous rows, copied only if need be, and the numbers from one row to the next."""
    _, heads, D = x.shape
    if x.size and (x.strides[2] != 4 or (heads > 1 and x.strides[1] != 4 * D)):
        not_recorded()
        x = np.ascontiguousarray(x)
    return x, x.strides[0] // 4 if len(x) > 1 else heads * D
