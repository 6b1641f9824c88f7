"""The choice of the request that gives way when the K/V cache has no page left: see `scheduler.py`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ..cache import PagedCache
from .run import Run


def choose_victim(needy: Run, running: Sequence[Run], caches: Mapping[str, PagedCache], name: str) -> Run | None:
    """The run to preempt so that `needy` gets a page of a cache: of the lowest priority, and cheapest to recompute.

    It may be `needy` itself, unless that is the first of all, so never one of higher priority. None if no other
    one has a page to give.

    Args:
        needy: a running request
        running: all of them, in the order of priority, then of arrival
        caches: each model's cache, by name
        name: the model whose cache has no page left
    """
    candidates = [run for run in running[1:] if run is needy or _own_pages(run, caches, name)]
    return max(
        candidates, key=lambda run: (run.request.priority, -lost_positions(run, caches), run.order), default=None
    )


def lost_positions(run: Run, caches: Mapping[str, PagedCache]) -> int:
    """Number of positions that a run alone has in the caches, those that its sequences share counted once."""
    return sum(sum(_own_pages(run, caches, name).values()) for name in run.live)


def _own_pages(run: Run, caches: Mapping[str, PagedCache], name: str) -> dict[int, int]:
    """The pages of one cache that no other run uses, and the number of positions computed in each."""
    cache, owners, positions = caches[name], Counter[int](), dict[int, int]()
    for sequence in run.live.get(name, ()):
        owners.update(sequence.pages)
        for i, page in enumerate(sequence.pages):
            computed = min(cache.page_size, max(0, sequence.cached - i * cache.page_size))
            positions[page] = max(positions.get(page, 0), computed)
        if sequence.encoder_input is not None and sequence is run.live[name][0]:
            owners.update(sequence.encoder_input.pages)
            positions |= dict.fromkeys(sequence.encoder_input.pages, cache.page_size)
    return {page: positions[page] for page, count in owners.items() if count == cache.owners(page)}
