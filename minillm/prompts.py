"""One place that decides what a prompt is, and makes it token ids that the model can take."""

import sys
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .errors import PromptError, shown
from .tokenizer import LAYOUTS, Tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
"""Text; or token ids: a list, tuple, range or other sequence of whole numbers, or a NumPy array of one dimension."""


def is_prompt(value: Any) -> bool:
    """Whether this is to be read as one prompt, and not as a list of them; it never fails.

    A list of prompts is a sequence or an array whose first member is text, a sequence or an array. An empty one is a
    list of no prompts. Anything that is neither is called a prompt, which `encode_prompt` then refuses.
    """
    return not _is_series(value) or bool(_length(value) and not (isinstance(value[0], str) or _is_series(value[0])))


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig, *, room: int = 0, begin: bool = True
) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: text or token ids
        tokenizer: for text
        config: vocabulary and context
        room: tokens that the context must have left after the prompt
        begin: of an empty prompt make the model's beginning-of-sequence token

    Raises:
        PromptError: neither text nor token ids, empty with no token to begin with, too long, or an id outside the
            vocabulary.
    """
    if not begin and (isinstance(prompt, str) or _is_series(prompt)) and not _length(prompt):
        raise PromptError("the prompt is empty: give at least one token")
    if isinstance(prompt, str):
        ids = encode_text(prompt, tokenizer, config, room=room)
    else:
        ids = _token_ids(prompt, config, room)
    outside = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if outside is not None:
        raise PromptError(f"token id {shown(outside)} is outside the vocabulary of {config.vocab_size}")
    if not ids:
        if config.bos_token_id is None:
            raise PromptError("the prompt is empty, and the model has no token to begin with")
        ids = [config.bos_token_id]
    _check_length(len(ids), config, room)
    return ids


def encode_text(
    text: str, tokenizer: Tokenizer | None, config: ModelConfig, *, room: int = 0, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text. One that is far too long for the context is refused with little of it tokenized.

    Raises:
        PromptError: there is no tokenizer, the text is not valid UTF-8, or it is far too long.
    """
    tokenizer = need_tokenizer(tokenizer)
    if tokenizer.exceeds(text, config.max_positions):
        raise _too_long(f"more than {config.max_positions} tokens ({len(text)} characters)", config, room)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a model that has one.

    Raises:
        PromptError: it has none; the message says which files it would be in.
    """
    if tokenizer is None:
        raise PromptError(
            "this model has no tokenizer: give the prompt as token ids, or name a tokenizer by Engine(tokenizer=...); "
            f"a folder is searched for {LAYOUTS}"
        )
    return tokenizer


def _is_series(value: Any) -> bool:
    """Whether its members may be token ids or prompts: bytes are neither, nor is a number as an array without any."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _length(value: Any) -> int:
    try:
        return len(value)
    except OverflowError:  # a range
        return sys.maxsize


def _token_ids(prompt: Any, config: ModelConfig, room: int) -> list[int]:
    if not _is_series(prompt):
        raise PromptError(f"a prompt is text or a list of token ids, found {shown(prompt)}")
    _check_length(_length(prompt), config, room)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or (prompt.dtype.kind not in "iuO" and prompt.size):
            kind = f"{prompt.ndim} dimensions of {prompt.dtype}"
            raise PromptError(f"token ids in an array are whole numbers in one dimension, found {kind!s:.60}")
        prompt = prompt.tolist()
    for value in prompt:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise PromptError(f"a prompt is text or a list of token ids, found {shown(value)} in it")
    return [int(value) for value in prompt]


def _check_length(tokens: int, config: ModelConfig, room: int) -> None:
    if tokens + room > config.max_positions:
        raise _too_long(f"{tokens} tokens", config, room)


def _too_long(length: str, config: ModelConfig, room: int) -> PromptError:
    more = f", which must leave room for {room} more" if room else ""
    return PromptError(f"the prompt has {length}; the context takes {config.max_positions}{more}")
