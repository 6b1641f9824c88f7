"""python -m minillm"""

import sys

from . import import_at_once
from .cli.startup import end_at_signals, open_streams, tune_blas


def main() -> None:
    """Run the command line and exit with its code."""
    end_at_signals()
    open_streams()
    tune_blas()  # before anything imports NumPy
    sys.exit(import_at_once(".cli.main").run())


if __name__ == "__main__":
    main()
