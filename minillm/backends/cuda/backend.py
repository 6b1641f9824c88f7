"""The CUDA backend: runs every operation by a kernel of `kernels/cuda/`, and decode steps as CUDA graphs.

The device and the launcher of kernels are arguments: CuPy's on a GPU, the host and an emulator without one. The kernels
are compiled for one storage type, so activations and K/V cache have the same format, and weights too unless they have
8 or 4 bits; sums and logits are float32. Attention with heads of an unsupported width, or with
relative positions, has no kernel: it runs as in the reference, on the device's array module.
"""

from itertools import pairwise
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...batch import Batch
from ...reference.attention import AttentionSpec
from ...reference.experts import SOFTMAX, RouterSpec, Routing
from ...reference.quantize import Quantized
from ...reference.rotary import Rotation
from ...reference.selective_scan import UNLIMITED
from ..formats import WEIGHT_FORMATS, Format
from ..group import Group
from ..low_rank import LowRankWeight
from ..operations import Backend
from ..pages import Pages
from ..recording import Recordable, Touched, recorded
from ..storage import Experts, some_rows
from ..weights import Weight
from . import attention, experts, low_rank, rows
from .batches import DeviceBatch
from .choosing import CudaSampler
from .device import WORKSPACE, Device
from .integers import expand
from .kernels import ALL_REDUCE, Kernels, Launcher
from .linear import ACTIVATIONS, Product, Products, linear
from .memory import CudaMemory
from .tensor_maps import TensorMaps
from .weights import CudaLoader, number_type

AUTO = "auto"


class CudaBackend(Recordable, Backend):
    """Runs on a GPU, or on an emulator of one."""

    name = "cuda"
    loader: CudaLoader
    memory: CudaMemory
    sampler: CudaSampler

    def __init__(
        self,
        device: Device,
        launcher: Launcher,
        weights: str = AUTO,
        *,
        max_batch_size: int = 16,
        debug: bool = False,
        dependent: bool = False,
        dependent_rows: int | None = None,
        prompt_tokens: int = 0,
        records_ranks: bool = False,
        persistent: bool = False,
        tensor_maps: TensorMaps | None = None,
        integer_warpgroups: bool = False,
        deferred: bool = False,
    ) -> None:
        """Set the device and the launcher of its kernels.

        Args:
            device: memory, copies and recording of steps
            launcher: compiles and launches
            weights: a name in `WEIGHT_FORMATS`. With "auto", "int8" and "int4" the type of activations and cache is by
                the first matrix that is loaded (`storage_of`)
            max_batch_size: decode steps of more sequences are not recorded
            debug: check indices on the device
            dependent: kernels of a recorded step may begin before those before them have ended (`dependent.py`)
            dependent_rows: in steps of up to so many sequences; None: in all
            prompt_tokens: passes of prompts of up to so many tokens are recorded too; the library's products, if the
                device has one, must be such that a graph can hold them
            records_ranks: decode steps of several ranks are recorded with their sums, if the group can do that
            persistent: the layers of a recorded step of few sequences are one kernel, if they can (`persistent.py`)
            tensor_maps: products of many rows are `gemm_tma`'s in the place of the library's, where it can
            integer_warpgroups: products of many rows with matrices of 8 and 4 bits are by warpgroups, where the device
                has them (`Products`)
            deferred: products of a recorded step of few sequences take on the norms before them (`deferring.py`)
        """
        self.device, self._records_ranks = device, records_ranks
        self.kernels = Kernels(launcher, debug=debug, dependent=dependent)
        library = device.multiply if device.has_library else None
        self.products = Products(self.kernels, library, self._empty, tensor_maps, integer_warpgroups=integer_warpgroups)
        self._heads: WeakKeyDictionary[Weight, Experts] = WeakKeyDictionary()
        self._routings: dict[tuple[int, int], Routing] = {}
        self._stacks: dict[tuple[LowRankWeight | None, ...], low_rank.Stack] = {}
        loader = CudaLoader(device, self.kernels, self._settle, WEIGHT_FORMATS[weights])
        sampler = CudaSampler(device, self.kernels)
        memory = CudaMemory(device, self.kernels, loader.uploader, sampler, self.products, max_batch_size)
        memory.dependent_rows, memory.prompt_tokens = dependent_rows, prompt_tokens
        memory.persistent, memory.deferred = persistent, deferred
        super().__init__(loader, memory, sampler)
        form = loader.formats.projection
        if form is not None and not form.scale_bits:
            self._settle(form)

    def _settle(self, form: Format) -> None:
        """Set the format of activations, cache and expanded weights: the one that the kernels are compiled for."""
        self.kernels.storage = form.name
        self.loader.storage = form
        self.memory.settle(form)

    def _empty(self, numbers: int) -> Any:
        return self._reserve((numbers,), number_type(self.kernels.storage))

    def join(self, group: Group) -> None:
        """As `Backend.join`; decode steps are recorded all the same if the group's sums may be, and the user asks."""
        super().join(group)
        if group.size > 1:
            self.memory.runs_ahead, self.memory.prompt_tokens = False, 0
            if self._records_ranks and group.captures:
                self.replays, self.memory.group = True, group

    @recorded
    def reduce(self, x: Any) -> Any:
        """The group's sum, in the order of the stream: a recorded step holds it like a launch. [T, E] -> [T, E]"""
        if self.group is not None and self.ranks > 1:
            self.kernels.call(ALL_REDUCE, self.group.all_reduce, x)
        return x

    def _reserve(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.device.empty(shape, dtype, WORKSPACE)

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
        """One launch, unless ranks share a table of 8 or 4 bits; token types are added by the array library.

        3 x [T] -> [T, E]
        """
        out = self.memory.arena.take((len(ids), table.shape[1]))
        learned = None if position_table is None else position_table.data
        if isinstance(table.data, Quantized):
            others = None
            if self.ranks > 1:
                self._not_recorded()
                others = (ids < table.first) | (ids >= table.stop)
                ids = self.xp.where(others, 0, ids - table.first).astype(np.int32)
            expand(self.kernels, table.data, out, ids=ids, position_table=learned, positions=positions, scale=scale)
            if others is not None:
                out[others] = 0 if learned is None else learned[positions[others]]
        else:
            added: dict[str, Any] = {"position_table": learned, "positions": positions, "scale": scale}
            rows.embed(self.kernels, table.data, ids, out, **added, first=table.first if self.ranks > 1 else None)
        if type_table is not None:
            self._not_recorded()
            out += type_table.data[types]
        return out

    @recorded
    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """One launch, or the library's product and one launch. Logits are float32. [T, in] -> [T, out]

        A head's tanh, which has no kernel, is the array library's. The square of ReLU is a launch more: in the
        epilogue of every product it would take registers that these do not have.
        """
        if activation == "relu2":
            return self._squared(self.linear(x, weight, activation="relu"), residual)
        if activation == "tanh":
            self._not_recorded()
            y = self.linear(x, weight)
            y = self.xp.tanh(y, out=y)
            return y if residual is None else self.xp.add(y, residual, out=y)
        dtype = np.float32 if weight.makes_logits else None
        out = self.memory.arena.take((len(x), weight.shape[0]), dtype)
        room = self.memory.workspace.scratch.splits
        self.products.linear(Product(x, weight.data, weight.bias, out, activation, residual, room))
        return out

    @recorded
    def add_low_rank(self, y: Any, x: Any, parts: Any, *, activation: str | None = None, residual: Any = None) -> Any:
        """In a decode step two launches for all adapters, which `parts` then has by number. [T, out], [T, in]

        Otherwise by the array library, for one adapter after the other.
        """
        if activation == "relu2":
            return self._squared(self.add_low_rank(y, x, parts, activation="relu"), residual)
        numbers = self.memory.row_adapters
        if numbers is None or activation not in ACTIVATIONS:
            self._not_recorded()
            present = [(self.xp.asarray(rows), change) for rows, change in parts if change is not None and len(rows)]
            return super().add_low_rank(y, x, present, activation=activation, residual=residual)
        changes = tuple(change for _, change in parts)
        if changes not in self._stacks:
            stacked = self._stacks[changes] = low_rank.stack(changes, self._reserve, self.xp)
            self.memory.adapter_bytes += stacked.nbytes
        stacked = self._stacks[changes]
        h = self.memory.arena.take((len(x), stacked.down.shape[1]), np.float32)
        out = self.memory.arena.take(y.shape, y.dtype)  # last: the arena keeps a layer's last result
        added: dict[str, Any] = {"activation": activation, "residual": residual}
        low_rank.add_low_rank(self.kernels, y, x, stacked, numbers, h, out, **added)
        return out

    @recorded
    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """One launch. [T, E] -> [T, E]"""
        out = self.memory.arena.take(x.shape)
        rows.layer_norm(self.kernels, x, weight.data, weight.bias, epsilon, out)
        return out

    @recorded
    def rms_norm(self, x: Any, weight: Weight, epsilon: float, *, residual: Any | None = None) -> Any:
        """One launch. [T, E] -> [T, E], or [T, heads, D] -> [T, heads, D]"""
        out = self.memory.arena.take(x.shape)
        rows.rms_norm(self.kernels, x, weight.data, epsilon, out, residual)
        return out

    @recorded
    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """One launch. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        assert isinstance(batch, DeviceBatch)
        q_out, k_out = self.memory.arena.take(q.shape), self.memory.arena.take(k.shape)
        rows.rotary(self.kernels, q, k, batch, rotation, q_out, k_out)
        return q_out, k_out

    @recorded
    def glu(self, x: Any, activation: str, *, alone: bool = False) -> Any:
        """One launch, or two of a gate with the square of ReLU. [T, 2 F] -> [T, F], or [T, F] -> [T, F]"""
        F = x.shape[1] if alone else x.shape[1] // 2
        out = self.memory.arena.take((len(x), F))
        if activation == "relu2":
            rows.glu(self.kernels, x[:, :F], "relu", out)
            rows.multiply(self.kernels, out, x[:, -F:], None, out)
        else:
            rows.glu(self.kernels, x, activation, out)
        return out

    def _squared(self, y: Any, residual: Any | None) -> Any:
        """y * y + residual of y >= 0, in place, by the kernel of a gate. [T, F] -> [T, F]"""
        rows.glu(self.kernels, y, "relu", y)
        if residual is None:
            return y
        self._not_recorded()
        return self.xp.add(y, residual, out=y)

    @recorded
    def gate(self, x: Any, logits: Any, *, silu: bool = False) -> Any:
        """One launch. [T, F], [T, n] -> [T, F]"""
        out = self.memory.arena.take(x.shape)
        rows.gate(self.kernels, x, logits, out, silu=silu)
        return out

    @recorded
    def multiply(self, x: Any, others: Any = None, *, factor: Weight | None = None) -> Any:
        """One launch. [T, F], [T, F] -> [T, F]"""
        out = self.memory.arena.take(x.shape)
        rows.multiply(self.kernels, x, others, None if factor is None else factor.data, out)
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
        """Two launches. [T, X] -> [T, k]"""
        assert logits.shape[1] <= experts.MOST_EXPERTS, logits.shape
        places = self.memory.workspace.scratch.places
        places.restart()
        added, times = (None if weight is None else weight.data for weight in (bias, factors))
        given: dict[str, Any] = {"normalised": normalised, "bias": added, "spec": spec, "factors": times}
        return experts.route(self.kernels, logits, k, places.take, **given)

    @recorded
    def linear_experts(self, x: Any, weight: Weight, routing: Routing) -> Any:
        """One launch; for many rows one for each expert, and the host waits to learn whose. [T k, in] -> [T k, out]"""
        out = self.memory.arena.take((len(x), weight.shape[1]))
        if self._decodes or len(x) <= experts.GROUPED_ROWS:
            experts.multiply(self.kernels, x, weight.data, routing, out, weight.bias)
            return out
        self._not_recorded()
        for i, (first, stop) in enumerate(pairwise(routing.starts.tolist())):
            bias = None if weight.bias is None else weight.bias[i]
            linear(self.kernels, Product(x[first:stop], weight.data.matrices[i], bias, out[first:stop]))
        return out

    @recorded
    def linear_heads(self, x: Any, weight: Weight) -> Any:
        """The heads' matrices as experts, each of which computes one head; the heads are sorted by copies before it.

        [T, H, r + in] -> [T, H, r + out]
        """
        (T, H, D), (height, inputs), scratch = x.shape, weight.shape, self.memory.workspace.scratch.heads
        scratch.restart()
        outputs, kept = height // H, D - inputs
        by_head, products = scratch.take((H, T, inputs)), scratch.take((H, T, outputs))
        out = self.memory.arena.take((T, H, kept + outputs))
        rows.move_heads(self.kernels, x[:, :, kept:], by_head.transpose(1, 0, 2))  # [T, H, in] -> [H, T, in]
        sorted_rows = by_head.reshape(H * T, inputs), products.reshape(H * T, outputs)
        if self._decodes or T <= experts.MOST_HEAD_ROWS:
            experts.multiply(
                self.kernels, sorted_rows[0], self._by_head(weight, H), self._each_head(T, H), sorted_rows[1]
            )
        else:
            for h, matrix in enumerate(self._by_head(weight, H).matrices):
                linear(self.kernels, Product(by_head[h], matrix, None, products[h]))
        rows.move_heads(self.kernels, products.transpose(1, 0, 2), out[:, :, kept:])  # [H, T, out] -> [T, H, out]
        if kept:
            rows.move_heads(self.kernels, x[:, :, :kept], out[:, :, :kept])
        return out

    def _by_head(self, weight: Weight, H: int) -> Experts:
        """A weight [H out, in] as the matrices of H experts."""
        if weight not in self._heads:
            outputs = weight.shape[0] // H
            matrices = (some_rows(weight.data, slice(h * outputs, (h + 1) * outputs)) for h in range(H))
            self._heads[weight] = Experts(tuple(matrices), weight.data)
        return self._heads[weight]

    def _each_head(self, T: int, H: int) -> Routing:
        """The routing of T rows of each of H heads, as much of it as products read."""
        if (T, H) not in self._routings:
            starts, present = np.arange(H + 1, dtype=np.int32) * T, np.arange(H, dtype=np.int32)
            weights = np.empty((T, 0), np.float32)
            self._routings[T, H] = Routing(None, weights, None, None, self.xp.asarray(starts), self.xp.asarray(present))
        return self._routings[T, H]

    @recorded
    def combine(self, y: Any, routing: Routing, residual: Any | None = None) -> Any:
        """One launch. [T k, E] -> [T, E]"""
        out = self.memory.arena.take((len(routing.weights), y.shape[1]))
        experts.combine(self.kernels, y, routing, residual, out)
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
        """One launch. [T, C] or gated [T, 3 C] -> [T, C]"""
        states, *_ = cache.states_of(layer)
        assert states.shape[1] < rows.MOST_TAPS
        out = self.memory.arena.take((len(x), states.shape[2]))
        places = batch.state_before, batch.state_after
        variant: Any = {"gated": gated, "activation": activation}
        rows.convolve(self.kernels, x, weight.data, weight.bias, states, places, out, **variant)
        return out

    @recorded
    def delta_rule(
        self, x: Any, gates: Any, weight: Weight, cache: Pages, layer: int, batch: Batch, *, keys: tuple[int, int]
    ) -> Any:
        """One launch. [T, 2 K dk + V dv], [T, 2 V] -> [T, V dv]"""
        _, states = cache.states_of(layer)
        assert states.shape[2] <= rows.MOST_KEYS
        out = self.memory.arena.take((len(x), states.shape[1] * states.shape[3]))
        places = batch.state_before, batch.state_after
        rows.delta_rule(self.kernels, x, gates, (weight.data, weight.bias), states, places, out, keys=keys)
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
        """One launch. [T, H P + 2 G N], [T, H] -> [T, H P]"""
        _, states = cache.states_of(layer)
        _, H, P, N = states.shape
        if N > rows.MOST_STATE:
            self._not_recorded()
            return super().selective_scan(x, steps, weight, cache, layer, batch, groups=groups, limits=limits)
        out = self.memory.arena.take((len(x), H * P))
        places = batch.state_before, batch.state_after
        variant: Any = {"groups": groups[0], "limits": limits}
        rows.selective_scan(self.kernels, x, steps, weight.data, weight.bias, states, places, out, **variant)
        return out

    @recorded
    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """One launch. k, v: [T, K, D]"""
        assert isinstance(batch, DeviceBatch)
        attention.store_kv(self.kernels, k, v, *cache.layers[layer], batch.slots)

    @recorded
    def attend(self, q: Any, cache: Pages, layer: int, batch: Batch, spec: AttentionSpec) -> Any:
        """One launch for sequences that decode, one for others; what has no kernel runs as in the reference.

        [T, H, D] -> [T, H, V]
        """
        assert isinstance(batch, DeviceBatch)
        keys, values = cache.layers[layer]
        (T, H, D), V = q.shape, values.shape[3]
        out = self.memory.arena.take((T, H, V))
        spec = spec.with_arrays(attrgetter("data")) if spec.has_weights else spec
        queries = batch.over_sources if spec.cross else batch
        assert isinstance(queries, DeviceBatch)
        decodes = attention.is_decode(q, queries, batch.max_queries, spec)
        has_kernel = attention.has_variant(spec) and (spec.causal or spec.cross or not batch.has_tree)
        if not (has_kernel and attention.has_kernel(self.kernels.storage, D, V, decodes=decodes)):
            self._not_recorded()
            return attention.attend_by_reference(q, keys, values, queries, spec, self.xp, out)
        N, B = queries.block_table.shape
        seen = attention.reach(spec.window, B * self.memory.page_size)
        singles = batch.singles if not decodes and attention.is_last_or_sees_all(spec) else 0
        room = self.memory.workspace.scratch.attention(N if decodes else singles, H, V, seen)
        counts: Any = {"max_queries": batch.max_queries, "singles": singles}
        places: Any = {"positions": batch.positions, "trees": queries.trees}
        attention.attend(self.kernels, q, keys, values, queries, out, room, spec, **counts, **places)
        return out

    @property
    def _decodes(self) -> bool:
        """Whether a decode step runs that may be recorded."""
        return self.memory.step is not None and not self.memory.step.prompts

    def _not_recorded(self) -> None:
        """Run this step call by call each time, since something runs that is not a launch of ours.

        Raises:
            Touched: it is a pass of prompts, which is then not padded.
        """
        if self.memory.step is not None:
            self.memory.step.plain = True
            if self.memory.step.prompts:
                raise Touched

    @recorded
    def take_rows(self, x: Any, wanted: Any) -> Any:
        """One launch. [T, E], [R] -> [R, E]"""
        out = self.memory.arena.take((len(wanted), x.shape[1]))
        rows.take_rows(self.kernels, x, wanted, out)
        return out

    @recorded
    def scale_logits(self, logits: Any, scale: float, cap: float | None) -> Any:
        """One launch, in place. [R, V] -> [R, V]"""
        rows.scale_logits(self.kernels, logits, scale, cap)
        return logits
