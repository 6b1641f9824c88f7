"""Backends: each runs the operations of the model on one kind of hardware."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class _Compiling(threading.local):
    seconds = 0.0
    """Time that this thread has spent in it"""


_compiling = _Compiling()


def kernel_sources(hardware: str) -> Path:
    """The folder `kernels/<hardware>`: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "kernels"
    return (inside if inside.is_dir() else package.parent / "kernels") / hardware


@contextmanager
def compiling() -> Iterator[None]:
    """Count the time of the `with` block as spent in compiling kernels."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _compiling.seconds += time.perf_counter() - began


def compile_seconds() -> float:
    """Seconds that this thread has spent in compiling kernels."""
    return _compiling.seconds


def working_time() -> float:
    """Seconds on a clock that stands still while this thread compiles kernels."""
    return time.perf_counter() - _compiling.seconds
