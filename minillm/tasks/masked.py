"""Masked tokens and what may stand in their place: the likeliest tokens by a masked language model.

Source: transformers 5.23, `pipelines/fill_mask.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError, PromptError, shown
from ..reference.softmax import softmax
from ..text.tokenizer import Tokenizer
from ..text.tokenizer.encoding import check_text


@dataclass(frozen=True)
class Filling:
    """A token in the place of a mask."""

    token_id: int
    token: str
    """Its text"""
    score: float
    """Its probability"""
    text: str
    """The whole text with it; other masks stay"""


def masks_of(token_ids: Sequence[int], tokenizer: Tokenizer, *, cut: bool = False) -> list[int]:
    """Places of the masks in a text.

    Raises:
        PromptError: it has none, or none before it was `cut`; or the tokenizer has no mask.
    """
    mask = tokenizer.mask_token_id
    if mask is None:
        raise PromptError("this model's tokenizer names no mask token")
    places = [i for i, token in enumerate(token_ids) if token == mask]
    if not places and cut:
        raise PromptError(f"the text has no mask in its first {len(token_ids)} tokens, to which it was cut: shorten it")
    if not places:
        raise PromptError(f"the text has no mask: write {tokenizer.token(mask)} where a token is to be filled in")
    return places


def target_ids(targets: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The tokens of some texts: by their name in the vocabulary, as "Ġred", else the text's own.

    Raises:
        ParameterError: one is not a single token; transformers takes its first.
        PromptError: one is not valid Unicode.
    """
    ids = []
    for target in targets:
        check_text(target)
        own = tokenizer.token_id(target)
        if own is None:
            tokens = tokenizer.encode(target, add_special_tokens=False)
            if len(tokens) != 1:
                raise ParameterError(f"the target {shown(target)} should be one token, found {len(tokens)}")
            own = tokens[0]
        ids.append(own)
    return list(dict.fromkeys(ids))


def fillings_of(
    token_ids: Sequence[int],
    places: Sequence[int],
    logits: NDArray[np.float32],
    tokenizer: Tokenizer,
    *,
    top_k: int,
    targets: Sequence[int] | None,
    padding: int | None,
) -> list[list[Filling]]:
    """The likeliest tokens of each mask, the best first.

    Args:
        token_ids: of the text [T]
        places: of the masks [k]
        logits: of the tokens at these places [k, V]
        tokenizer: the model's
        top_k: tokens of a mask at most
        targets: tokens among which to choose; None: all
        padding: token that is left out of texts
    """
    fillings = []
    for place, row in zip(places, logits, strict=True):
        scores = softmax(row, np)  # [V]
        among = np.arange(len(scores)) if targets is None else np.array(targets)
        best = among[np.argsort(-scores[among], kind="stable")[:top_k]]
        fillings.append(
            [_filling(token_ids, place, int(i), float(scores[i]), places, tokenizer, padding) for i in best]
        )
    return fillings


def _filling(
    token_ids: Sequence[int],
    place: int,
    token: int,
    score: float,
    places: Sequence[int],
    tokenizer: Tokenizer,
    padding: int | None,
) -> Filling:
    filled = [token if i == place else own for i, own in enumerate(token_ids)]
    text = tokenizer.decode([i for i in filled if i != padding], skip_special_tokens=len(places) == 1)
    return Filling(token, tokenizer.decode([token], skip_special_tokens=False), score, text)
