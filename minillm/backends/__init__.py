"""Backends: each runs the operations of the model on one kind of hardware."""

from pathlib import Path


def kernel_sources(hardware: str) -> Path:
    """The folder `kernels/<hardware>`: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "kernels"
    return (inside if inside.is_dir() else package.parent / "kernels") / hardware
