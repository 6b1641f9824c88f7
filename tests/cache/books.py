"""Rules that a cache's pages keep after every step, checked from outside."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from minillm.batch import TokenSequence
from minillm.cache import PrefixCache
from minillm.cache.prefix import Node
from minillm.cache.windows import WindowPages
from minillm.engine.loop import StepLoop
from minillm.runner.runner import Runner

from ..tiny import runner_of


def check_books(cache: PrefixCache, owners: Iterable[TokenSequence]) -> None:
    """Every page is free, known, or owned by those that count as its owners; texts in the cache hang together."""
    owners = list(owners)
    sources = {sequence.encoder_input for sequence in owners if sequence.encoder_input is not None}
    owned = Counter(page for owner in (*owners, *sources) for page in owner.pages)
    assert all(not source.pages or source.users <= set(owners) for source in sources)
    known = nodes_of(cache)
    for window in cache.windows:
        check_parts(window, owners, set(known))
    unused = set(known) - set(owned)
    assert [owned[page] for page in range(cache.num_pages)] == cache._references
    assert sorted([*cache._free, *cache._unbacked, *unused, *owned]) == list(range(cache.num_pages))
    assert set(cache._known._unused) == unused
    assert (cache.cached_pages, cache.free_pages) == (len(unused), cache.num_pages - len(owned))
    for page, node in known.items():
        full = len(node.tokens) == cache.page_size
        assert 0 < len(node.tokens) <= cache.page_size
        assert full or not node.children
        assert [child.tokens for child in node.children] == sorted({child.tokens for child in node.children})
        if page in unused:
            assert unused.issuperset(child.page for child in node.children)


def check_parts(window: WindowPages, owners: Sequence[TokenSequence], known: set[int]) -> None:
    """Every part is free, used by those that count as its users, or of a page that prompts may find."""
    used = Counter(page for owner in owners for page in owner.pages[window.first(owner) :])
    assert [used[page] for page in range(len(window.users))] == window.users
    left = set(window._left)
    assert left <= known and not left & set(used)
    owned = {page: part for page, part in enumerate(window.parts) if part >= 0}
    assert set(owned) == left | set(used)
    assert sorted([*owned.values(), *window._free, *window._unbacked]) == list(range(window.num_parts))
    assert window.free_parts == window.num_parts - len(used)
    assert all(window.whole(owner) for owner in owners if owner.cached)


def check_loop(loop: StepLoop) -> None:
    """The books of every model's cache, between two steps."""
    for name, runner in loop.runners.items():
        check_books(runner.cache, [sequence for run in loop.scheduler.running for sequence in run.live.get(name, ())])


def nodes_of(cache: PrefixCache) -> dict[int, Node]:
    """Every known page, found from the roots."""
    found: dict[int, Node] = {}
    waiting = [child for root in cache._known._roots.values() for child in root.children]
    while waiting:
        node = waiting.pop()
        assert node.page not in found
        found[node.page] = node
        assert all(child.parent is node for child in node.children)
        waiting += node.children
    assert found == cache._known._nodes
    return found


def text_of(node: Node) -> list[int]:
    """The tokens of a page and of all before it."""
    return [] if node.parent is None else [*text_of(node.parent), *node.tokens]


def check_contents(runner: Runner) -> None:
    """The known pages hold the keys and values that their tokens have where there is no cache."""
    nodes = nodes_of(runner.cache)
    for node in nodes.values():
        if node.children or not node.tokens:
            continue  # each leaf's text covers the pages before it
        line = TokenSequence(text_of(node))
        alone = runner_of(runner.model, pages=1, page_size=len(line.token_ids))
        alone.prefill(line)
        end = len(line.token_ids)
        while node.parent is not None:
            start, size = (end - 1) // runner.cache.page_size * runner.cache.page_size, len(node.tokens)
            for ours, theirs in (
                (runner.cache.storage.keys, alone.cache.storage.keys),
                (runner.cache.storage.values, alone.cache.storage.values),
            ):
                expected = theirs[:, line.pages[0], :, start : start + size]  # [L, K, size, D]
                np.testing.assert_allclose(ours[:, node.page, :, :size], expected, rtol=0, atol=1e-4)
            node, end = node.parent, start
