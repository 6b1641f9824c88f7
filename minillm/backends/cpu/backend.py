"""The CPU backend: runs every operation of a step in kernels in C.

Weights keep their stored format, 32, 16, 8 or 4 bits, and each is read from memory once for up to 16 rows. Operations
that are not overridden here run as in the reference.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...errors import NumericalError
from ...reference.philox import Keys
from ...reference.quantize import Quantized
from ...reference.rotary import Rotation
from ..chooser import Chooser
from ..formats import Format, WeightFormats
from ..operations import Backend
from ..pages import Pages, StoredVectors
from ..weights import Loader, Weight
from .launching import (
    DRAW,
    Attention,
    Embed,
    Glu,
    Linear,
    Norm,
    Rotary,
    Sample,
    Scratch,
    StoreKV,
    Table,
    TakeRows,
    address,
    filled,
    kernels,
    launch,
    not_recorded,
    num_threads,
    shares_of,
)
from .memory import FEW_ROWS, CpuMemory

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_new": 3, "silu": 4}
"""Codes of `kernels/cpu/activation.h`"""
_CODES = {"float32": 0, "float16": 1, "uint16": 2, "int8": 3, "uint8": 4}
"""Type of an array of weights, keys or values -> its format in C: uint16 holds bfloat16, uint8 pairs of int4"""


class CpuBackend(Backend):
    """Runs on a CPU with the kernels of `kernels/cpu`."""

    name = "cpu"
    memory: CpuMemory

    def __init__(self, *, weights: str | WeightFormats = "auto", cache: str | Format = "float32") -> None:
        """Set the formats of weights and of the K/V cache, or their names; activations are float32.

        Raises:
            DeviceError: the kernels cannot be compiled.
        """
        kernels()
        memory = CpuMemory(cache)
        super().__init__(Loader(weights), memory, CpuChooser(memory))

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """table[ids], plus position_table[positions]. [T], [T] -> [T, E]"""
        T, E = len(ids), table.shape[1]
        out = self.memory.arena.take((T, E))
        places = None if position_table is None else position_table.data
        arguments = filled(
            Embed, ids=ids, words=_table(table.data), positions=positions, places=_table(places), out=out, T=T, E=E
        )
        launch("embed", arguments, shares_of(T))
        return out

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual. [T, in] -> [T, out]"""
        if activation not in ACTIVATIONS:
            not_recorded()
            return super().linear(x, weight, activation=activation, residual=residual)
        T, outputs = len(x), weight.shape[0]
        out, scratch = self.memory.arena.take((T, outputs)), self.memory.workspace.scratch
        values, scales, group = _matrix(weight.data)
        arguments = filled(
            Linear, weight=values, scales=scales, bias=weight.bias, residual=_contiguous(residual), x=_contiguous(x),
            out=out, rows=T, inputs=weight.shape[1], outputs=outputs, format=_CODES[values.dtype.name], group=group,
            activation=ACTIVATIONS[activation],
        )  # fmt: skip
        many = T > FEW_ROWS
        if scales is not None:
            groups = scales.shape[1] * group // 32
            arguments.wide = many and values.dtype == np.int8 and kernels().wide_integers()
            arguments.integers = address(scratch.take("integers", 2 * T * groups * 32 + 64, np.int8))
            arguments.x_scales, arguments.x_sums = (
                address(scratch.take(name, T * (-(-groups // 16) * 16))) for name in ("x scales", "x sums")
            )
            launch("round_rows", arguments, shares_of(T))
        if many:
            arguments.scratch = address(scratch.take("panels", num_threads() * kernels().linear_scratch(), np.uint8))
        arguments.kept += scratch.buffers()
        launch("linear_many" if many else "linear_few", arguments, shares_of(-(-outputs // 4)))
        return out

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean 0 and variance 1, then apply gain and bias. [T, E] -> [T, E]"""
        return self._norm("layer_norm", x[:, None], weight, epsilon).reshape(x.shape)

    def rms_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean square 1, then apply gain. [T, E] -> [T, E], by head [T, heads, D] -> [T, heads, D]"""
        return self._norm("rms_norm", x if x.ndim == 3 else x[:, None], weight, epsilon).reshape(x.shape)

    def _norm(self, kernel: str, x: Any, weight: Weight, epsilon: float) -> Any:
        T, heads, width = x.shape
        x, stride = _rows(x)
        out = self.memory.arena.take(x.shape)
        arguments = filled(
            Norm, x=x, gain=weight.data, bias=weight.bias, out=out, T=T, heads=heads, width=width, stride=stride,
            epsilon=epsilon,
        )  # fmt: skip
        launch(kernel, arguments, shares_of(T))
        return out

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """Rotate queries and keys by their positions. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        cosines, sines = self.memory.workspace.angles(rotation, batch)
        T, _, D = q.shape
        arguments = filled(Rotary, cosines=cosines, sines=sines, T=T, D=D, half=cosines.shape[1])
        outs = []
        for part, x in ((arguments.q, q), (arguments.k, k)):
            x, stride = _rows(x)
            out = self.memory.arena.take(x.shape)
            part.x, part.out, part.heads, part.stride = address(x), address(out), x.shape[1], stride
            part.out_stride = x.shape[1] * D
            arguments.kept += [x, out]
            outs.append(out)
        launch("rotary", arguments, shares_of(T))
        return outs[0], outs[1]

    def glu(self, x: Any, activation: str) -> Any:
        """activation(gate) * up, of the two halves of each row. [T, 2 F] -> [T, F]"""
        if activation not in ACTIVATIONS:
            not_recorded()
            return super().glu(x, activation)
        T, F = len(x), x.shape[1] // 2
        out = self.memory.arena.take((T, F))
        arguments = filled(Glu, x=_contiguous(x), out=out, T=T, F=F, activation=ACTIVATIONS[activation])
        launch("glu", arguments, shares_of(T))
        return out

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """Round the new tokens' keys and values to the cache's dtype and write them to their slots. k, v: [T, K, D]"""
        T, K, D = k.shape
        (k, k_stride), (v, v_stride) = _rows(k), _rows(v)
        arguments = filled(
            StoreKV, k=k, v=v, **_cached(*cache.layer(layer)), slot_pages=batch.slot_pages,
            slot_offsets=batch.slot_offsets, T=T, K=K, D=D, k_stride=k_stride, v_stride=v_stride,
        )  # fmt: skip
        launch("store_kv", arguments, shares_of(T))

    def attend(
        self,
        q: Any,
        cache: Pages,
        layer: int,
        batch: Batch,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        slopes: Weight | None = None,
        bias: Sequence[Any] | None = None,
        softcap: float | None = None,
    ) -> Any:
        """Attention over the cache, sequence by sequence. [T, H, D] -> [T, H, D]"""
        if not causal and batch.has_tree:  # a combination that no model has: no kernel
            not_recorded()
            variant: dict[str, Any] = {"causal": causal, "window": window, "slopes": slopes}
            return super().attend(q, cache, layer, batch, scale=scale, **variant, bias=bias, softcap=softcap)
        _, H, D = q.shape
        out = self.memory.arena.take(q.shape)
        added = [np.ascontiguousarray(each, np.float32) for each in bias or ()]
        if added:
            not_recorded()  # its shape changes with each step
        q, stride = _rows(q)
        arguments = filled(
            Attention, q=q, out=out, **_cached(*cache.layer(layer)), slopes=None if slopes is None else slopes.data,
            N=len(batch.spans), H=H, K=cache.heads, D=D, stride=stride, out_stride=H * D, window=window or 0,
            causal=causal, scale=float(scale), cap=softcap or 0.0,
            bias=np.array([address(each) for each in added]) if added else None,
        )  # fmt: skip
        arguments.kept += added
        self.memory.workspace.sequences.add(batch, arguments)
        launch("attention", arguments, shares_of(max(1, len(q)) * cache.heads))
        return out

    def take_rows(self, x: Any, rows: Any) -> Any:
        """The rows whose logits are wanted. [T, E] -> [R, E]"""
        R, E = len(rows), x.shape[1]
        out = self.memory.arena.take((R, E))
        rows = np.ascontiguousarray(rows, np.int64)
        launch("take_rows", filled(TakeRows, x=_contiguous(x), rows=rows, out=out, R=R, E=E), shares_of(R))
        return out


class CpuHost(Chooser):
    """The chooser of the host, with sampling by a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = Scratch()

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row from its filtered distribution. [R, V], [R] -> [R]"""
        logits = np.ascontiguousarray(logits, np.float32)
        R, V = logits.shape
        draws, tokens = np.empty(R, DRAW), np.empty(R, np.int64)
        for name, value in {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
            draws[name] = value
        draws["uniform"] = keys.uniforms()
        scratch = self._scratch.take("sample", num_threads() * kernels().sample_scratch(V), np.float64)
        arguments = filled(Sample, logits=logits, draws=draws, tokens=tokens, scratch=scratch, R=R, V=V)
        launch("sample", arguments, shares_of(R))
        if (tokens < 0).any():
            row = int(np.argmin(tokens))
            raise NumericalError(
                f"row {row} of the logits cannot be sampled from: its largest value is {float(logits[row].max())}, "
                "not finite"
            )
        return tokens


class CpuChooser(CpuHost):
    """Knows the argmax of a program's own logits."""

    def __init__(self, memory: CpuMemory) -> None:
        super().__init__()
        self._memory = memory
        self._host = CpuHost()

    @property
    def host(self) -> Chooser:
        """A chooser without results kept from a pass, since its callers may change logits in place."""
        return self._host

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity; already known for a program's own logits. [R, V]"""
        found = self._memory.likeliest
        return super().finite(logits) if found is None or found.logits is not logits else found.finite()

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row; already known for a program's own logits. [R, V] -> [R]"""
        found = self._memory.likeliest
        return super().argmax(logits) if found is None or found.logits is not logits else found.tokens()


def _contiguous(x: Any) -> Any:
    """An array whose rows follow one another; copied only if they do not."""
    if x is None or x.flags.c_contiguous:
        return x
    not_recorded()
    return np.ascontiguousarray(x)


def _rows(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """Heads [T, heads, D] with contiguous rows, copied only if need be, and the numbers from one row to the next."""
    _, heads, D = x.shape
    if x.size and (x.strides[2] != 4 or (heads > 1 and x.strides[1] != 4 * D)):
        not_recorded()
        x = np.ascontiguousarray(x)
    return x, x.strides[0] // 4 if len(x) > 1 else heads * D


def _matrix(data: Any) -> tuple[NDArray[Any], NDArray[np.uint16] | None, int]:
    """Numbers and scales of a stored matrix, and how many inputs share a scale; 32 where there is none."""
    if isinstance(data, Quantized):
        return data.values, data.scales.view(np.uint16), data.group
    return _contiguous(data), None, 32


def _table(data: Any) -> Any:
    """A table of embeddings in C."""
    if data is None:
        return Table()
    values, scales, group = _matrix(data)
    return filled(Table, values=values, scales=scales, format=_CODES[values.dtype.name], group=group)


def _cached(keys: Any, values: Any) -> dict[str, Any]:
    """One layer of the cache as fields of arguments."""
    stored = [each if isinstance(each, StoredVectors) else StoredVectors(each) for each in (keys, values)]
    return {
        "keys": stored[0].data,
        "values": stored[1].data,
        "key_scales": stored[0].scales,
        "value_scales": stored[1].scales,
        "format": _CODES[stored[0].data.dtype.name],
        "P": keys.shape[2],
    }
