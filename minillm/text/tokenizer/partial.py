"""A tokenizer of which a text gets the part that it needs: with a large vocabulary the first token then comes sooner.

The `tokenizers` library takes seconds to build a BPE tokenizer of 262,144 tokens and their 500,000 merges. But the
tokens of a text depend only on those that stand somewhere in it: merges make nothing else. So for a short text a
tokenizer of these tokens, with the same ids and in the same order of merges, gives the same tokens, and is built in
milliseconds. The whole one is built for a long text, after a few texts, or when something else is asked of it.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .names import Names
from .settings import SPACE

if TYPE_CHECKING:
    import tokenizers

MOST_CHARACTERS = 2000
"""Characters of a text that has a tokenizer of its own"""
MOST_TEXTS = 8
"""Texts that have a tokenizer of their own"""


class PartialTokenizer:
    """A SentencePiece BPE model with the methods of `tokenizers.Tokenizer` that minillm uses.

    Those that are not defined here are the whole tokenizer's, which is built then.
    """

    def __init__(
        self, names: Names, build: Callable[[list[int] | None], "tokenizers.Tokenizer"], added: list[int]
    ) -> None:
        """Build no more than the special and added tokens.

        Args:
            names: all tokens
            build: makes the tokenizer of the special tokens, single bytes and the tokens of these ids; None: of all
            added: the ids of added tokens that are not special
        """
        self.names, self._build = names, build
        self._small = build(added)
        self._added = self._small.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._texts = 0
        self.decoder = self._small.decoder
        self.encode_special_tokens = self._small.encode_special_tokens

    @cached_property
    def whole(self) -> "tokenizers.Tokenizer":
        """The tokenizer of all tokens."""
        return self._build(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> "tokenizers.Encoding":
        """The tokens of a text."""
        known = "whole" in self.__dict__
        if known or self._texts >= MOST_TEXTS or len(text) > MOST_CHARACTERS:
            backend = self.whole
        else:
            self._texts += 1
            backend = self._build(self._inside(text))
        return backend.encode(text, add_special_tokens=add_special_tokens)

    def _inside(self, text: str) -> list[int]:
        """The ids of all tokens that stand in a text, also behind a space that the normaliser puts in front.

        Added tokens are found in the text as it is.
        """
        normalizer = self._small.normalizer
        seen = text if normalizer is None else normalizer.normalize_str(text)
        raw = [] if seen == text else self.names.inside(text)
        return [*self.names.inside(SPACE), *self.names.inside(seen, SPACE), *raw]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids without a token are left out."""
        shown = (i for i in ids if not skip_special_tokens or i not in self._special)
        names = [name for name in map(self.id_to_token, shown) if name is not None]
        return " ".join(names) if self.decoder is None else str(self.decoder.decode(names))

    def id_to_token(self, token_id: int) -> str | None:
        """The name of a token; None if there is none."""
        return self.names[token_id] if 0 <= token_id < len(self.names) else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None if there is none."""
        return self.names.id_of(token)

    def get_added_tokens_decoder(self) -> "dict[int, tokenizers.AddedToken]":
        """The special and added tokens by their ids."""
        return self._added

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """All tokens and their ids; added ones are among them."""
        return {name: i for i, name in enumerate(self.names)}
