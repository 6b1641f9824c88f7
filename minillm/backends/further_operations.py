"""The operations that a plain decoder does not ask for: experts, gates, convolutions, recurrences, adapters.

By default they are `reference/`'s, as all in `operations.py`. Convolutions and recurrences mix tokens otherwise than
attention: what a text has seen so far is in its layer's states.
"""

from typing import Any

from .. import reference
from ..batch import Batch
from ..reference.experts import SOFTMAX, RouterSpec, Routing
from ..reference.selective_scan import UNLIMITED
from .memory import Memory
from .pages import Pages
from .storage import expand
from .weights import Weight


class FurtherOperations:
    """The operations of a `Backend` that only some families ask for, or adapters."""

    memory: Memory
    xp: Any

    def linear_heads(self, x: Any, weight: Weight) -> Any:
        """The last numbers of each head times its own matrix, as `reference.linear_heads` has it.

        [T, H, r + in] -> [T, H, r + out]

        The weight has the heads' matrices below one another, [H out, in].
        """
        (T, H, D), (rows, inputs) = x.shape, weight.shape
        out = self.memory.arena.take((T, H, D - inputs + rows // H))
        return reference.linear_heads(x, expand(weight.data), self.xp, out)

    def add_low_rank(self, y: Any, x: Any, parts: Any, *, activation: str | None = None, residual: Any = None) -> Any:
        """activation(y + (x A^T) B^T) + residual, in y or not; `parts`: rows and `LowRankWeight`s. [T, out], [T, in]

        With a memory that numbers adapters, a pass that may be recorded has all of them in `parts`, by number, and None
        for those that do not change the projection.
        """
        arrays = [(rows, change.down.data, change.up.data) for rows, change in parts]
        return reference.add_low_rank(y, x, arrays, self.xp, activation=activation, residual=residual)

    def gate(self, x: Any, logits: Any, *, silu: bool = False) -> Any:
        """x * sigmoid(logits), each of n parts of a row by a logit of its own. [T, F], [T, n] -> [T, F]

        With `silu` the factor is logits * sigmoid(logits).
        """
        return reference.gate(x, logits, self.xp, self.memory.arena.take(x.shape), silu=silu)

    def multiply(self, x: Any, others: Any = None, *, factor: Weight | None = None) -> Any:
        """x * others, or times a weight of one number or of one a column, or both. [T, F], [T, F] -> [T, F]"""
        numbers = None if factor is None else factor.data
        return reference.multiply(x, others, numbers, self.xp, self.memory.arena.take(x.shape))

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
        """The k experts of each token, and its rows sorted by expert: see `reference.route`. [T, X] -> [T, k]"""
        added, times = (None if weight is None else weight.data for weight in (bias, factors))
        return reference.route(logits, k, self.xp, normalised=normalised, bias=added, spec=spec, factors=times)

    def linear_experts(self, x: Any, weight: Weight, routing: Routing) -> Any:
        """Each row's product with its expert's matrix, + its bias; the others are not read. [T k, in] -> [T k, out]"""
        matrices, starts = weight.data.matrices, routing.starts.tolist()
        out = self.memory.arena.take((len(x), weight.shape[1]))
        return reference.linear_experts(x, lambda expert: expand(matrices[expert]), starts, self.xp, out, weight.bias)

    def combine(self, y: Any, routing: Routing, residual: Any | None = None) -> Any:
        """Each token's weighted sum of its experts' results, + residual. [T k, E] -> [T, E]"""
        out = self.memory.arena.take((len(routing.weights), y.shape[1]))
        return reference.combine(y, routing, residual, self.xp, out)

    def scale_logits(self, logits: Any, scale: float, cap: float | None) -> Any:
        """cap * tanh(scale * logits / cap), or scale * logits without a soft cap, in place. [R, V] -> [R, V]"""
        return reference.scale_logits(logits, scale, cap, self.xp)

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
        """Causal convolution of each channel, its last inputs in the cache: `reference.convolve`. [T, C] -> [T, C]

        The weight has k C numbers, by the position of the input; gated [T, 3 C] -> [T, C]. The last inputs are the
        first of a layer's states, which may have others besides.
        """
        states, *_ = cache.states_of(layer)
        k, C = states.shape[1] + 1, states.shape[2]
        taps, out = weight.data.reshape(k, C), self.memory.arena.take((len(x), C))
        places = batch.state_before, batch.state_after
        return reference.convolve(
            x, taps, weight.bias, states, *places, self.xp, out, gated=gated, activation=activation
        )

    def unfold(self, x: Any, width: int, batch: Batch, *, stride: int = 1) -> Any:
        """Every `stride`-th row of x beside its neighbours of the same text: `reference.unfold`.

        x has a row for each token, or several. [R, E] -> [R / stride, width E]
        """
        out = self.memory.arena.take((len(x) // stride, width * x.shape[1]))
        rows = len(x) // batch.num_tokens
        return reference.unfold(x, width, batch.spans, out, rows=rows, stride=stride)

    def delta_rule(
        self, x: Any, gates: Any, weight: Weight, cache: Pages, layer: int, batch: Batch, *, keys: tuple[int, int]
    ) -> Any:
        """The gated delta rule, its states in the cache: `reference.delta_rule`. [T, 2 K dk + V dv] -> [T, V dv]

        `keys` are K and dk, the gates [T, 2 V]; the weight has the rates of decay [V], and as bias the step's. The
        matrices are the second of a layer's states, beside a convolution's.
        """
        _, states = cache.states_of(layer)
        out = self.memory.arena.take((len(x), states.shape[1] * states.shape[3]))
        places = batch.state_before, batch.state_after
        return reference.delta_rule(
            x, gates, weight.data, weight.bias, states, *places, self.xp, out, key_heads=keys[0]
        )

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
        """Mamba-2's recurrence, its states in the cache: `reference.selective_scan`. [T, H P + 2 G N] -> [T, H P]

        Steps are [T, H], `groups` are G and N. The weight has the rates of decay [H], then the factors to skip [H], and
        as bias the steps'. The states are the second of a layer's, beside a convolution's.
        """
        _, states = cache.states_of(layer)
        _, H, P, _ = states.shape
        out = self.memory.arena.take((len(x), H * P))
        before, after = batch.state_before, batch.state_after
        decay, skip = weight.data.reshape(2, H)  # [2 H] -> 2 x [H]
        return reference.selective_scan(
            x, steps, decay, skip, weight.bias, states, before, after, self.xp, out, groups=groups[0], limits=limits
        )
