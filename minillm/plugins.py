"""Strategies, processors, potentials and model families of other packages, found by their entry points.

A package declares them in its pyproject.toml, and nothing is imported before its name is used:

    [project.entry-points."minillm.strategies"]
    typical_beam = "my_package.beams:TypicalBeamSearch"
    [project.entry-points."minillm.processors"]
    no_digits = "my_package.processors:no_digits"
    [project.entry-points."minillm.potentials"]
    rhyme = "my_package.potentials:rhyme"
    [project.entry-points."minillm.models"]
    my_model_type = "my_package.my_model"

`decoding/README.md` says what a strategy, a processor and a potential are, `models/README.md` what a family has.

Source: https://packaging.python.org/en/latest/specifications/entry-points/
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from .errors import MinillmError, ParameterError, PluginError, listed, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = {
    "minillm.strategies": "strategy",
    "minillm.processors": "logits processor",
    "minillm.potentials": "potential",
    "minillm.models": "model family",
}
"""Group of entry points -> what one of them is"""


def plugins(group: str) -> dict[str, "EntryPoint"]:
    """The entry points of a group by name, of all installed packages; of two with one name, the first."""
    from importlib.metadata import entry_points  # here, for it takes 20 ms to import

    known: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        known.setdefault(point.name, point)
    return known


def package_of(point: "EntryPoint") -> str:
    """The package that an entry point is from, with its version."""
    return "another package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load(group: str, name: str) -> Any:
    """The object of an entry point.

    Raises:
        ParameterError: there is none of this name, or it cannot be imported.
    """
    known, kind = plugins(group), GROUPS[group]
    if name not in known:
        others = f"those installed: {listed(sorted(known))}" if known else f"no installed package has a {kind}"
        raise ParameterError(f"there is no {kind} {shown(name)}: {others}")
    try:
        return known[name].load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error!s:.200}".replace("\n", " ")
        raise ParameterError(
            f"the {kind} {shown(name)} of {package_of(known[name])} cannot be imported: {reason}"
        ) from error


def failure(plugin: str, error: Exception) -> PluginError:
    """The error of a plug-in whose code failed, named as in "strategy 'ranked'"."""
    return PluginError(f"the {plugin} failed: {type(error).__name__}: {error}")


def with_name(function: Callable[..., Any], plugin: str) -> Callable[..., Any]:
    """A plug-in's function whose errors have the plug-in's name, but for minillm's own."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except MinillmError:
            raise
        except Exception as error:
            raise failure(plugin, error) from error

    return call
