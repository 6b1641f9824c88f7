"""A paged cache in which sequences with the same beginning share its pages.

A page is known by its tokens and those before it as soon as it is full and computed, as is the last, partly filled page
of a prompt or of a finished text. A prompt takes over the full pages that it begins with, and a copy of as many
positions of the next one as it has in common with it. Pages that no sequence uses any more stay known until their
memory is needed; the least recently used ones go first.

It is needed when every page is in use or known. In a frugal cache it is needed before a page is used for the first
time, where the known ones are pages for `KEPT_POSITIONS`, and `KEPT_TIMES` as many as sequences have used at most. So
its memory grows with what runs at once, not with the number of texts.

Known pages form a tree as texts do: the parent of a page holds the tokens before its own (radix tree of pages: Zheng et
al., "SGLang", arXiv 2312.07104, section 3). Tokens are compared, not hashes of them, so that no text is ever taken for
another. Texts of different LoRA adapters have different roots, since their keys and values differ. Whoever uses a page
uses those before it too, so a parent is never unused earlier than its children: in the order of their last use, leaves
come first.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ..batch import TokenSequence, common_prefix
from .paged import PagedCache
from .windows import MARGIN

KEPT_TIMES = 2
"""Pages of ended texts that a frugal cache keeps for each page that sequences have used at most"""
KEPT_POSITIONS = 8192
"""Positions of ended texts that it keeps in any case"""
WORTH_WAITING = 16
"""Tokens in common with another prompt that a prompt waits for, to find them computed in the next step"""

Tokens = tuple[int, ...]


class Node:
    """A page of computed positions, or a root, which has none."""

    __slots__ = ("children", "page", "parent", "tokens")

    def __init__(self, parent: "Node | None" = None, tokens: Tokens = (), page: int = -1) -> None:
        self.parent = parent
        self.tokens = tokens
        """Tokens of the positions computed; fewer than a page has in the last page of a text, which has no children"""
        self.page = page
        self.children: list[Node] = []
        """Sorted by their tokens"""


_tokens_of = attrgetter("tokens")


class PrefixTree:
    """The pages of one cache that can be found by their tokens."""

    def __init__(self) -> None:
        self._roots: dict[str | None, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._unused: OrderedDict[int, Node] = OrderedDict()

    @property
    def unused(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._unused)

    def root(self, adapter: str | None) -> Node:
        """The beginning of all texts that an adapter computes."""
        if adapter not in self._roots:
            self._roots[adapter] = Node()
        return self._roots[adapter]

    def node(self, page: int) -> Node | None:
        """The node of a page; None of one that cannot be found."""
        return self._nodes.get(page)

    def find(self, parent: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """The page after `parent` that has the most leading tokens in common with `tokens`, and their number."""
        best, most = None, 0
        at = bisect_left(parent.children, tokens, key=_tokens_of)
        for child in parent.children[max(at - 1, 0) : at + 1]:  # neighbours in the order have the most in common
            common = common_prefix(child.tokens, tokens)
            if common > most:
                best, most = child, common
        return best, most

    def insert(self, parent: Node, tokens: Tokens, page: int) -> Node:
        """Make a page that a sequence uses known by its tokens, which may be more than before.

        Returns:
            The page's node, or another page's after `parent` that begins with the same tokens: then this page
            is not known.
        """
        known = self._nodes.get(page)
        if known is not None:
            assert known.parent is parent
            if known.tokens[: len(tokens)] == tokens:  # by another sequence that shares it
                return known
            assert not known.children
            self._detach(known)
        at = bisect_left(parent.children, tokens, key=_tokens_of)
        if at < len(parent.children) and parent.children[at].tokens[: len(tokens)] == tokens:
            same = parent.children[at]
            if same.page in self._unused:
                self._unused.move_to_end(same.page)
            return same
        node = self._nodes[page] = Node(parent, tokens, page)
        parent.children.insert(at, node)
        return node

    def use(self, page: int) -> None:
        """Note that a sequence uses an unused page."""
        del self._unused[page]

    def leave(self, page: int) -> None:
        """Note that no sequence uses a known page any more: it is the most recently used one."""
        self._unused[page] = self._nodes[page]

    def evict(self) -> int:
        """Forget the unused page that was used longest ago, and return it."""
        page, node = self._unused.popitem(last=False)
        assert not node.children
        self._detach(node)
        return page

    def remove(self, node: Node) -> list[int]:
        """Forget a page and all that follow it, which are unused. Returns those that were unused."""
        gone = list(_below(node))
        self._detach(node)
        for removed in gone[1:]:
            del self._nodes[removed.page]
        return [removed.page for removed in gone if self._unused.pop(removed.page, None) is not None]

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[_place(node)], self._nodes[node.page]


def _place(node: Node) -> int:
    """Index of a node among its parent's children."""
    assert node.parent is not None
    return bisect_left(node.parent.children, node.tokens, key=_tokens_of)


def _below(node: Node) -> Iterator[Node]:
    """A node and all after it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


class PrefixCache(PagedCache):
    """A paged cache whose sequences share the pages of a common beginning."""

    def __init__(self, *arguments: Any, prefix_cache: bool = True, frugal: bool = False, **options: Any) -> None:
        """As `PagedCache`; without `prefix_cache` nothing is shared. `frugal`: ended texts take little memory."""
        super().__init__(*arguments, **options)
        self.prefix_cache = prefix_cache
        self._frugal = frugal
        for window in self.windows:
            window.frugal = frugal
        self._most_used = 0
        """The most pages that sequences have used at once since `trim`"""

    def clear(self) -> None:
        """Free all pages and forget what is in them. Existing sequences must not be used again."""
        super().clear()
        self._known = PrefixTree()

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence uses; what is known of `cached_pages` of them is lost when they are used."""
        return super().free_pages + self._known.unused

    @property
    def cached_pages(self) -> int:
        """Number of pages that no sequence uses but prompts may find."""
        return self._known.unused

    def advance(self, sequence: TokenSequence, count: int) -> None:
        """Count the next `count` pending tokens as cached; prompts can find them from now on.

        Single tokens are found once their page is full.
        """
        first = sequence.cached // self.page_size
        sequence.cached += count
        if self.prefix_cache and (count > 1 or not sequence.cached % self.page_size):
            self._register(sequence, first)
        if self.windows and count > MARGIN:
            self._slide(sequence)

    def retire(self, sequence: TokenSequence) -> None:
        """Free all pages of a finished text; prompts may also find the last, partly filled one."""
        if self.prefix_cache:
            self._register(sequence, sequence.line // self.page_size)
        self.free(sequence)

    def discard(self, sequence: TokenSequence) -> None:
        """Free all pages of a failed text; nobody finds those that it alone has computed."""
        own = sequence.pages[sequence.reused // self.page_size :]
        self.free(sequence)
        for page in reversed(own):
            if not self._references[page]:
                self._forget_from(page, 0)

    def trim(self) -> None:
        """As `PagedCache.trim`; a frugal cache first loses what it would not keep if no more had run than runs now."""
        self._most_used = self.num_pages - self.free_pages
        while self._known.unused > self._kept_pages:
            self._lose(self._known.evict())
        super().trim()

    def _lose(self, page: int) -> None:
        """Free a page that prompts find no more."""
        self._free.append(page)
        for window in self.windows:
            window.forget(page)

    # --- finding ---------------------------------------------------------------------------------------------------

    def match(self, sequence: TokenSequence, limit: int | None = None) -> int:
        """Take over pages with the tokens that a sequence has to compute next.

        Args:
            sequence: its pending tokens are looked up, except a tree's
            limit: number of positions that it may have then; by default the last token is left to compute

        Returns:
            Number of positions found.
        """
        if not self.prefix_cache or self.apart or sequence.private:
            return 0
        before, P = sequence.cached, self.page_size
        limit = len(sequence.token_ids) - 1 if limit is None else limit
        limit = min(limit, len(sequence.token_ids) - len(sequence.tree))
        whole = self._whole_limit(sequence, limit) if self.windows else limit
        while sequence.cached < whole:
            k = sequence.cached // P  # the page of the next position
            parent = self._parent(sequence, k)
            if parent is None:
                break
            node, common = self._known.find(parent, tuple(sequence.token_ids[k * P : min(k * P + P, limit)]))
            common = min(common, whole - k * P)
            if node is None or k * P + common <= sequence.cached or not self._take_over(sequence, k, node, common):
                break
            if sequence.reused == sequence.cached:
                sequence.reused = k * P + common
            sequence.cached = k * P + common
            if common < P:
                break
        return sequence.cached - before

    def _whole_limit(self, sequence: TokenSequence, limit: int) -> int:
        """The most positions, up to `limit`, that a sequence may have with all that its windows see."""
        P, cached = self.page_size, sequence.cached
        pages, stop = sequence.pages[: cached // P], cached
        parent = self._parent(sequence, len(pages))
        while parent is not None and stop < limit:
            first = len(pages) * P
            parent, common = self._known.find(parent, tuple(sequence.token_ids[first : min(first + P, limit)]))
            if parent is None or first + common <= stop:
                break
            pages.append(parent.page)
            stop = first + common
            if common < P:
                break
        before = 0
        while stop != before:  # a shorter text may lack what another window sees
            before = stop
            for window in self.windows:
                stop = window.longest(pages, stop, cached)
        return stop

    def _take_over(self, sequence: TokenSequence, k: int, node: Node, common: int) -> bool:
        """Take the first `common` positions of a known page into a sequence's page k; False if no page is free."""
        page, seen = node.page, False
        if common == self.page_size:
            self._use(page)
            self._drop_pages(sequence, k)  # it may have computed a part of the page
        elif k < len(sequence.pages):
            used = sequence.cached - k * self.page_size
            if self._references[sequence.pages[k]] > 1:
                return False
            self._forget_from(sequence.pages[k], used)
            self._copy(page, sequence.pages[k], slice(used, common))
            return True
        else:
            unused, seen = not self._references[page], True
            self._use(page)
            for window in self.windows:
                window.use(page)
            room = self.free_pages and (not self.windows or self.takes(1))
            if unused and (len(node.tokens) == common or not room):
                self._forget_from(page, common)
            else:
                copy = self._take() if room else None
                if copy is not None:
                    self._copy(page, copy, slice(0, common))
                for window in self.windows:
                    window.leave(page)
                self._release(page)
                if copy is None:
                    return False
                page = copy
        if self.windows and not seen:
            sequence.first_parts = tuple([window.extend(sequence, page) for window in self.windows])
        sequence.pages.append(page)
        return True

    def computes_next(self, leader: TokenSequence, count: int, follower: TokenSequence) -> bool:
        """True if computing the next `count` tokens of `leader` computes tokens that `follower` then need not.

        At least `WORTH_WAITING` of them, so that a few words at the beginning make nobody wait.
        """
        if not self.prefix_cache or self.apart or leader.private or follower.private:
            return False
        if leader.adapter != follower.adapter:
            return False
        at, stop = follower.cached, follower.cached + WORTH_WAITING
        return (
            leader.cached <= at < leader.cached + count
            and not leader.tree
            and stop < len(follower.token_ids)  # the last token is computed in any case
            and leader.token_ids[at:stop] == follower.token_ids[at:stop]
            and leader.token_ids[:at] == follower.token_ids[:at]
        )

    def _register(self, sequence: TokenSequence, first: int) -> None:
        """Make a sequence's computed pages known, from page number `first` on."""
        if sequence.private:
            return
        P, stop = self.page_size, sequence.line
        while self._parent(sequence, first) is None:  # accepted guesses of a tree were not in the line before
            first -= 1
        for k in range(first, self.pages_for(stop)):
            parent, page = self._parent(sequence, k), sequence.pages[k]
            assert parent is not None
            node = self._known.insert(parent, tuple(sequence.token_ids[k * P : min(k * P + P, stop)]), page)
            if node.page != page and k * P + P <= stop:  # computed twice, at the same time: one is enough
                seeing = [window for window in self.windows if k >= window.first(sequence)]
                if not all(window.may_move(page, node.page) for window in seeing):
                    sequence.private = True  # the other's is gone, and this one's is a fork's too
                    return
                self._use(node.page)
                for window in seeing:
                    window.move(page, node.page)
                self._release(page)
                sequence.pages[k] = node.page

    def _parent(self, sequence: TokenSequence, k: int) -> Node | None:
        """The node of the page before a sequence's page k; None if not all of its tokens are known."""
        if not k:
            return self._known.root(sequence.adapter)
        node = self._known.node(sequence.pages[k - 1])
        return node if node is not None and len(node.tokens) == self.page_size else None

    def _forget_from(self, page: int, used: int) -> None:
        """Forget the page if it is known by more than its first `used` positions, and all that follow it."""
        node = self._known.node(page)
        if node is not None and len(node.tokens) > used:
            for gone in self._known.remove(node):
                self._lose(gone)

    def _is_known(self, page: int) -> bool:
        return self._known.node(page) is not None

    # --- single pages -------------------------------------------------------------------------------------------------

    def _next_free(self) -> int:
        unused = self._known.unused
        self._most_used = max(self._most_used, self.num_pages - self.free_pages + 1)
        if unused and not self._free and (unused >= self._kept_pages or not self._unbacked):
            return self._known.evict()
        return super()._next_free()

    @property
    def _kept_pages(self) -> int:
        """Number of unused pages that are kept while there is memory for others."""
        return max(KEPT_TIMES * self._most_used, self.pages_for(KEPT_POSITIONS)) if self._frugal else self.num_pages

    def _use(self, page: int) -> None:
        """Add a reference to a known page."""
        if not self._references[page]:
            self._known.use(page)
        self._references[page] += 1

    def _own(self, page: int, used: int) -> int:
        if self._references[page] != 1:
            return super()._own(page, used)
        self._forget_from(page, used)
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            if self._known.node(page) is None:
                self._free.append(page)
            else:
                self._known.leave(page)
