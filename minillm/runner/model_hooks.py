"""The hooks of a model: who looks in at which of its points. What happens there is in `hooked_backend.py`."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..backends.operations import Backend
from ..batch import Batch, TokenSequence
from ..decoding.field_values import function as function_of
from ..decoding.hooks import Hook, Hooks
from ..errors import ParameterError, shown
from .given_embeddings import GivenEmbeddings, needs_them
from .hooked_backend import HookedBackend, Probe, View

if TYPE_CHECKING:
    from ..models.points import Points, Shape

_hook = function_of("a function (array, place)", 2)
"""Reads a hook; ValueError for anything else"""


class ModelHooks:
    """The points of a model, and the functions for all texts."""

    def __init__(self, model: Any) -> None:
        """Begin without functions."""
        self._model = model
        self.functions: dict[str, tuple[Hook, ...]] = {}
        """Name of a point -> the functions for all texts there"""

    @cached_property
    def _points(self) -> "tuple[Points, Points | None]":
        """The points of the decoder, and of the encoder if there is one."""
        from ..models.points import encoder_points, points_of  # it knows all kinds of layers

        return points_of(self._model), encoder_points(self._model)

    @property
    def shapes(self) -> "dict[str, Shape]":
        """Name of each point -> shape, in the order of the computation."""
        decoder, encoder = self._points
        return {**(encoder.shapes if encoder is not None else {}), **decoder.shapes}

    def read(self, watch: object, functions: object) -> Hooks:
        """Hooks from the user's patterns of names.

        Args:
            watch: a pattern of names of points, or a list of them
            functions: a mapping from patterns to functions; None: none

        Raises:
            ParameterError: a pattern names no point, or a function is none; as `shapes`.
        """
        from ..models.points import names_matching

        names = [*self.shapes]
        patterns = [watch] if isinstance(watch, str) else watch
        if not isinstance(patterns, Collection) or isinstance(patterns, Mapping | bytes):
            raise ParameterError(f"watch should be a list of names of points, found {shown(watch)}")
        if not isinstance(functions, Mapping | None):
            raise ParameterError(f"hooks should be a dict of names of points and functions, found {shown(functions)}")
        changes: dict[str, tuple[Hook, ...]] = {}
        for pattern, function in (functions or {}).items():
            try:
                _hook(function)
            except ValueError:
                raise ParameterError(
                    f"hooks[{shown(pattern)}] should be {_hook.expected}, found {shown(function)}"
                ) from None
            for name in names_matching(pattern, names, "hooks"):
                changes[name] = (*changes.get(name, ()), function)
        watched = {name for pattern in patterns for name in names_matching(pattern, names, "watch")}
        return Hooks(tuple(name for name in names if name in watched), changes)

    def check(self, hooks: Hooks) -> None:
        """Refuse hooks that were made for another model.

        Raises:
            ParameterError: a name is of no point here.
        """
        missing = {*hooks.watched, *hooks.functions} - self.shapes.keys()
        if missing:
            raise ParameterError(f"the request's hooks are for another model: this one has no point {min(missing)!r}")

    def views(self, batch: Batch, sequences: Sequence[TokenSequence], prefix: str = "") -> list[View]:
        """The views of those sequences of a batch that have hooks, or of all if some functions are for all."""
        views: list[View] = []
        spans = [span for span in batch.spans if not span.beyond]
        for span, sequence in zip(spans, sequences, strict=True):
            probe: Probe | None = sequence.probe
            if self.functions or probe is not None:
                watches = probe is not None and probe.watched
                nodes = probe.nodes(sequence, span.stop - span.start, prefix) if probe and watches else []
                rows = slice(span.start, span.stop)
                views.append(View(rows, span.positions(), probe, nodes, self.functions, number=len(views)))
        return views

    def around(
        self, body: Backend, head: Backend, views: Sequence[View], rows: Sequence[int]
    ) -> tuple[Backend, Backend]:
        """Backends that call the hooks: for all rows of a batch, and for the head, which gets some of them."""
        points, own = self._points[0], [view.among(rows) for view in views]
        if needs_them(views):
            body = GivenEmbeddings(body, self._model.embedding, views)
        return HookedBackend(body, points, views), HookedBackend(head, points, [view for view in own if len(view.rows)])

    def around_encoder(self, body: Backend, views: Sequence[View]) -> Backend:
        """A backend that calls the hooks on the encoder's texts."""
        points = self._points[1] if views else None
        return body if points is None else HookedBackend(body, points, views)


def other_rows(views: Sequence[View], rows: Sequence[int]) -> list[int]:
    """Rows of a batch whose logits are watched, beside those whose logits are computed in any case."""
    spans = [view.rows for view in views if view.watches("logits")]
    return sorted({row for span in spans for row in range(span.start, span.stop)}.difference(rows))
