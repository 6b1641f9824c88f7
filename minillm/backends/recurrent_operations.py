"""The operations of layers that mix tokens otherwise than attention: convolutions and recurrences.

By default they are `reference/`'s, as all in `operations.py`. What a text has seen so far is in its layer's states.
"""

from typing import Any

from .. import reference
from ..batch import Batch
from ..reference.selective_scan import UNLIMITED
from .memory import Memory
from .pages import Pages
from .weights import Weight


class RecurrentOperations:
    """Convolutions and recurrences of a `Backend`."""

    memory: Memory
    xp: Any

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
