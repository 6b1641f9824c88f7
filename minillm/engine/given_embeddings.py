"""Requests whose prompt is given by vectors (`inputs_embeds`): what is read, and what is refused by name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..decoding.arrays import as_numpy
from ..decoding.fields import FIELDS
from ..decoding.hooks import Hooks
from ..decoding.prompts import Prompt
from ..decoding.settings import Settings
from ..decoding.strategy import Request
from ..errors import ParameterError, PromptError

Rows = NDArray[np.float32]
"""Vectors of a prompt's tokens. [T, E]"""

READ_PROMPT = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("dry_multiplier", "bad_words_ids", "sequence_bias", "prefix_allowed_tokens_fn", "watermarking_config"),
    *("logits_processor", "stopping_criteria", "max_thinking_tokens", "potential", "strategy"),
    *("prompt_lookup_num_tokens", "lookahead_window", "echo", "forced_bos_token_id"),
)
"""Fields that read the prompt's tokens"""
SECOND_TEXT = ("guidance_scale", "amateur")
"""Fields by which another text, or another model, reads the prompt too"""


def embedded_requests(
    prompts: Sequence[Prompt | None] | None,
    inputs_embeds: Any,
    make: Callable[..., Request],
    hooks: Hooks | None,
    config: ModelConfig,
    width: int,
) -> list[Request]:
    """The requests of prompts that are given by vectors.

    Args:
        prompts: the tokens that the vectors stand for; None where there are none
        inputs_embeds: vectors of the one prompt, or of each
        make: makes a request of a prompt
        hooks: of all of them
        config: the model's
        width: of its token embeddings

    Raises:
        MinillmError: as the functions below, and as `make`.
    """
    if prompts is not None:
        count = len(prompts)
    elif is_single(inputs_embeds) or not hasattr(inputs_embeds, "__len__") or not len(inputs_embeds):
        count = 1
    else:
        count = len(inputs_embeds)
    requests = []
    for i, (prompt, array) in enumerate(
        zip([None] * count if prompts is None else prompts, read_rows(inputs_embeds, count), strict=True)
    ):
        rows = read_embeddings(array, config, width)
        own = replace(hooks or Hooks(), embeddings=rows)
        request = make(placeholders(rows, config) if prompt is None else prompt, batch_id=i, hooks=own)
        check_settings(request.settings, prompted=prompt is not None)
        check_lengths(request.prompt_ids, rows)
        requests.append(request)
    return requests


def read_rows(value: Any, count: int) -> list[Any]:
    """The array of each prompt: of one prompt an array, of several a list of arrays, or one array [N, T, E].

    Raises:
        ParameterError: there are not as many arrays as prompts.
    """
    several = hasattr(value, "__len__") and getattr(value, "ndim", 3) == 3
    arrays = [value] if is_single(value) else [*value] if several else []
    if len(arrays) != count:
        raise ParameterError(f"inputs_embeds should be an array [T, E] for each prompt ({count}), found {len(arrays)}")
    return arrays


def is_single(value: Any) -> bool:
    """True for the vectors of one prompt."""
    return getattr(value, "ndim", None) == 2


def read_embeddings(value: Any, config: ModelConfig, width: int) -> Rows:
    """The vectors of a prompt from an array of NumPy's or another library.

    Raises:
        ParameterError: the model has an encoder or reads token ids in its layers; or it is no array of finite numbers
            [T, width].
        PromptError: there are more than the context holds.
    """
    if config.encoder_layers:
        raise ParameterError("inputs_embeds is not offered with an encoder-decoder: give token ids or text")
    if config.per_layer_width:
        raise ParameterError(
            f"inputs_embeds is not offered with this {config.model_type} model, whose layers have embeddings of the "
            "token ids too: give token ids or text"
        )
    try:
        rows = as_numpy(value) if hasattr(value, "__dlpack__") else np.asarray(value)
        if rows.dtype.kind not in "fiu" and rows.dtype.name != "bfloat16":
            raise ValueError(f"{rows.dtype}")
        rows = np.array(rows, np.float32)  # a copy: its owner may change it before it is read
    except (TypeError, ValueError) as error:
        raise ParameterError(f"inputs_embeds should be an array of numbers, such as float32, found {error}") from None
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != width:
        raise ParameterError(f"inputs_embeds should have the shape [T, {width}], found {[*rows.shape]}")
    if not np.isfinite(rows).all():
        raise ParameterError("inputs_embeds holds NaN or infinity")
    if len(rows) > config.max_positions:
        raise PromptError(f"inputs_embeds has {len(rows)} rows; the context holds {config.max_positions}")
    return rows


def placeholders(rows: Rows, config: ModelConfig) -> list[int]:
    """Token ids that stand for those of a prompt without any: the BOS token's, or 0."""
    return [config.bos_token_id or 0] * len(rows)


def check_settings(settings: Settings, *, prompted: bool) -> None:
    """Refuse fields that vectors do not go with.

    Args:
        settings: of the request
        prompted: whether the prompt's tokens were given beside the vectors

    Raises:
        ParameterError: a field reads the prompt's tokens, and there are none; or another text or model reads them.
    """
    for name in SECOND_TEXT:
        if getattr(settings, name) != (FIELDS[name].default if name in FIELDS else False):
            raise ParameterError(f"{name} is not offered with inputs_embeds: another text reads tokens; leave it out")
    for name in () if prompted else READ_PROMPT:
        value = getattr(settings, name)
        if value not in (FIELDS[name].default, None, False, ()):
            raise ParameterError(
                f"{name}={value!r:.40} reads the prompt's tokens, and inputs_embeds alone has none: give the prompt too"
            )


def check_lengths(token_ids: Sequence[int], rows: Rows) -> None:
    """Refuse vectors that are not one for each token.

    Raises:
        ParameterError: they are not.
    """
    if len(token_ids) != len(rows):
        raise ParameterError(f"inputs_embeds has {len(rows)} rows, the prompt {len(token_ids)} tokens: one for each")
