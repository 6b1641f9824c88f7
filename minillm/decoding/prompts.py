"""Prompts: text or token ids, checked against the model and converted to token ids."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..encoder_input import AudioFeatures
from ..errors import PromptError, shown
from ..text.tokenizer import LAYOUTS, Tokenizer
from .arrays import Array, as_numpy

Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Array | AudioFeatures
"""Text; or token ids: a list, range or other sequence of integers, or a 1-d array; or frames of sound"""


def is_prompt(value: Any) -> bool:
    """True if a value is one prompt, False if it is a list of prompts; never raises.

    A list of prompts is a sequence or an array whose first member is text, a sequence, an array or frames of sound, or
    an empty one. Anything else counts as a prompt, which `encode_prompt` may refuse.
    """
    if not _is_series(value):
        return True
    return bool(_length(value)) and not (isinstance(value[0], str | AudioFeatures) or _is_series(value[0]))


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig, *, room: int = 0, begin: bool = True
) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: text or token ids
        tokenizer: for text
        config: vocabulary and context
        room: number of tokens to leave free in the context after the prompt
        begin: replace an empty prompt by the model's beginning-of-sequence token

    Raises:
        PromptError: it is neither text nor token ids, is empty without a BOS token, is too long, or has an id outside
                the vocabulary.
    """
    if not begin and (isinstance(prompt, str) or _is_series(prompt)) and not _length(prompt):
        raise PromptError("the prompt is empty: give at least one token")
    if isinstance(prompt, str):
        ids = encode_text(prompt, tokenizer, config, room=room)
    else:
        ids = _token_ids(prompt, config, room)
    if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
        outside = next(i for i in ids if not 0 <= i < config.vocab_size)
        raise PromptError(f"token id {shown(outside)} is outside the vocabulary of {config.vocab_size}")
    if not ids:
        if config.bos_token_id is None:
            raise PromptError("the prompt is empty, and the model has no BOS token: give at least one token")
        ids = [config.bos_token_id]
    _check_length(len(ids), config, room)
    return ids


def encode_text(
    text: str, tokenizer: Tokenizer | None, config: ModelConfig, *, room: int = 0, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text. One far too long for the context is refused without tokenizing most of it.

    Raises:
        PromptError: there is no tokenizer, the text is not valid UTF-8, or it is far too long.
    """
    tokenizer = need_tokenizer(tokenizer)
    if tokenizer.exceeds(text, config.max_positions):
        raise _too_long(f"more than {config.max_positions} tokens ({len(text)} characters)", config, room)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or an error if there is none.

    Raises:
        PromptError: there is none; the message lists the files it could be in.
    """
    if tokenizer is None:
        raise PromptError(
            "this model has no tokenizer: give the prompt as token ids, or name a tokenizer by Engine(tokenizer=...), "
            f"such as a folder with {LAYOUTS}"
        )
    return tokenizer


def source_config(config: ModelConfig) -> ModelConfig:
    """The configuration that the text of an encoder-decoder's encoder is checked against."""
    return replace(config, max_positions=config.max_source_positions)


def _is_series(value: Any) -> bool:
    """True if its members may be token ids or prompts; not so for bytes and 0-d arrays."""
    if isinstance(value, np.ndarray) or _is_foreign(value):
        return bool(getattr(value, "ndim", 1) > 0)
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_foreign(value: Any) -> bool:
    """True for an array of another library; NumPy's own numbers are none."""
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def _length(value: Any) -> int:
    try:
        return len(value)
    except OverflowError:  # a range
        return sys.maxsize


def _token_ids(prompt: Any, config: ModelConfig, room: int) -> list[int]:
    if isinstance(prompt, AudioFeatures):
        raise PromptError("this model reads text, found frames of sound: give text or token ids")
    if not _is_series(prompt):
        hint = "; decode it first" if isinstance(prompt, bytes | bytearray | memoryview) else ""
        raise PromptError(f"a prompt should be text or a list of token ids, found {shown(prompt)}{hint}")
    _check_length(_length(prompt), config, room)
    if _is_foreign(prompt):
        try:
            prompt = as_numpy(prompt)
        except ValueError as error:
            raise PromptError(f"an array of token ids should have integers that NumPy reads, found {error}") from None
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or (prompt.dtype.kind not in "iuO" and prompt.size):
            kind = f"{prompt.ndim} dimensions of {prompt.dtype}"
            raise PromptError(f"an array of token ids should have one dimension of integers, found {kind!s:.60}")
        prompt = prompt.tolist()
    if {*map(type, prompt)} <= {int}:  # most prompts, quickly
        return list(prompt)
    for value in prompt:
        if isinstance(value, bool) or not isinstance(value, Integral):
            hint = _HINTS.get(type(value), "")
            raise PromptError(f"a prompt should be text or a list of token ids, found {shown(value)} in it{hint}")
    return [int(value) for value in prompt]


_HINTS: dict[type, str] = {bytes: "; decode it first", dict: "; messages are for `chat`", str: "; give one prompt here"}
"""Advice about members of these types"""


def _check_length(tokens: int, config: ModelConfig, room: int) -> None:
    if tokens + room > config.max_positions:
        raise _too_long(f"{tokens} tokens", config, room)


def _too_long(length: str, config: ModelConfig, room: int) -> PromptError:
    more = f", which must leave room for {room} more" if room else ""
    return PromptError(f"the prompt has {length}; the context holds {config.max_positions}{more}")
