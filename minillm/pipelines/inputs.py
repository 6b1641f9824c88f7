"""Texts in: lists of them, and cut to what a model reads."""

from collections.abc import Callable, Mapping
from typing import Any

from ..decoding.prompts import need_tokenizer
from ..engine.engine import Engine
from ..errors import ParameterError, PromptError, shown
from ..files import read_optional_json
from ..text.tokenizer import fitting


def listed_inputs(inputs: Any, expected: str, also: Callable[[Any], bool] = lambda value: False) -> list[Any]:
    """The members of a list of inputs.

    Raises:
        PromptError: it is no list, or has a member that is neither text nor what `also` accepts.
    """
    if not isinstance(inputs, list | tuple):
        raise PromptError(f"expected a text or a list of {expected}, found {shown(inputs)}")
    for member in inputs:
        if not (isinstance(member, str) or also(member)):
            raise PromptError(f"expected a list of {expected}, found {shown(member)} in it")
    return list(inputs)


def truncates(options: Mapping[str, Any]) -> bool:
    """Whether texts that are too long are cut, in transformers' words.

    Raises:
        ParameterError: `truncation` is none of these.
    """
    truncation = options.get("truncation")
    if not isinstance(truncation, bool | None) and truncation not in ("longest_first", "only_first", "do_not_truncate"):
        raise ParameterError(f"truncation should be True or False, found {shown(truncation)}")
    return truncation not in (None, False, "do_not_truncate")


def framed(engine: Engine, text: str, limit: int | None = None) -> tuple[list[int], list[int], list[int]]:
    """`Tokenizer.framed`, with the text's own tokens cut, so that there are `limit` in all."""
    tokenizer = need_tokenizer(engine.tokenizer)
    before, inside, after = fitting.framed(tokenizer, text)
    return before, inside if limit is None else fitting.cut(tokenizer, inside, limit - len(before) - len(after)), after


def truncated(engine: Engine, text: str, limit: int, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text, cut to `limit` tokens; special tokens stay. As transformers' truncation=True."""
    before, inside, after = framed(engine, text, limit)
    return [*before, *inside, *after] if add_special_tokens else inside


def longest_input(engine: Engine) -> int:
    """Tokens to which `truncation` cuts: the model's positions, or fewer if its tokenizer's model_max_length is."""
    path, config = engine.path, engine.config
    most = config.max_source_positions if config.encoder_layers else engine.context
    settings = read_optional_json(path / "tokenizer_config.json") if path is not None and path.is_dir() else {}
    length = settings.get("model_max_length")
    return min(most, int(length)) if isinstance(length, int | float) and length >= 1 else most


def config_json(engine: Engine) -> dict[str, Any]:
    """The checkpoint's config.json; empty of a GGUF file or of random weights."""
    path = engine.path
    return read_optional_json(path / "config.json") if path is not None and path.is_dir() else {}
