"""Texts far too long for a model, recognised without tokenizing most of them."""

from typing import TYPE_CHECKING

from .encoding import PIECE, check_text

if TYPE_CHECKING:
    from .encoding import Tokenizer


def exceeds(tokenizer: "Tokenizer", text: str, limit: int) -> bool:
    """True for a text that certainly has more than `limit` tokens, which

    - has more characters than `limit` times four times the bytes of the longest token: normalising to NFC or NFKC
      removes at most three of four bytes. Long runs of white space that a tokenizer drops count too.
    - has more than twice the limit when pieces of it are tokenized one by one. A split changes the tokens next to it, a
      few in each piece.

    Raises:
        PromptError: it is not valid Unicode.
    """
    if len(text) > 4 * tokenizer.longest_token * limit:
        return True
    check_text(text)
    count = 0
    for first in range(0, len(text), PIECE):
        count += len(tokenizer.encode(text[first : first + PIECE], add_special_tokens=False))
        if count > 2 * limit:
            return True
    return False
