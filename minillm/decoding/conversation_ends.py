"""The tokens at which conversations end, beside those that end any text."""

import logging
from collections.abc import Mapping
from typing import Any

from .request import RequestMaker

logger = logging.getLogger("minillm")


def turn_ends(maker: RequestMaker, defaults: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Tokens that end a turn of a conversation: `eos_token_ids` and, as in llama.cpp and vLLM, the tokenizer's.

    Where a user has replaced the checkpoint's, no others count.
    """
    own = maker.eos_token_ids(defaults)
    if maker.tokenizer is None or maker.checkpoint_ends not in (None, own):
        return own
    inside = (token for token in maker.tokenizer.turn_ends if token < maker.config.vocab_size)
    return tuple(dict.fromkeys([*own, *inside]))


def chat_defaults(maker: RequestMaker, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults of a conversation, which ends at `turn_ends`."""
    own = maker.defaults if defaults is None else defaults
    known = isinstance(own.get("eos_token_id"), int | list | tuple | None)  # else resolving refuses it
    return {**own, **({"eos_token_id": [*turn_ends(maker, defaults)]} if known else {})}


def warn_of_turn_ends(maker: RequestMaker, where: str, template: str) -> None:
    """Name the tokens at which conversations end and other texts go on, since the checkpoint's EOS ids lack them.

    Args:
        maker: of the model's requests
        where: the checkpoint
        template: its chat template, in whose turns one of these tokens has to be, unless it is the tokenizer's EOS
    """
    ends, tokenizer = maker.eos_token_ids(), maker.tokenizer
    if tokenizer is None:
        return
    lacking = {token: tokenizer.token(token) for token in turn_ends(maker) if token not in ends}
    named = [token for token, name in lacking.items() if token == tokenizer.eos_token_id or name in template]
    if named:
        logger.warning(
            "%s: conversations end at %s, and other texts go on, as in transformers: the checkpoint's eos_token_id "
            "is %s; with eos_token_id=%s they end there too",
            where,
            ", ".join(lacking[token] for token in named),
            [*ends],
            [*ends, *named],
        )
