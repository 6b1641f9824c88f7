"""Log-probabilities in the two forms of OpenAI's API: four lists for completions, a list of tokens for a chat."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..decoding.event import Event
from ..decoding.prompt_scores import TopLogProbs
from ..engine.results import Completion
from ..text.tokenizer import Tokenizer

BYTES = "bytes:"
"""Begins the text of a token that is no whole character, as in OpenAI's completions: "bytes:\\xe2\\x82"."""


class TokenTexts:
    """The tokens of a vocabulary as the API shows them. Each is looked up once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes | None] = {}
        self._texts: dict[int, str] = {}

    def bytes(self, token_id: int) -> bytes | None:
        """The token's bytes (its name's if it is special); None without a tokenizer."""
        if token_id not in self._bytes:
            self._bytes[token_id] = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return self._bytes[token_id]

    def text(self, token_id: int, *, as_id: bool = False) -> str:
        """The token's text; "token_id:5" without a tokenizer, or if `as_id`."""
        if as_id or self._tokenizer is None:
            return f"token_id:{token_id}"
        if token_id not in self._texts:
            utf8 = self.bytes(token_id) or b""
            try:
                self._texts[token_id] = utf8.decode()
            except UnicodeDecodeError:
                self._texts[token_id] = BYTES + "".join(f"\\x{byte:02x}" for byte in utf8)
        return self._texts[token_id]

    def list(self, token_id: int) -> "list[int] | None":
        """The token's bytes as JSON has them."""
        utf8 = self.bytes(token_id)
        return None if utf8 is None else list(utf8)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        return frozenset() if self._tokenizer is None else self._tokenizer.special_ids


def chat_logprobs(texts: TokenTexts, piece: Completion | Event, *, as_ids: bool = False) -> list[dict[str, Any]]:
    """The log-probabilities of an answer, or of a part of it: an object for each token.

    `bytes` are UTF-8, several tokens may make one character; null without a tokenizer.
    """

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts.text(token_id, as_id=as_ids)
        return {"token": text, "logprob": finite(logprob), "bytes": texts.list(token_id)}

    tokens = []
    for i, (token_id, logprob) in enumerate(zip(piece.token_ids, piece.logprobs or (), strict=True)):
        top = piece.top_logprobs[i] if piece.top_logprobs else []
        tokens.append(described(token_id, logprob) | {"top_logprobs": [described(*other) for other in top]})
    return tokens


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it; -9999 for minus infinity, as in OpenAI's API."""
    return max(logprob, -9999.0)


class LegacyLogprobs:
    """Log-probabilities of one choice of a completion, whole or in parts; counts the characters before each token."""

    def __init__(self, texts: TokenTexts, top: int, *, as_ids: bool = False) -> None:
        """`top`: number of alternatives, the field `logprobs`; the chosen token is added if it is not one of them."""
        self._texts, self._top, self._as_ids = texts, top, as_ids
        self._characters = 0

    def next(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], top_logprobs: Sequence[TopLogProbs | None]
    ) -> dict[str, Any]:
        """The log-probabilities of the next tokens; each token has the same place in four lists.

        None for a prompt's first token, which has nothing before it. `text_offset` is where each token begins in the
        choice's text, in characters.
        """
        tokens = [self._texts.text(token_id, as_id=self._as_ids) for token_id in token_ids]
        values = [None if value is None else finite(value) for value in logprobs]
        best = [
            None if value is None else self._alternatives(token, value, top_logprobs[i] if top_logprobs else None)
            for i, (token, value) in enumerate(zip(tokens, values, strict=True))
        ]
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": best if self._top else None,
            "text_offset": [*map(self._offset, token_ids)],
        }

    def _alternatives(self, token: str, logprob: float, top: TopLogProbs | None) -> dict[str, float]:
        alternatives: dict[str, float] = {}
        for token_id, value in top or ():
            text = self._texts.text(token_id, as_id=self._as_ids)
            alternatives.setdefault(text, finite(value))  # of equal texts the best
        alternatives.setdefault(token, logprob)
        return alternatives

    def _offset(self, token_id: int) -> int:
        """The place at which the token begins; one in the middle of a character at that character."""
        utf8 = b"" if token_id in self._texts.special_ids else self._texts.bytes(token_id) or b""
        inside = bool(utf8) and utf8[0] & 0xC0 == 0x80
        offset = max(0, self._characters - inside)
        self._characters += sum(byte & 0xC0 != 0x80 for byte in utf8)
        return offset
