"""The files beside the weights, or their counterparts in a GGUF file: tokenizer, chat template, generation defaults."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..decoding.settings import model_config_fields, unsupported
from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from ..files import read_optional_json, read_text
from ..tasks.pooling import Pooling
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer
from ..text.tokenizer.settings import read_settings
from . import find_tokenizer
from .gguf.file import GGUF, is_gguf, read_gguf

logger = logging.getLogger("minillm")


TOOL_USE = "additional_chat_templates/tool_use.jinja"

Name = str | os.PathLike[str]
"""A checkpoint folder, a GGUF file or a Hugging Face hub id."""


def read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder or a GGUF file; None if it has none.

    Raises:
        ModelError: it cannot be read.
    """
    if not is_gguf(path):
        return Tokenizer.find(path)
    gguf = read_gguf(path)
    table = gguf.tensors.get("token_embd.weight")
    return Tokenizer.from_gguf(gguf, table.shape[0] if table is not None else 0)


def named_tokenizer(tokenizer: Name | Tokenizer | None) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer that a user names, and the chat template in its folder."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer, None
    path = find_tokenizer(tokenizer)
    if is_gguf(path):
        found = read_tokenizer(path)
        if found is None:
            raise ModelNotFoundError(f"{path} holds no tokenizer")
        return found, read_chat_template(path)
    return Tokenizer.from_path(path), read_chat_template(path.parent if path.is_file() else path)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's defaults, as `generation_fields`; unsupported ones are named in a warning of "minillm".

    Raises:
        CheckpointError: a file cannot be read, or is not a JSON object.
    """
    path, defaults = generation_fields(folder)
    if names := unsupported(defaults):
        logger.warning(
            "%s: minillm does not support %s; results may differ from those of transformers", path, ", ".join(names)
        )
    return defaults


def generation_fields(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The generation fields of a checkpoint, and their file: generation_config.json, in older ones config.json.

    As in transformers, the one replaces all such fields of the other. Empty without either.
    Those of a GGUF file are in its metadata.

    Raises:
        CheckpointError: a file cannot be read, or is not a JSON object.
    """
    if is_gguf(folder):
        return folder, _gguf_defaults(read_gguf(folder))
    path = folder / "generation_config.json"
    if path.exists():
        return path, read_optional_json(path)
    path = folder / "config.json"
    return path, model_config_fields(read_optional_json(path))


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key of a GGUF file, after "general.sampling." -> field of generation_config.json"""


def _gguf_defaults(gguf: GGUF) -> dict[str, Any]:
    """`general.sampling.*` and `tokenizer.ggml.suppress_tokens`, as fields of generation_config.json."""
    prefix = "general.sampling."
    stored = {key.removeprefix(prefix): gguf.metadata[key] for key in gguf.metadata if key.startswith(prefix)}
    defaults = {name: _as_written(stored[key]) for key, name in _SAMPLING.items() if key in stored}
    if defaults:
        defaults["do_sample"] = defaults.get("temperature", 1) > 0
    if not defaults.get("temperature", 1):
        del defaults["temperature"]
    if others := sorted(key for key, value in stored.items() if key not in _SAMPLING and value):
        logger.warning("%s: not read: %s", gguf.path, ", ".join(prefix + key for key in others))
    suppressed = gguf.numbers("tokenizer.ggml.suppress_tokens")
    return defaults if suppressed is None else defaults | {"suppress_tokens": suppressed.tolist()}


def _as_written(value: float) -> float:
    """A fraction as it was before it became a float32: 0.9, not 0.8999999762."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}


def gguf_pooling(gguf: GGUF, usual: Pooling) -> Pooling:
    """The pooling that a GGUF file names, or the usual one.

    Raises:
        UnsupportedModelError: another pooling, such as that of a head that scores pairs of texts.
    """
    key = f"{gguf.get('general.architecture', str)}.pooling_type"
    code = gguf.get(key, int, 0)
    if code not in _POOLINGS:
        raise UnsupportedModelError(f"{gguf.path}: {key} is {code}; minillm runs {', '.join(map(str, _POOLINGS))}")
    return _POOLINGS[code] or usual


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint folder or a GGUF file; None if it has none.

    In a folder it is chat_template.jinja, else the one in tokenizer_config.json.

    Of several named templates "default" is used, and "tool_use" for conversations with tools, as in transformers. They
    are in tokenizer_config.json, or in the folder additional_chat_templates/; in a GGUF file under keys of their own.

    Raises:
        CheckpointError: a file cannot be read, or a template is not text.
    """
    if is_gguf(folder):
        return _gguf_template(read_gguf(folder))
    config = folder / "tokenizer_config.json"
    settings = read_settings(folder)
    path = folder / "chat_template.jinja"
    source: str | None
    if path.exists():
        source, other = read_text(path), folder / TOOL_USE
        tool_use = read_text(other) if other.exists() else None
    else:
        path, (source, tool_use) = config, _named_templates(config, settings.get("chat_template"))
    if source is None:
        return None
    return ChatTemplate(source, f"the chat template of {path}", _special_tokens(settings), tool_use)


def _gguf_template(gguf: GGUF) -> ChatTemplate | None:
    """`tokenizer.chat_template`, with the special tokens that the metadata name."""
    source = gguf.get("tokenizer.chat_template", str)
    if source is None:
        return None
    tokens, special = gguf.strings("tokenizer.ggml.tokens") or [], {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = gguf.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    tool_use = gguf.get("tokenizer.chat_template.tool_use", str)
    return ChatTemplate(source, f"the chat template of {gguf.path}", special, tool_use)


def _named_templates(path: Path, value: Any) -> tuple[str | None, str | None]:
    """One template, or "default" and "tool_use" of `[{"name": ..., "template": ...}]`."""
    tool_use = None
    if isinstance(value, list) and all(
        isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value
    ):
        named = {str(item["name"]): item["template"] for item in value}
        if "default" not in named:
            logger.warning("%s: no chat template is named default; ignored: %s", path, ", ".join(named))
        value, tool_use = named.get("default"), named.get("tool_use")
    for source in (value, tool_use):
        if source is not None and not isinstance(source, str):
            found = f"found {source!r:.60}"
            raise CheckpointError(
                f"{path}: chat_template should be text, or a list of objects with name and template; {found}"
            )
    return value, tool_use


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that transformers passes to a template, as text: `..._token` fields, and named extra ones."""
    further = settings.get("extra_special_tokens")
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    tokens = named | (further if isinstance(further, dict) else {})
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
