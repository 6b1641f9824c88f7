"""Models built by their families' `build`: from a checkpoint's tensors, random ones, or shapes alone.

- A checkpoint (`build_from`): all names and shapes are checked before any data is read.
- Random numbers: `build_from` on `random_tensors`.
- Shapes (`build_of_shapes`, `tensor_shapes`, `parameters_of`): nothing is read or allocated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..backends.loader import RandomTensor, Tensor
from ..backends.operations import Backend
from ..backends.shapes import ShapeBackend
from ..errors import CheckpointError
from ..progress import work
from .base import only_looked_up
from .decoder import Decoder
from .parameters import PARAMETERS, Build, Parameter, Weights

Shapes = dict[str, tuple[int, ...]]
"""The shape of every tensor that a configuration requires, by name."""


def build_from(
    build: Build,
    config: Any,
    tensors: Mapping[str, Tensor],
    backend: Backend,
    *,
    as_built: bool = True,
    rank: int = 0,
    ranks: int = 1,
    holds: Callable[[str], bool] = lambda name: True,
    verb: str = "loading",
) -> Decoder:
    """Build a model, or one rank's share, from tensors by name; arguments as of `Weights`.

    `verb` says in the report of progress what is done.

    Raises:
        CheckpointError: a tensor is missing, has the wrong shape or is not asked for. Nothing was read then.
        ParameterError: the ranks cannot share the model equally.
    """
    shapes: Shapes = {}
    config.sharded(ranks)  # names heads that cannot be shared
    asked = _weights_of_shapes(shapes, ShapeBackend(), as_built=as_built, rank=rank, ranks=ranks, holds=holds)
    looked_up = only_looked_up(build(config, asked, ShapeBackend()))
    check_tensors(tensors, shapes)
    form = backend.loader.formats.projection
    with work(verb if form is None else f"{verb} as {form.name}", asked.prepared, PARAMETERS) as progress:
        options: dict[str, Any] = {"as_built": as_built, "rank": rank, "ranks": ranks, "holds": holds}
        options |= {"looked_up": looked_up, "progress": progress}
        weights = Weights(lambda name, shape: tensors[name], backend, **options)
        return build(config, weights, backend)


def build_of_shapes(build: Build, config: Any, backend: ShapeBackend) -> Decoder:
    """The model on a backend of shapes, however large it is."""
    return build(config, _weights_of_shapes({}, backend), backend)


def tensor_shapes(build: Build, config: Any, *, as_built: bool = True) -> Shapes:
    """Name and shape of every tensor of a model, in the order in which it is built."""
    shapes: Shapes = {}
    backend = ShapeBackend()
    build(config, _weights_of_shapes(shapes, backend, as_built=as_built), backend)
    return shapes


def parameters_of(build: Build, config: Any) -> dict[str, Parameter]:
    """The matrices of a model's projections and tables, by their published names without ".weight"."""
    parameters: dict[str, Parameter] = {}

    def note(parameter: Parameter, tensors: Sequence[Tensor]) -> None:
        parameters[parameter.name] = parameter

    backend = ShapeBackend()
    build(config, _weights_of_shapes({}, backend, on_parameter=note), backend)
    return parameters


def random_tensors(shapes: Shapes, seed: int, std: float, backend: Backend) -> dict[str, Tensor]:
    """Random tensors of these shapes, generated on the backend's device when they are prepared."""
    return {name: backend.loader.random(name, shape, seed, std) for name, shape in shapes.items()}


def _weights_of_shapes(shapes: Shapes, backend: ShapeBackend, **options: Any) -> Weights:
    """Weights without numbers; `shapes` takes up the name and shape of each tensor that is asked for."""

    def find(name: str, shape: tuple[int, ...]) -> Tensor:
        shapes[name] = shape
        return RandomTensor(name, shape, seed=0, std=0)  # makes its numbers when it is read: never, here

    return Weights(find, backend, **options)


def check_tensors(stored: Mapping[str, Tensor], required: Shapes) -> None:
    """Compare a checkpoint's tensors with those that the configuration requires."""
    missing = [name for name in required if name not in stored]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}, which its config.json asks for")
    extra = [name for name in stored if name not in required]
    if extra:
        raise CheckpointError(f"the checkpoint holds {_some(extra)}, which its config.json leaves no place for")
    for name, shape in required.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"tensor {name} should have shape {list(shape)} by config.json, found {list(stored[name].shape)}"
            )


def _some(names: Sequence[str]) -> str:
    """The first three names and the number of further ones."""
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"
