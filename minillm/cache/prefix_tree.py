"""Computed pages by the tokens in them and before them, so that texts with the same beginning share pages.

The pages form a tree as texts do: the parent of a page holds the tokens before its own. Tokens are compared, not hashes
of them, so that no text is ever taken for another. Texts of different LoRA adapters have different roots, since their
keys and values differ (radix tree of pages: Zheng et al., "SGLang", arXiv 2312.07104, section 3).

A page without a sequence is unused: kept until its memory is needed. Whoever uses a page uses those before it too,
so a parent is never unused earlier than its children: in the order of their last use, leaves come first.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from ..batch import common_prefix

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
        return self._roots.setdefault(adapter, Node())

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
