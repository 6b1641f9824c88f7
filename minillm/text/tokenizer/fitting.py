"""Texts, and pairs of texts, encoded for models that read them whole: with token types, cut to a number of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import PromptError
from .encoding import Tokenizer, check_text


class EncodedText(NamedTuple):
    """A text, or a pair of texts, as a model reads it."""

    token_ids: list[int]
    types: list[int]
    """For each token 0 if it belongs to the first text, 1 to the second, as the checkpoint's tokenizer numbers them"""
    truncated: bool = False
    """True if tokens were left out because there were more than the limit"""
    prompt_tokens: int = 0
    """Tokens of a prompt before the text that do not count in its embedding"""
    unseen: int = 0
    """Last tokens that attend to those before them, and to which none attends (`tasks/late_interaction.py`)"""


def encode_texts(
    tokenizer: Tokenizer, first: str, second: str | None = None, *, limit: int | None = None, ended: bool = False
) -> EncodedText:
    """Token ids of a text or a pair of texts, with special tokens and token types, cut to `limit` tokens.

    The special tokens remain. Of a pair the longer text is cut, then both to the same length, as transformers'
    "longest_first" does. The end of a text is cut off, or its beginning (`truncation_side`).

    Args:
        tokenizer: the model's
        first: text
        second: text of a pair
        limit: tokens at most
        ended: put the EOS token after it, if `add_eos_token` of tokenizer_config.json is set, even where
            tokenizer.json adds none: a model that represents a text by its last token was trained so.

    Raises:
        PromptError: as `Tokenizer.encode`; or a pair for a tokenizer that has no rule for pairs.
    """
    texts = [text for text in (first, second) if text is not None]
    for text in texts:
        check_text(text)
    end = [tokenizer.eos_token_id] if ended and tokenizer.lacks_end and tokenizer.eos_token_id is not None else []
    parts = [tokenizer._call("encode", text, add_special_tokens=False) for text in texts]
    if not hasattr(parts[0], "truncate"):  # a SentencePiece model
        if second is not None:
            raise PromptError("this model's tokenizer has no rule for pairs of texts: give one text")
        before, inside, after = framed(tokenizer, first)
        rest = inside if limit is None else cut(tokenizer, inside, limit - len(before) - len(after))
        ids = [*before, *rest, *after]
        return EncodedText(ids, [0] * len(ids), len(rest) < len(inside))
    lengths = [len(encoding) for encoding in parts]
    if limit is not None:
        special = int(tokenizer._call("num_special_tokens_to_add", second is not None)) + len(end)
        for encoding, length in zip(parts, _fitting(lengths, max(0, limit - special)), strict=True):
            encoding.truncate(length, direction="left" if tokenizer._manner.cuts_left else "right")
    whole = tokenizer._call("post_process", *parts)
    types = [*whole.type_ids, *(0 for _ in end)] if tokenizer._manner.typed else [0] * (len(whole.ids) + len(end))
    return EncodedText([*whole.ids, *end], types, [len(encoding) for encoding in parts] != lengths)


def framed(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int], list[int]]:
    """Token ids of a text in three parts: special tokens before it, its own tokens, and special tokens after it.

    Raises:
        PromptError: as `Tokenizer.encode`.
    """
    whole, inside = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    starts = range(len(whole) - len(inside) + 1)
    first = next((i for i in starts if whole[i : i + len(inside)] == inside), None)
    if first is None:  # special tokens change the text's own: none can be told apart
        return [], whole, []
    return whole[:first], inside, whole[first + len(inside) :]


def cut(tokenizer: Tokenizer, token_ids: list[int], limit: int) -> list[int]:
    """The first `limit` tokens of a text, or the last ones if `truncation_side` says so."""
    limit = max(0, limit)
    return token_ids[max(0, len(token_ids) - limit) :] if tokenizer._manner.cuts_left else token_ids[:limit]


def _fitting(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths of one or two texts cut to `room` tokens together: the longer first, then both to the same."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(lengths[0], room), *lengths[1:]]
    short = min(min(lengths), room // 2)
    return [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]
