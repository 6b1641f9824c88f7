"""A request's hooks inside the model, and the rows that it watched; `runner/model_hooks.py` puts them into a pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Watched = dict[str, "NDArray[np.float32]"]
"""Name of a point -> its rows of one text, [positions, ...]"""


class Place(NamedTuple):
    """The place in a forward pass at which a hook is called."""

    name: str
    """The point, such as "blocks.3.attention.z"; `models/points.py` lists them"""
    layer: int | None
    """The block's number; None outside of blocks"""
    positions: "NDArray[np.int64]"
    """The position in its text of each row. [n]"""
    request: int | None
    """The request's number, as `Engine.add` returns it; None outside of requests, as in `Engine.forward`"""


Hook = Callable[[Any, Place], Any]
"""Gets a copy of the rows of one text at a point, and the place. Returns what stands in their place; None: no change"""


@dataclass(frozen=True, eq=False)
class Hooks:
    """Points that a request watches, and functions by which it changes others."""

    watched: tuple[str, ...] = ()
    """Names of points whose rows come with the result"""
    functions: Mapping[str, tuple[Hook, ...]] = field(default_factory=dict)
    """Name of a point -> the functions that change its rows, in their order"""
    embeddings: "NDArray[np.float32] | None" = None
    """Vectors in the place of the embeddings of its first tokens, [t, E]"""


def join_watched(chunks: Sequence[Watched]) -> Watched | None:
    """Successive rows of one text as one array for each point; None if there are none."""
    import numpy as np

    names = dict.fromkeys(name for chunk in chunks for name in chunk)  # the encoder's come once
    arrays = {name: padded([chunk[name] for chunk in chunks if name in chunk]) for name in names}
    return {name: np.concatenate(rows) for name, rows in arrays.items()} or None


def padded(arrays: Sequence["NDArray[np.float32]"]) -> list["NDArray[np.float32]"]:
    """Arrays with equal last axes: those of attention patterns, whose contexts differ, get zeros for later keys."""
    import numpy as np

    longest = max(array.shape[-1] for array in arrays)
    missing = [longest - array.shape[-1] for array in arrays]
    return [
        np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width)]) if width else array
        for array, width in zip(arrays, missing, strict=True)
    ]
