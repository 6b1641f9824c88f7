"""The operations of the model, by default `reference/`'s. Layers call these methods, never an array library.

A backend overrides those it has a faster implementation of, so a missing kernel never blocks a feature. The rest is
done by the objects it carries: `loader` (weights), `memory` (results, cache, recording), `sampler` (tokens).
What a plain decoder does not ask for is in `further_operations.py`.
"""

from operator import attrgetter
from typing import Any

from .. import reference
from ..batch import Batch
from ..reference.attention import AttentionSpec
from ..reference.experts import Routing
from ..reference.rotary import Rotation
from .further_operations import FurtherOperations
from .group import Group
from .loader import Loader
from .memory import Memory
from .pages import Pages
from .recording import composed
from .storage import expand
from .token_sampler import TokenSampler
from .weights import Weight


class Backend(FurtherOperations):
    """Runs every operation as `reference/` defines it, on the array module of its memory.

    Results are allocated from the memory's arena: each is valid until the next layer begins, a layer's last one until
    the next layer has ended (see `Arena`).
    """

    name = "reference"
    replays = True
    """Whether a forward pass may be replayed by the memory; otherwise its operations are called each time"""
    changes_results = False
    """Whether results may differ from the model's: keys and values are then shared with no other text"""
    rank, ranks = 0, 1
    group: Group | None = None
    """The processes that share each layer (tensor parallelism), this one's number among them, and how many they are"""

    def __init__(
        self, loader: Loader | None = None, memory: Memory | None = None, sampler: TokenSampler | None = None
    ) -> None:
        """Set the parts; those left out are float32 on the array module of the memory, which is NumPy by default."""
        self.memory = memory or Memory()
        self.xp = self.memory.xp
        self.loader = loader or Loader(xp=self.xp)
        self.sampler = sampler or TokenSampler(self.xp)

    def join(self, group: Group) -> None:
        """Share each layer with the processes of a group: `reduce` sums over them. Passes are no longer replayed."""
        self.group, self.rank, self.ranks, self.replays = group, group.rank, group.size, group.size == 1

    @composed
    def enter_layer(self, layer: int, x: Any = None) -> None:
        """Announce the beginning of layer number `layer`, and what enters it [T, E]; L is what follows the last one."""
        self.memory.arena.turn()

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
        """scale * table[ids], plus position_table[positions], plus type_table[types]. 3 x [T] -> [T, E]

        Where ranks share the table, the vectors of other ranks' tokens are zero.
        """
        out = self.memory.arena.take((len(ids), table.shape[1]))
        words = table.rows(ids) if self.ranks == 1 else table.rows_of_share(ids, self.xp)
        place = None if position_table is None else position_table.rows(positions)
        kind = None if type_table is None else type_table.rows(types)
        rows = self.xp.arange(len(ids))
        return reference.embed(words, rows, self.xp, out, rows, place, rows, kind, scale=scale)

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual; logits are float32. [T, in] -> [T, out]"""
        dtype = self.xp.float32 if weight.makes_logits else None
        out = self.memory.arena.take((len(x), weight.shape[0]), dtype)
        matrix = weight.data if weight.in_float32 else expand(weight.data)
        return reference.linear(x, matrix, weight.bias, self.xp, out, activation=activation, residual=residual)

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean 0 and variance 1, then apply gain and bias. [T, E] -> [T, E]"""
        return reference.layer_norm(x, weight.data, weight.bias, epsilon, self.xp, self.memory.arena.take(x.shape))

    def rms_norm(self, x: Any, weight: Weight, epsilon: float, *, residual: Any | None = None) -> Any:
        """Normalise rows to mean square 1, apply gain, add the residual. [T, E] -> [T, E]

        By head without a residual: [T, heads, D] -> [T, heads, D], with a gain [D] or [heads D].
        """
        return reference.rms_norm(x, weight.data, epsilon, self.xp, self.memory.arena.take(x.shape), residual)

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """Rotate queries and keys by their positions. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]

        Keys may be narrower than queries: of latent attention they are the rotated numbers alone.
        """
        frequencies, growth = rotation.frequencies.data, rotation.growth(batch)
        turns = reference.cosines_and_sines(
            batch.positions, frequencies, growth, rotation.scale, self.xp
        )  # 2 x [T, r / 2]
        turned = [reference.rotary(x, *turns, self.xp, self.memory.arena.take(x.shape)) for x in (q, k)]
        return turned[0], turned[1]

    def glu(self, x: Any, activation: str, *, alone: bool = False) -> Any:
        """activation(gate) * up, of the two halves of each row. [T, 2 F] -> [T, F]

        With `alone` each row is both, activation(x) * x. [T, F] -> [T, F]
        """
        F = x.shape[1] if alone else x.shape[1] // 2
        return reference.glu(x, activation, self.xp, self.memory.arena.take((len(x), F)))

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """Write the new tokens' keys and values to their slots of the cache. k, v: [T, K, D]

        Where values are the last numbers of the keys, k has those before them. [T, K, D - V], [T, K, V]
        """
        keys, values = cache.layers[layer]
        if cache.value_dim:
            reference.store_joined(k, v, keys, batch, self.xp)
        else:
            reference.store_kv(k, v, keys, values, batch)

    def attend(self, q: Any, cache: Pages, layer: int, batch: Batch, spec: AttentionSpec) -> Any:
        """Attention over the cache, or over each sequence's source: `reference.attend`. [T, H, D] -> [T, H, V]"""
        batch = batch.over_sources if spec.cross else batch
        spec = spec.with_arrays(attrgetter("data")) if spec.has_weights else spec
        keys, values = cache.layers[layer]
        out = self.memory.arena.take((*q.shape[:2], values.shape[3]))
        return reference.attend(q, keys, values, batch, spec, self.xp, out)

    def take_rows(self, x: Any, rows: Any) -> Any:
        """The rows whose logits are wanted. [T, E], [R] -> [R, E]"""
        return self.xp.take(x, rows, axis=0, out=self.memory.arena.take((len(rows), x.shape[1])), mode="clip")

    def reduce(self, x: Any) -> Any:
        """The sum of x over all ranks, on each of them; on one rank x itself. [T, E] -> [T, E]"""
        return x if self.group is None else self.group.all_reduce(x)

    # --- what ranks share -----------------------------------------------------------------------------------------

    @composed
    def embed_reduced(self, ids: Any, table: Weight, scale: float = 1.0, **added: Any) -> Any:
        """As `embed`, where each rank has some of the rows, and rank 0 adds positions and types. 3 x [T] -> [T, E]"""
        x = self.embed(ids, table, scale=scale, **({} if self.rank else added))
        return x if self.ranks == 1 else self.reduce(x)

    @composed
    def linear_reduced(self, x: Any, weight: Weight, residual: Any | None) -> Any:
        """x W^T + b + residual, where each rank has some of the inputs: x and the columns of W. [T, in] -> [T, out]

        One rank adds the residual, and has the bias.
        """
        if self.ranks == 1:
            return self.linear(x, weight, residual=residual)
        return self.reduce(self.linear(x, weight, residual=residual if self.rank == 0 else None))

    @composed
    def combine_reduced(self, y: Any, routing: Routing, residual: Any | None) -> Any:
        """As `combine`, where y is a part of a sum over ranks. [T k, E] -> [T, E]"""
        if self.ranks == 1:
            return self.combine(y, routing, residual)
        return self.reduce(self.combine(y, routing, residual if self.rank == 0 else None))
