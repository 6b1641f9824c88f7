"""Hooks inside a model that several ranks share: rank 0 has the functions, and what is watched.

Each rank runs its part of a pass on a `RankHookedBackend`. At a point that a text looks at, the ranks of the stage send
rank 0 the rows: each its own heads, numbers of `mlp.hidden`, or logits; of what all of them have, the first alone.
Where there are functions, the whole rows come back, and each rank takes its share of them.

Rank 0 does its own layers first. Then it answers the later stages, one after the other: a header names the point.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..backends.shapes import ShapeBackend
from ..batch import Batch
from ..decoding.hooks import Hook, Hooks, Place
from ..models import shape_model
from ..models.base import Model, weight_paths
from ..models.parameters import vocabulary_share
from ..models.points import Points, encoder_points, points_of
from ..runner.hooked_backend import HookedBackend, Probe, View, keys_seen
from ..runner.model_hooks import ModelHooks, other_rows
from .messages import Look

if TYPE_CHECKING:
    from .ranks import Ranks

DIVIDED = ("q", "k", "v", "pattern", "z", "hidden")
"""Last parts of the names of points whose second axis the ranks of a stage share"""


def looks_of(batch: Batch, views: Sequence[View]) -> tuple[Look, ...]:
    """The message of a pass's views."""
    numbers = {span.start: i for i, span in enumerate(batch.spans)}
    looks = []
    for view in views:
        watched = () if view.probe is None else view.probe.hooks.watched
        own = () if view.probe is None else view.probe.hooks.functions
        looks.append(Look(numbers[view.rows.start], tuple(watched), (*view.shared, *own)))
    return tuple(looks)


def views_of(batch: Batch, looks: Sequence[Look]) -> list[View]:
    """The views of another rank than 0, whose functions are called on rank 0."""
    views: list[View] = []
    for look in looks:
        span = batch.spans[look.number]
        functions: dict[str, tuple[Hook, ...]] = dict.fromkeys(look.changed, (_called_on_rank_0,))
        probe = Probe(Hooks(look.watched, functions), 0)
        views.append(View(slice(span.start, span.stop), span.positions(), probe, (), number=len(views)))
    return views


def _called_on_rank_0(array: Any, place: Place) -> None:
    raise AssertionError("a hook is called on rank 0 alone")


class RankHooks(ModelHooks):
    """The points of a model that ranks share; on rank 0 also the functions, and the error of one of them."""

    def __init__(self, model: Model, ranks: "Ranks") -> None:
        super().__init__(model)
        self.ranks, self.world = ranks, ranks.world
        self.error: Exception | None = None
        """The first error, in a pass, of a function for all texts: all ranks go on to the end of the pass"""
        self._logit_rows: list[int] = []
        """The rows of the pass whose logits are wanted in any case"""

    @cached_property
    def _points(self) -> tuple[Points, Points | None]:
        """Names and shapes as of the whole model, met at this rank's weights."""
        whole = shape_model(self.ranks.config, ShapeBackend())
        own = dict(weight_paths(self._model))
        ids = {id(weight): id(own[path]) for path, weight in weight_paths(whole) if path in own}

        def here(points: Points) -> Points:
            met: dict[str, Any] = {
                kind: {ids[weight]: name for weight, name in getattr(points, kind).items() if weight in ids}
                for kind in ("inputs", "summands", "results", "before", "after")
            }
            return replace(points, **met)

        encoder = encoder_points(whole)
        return here(points_of(whole)), None if encoder is None else here(encoder)

    @cached_property
    def names(self) -> list[str]:
        """The names of all points, which headers count."""
        return [*self.shapes]

    def share(self, name: str, rank: int) -> slice:
        """The part of a point's second axis that a rank of a stage has."""
        shape, ranks = self.shapes[name], self.ranks.parallel.tensor
        kind = name.rpartition(".")[2]
        if name == "logits":
            return slice(*vocabulary_share(self.ranks.config.vocab_size, rank, ranks))
        if ranks == 1 or kind not in DIVIDED:
            return slice(None)
        count = int(shape[1])
        size = count // min(count, ranks)  # key/value heads may be fewer than ranks
        first = rank * min(count, ranks) // ranks * size
        return slice(first, first + size)

    def around(
        self, body: Backend, head: Backend, views: Sequence[View], rows: Sequence[int]
    ) -> tuple[Backend, Backend]:
        """As `ModelHooks`; the head's rows are the pass's, or the others whose logits are watched."""
        points, kind = self._points[0], 1 if [int(row) for row in rows] == self._logit_rows else 2
        own = [view.among(rows) for view in views]
        return (
            RankHookedBackend(body, points, views, self, 0),
            RankHookedBackend(head, points, [view for view in own if len(view.rows)], self, kind),
        )

    def around_encoder(self, body: Backend, views: Sequence[View]) -> Backend:
        """As `ModelHooks`."""
        points = self._points[1] if views else None
        return body if points is None else RankHookedBackend(body, points, views, self, 0)

    @contextmanager
    def looking(self, batch: Batch, rows: Sequence[int], views: Sequence[View]) -> Iterator[None]:
        """A rank's part of a pass with hooks; rank 0 answers the later stages at its end.

        Raises:
            Exception: a function for all texts failed, on rank 0.
        """
        self._logit_rows = [int(row) for row in rows]
        yield
        if not views:
            return
        if self.ranks.rank == 0:
            self._answer_stages(batch, views)
        elif not self.ranks.is_first and self.ranks.group.rank == 0:
            self.world.send(np.full(5, -1), 0, "hooks")

    def take_error(self) -> None:
        """Raise the error of a function for all texts, if one has failed in the last pass."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _answer_stages(self, batch: Batch, views: Sequence[View]) -> None:
        """Answer the ranks of the later stages at the points that they come to, until all have ended."""
        chosen = self._logit_rows, other_rows(views, self._logit_rows)
        lists = [views, *([view.among(rows) for view in views] for rows in chosen)]
        for stage in range(1, self.ranks.parallel.pipeline):
            ranks = self.ranks.parallel.ranks_of(stage)
            header = np.empty(5, np.int64)
            while True:
                self.world.receive(header, ranks[0])
                point, kind, number, keys, layer = header.tolist()
                if point < 0:
                    break
                name = self.names[point]
                view = next(view for view in lists[kind] if view.number == number)
                if name.endswith(".pattern"):
                    span = next(span for span in batch.spans if span.start == view.rows.start)
                    seen = None if self.ranks.config.bidirectional else keys_seen(span)
                    view = replace(view, rows=slice(None), keys=seen)
                self.answer(view, name, None if layer < 0 else layer, ranks, self.width(name, keys))

    def width(self, name: str, keys: int) -> tuple[int, ...]:
        """The sizes of a point's rows, all ranks' together."""
        return tuple(keys if size == "S" else int(size) for size in self.shapes[name][1:])

    def answer(
        self,
        view: View,
        name: str,
        layer: int | None,
        ranks: Sequence[int],
        width: tuple[int, ...],
        own: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32] | None:
        """Collect the rows of a text at a point on rank 0, keep them if they are watched, and answer the functions'.

        Args:
            view: the text's
            name: the point
            layer: its block
            ranks: those of the stage
            width: the sizes of a row, all ranks' together
            own: this rank's share of the rows if it is one of them

        Returns:
            Whole rows, if they were changed.
        """
        rows = np.empty((len(view.positions), *width), np.float32)
        shared = self.share(name, 0) != slice(None)
        for i, rank in enumerate(ranks[: None if shared else 1]):
            share = rows[:, self.share(name, i)]
            if rank == 0:
                share[...] = own
            else:
                received = np.empty(share.shape, np.float32)
                self.world.receive(received, rank)
                share[...] = received
        new, functions = None, view.functions(name)
        if functions:
            try:
                request = None if view.probe is None else view.probe.request_id
                new = view.changed(rows, Place(name, layer, view.positions, request))
            except Exception as error:
                self.error = self.error or error
            new = None if new is None else np.ascontiguousarray(new, np.float32)
            for rank in ranks:
                if rank:
                    self.world.send(np.array([new is not None], np.int64), rank, "hooks")
                    if new is not None:
                        self.world.send(new, rank, "hooks")
        if view.watches(name):
            view.keep(name, rows if new is None else new)
        return new

    def ask(
        self, view: View, name: str, header: Sequence[int], rows: NDArray[np.float32]
    ) -> NDArray[np.float32] | None:
        """Send this rank's share of rows to rank 0. Returns whole rows, if functions have changed them."""
        ranks, first = self.ranks, self.ranks.group.rank == 0
        if first and not ranks.is_first:
            self.world.send(np.array(header, np.int64), 0, "hooks")
        if first or self.share(name, 0) != slice(None):
            self.world.send(np.ascontiguousarray(rows), 0, "hooks")
        if not view.functions(name):
            return None
        changed = np.empty(1, np.int64)
        self.world.receive(changed, 0)
        if not changed[0]:
            return None
        new = np.empty((len(rows), *self.width(name, rows.shape[-1])), np.float32)
        self.world.receive(new, 0)
        return new


class RankHookedBackend(HookedBackend):
    """Calls the hooks of a pass that ranks share."""

    def __init__(self, inner: Backend, points: Points, views: Sequence[View], hooks: RankHooks, kind: int) -> None:
        """`kind` says which rows the views are of: 0 the batch's, 1 those of the logits, 2 the other watched ones."""
        super().__init__(inner, points, views)
        self._hooks, self._kind = hooks, kind

    def look(self, point: str, array: Any, views: Sequence[View] | None = None) -> list[Any]:
        """As `HookedBackend`; `array` is this rank's share."""
        name, changed, hooks = self._points.name(self.layer, point), [], self._hooks
        if name not in self._names:
            return []
        ranks = hooks.ranks
        layer = self.layer if f"blocks.{self.layer}." in name else None
        for view in self._views if views is None else views:
            if not view.functions(name) and not view.watches(name):
                continue
            rows = self._on_host(array[view.rows])
            if ranks.rank == 0:
                width = hooks.width(name, rows.shape[-1])
                new = hooks.answer(view, name, layer, ranks.parallel.ranks_of(0), width, rows)
            else:
                place = -1 if layer is None else layer
                header = hooks.names.index(name), self._kind, view.number, rows.shape[-1], place
                new = hooks.ask(view, name, header, rows)
            if new is not None:
                share = new[:, hooks.share(name, ranks.group.rank)]
                array[view.rows] = share if isinstance(array, np.ndarray) else self.inner.xp.asarray(share)
                changed.append(view.rows)
        return changed
