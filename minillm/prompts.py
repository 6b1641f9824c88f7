"""What counts as a prompt, and how it becomes token ids that the model can take."""

from collections.abc import Sequence
from typing import Any

from .config import ModelConfig
from .errors import PromptError
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""


def is_prompt(value: Any) -> bool:
    """Text or token ids, rather than a list of prompts. An empty list is a list of no prompts."""
    return isinstance(value, str) or (
        len(value) > 0 and not isinstance(value[0], str) and not hasattr(value[0], "__len__")
    )


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig, *, room: int = 0) -> list[int]:
    """Token ids of a prompt; an empty one becomes the model's beginning-of-sequence token.

    Args:
        prompt: text or token ids
        tokenizer: for text
        config: vocabulary and context
        room: tokens that the context must have left after the prompt

    Raises:
        PromptError: empty with no token to begin with, too long, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("this model has no tokenizer: give the prompt as token ids")
        ids = tokenizer.encode(prompt)
    else:
        ids = _whole_numbers(prompt)
    outside = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if outside is not None:
        raise PromptError(f"token id {outside} is outside the vocabulary of {config.vocab_size}")
    if not ids:
        if config.bos_token_id is None:
            raise PromptError("the prompt is empty, and the model has no token to begin with")
        ids = [config.bos_token_id]
    if len(ids) + room > config.max_positions:
        more = f", which must leave room for {room} more" if room else ""
        raise PromptError(f"the prompt has {len(ids)} tokens; the context takes {config.max_positions}{more}")
    return ids


def _whole_numbers(values: Sequence[int]) -> list[int]:
    ids = []
    for value in values:
        if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
            raise PromptError(f"a prompt is text or a list of token ids, found {value!r:.40} in it")
        ids.append(int(value))
    return ids
