"""Pictures, where the extra "plot" is installed."""

from pathlib import Path
from typing import Any

from ..errors import UsageError


def figure_module() -> Any:
    """matplotlib's `figure`, which draws without a screen.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'minillm[plot]'") from None
    return matplotlib.figure


def save(figure: Any, path: Path, dpi: int = 130) -> None:
    """Write a picture; the ending of its name says the format.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {error}") from None
