"""minillm: a transformer inference engine written from scratch on NumPy.

>>> from minillm import Engine, GenerationConfig
>>> engine = Engine()                                   # the small model that ships with the package
>>> engine.generate("A list of colors: red,", GenerationConfig(max_new_tokens=4)).text
' orange, yellow,'

The names below are loaded on first use: `import minillm` alone costs nothing, and the command line can still
configure the BLAS before NumPy is imported.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .decoding.constraints import DisjunctiveConstraint, PhrasalConstraint
    from .decoding.event import Event
    from .decoding.settings import GenerationConfig
    from .engine.async_engine import AsyncEngine
    from .engine.engine import Engine
    from .engine.inspect import Score
    from .engine.results import Completion, Generation
    from .errors import MinillmError
    from .pipelines import pipeline

_HOMES = {
    "AsyncEngine": ".engine.async_engine",
    "Completion": ".engine.results",
    "DisjunctiveConstraint": ".decoding.constraints",
    "Engine": ".engine.engine",
    "Event": ".decoding.event",
    "Generation": ".engine.results",
    "GenerationConfig": ".decoding.settings",
    "MinillmError": ".errors",
    "PhrasalConstraint": ".decoding.constraints",
    "Score": ".engine.inspect",
    "pipeline": ".pipelines",
}

__all__ = [
    "AsyncEngine",
    "Completion",
    "DisjunctiveConstraint",
    "Engine",
    "Event",
    "Generation",
    "GenerationConfig",
    "MinillmError",
    "PhrasalConstraint",
    "Score",
    "__version__",
    "pipeline",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_at_once(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def import_at_once(module: str) -> Any:
    """Import a module of this package, such as ".cli.main", without looking for garbage meanwhile.

    An import makes many objects and hardly any garbage: a hundred searches for it would be a tenth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(module, __name__)
    finally:
        if enabled:
            gc.enable()


def load_ipython_extension(shell: Any) -> None:
    """Add the magic `%%minillm` to IPython, by `%load_ext minillm`; see `minillm.integrations.notebook`."""
    magic = import_module(".integrations.notebook", __name__).MinillmMagic(shell)
    shell.register_magic_function(magic, "line_cell", "minillm")


def __dir__() -> list[str]:
    return __all__
