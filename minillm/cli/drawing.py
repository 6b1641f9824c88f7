"""Pictures, where the extra "plot" is installed."""

from io import BytesIO
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..output_files import write_file


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
    """Write a picture; the ending of its name says the format, PNG where there is none.

    Raises:
        UsageError: the file cannot be written, or matplotlib has no such format.
    """
    drawn = BytesIO()
    try:
        figure.savefig(drawn, format=path.suffix[1:] or "png", dpi=dpi)
    except ValueError as error:
        raise UsageError(f"{path} cannot be written: {error}") from None
    write_file(path, drawn.getvalue())
