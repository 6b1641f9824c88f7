"""A limit on the digits of numbers in guided JSON, so that a model that repeats itself does not write them for ever.

JSON sets no limit, and a weak model at temperature 0 writes `1.2500000...` up to the end of its context. llama.cpp's
grammars of JSON schemas end the integral and the decimal part after 16 digits; here the digits of an exponent are two,
so that each number is a finite float64.

The limit is applied to the mask of allowed tokens: after the last digit, tokens that begin with another are left out.
Where nothing else is allowed, the schema needs more (`const: 1e30`), and the mask stays as it is. Digits of a text are
no number: there a letter or a quotation mark can follow.
"""

import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_EXPONENT_DIGITS = 2

_RUN = re.compile(rb"[^0-9.eE+-]?[0-9.eE+-]*\Z", re.DOTALL)
"""The end of a text that may be a number, and the character before it"""
_NUMBER = re.compile(rb"[\s:,\[=>]?-?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]*)?")
_LONG_EXPONENT = re.compile(rb"[0-9.]*[eE][+-]?[0-9]{%d}" % (MOST_EXPONENT_DIGITS + 1))
_IN_JSON = frozenset(b"0123456789.eE+-,}] \t\r\n<)")
"""Characters in a number of JSON, or after it; calls have numbers between tags and parentheses too"""
_UNREAD, _OUTSIDE, _ENDLESS = -1, -2, 999
"""Instead of a token's digits: not read yet; no JSON after a digit; an exponent of too many"""


class TokenDigits:
    """The number of digits at the beginning of each token of a vocabulary, read as they are asked for."""

    def __init__(self, tokenizer: "LLTokenizer", size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`size`: tokens in a mask."""
        self._tokenizer = tokenizer
        self._counts = np.full(-(-size // 32) * 32, _UNREAD, np.int16)
        self._counts[list(eos_token_ids)] = 0

    def text_of(self, token_id: int) -> bytes:
        """The bytes of a token; none of an id that the tokenizer has not."""
        return bytes(self._tokenizer.decode_bytes([token_id])) if token_id < self._tokenizer.vocab_size else b""

    def leading(self, token_ids: NDArray[np.intp]) -> NDArray[np.int16] | None:
        """The digits that tokens begin with, [N]; None if one of them is no JSON after a digit."""
        counts = self._counts[token_ids]
        if (counts == _OUTSIDE).any():
            return None
        for token_id in token_ids[counts == _UNREAD].tolist():
            self._counts[token_id] = count = self._count(self.text_of(token_id))
            if count == _OUTSIDE:
                return None
        return self._counts[token_ids]

    def _count(self, text: bytes) -> int:
        if text and text[0] not in _IN_JSON:
            return _OUTSIDE
        return _ENDLESS if _LONG_EXPONENT.match(text) else len(text) - len(text.lstrip(b"0123456789"))


class NumberLimit:
    """The number at the end of one text, and the tokens that would make it too long."""

    def __init__(self, digits: TokenDigits, most: int, run: bytes = b"") -> None:
        """`most`: digits of an integral or a decimal part; `run`: the end of the text so far."""
        self._digits, self._most, self._run = digits, most, run

    def after(self, token_id: int) -> "NumberLimit":
        """The same after a further token."""
        run = _RUN.search(self._run + self._digits.text_of(token_id))
        return NumberLimit(self._digits, self._most, b"" if run is None else run[0])

    def apply(self, mask: NDArray[np.uint32]) -> None:
        """Clear the tokens that would make the number too long, unless no other is set. mask: [W]"""
        number = _NUMBER.fullmatch(self._run)
        if number is None:
            return
        trailing_digits = len(self._run) - len(self._run.rstrip(b"0123456789"))
        most = self._most if number[2] is None else MOST_EXPONENT_DIGITS
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        leading = self._digits.leading(allowed)
        if leading is None:
            return
        longer = allowed[leading > max(most - trailing_digits, 0)]
        if 0 < len(longer) < len(allowed):
            bits[longer] = 0
            mask[:] = np.packbits(bits, bitorder="little").view(np.uint32)
