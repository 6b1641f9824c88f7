"""The names of a large vocabulary as bytes, with their ids by hashes.

262,144 names as a list and a dict of Python's strings take 37 MB and longer to make than anything else of a tokenizer;
this way they take 8. The hash of a text of bytes b_1 .. b_n is the sum of (b_i + 1) base^(n - i), modulo 2^64: that of
any part of a text then follows from those of the text's beginnings (Karp and Rabin, "Efficient randomized
pattern-matching algorithms", 1987). What is found by a hash is compared.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

BASE = 0x9E3779B97F4A7C15
"""The base of hashes"""
_MODULUS = 1 << 64


class Names(Sequence[str]):
    """The names of tokens, by their ids."""

    def __init__(self, data: bytes, first: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Hash all names.

        Args:
            data: text in UTF-8
            first: where each name begins [V]
            lengths: its bytes, below 2^15 [V]
        """
        self._data, self._first, self._lengths = data, first.astype(np.uint32), lengths.astype(np.uint16)
        self.longest = int(lengths.max(initial=0))
        """Bytes of the longest name"""
        hashes = self._hashes()
        order = np.argsort(hashes)
        self._sorted, self._ids = hashes[order], order.astype(np.uint32)
        self.unique = not (self._sorted[1:] == self._sorted[:-1]).any()
        """No two names have one hash; so none stands twice"""

    def _hashes(self) -> NDArray[np.uint64]:
        """The hash of each name. [V]"""
        order = np.argsort(-self._lengths.astype(np.int16), kind="stable")  # the longest first
        longer = len(order) - np.cumsum(np.bincount(self._lengths))  # than 0, 1, ... bytes
        data = np.frombuffer(self._data, np.uint8)
        at, hashes, base = self._first[order], np.zeros(len(order), np.uint64), np.uint64(BASE)
        for count in longer[:-1].tolist():
            some = hashes[:count]
            some *= base
            some += data[at[:count]]
            some += np.uint64(1)
            at += np.uint32(1)
        unsorted = np.empty_like(hashes)
        unsorted[order] = hashes
        return unsorted

    def __len__(self) -> int:
        return len(self._first)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._bytes(index).decode()

    def _bytes(self, index: int) -> bytes:
        first = self._first.item(index)
        return self._data[first : first + self._lengths.item(index)]

    def id_of(self, name: str) -> int | None:
        """The id of a name; None if there is none."""
        if len(name) > self.longest:
            return None
        try:
            ids = self.inside(name, whole=True)
        except UnicodeEncodeError:  # a lone surrogate
            return None
        return ids[0] if ids else None

    def inside(self, text: str, before: str = "", *, whole: bool = False) -> list[int]:
        """The ids of all names that stand somewhere in a text, in any order; or of the `whole` text alone.

        Args:
            text: any text in valid Unicode
            before: names that begin with this, and then stand in the text, are others; ids may occur twice
            whole: only the text itself is looked up
        """
        own, front = text.encode(), before.encode()
        data = np.frombuffer(own, np.uint8)
        edges = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(own))  # of characters
        hashes, powers = np.array(_beginnings(own), np.uint64), np.array(_powers(len(own)), np.uint64)
        front_hash, ids = np.uint64(_beginnings(front)[-1]), list[int]()
        for count in range(max(1, len(edges) - 1 if whole else 1), len(edges)):  # characters
            first, stop = edges[:-count], edges[count:]
            fits = stop - first <= self.longest
            if not fits.any():
                break
            first, stop = first[fits], stop[fits]
            power = powers[stop - first]
            part = hashes[stop] - hashes[first] * power
            ids += self._equal(part, own, first, stop)
            if before:
                ids += self._equal(front_hash * power + part, own, first, stop, front)
        return ids

    def _equal(
        self, hashes: NDArray[np.uint64], text: bytes, first: NDArray[Any], stop: NDArray[Any], front: bytes = b""
    ) -> list[int]:
        """The ids of those parts of a text, behind `front`, that are names, by their hashes. [n] each"""
        places = np.minimum(np.searchsorted(self._sorted, hashes), len(self) - 1)
        equal = np.flatnonzero(self._sorted[places] == hashes)
        parts = zip(self._ids[places[equal]].tolist(), first[equal].tolist(), stop[equal].tolist(), strict=True)
        return [name for name, i, j in parts if self._bytes(name) == front + text[i:j]]


def _beginnings(text: bytes) -> list[int]:
    """The hashes of the first 0, 1, ... bytes of a text, and of all."""
    hashes = [0]
    for byte in text:
        hashes.append((hashes[-1] * BASE + byte + 1) % _MODULUS)
    return hashes


def _powers(most: int) -> list[int]:
    """base^0 to base^most."""
    powers = [1]
    for _ in range(most):
        powers.append(powers[-1] * BASE % _MODULUS)
    return powers
