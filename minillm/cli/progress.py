"""A bar on standard error that says how far something has come, where a person may be looking."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """What to call with the numbers done and those in all; None where no bar is wanted or nobody sees one.

    The bar comes after half a second, and is gone at the end.
    """
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=title, unit="", unit_scale=True, leave=False, delay=0.5) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
