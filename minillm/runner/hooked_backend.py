"""A forward pass with hooks: rows of single texts are watched or changed at points inside the model.

A pass in which a text has hooks runs on a `HookedBackend`, which knows by the operation and its weight at which point
it is (`models/points.py`), and by the batch which rows are whose. Layers know nothing of it, and a pass without hooks
costs nothing. Rows of other texts are computed as ever: not a bit of them changes.

A summand of the residual stream, such as `attention.out`, has no array of its own, since a product adds the residual
itself: where it is looked at, the product is computed a second time without.

What is watched is kept by the tokens that led to it, as a tree. So a rejected guess, a dropped beam and a text that is
computed once more after a preemption need no care: at the end a text finds its own rows along its tokens.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.observe import WrappedBackend
from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch, Span, TokenSequence
from ..decoding.field_values import ByIdentity
from ..decoding.functions import called
from ..decoding.hooks import Hook, Hooks, Place, Watched, padded
from ..errors import MinillmError, NumericalError, ParameterError
from ..reference.attention import AttentionSpec, attention_scores, attention_weights, merge_values
from ..reference.experts import SOFTMAX, RouterSpec, Routing
from ..reference.softmax import softmax

if TYPE_CHECKING:
    from ..models.points import Points


logger = logging.getLogger("minillm")


class _Node(dict[int, "_Node"]):
    """A token in the tree of a request's texts: the tokens that followed it, and its row at each point."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: dict[str, NDArray[np.float32]] = {}


class Probe:
    """The hooks of one request that runs, what they have seen, and the error of one that failed."""

    def __init__(self, hooks: Hooks, request_id: int) -> None:
        """Begin. `request_id` is what `Place.request` says."""
        self.hooks, self.watched = hooks, frozenset(hooks.watched)
        self.request_id = request_id
        self.kept_bytes = 0
        """Bytes of the rows that are kept until the request ends"""
        self.error: Exception | None = None
        """The first error of a function, which ends the request"""
        self._roots = {"": _Node(), "encoder.": _Node()}
        self._taken: dict[tuple[str, int], int] = {}

    def nodes(self, sequence: TokenSequence, count: int, prefix: str) -> list[_Node]:
        """The nodes of a sequence's next `count` tokens; `prefix` says whether the encoder computes them."""
        line = len(sequence.token_ids) - len(sequence.tree)
        stop, path = sequence.cached + count, [self._roots[prefix]]  # the root, then a node for each token
        for i, token in enumerate(sequence.token_ids[:stop]):
            parent = path[-1] if i < line else path[line + 1 + sequence.tree[i - line]]  # a tree follows the line
            path.append(parent.setdefault(token, _Node()))
        return path[stop - count + 1 :]

    def take(self, index: int, token_ids: Sequence[int], prefix: str = "") -> Watched | None:
        """Rows of a text that were watched since the last call for this `index`; None: no new ones.

        Args:
            index: of the returned sequence
            token_ids: the tokens that were computed: prompt and answer but its last token
            prefix: "encoder." for the encoder's text
        """
        names = {name for name in self.hooks.watched if name.startswith("encoder.") == bool(prefix)}
        node, path = self._roots[prefix], []
        for token in token_ids:
            if token not in node or not names <= node[token].rows.keys():  # it was ended before this was computed
                break
            node = node[token]
            path.append(node)
        new = path[self._taken.get((prefix, index), 0) :]
        if not names or not new:
            return None
        self._taken[prefix, index] = len(path)
        ordered = [name for name in self.hooks.watched if name in names]
        return {name: np.stack(padded([node.rows[name] for node in new])) for name in ordered}


@dataclass(eq=False)
class View:
    """The rows of one text in a pass, and the hooks on them."""

    rows: Any
    """A slice, or an array of indices"""
    positions: NDArray[np.int64]
    probe: Probe | None
    nodes: Sequence[_Node]
    """One for each row; empty if nothing is watched"""
    shared: Mapping[str, tuple[Hook, ...]] = field(default_factory=dict)
    """The functions for all texts, which come first"""
    keys: Sequence[Any] | None = None
    """Keys in each row's own past, of attention patterns; None: all are"""
    number: int = 0
    """Its number among the views of the pass"""

    def functions(self, name: str) -> list[tuple[Hook, bool]]:
        """The functions at a point, and whether each is the request's own."""
        own = () if self.probe is None else self.probe.hooks.functions.get(name, ())
        return [(hook, False) for hook in self.shared.get(name, ())] + [(hook, True) for hook in own]

    def given(self) -> tuple[slice, NDArray[np.float32]]:
        """The rows whose embeddings are given, the first of a pass's, and their vectors. [n, E]"""
        vectors = None if self.probe is None else self.probe.hooks.embeddings
        first = int(self.positions[0]) if vectors is not None and len(self.positions) else 0
        own = np.empty((0, 0), np.float32) if vectors is None else vectors[first : first + len(self.positions)]
        return slice(self.rows.start, self.rows.start + len(own)), own

    def watches(self, name: str) -> bool:
        """Whether the rows of a point are kept."""
        return self.probe is not None and name in self.probe.watched

    def changed(self, rows: Any, place: Place) -> Any | None:
        """The rows after all functions; None if none of them has changed them.

        Raises:
            Exception: a function for all texts failed; the error of a request's own is noted in its probe.
        """
        result = None
        for hook, own in self.functions(place.name):
            if own and self.probe is not None and self.probe.error is not None:
                return result
            who = getattr(hook, "__qualname__", repr(hook))
            try:
                before = rows if result is None else result
                own_copy = before.copy()
                answer = called(hook, own_copy, place)
                if answer is not None:
                    _check(answer, rows, who, place.name)
                elif not self.positions[:1].any() and bool(((own_copy != before) & (own_copy == own_copy)).any()):
                    _warn_of_no_effect(ByIdentity(hook), who)  # looked for once a text; NaN differs from itself
            except Exception as error:
                if not isinstance(error, MinillmError):
                    error.add_note(f"in the hook {who} at {place.name}")
                if not own or self.probe is None:
                    raise
                self.probe.error = error
                return None
            result = result if answer is None else answer
        return result

    def among(self, rows: Sequence[int]) -> "View":
        """The view of an array with some of a batch's rows."""
        chosen = [(i, row - self.rows.start) for i, row in enumerate(rows) if self.rows.start <= row < self.rows.stop]
        places, own = [i for i, _ in chosen], [row for _, row in chosen]
        nodes = [self.nodes[row] for row in own] if self.nodes else []
        return replace(self, rows=np.array(places, np.intp), positions=self.positions[own], nodes=nodes)

    def keep(self, name: str, rows: NDArray[np.float32]) -> None:
        """Keep the rows of a point; of attention patterns each row with its own keys alone."""
        assert self.probe is not None
        for i, (node, row) in enumerate(zip(self.nodes, rows, strict=True)):
            own = row if self.keys is None else row[..., self.keys[i]].copy()
            self.probe.kept_bytes += own.nbytes if name not in node.rows else 0  # else it was computed anew
            node.rows[name] = own


def _check(answer: Any, rows: Any, hook: str, name: str) -> None:
    """Refuse what a hook returned, unless it can stand in the place of the rows.

    Raises:
        ParameterError: it is no array of numbers of the same shape.
        NumericalError: it holds NaN or infinity.
    """
    shape, dtype = getattr(answer, "shape", None), getattr(answer, "dtype", None)
    numbers = dtype == rows.dtype or getattr(dtype, "kind", None) in tuple("fiub")
    if shape != rows.shape or not numbers:
        actual = type(answer).__name__ if shape is None or dtype is None else f"{dtype} {shape}"
        raise ParameterError(
            f"the hook {hook} at {name} should return None or an array of numbers of shape {rows.shape}, found {actual}"
        )
    if not bool((abs(answer) < np.inf).all()):
        raise NumericalError(f"the hook {hook} at {name} returned NaN or infinity")


@lru_cache(maxsize=8)  # points of one hook
def _warn_of_no_effect(hook: ByIdentity, name: str) -> None:
    """Say once of a hook that it changed its copy of the rows and did not return it, as hooks elsewhere may."""
    logger.warning(
        "the hook %s changed its rows and returned None, which leaves them as they were: should it return them?", name
    )


def keys_seen(span: Span) -> list[Any]:
    """The keys that each new token of a sequence follows, itself included: its line, and its ancestors in a tree."""
    n = span.stop - span.start
    line = span.context_len - (0 if span.tree is None else len(span.tree))
    keys: list[Any] = [slice(0, S) for S in range(span.context_len - n + 1, line + 1)]
    if span.tree is not None:
        keys += [np.r_[0:line, line + np.flatnonzero(row)] for row in span.tree]
    return keys


class HookedBackend(WrappedBackend):
    """Calls the hooks of a pass at the points of a model."""

    def __init__(self, inner: Backend, points: "Points", views: Sequence[View]) -> None:
        super().__init__(inner)
        self._points, self._views = points, views
        self._changed: tuple[Any, Any] = (None, None)
        """The last input of a product that was changed, and the copy that is so"""
        self._names = {name for view in views for name in view.shared}
        for probe in {view.probe for view in views if view.probe is not None}:
            self._names |= probe.watched | probe.hooks.functions.keys()

    def looks_at(self, point: str) -> bool:
        """Whether any text has a hook at a point, in the current layer if it is in a block."""
        return self._points.name(self.layer, point) in self._names

    def look(self, point: str, array: Any, views: Sequence[View] | None = None) -> list[Any]:
        """Show the rows of a point, and change them in place. Returns which rows were changed.

        Args:
            point: the point, in the current layer if it is in a block
            array: its rows, [T, ...]
            views: other views than the pass's own, for an array with other rows
        """
        name, changed = self._points.name(self.layer, point), []
        if name not in self._names:
            return []
        layer = self.layer if f"blocks.{self.layer}." in name else None
        for view in self._views if views is None else views:
            functions, watched = view.functions(name), view.watches(name)
            if not functions and not watched:
                continue
            place = Place(name, layer, view.positions, None if view.probe is None else view.probe.request_id)
            new = view.changed(array[view.rows], place)
            if new is not None:
                array[view.rows] = new if isinstance(array, np.ndarray) else self.inner.xp.asarray(new)
                changed.append(view.rows)
            if watched:
                view.keep(name, self._on_host(array[view.rows]))
        return changed

    def _on_host(self, rows: Any) -> NDArray[np.float32]:
        return np.array(rows if isinstance(rows, np.ndarray) else self.sampler.to_host(rows), np.float32)

    # --- operations ----------------------------------------------------------------------------------------------

    def enter_layer(self, layer: int, x: Any = None) -> None:
        """The residual stream between two blocks."""
        if layer:
            self.layer = layer - 1  # None at a stage's first
            self.look("residual", x)
        else:
            self.layer = None
            self.look("embedding", x)
        self.layer = layer
        if layer == self._points.last and self._points.closing is not None:
            self.look(self._points.closing, x)
        self.inner.enter_layer(layer, x)

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """[T, in] -> [T, out]"""
        if (point := self._points.inputs.get(id(weight))) is not None and self.looks_at(point):
            x = self._looked_at(point, x)
        elif x is self._changed[0]:
            x = self._changed[1]  # what the shared expert reads, as the router does
        if (point := self._points.results.get(id(weight))) is not None:
            out = self.inner.linear(x, weight, activation=activation, residual=residual)
            self.look(point, out)
            return out
        return self.inner.linear(x, weight, activation=activation, residual=residual)

    def linear_heads(self, x: Any, weight: Weight) -> Any:
        """[T, H, r + in] -> [T, H, r + out]"""
        if (point := self._points.inputs.get(id(weight))) is not None and self.looks_at(point):
            x = self._looked_at(point, x)
        out = self.inner.linear_heads(x, weight)
        if (point := self._points.results.get(id(weight))) is not None:
            self.look(point, out)
        return out

    def linear_reduced(self, x: Any, weight: Weight, residual: Any | None) -> Any:
        """[T, in] -> [T, out]"""
        point = self._points.summands.get(id(weight))
        if point is None or not self.looks_at(point):
            return super().linear_reduced(x, weight, residual)
        if (before := self._points.inputs.get(id(weight))) is not None and self.looks_at(before):
            x = self._looked_at(before, x)
        return self._sum(point, partial(self.inner.linear_reduced, x, weight), residual)

    def _looked_at(self, point: str, x: Any) -> Any:
        """x, or a copy with changed rows: x itself may be read elsewhere."""
        copy = x.copy()
        if not self.look(point, copy):
            return x
        self._changed = x, copy
        return copy

    def take_rows(self, x: Any, rows: Any) -> Any:
        """Rows as experts read them: changed, if what the router has read was. [T, E], [R] -> [R, E]"""
        return self.inner.take_rows(self._changed[1] if x is self._changed[0] else x, rows)

    def _sum(self, point: str, compute: Callable[[Any], Any], residual: Any | None) -> Any:
        """The sum of a summand and the residual; the summand alone is looked at. [T, E]"""
        alone = compute(None)
        changed = self.look(point, alone)
        if residual is None:
            return alone
        out = compute(residual)  # last: the memory of a layer's last result is kept
        for rows in changed:
            out[rows] = alone[rows] + residual[rows]
        return out

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """[T, E] -> [T, E]"""
        return self._norm(x, weight, lambda: self.inner.layer_norm(x, weight, epsilon))

    def rms_norm(self, x: Any, weight: Weight, epsilon: float, *, residual: Any | None = None) -> Any:
        """[T, E] -> [T, E]"""
        return self._norm(x, weight, lambda: self.inner.rms_norm(x, weight, epsilon, residual=residual))

    def _norm(self, x: Any, weight: Weight, compute: Callable[[], Any]) -> Any:
        if (point := self._points.before.get(id(weight))) is not None:
            self.look(point, x)
        out = compute()
        if (point := self._points.after.get(id(weight))) is not None:
            self.look(point, out)
        return out

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """2 x [T, K, D]"""
        self.look("attention.k", k)
        self.look("attention.v", v)
        self.inner.store_kv(k, v, cache, layer, batch)

    def attend(self, q: Any, cache: Pages, layer: int, batch: Batch, spec: AttentionSpec) -> Any:
        """[T, H, D] -> [T, H, V]; queries and results of latents are looked at where they are not absorbed."""
        kind = "cross" if spec.cross else "attention"
        if not cache.value_dim:
            self.look(f"{kind}.q", q)
        z = self.inner.attend(q, cache, layer, batch, spec)
        if self.looks_at(f"{kind}.pattern"):
            self._look_at_patterns(f"{kind}.pattern", q, z, cache.layers[layer], batch, spec)
        if not cache.value_dim:
            self.look(f"{kind}.z", z)
        return z

    def _look_at_patterns(self, point: str, q: Any, z: Any, pages: Any, batch: Batch, spec: AttentionSpec) -> None:
        """Compute the attention weights once more, on the host, and z anew where they were changed."""
        host, name = self.sampler.to_host, self._points.name(self.layer, point)
        keys, values = map(host, pages)
        spec = spec.with_arrays(lambda weight: host(weight.data))
        spans = {span.start: span for span in (batch.over_sources if spec.cross else batch).spans}
        for view in self._views:
            if not view.functions(name) and not view.watches(name):
                continue
            span, rows = spans[view.rows.start], host(q[view.rows])
            scores = attention_scores(rows, keys, span, span.stop, spec, np)  # [K, G n, S]
            weights = attention_weights(scores, spec, np)
            n, H, _ = rows.shape
            pattern = weights.reshape(H, n, -1).swapaxes(0, 1).copy()  # [K, G n, S] -> [n, H, S]
            if self.look(
                point, pattern, [replace(view, rows=slice(None), keys=keys_seen(span) if spec.causal else None)]
            ):
                weights, out = pattern.swapaxes(0, 1).reshape(weights.shape), np.empty((n, H, z.shape[2]), rows.dtype)
                merge_values(weights, values, span, out, np)
                z[view.rows] = self.inner.xp.asarray(out)

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
        """[T, X] -> [T, k]"""
        if self.looks_at("experts.probabilities"):
            xp = self.inner.xp
            probabilities = 1 / (1 + xp.exp(-logits)) if spec.sigmoid else softmax(logits, xp)  # [T, X]
            for rows in self.look("experts.probabilities", probabilities):
                changed = probabilities[rows]
                logits[rows] = xp.log(changed / (1 - changed)) if spec.sigmoid else xp.log(changed)
        return self.inner.route(logits, k, normalised=normalised, bias=bias, spec=spec, factors=factors)

    def combine_reduced(self, y: Any, routing: Routing, residual: Any) -> Any:
        """[T k, E] -> [T, E]"""
        beside = self._points.name(self.layer, "experts.out") in self._points.shapes
        point = "experts.out" if beside else "mlp.out"
        if not self.looks_at(point):
            return super().combine_reduced(y, routing, residual)
        return self._sum(point, partial(self.inner.combine_reduced, y, routing), residual)

    def scale_logits(self, logits: Any, scale: float, cap: float | None) -> Any:
        """[R, V] -> [R, V]"""
        logits = self.inner.scale_logits(logits, scale, cap)
        self.look("logits", logits)
        return logits
