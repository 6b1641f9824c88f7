"""Drawing with matplotlib, from the extra "plot"."""

from io import BytesIO
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..output_files import write_file


def figure_module() -> Any:
    """matplotlib's `figure` module, which needs no display.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'minillm[plot]'") from None
    return matplotlib.figure


def save(figure: Any, path: Path, dpi: int = 130) -> None:
    """Write a figure to a file in the format of its suffix, PNG without one.

    Raises:
        UsageError: the file cannot be written, or matplotlib does not support the format.
    """
    drawn = BytesIO()
    try:
        figure.savefig(drawn, format=path.suffix[1:] or "png", dpi=dpi)
    except ValueError as error:
        raise UsageError(f"{path} cannot be written: {error}") from None
    write_file(path, drawn.getvalue())
