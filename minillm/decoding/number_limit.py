"""A limit on the digits of numbers in guided JSON, so that a model that repeats itself does not write them for ever.

JSON sets no limit, and a weak model at temperature 0 writes `1.2500000...` up to the end of its context. llama.cpp's
grammars of JSON schemas end the integral and the decimal part after 16 digits; here the digits of an exponent are two,
so that each number is a finite float64.

The limit is applied to the mask of allowed tokens: after the last digit, tokens that begin with another are left out.
Where nothing else is allowed, the schema needs more (`const: 1e30`), and the mask stays as it is. Digits of a text are
no number: there a letter or a quotation mark can follow.
"""

import re
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_EXPONENT_DIGITS = 2

_RUN = re.compile(rb"[^0-9.eE+-]?[0-9.eE+-]*\Z", re.DOTALL)
"""The end of a text that may be a number, and the character before it"""
_NUMBER = re.compile(rb"[\s:,\[]?-?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]*)?")
_LONG_EXPONENT = re.compile(rb"[0-9.]*[eE][+-]?[0-9]{%d}" % (MOST_EXPONENT_DIGITS + 1))
_IN_JSON = frozenset(b"0123456789.eE+-,}] \t\r\n")
"""What may stand in a number of JSON, or after it"""


class TokenDigits:
    """The digits at the beginning of each token of a vocabulary, as masks."""

    def __init__(self, tokenizer: "LLTokenizer", size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`size`: that of the masks, in tokens."""
        self._tokenizer, self._size, self._eos_token_ids = tokenizer, size, eos_token_ids

    def text_of(self, token_id: int) -> bytes:
        """The bytes of a token; none of an id that the tokenizer has not."""
        return bytes(self._tokenizer.decode_bytes([token_id])) if token_id < self._tokenizer.vocab_size else b""

    @cached_property
    def _texts(self) -> list[bytes]:
        return [self.text_of(token_id) for token_id in range(self._size)]

    @cached_property
    def leading(self) -> list[NDArray[np.uint32]]:
        """By n: the mask of tokens that begin with at least n digits."""
        counts = np.array([len(text) - len(text.lstrip(b"0123456789")) for text in self._texts])
        return [_mask(counts >= n) for n in range(int(counts.max(initial=0)) + 1)]

    @cached_property
    def long_exponents(self) -> NDArray[np.uint32]:
        """The mask of tokens with an exponent of too many digits."""
        return _mask(np.array([_LONG_EXPONENT.match(text) is not None for text in self._texts]))

    @cached_property
    def outside(self) -> NDArray[np.uint32]:
        """The mask of tokens that follow no digit of a number in JSON."""
        follow = np.array([not text or text[0] in _IN_JSON for text in self._texts])
        follow[list(self._eos_token_ids)] = True
        return _mask(~follow)


class NumberLimit:
    """The number at the end of one text, and the tokens that would make it too long."""

    def __init__(self, digits: TokenDigits, most: int, run: bytes = b"") -> None:
        """`most`: digits of an integral or a decimal part; `run`: the end of the text so far."""
        self._digits, self._most, self._run = digits, most, run

    def after(self, token_id: int) -> "NumberLimit":
        """The same after a further token."""
        found = _RUN.search(self._run + self._digits.text_of(token_id))
        return NumberLimit(self._digits, self._most, b"" if found is None else found[0])

    def apply(self, mask: NDArray[np.uint32]) -> None:
        """Clear the tokens that would make the number too long, unless no other is set. mask: [W]"""
        number = _NUMBER.fullmatch(self._run)
        if number is None:
            return
        part = len(self._run) - len(self._run.rstrip(b"0123456789"))
        most = self._most if number[2] is None else MOST_EXPONENT_DIGITS
        leading = self._digits.leading
        limited = mask & ~self._digits.long_exponents if number[2] is None else mask
        if most - part + 1 < len(leading):
            limited = limited & ~leading[max(most - part + 1, 1)]
        if limited.any() and not (mask & self._digits.outside).any():
            mask[:] = limited


def _mask(tokens: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """One bit for each token, the first in the lowest bit. [V] -> [W]"""
    padded = np.zeros(-(-len(tokens) // 32) * 32, bool)
    padded[: len(tokens)] = tokens
    return np.packbits(padded, bitorder="little").view(np.uint32)
