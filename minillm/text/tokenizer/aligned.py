"""Texts encoded with the place of each token in them, in one window or in several that overlap.

Labels of tokens and answers in a text are reported by these places.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ParameterError, PromptError
from .encoding import Tokenizer, check_text
from .fitting import EncodedText
from .guarded import call

_WHERE = "the checkpoint's tokenizer"


@dataclass(frozen=True)
class AlignedText:
    """A window of a text, or of a pair of texts, of T tokens."""

    encoded: EncodedText
    tokens: list[str]
    """The tokenizer's names of the tokens. [T]"""
    spans: list[tuple[int, int]]
    """First character of each token in its own text, and the one after its last. [T]"""
    owners: list[int | None]
    """The text that each token is of, 0 or 1; None of special tokens that stand around the texts. [T]"""
    words: list[int | None]
    """Number of each token's word in its text. [T]"""

    def word_span(self, token: int) -> tuple[int, int] | None:
        """First character and stop of a token's word, as far as it is in the window; None: it is part of none."""
        word, owner = self.words[token], self.owners[token]
        if word is None or owner is None:
            return None
        members = [i for i, own in enumerate(self.words) if own == word and self.owners[i] == owner]
        return self.spans[members[0]][0], self.spans[members[-1]][1]


def align_texts(
    tokenizer: Tokenizer,
    first: str,
    second: str | None = None,
    *,
    limit: int,
    cut: Literal["first", "second"] = "first",
    stride: int | None = None,
) -> list[AlignedText]:
    """The windows of a text or a pair of texts, with special tokens and token types.

    Args:
        tokenizer: the model's
        first: text
        second: text of a pair
        limit: tokens of a window at most
        cut: the text of which a window has a part; the other is in each
        stride: tokens that neighbouring windows share; None: there is one window, and the rest is left out

    Raises:
        PromptError: as `Tokenizer.encode`; the tokenizer tells no places; or the other text fills a window.
        ParameterError: the stride leaves no room for new tokens.
    """
    texts = [text for text in (first, second) if text is not None]
    for text in texts:
        check_text(text)
    parts = [tokenizer._call("encode", text, add_special_tokens=False) for text in texts]
    if not hasattr(parts[0], "truncate"):
        raise PromptError("this tokenizer, a SentencePiece model, tells no places of its tokens: add a tokenizer.json")
    chosen = parts[cut == "second"]
    special = int(tokenizer._call("num_special_tokens_to_add", second is not None))
    room = limit - special - sum(len(part) for part in parts if part is not chosen)
    truncated = len(chosen) > room
    if truncated:
        if room < 1:
            raise PromptError(f"{limit} tokens have no room for a text beside the other: shorten that")
        if stride is not None and stride >= room:
            raise ParameterError(
                f"stride should be less than the {room} tokens of the text in a window, found {stride}"
            )
        chosen.truncate(room, stride=stride or 0, direction="left" if tokenizer._manner.cuts_left else "right")
    whole = tokenizer._call("post_process", *parts)
    windows = [whole, *(whole.overflowing if stride is not None else [])]
    types = dict(zip(whole.sequence_ids, whole.type_ids, strict=True)) if tokenizer._manner.typed else {}
    return [_aligned(window, types, truncated=truncated) for window in windows]


def _aligned(encoding: Any, types: Mapping[int | None, int], *, truncated: bool) -> AlignedText:
    """A window as the library has it. `types` of the texts: the library gives them to the first window alone."""
    ids = list(encoding.ids)
    owners = [
        None if special else i for special, i in zip(encoding.special_tokens_mask, encoding.sequence_ids, strict=True)
    ]
    own_types = encoding.type_ids if types else [0] * len(ids)
    return AlignedText(
        EncodedText(
            ids,
            [kind if i is None else types.get(i, kind) for i, kind in zip(owners, own_types, strict=True)],
            truncated,
        ),
        list(encoding.tokens),
        [(int(start), int(stop)) for start, stop in encoding.offsets],
        owners,
        list(encoding.word_ids),
    )


def joined_tokens(tokenizer: Tokenizer, tokens: list[str]) -> str:
    """Text of tokens by their names."""
    decoder = tokenizer._backend.decoder
    return " ".join(tokens) if decoder is None else str(call(_WHERE, decoder.decode, tokens))


def marks_continued_words(tokenizer: Tokenizer) -> bool:
    """Whether tokens within a word have names that say so, as BERT's "##"."""
    return bool(getattr(tokenizer._backend.model, "continuing_subword_prefix", None))


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The token that stands for text outside the vocabulary, by its usual name if the model has none; None without."""
    own = getattr(tokenizer._backend.model, "unk_token", None)
    ids = (tokenizer.token_id(name) for name in (own, "<unk>", "[UNK]") if name)
    return next((token_id for token_id in ids if token_id is not None), None)
