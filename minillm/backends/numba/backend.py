"""The CPU backend of the extra "fast": runs every operation of a step in kernels compiled by Numba.

Weights keep their stored format, 32, 16, 8 or 4 bits, and each is read from memory once for up to 16 rows. Operations
that are not overridden here run as in the reference.
"""

from collections.abc import Sequence
from typing import Any

from ...batch import Batch
from ...reference.philox import Keys
from ...reference.rotary import Rotation
from ..chooser import Chooser
from ..formats import Format, WeightFormats
from ..operations import Backend
from ..pages import Pages
from ..weights import Loader, Weight
from . import rows
from .activations import ACTIVATION_CODES
from .attention import store_kv
from .choice import Sampler
from .fewrows import linear_few
from .launching import not_recorded
from .manyrows import linear_many
from .steps import FEW_ROWS, NumbaMemory


class NumbaBackend(Backend):
    """Runs on a CPU with the kernels of this package."""

    name = "numba"
    memory: NumbaMemory

    def __init__(self, *, weights: str | WeightFormats = "auto", cache: str | Format = "float32") -> None:
        """Set the formats of weights and of the K/V cache, or their names; activations are float32."""
        memory = NumbaMemory(cache)
        super().__init__(Loader(weights), memory, NumbaChooser(memory))

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """table[ids], plus position_table[positions]. [T], [T] -> [T, E]"""
        out = self.memory.arena.take((len(ids), table.shape[1]))
        return rows.embed(ids, table.data, out, positions, position_table and position_table.data)

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual. [T, in] -> [T, out]"""
        if activation not in ACTIVATION_CODES:
            not_recorded()
            return super().linear(x, weight, activation=activation, residual=residual)
        out = self.memory.arena.take((len(x), weight.shape[0]))
        product = linear_few if len(x) <= FEW_ROWS else linear_many
        return product(x, weight.data, weight.bias, out, activation=activation, residual=residual)

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean 0 and variance 1, then apply gain and bias. [T, E] -> [T, E]"""
        return rows.layer_norm(x, weight.data, weight.bias, epsilon, self.memory.arena.take(x.shape))

    def rms_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean square 1, then apply gain. [T, E] -> [T, E], by head [T, heads, D] -> [T, heads, D]"""
        return rows.rms_norm(x, weight.data, epsilon, self.memory.arena.take(x.shape))

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """Rotate queries and keys by their positions. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        take = self.memory.arena.take
        return self.memory.workspace.rotary.rotate(q, k, batch, rotation, take(q.shape), take(k.shape))

    def glu(self, x: Any, activation: str) -> Any:
        """activation(gate) * up, of the two halves of each row. [T, 2 F] -> [T, F]"""
        if activation not in ACTIVATION_CODES:
            not_recorded()
            return super().glu(x, activation)
        return rows.glu(x, activation, self.memory.arena.take((len(x), x.shape[1] // 2)))

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """Round the new tokens' keys and values to the cache's dtype and write them to their slots. k, v: [T, K, D]"""
        store_kv(k, v, *cache.layer(layer), batch)

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
        """Attention over the cache, sequence by sequence; variants without a kernel run as in the reference.

        [T, H, D] -> [T, H, D]
        """
        if not causal or bias is not None or softcap is not None:
            not_recorded()
            variant: dict[str, Any] = {"causal": causal, "window": window, "slopes": slopes}
            return super().attend(q, cache, layer, batch, scale=scale, **variant, bias=bias, softcap=softcap)
        alibi = None if slopes is None else slopes.data
        out, attention = self.memory.arena.take(q.shape), self.memory.workspace.attention
        return attention.attend(q, *cache.layer(layer), batch, scale, out, window=window, slopes=alibi)

    def take_rows(self, x: Any, rows: Any) -> Any:
        """The rows whose logits are wanted. [T, E] -> [R, E]"""
        not_recorded()
        return super().take_rows(x, rows)


class NumbaChooser(Chooser):
    """Knows the argmax of a program's own logits, and samples by a kernel."""

    def __init__(self, memory: NumbaMemory) -> None:
        super().__init__()
        self._memory = memory
        self._host = NumbaHost()

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

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row from its filtered distribution. [R, V], [R] -> [R]"""
        return self._host.sample(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


class NumbaHost(Chooser):
    """The chooser of the host, with sampling by a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._sampler = Sampler()

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row from its filtered distribution. [R, V], [R] -> [R]"""
        return self._sampler.sample(
            logits, keys.uniforms(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
