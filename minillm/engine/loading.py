"""Loading the parts of an engine: models, tokenizer, chat template, the checkpoint's defaults."""

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backends.low_rank import AdapterWeights
from ..backends.memory import Memory
from ..backends.operations import Backend
from ..backends.states import SLOTS_PER_SEQUENCE, state_bytes
from ..cache import Concurrency
from ..cache.states import snapshot_bytes
from ..config import ModelConfig
from ..errors import ParameterError
from ..formats import find_adapter, find_model, find_tokenizer, open_model
from ..formats.load_model import is_model_file, load_adapter, load_model
from ..models.base import Model
from ..tasks.pooling import EmbeddingSettings
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer

logger = logging.getLogger("minillm")

Name = str | os.PathLike[str]
"""A checkpoint folder, a GGUF file or a Hugging Face hub id."""

DEMO_MODEL = Path(__file__).parents[1] / "assets" / "demo-opt"


@dataclass(frozen=True)
class Parts:
    """The loaded parts of an engine, without its cache."""

    backend: Backend
    model: Model
    tokenizer: Tokenizer | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Generation fields of the checkpoint"""
    helpers: Mapping[str, Model] = field(default_factory=dict)
    """Additional models by role, "draft" or "amateur" """
    chat_template: ChatTemplate | None = None
    adapters: Mapping[str, AdapterWeights] = field(default_factory=dict)
    """LoRA adapters for single requests, by name"""
    helper_backend: Backend | None = None
    """Backend of the helper models, where ranks share the model"""
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    """Settings of embedding"""
    path: Path | None = None
    """The checkpoint's folder or GGUF file; None of random weights"""


def load_parts(
    model: Name | None,
    revision: str | None,
    helpers: Mapping[str, Name],
    backend: Backend,
    tokenizer: Name | Tokenizer | None = None,
    adapter: Name | None = None,
    adapters: Mapping[str, Name] | None = None,
    *,
    share: Callable[[Path, Sequence[Path]], dict[str, Any]] | None = None,
    helper_backend: Backend | None = None,
) -> Parts:
    """Load a model (the demo model if none is named) and its helper models.

    Args:
        model: folder, GGUF file or hub id
        revision: on the hub
        helpers: names of the "draft" and "amateur" models
        backend: the backend
        tokenizer: replaces the model's own; a chat template in its folder takes precedence over the model's
        adapter: a LoRA adapter to merge into the model: folder or hub id
        adapters: LoRA adapters for single requests, by name
        share: takes the paths of the model and its adapters; returns `load_model`'s arguments for this process's share
        helper_backend: backend of the helper models, which are not shared; by default `backend`

    Raises:
        ModelError: a model, the adapter or the tokenizer cannot be loaded (see `errors`).
        ParameterError: the arguments contradict each other, or a helper or the tokenizer has another vocabulary.
    """
    if model is None and revision is not None:
        raise ParameterError("revision applies to a hub id, and no model is given: leave it out")
    if len(helpers) > 1:
        raise ParameterError("draft and amateur select different decoding strategies: leave one of them out")
    path = DEMO_MODEL if model is None else find_model(model, revision=revision)
    files = open_model(path)
    own, template = (files.tokenizer, None) if tokenizer is None else named_tokenizer(tokenizer)
    merged = None if adapter is None else find_adapter(adapter)
    folders = {name: find_adapter(where) for name, where in (adapters or {}).items()}
    shared = {} if share is None else share(path, [*([] if merged is None else [merged]), *folders.values()])
    loaded = load_model(path, backend, adapter=merged, **shared)
    if tokenizer is not None and own is not None:
        own = own.for_model(loaded.config.vocab_size)
    helping = {
        name: _load_helper(name, where, loaded.config, helper_backend or backend) for name, where in helpers.items()
    }
    defaults = files.generation_defaults(loaded.config.vocab_size)
    if own is not None and own.end_ids:
        defaults = {"eos_token_id": list(own.end_ids)} | defaults
    template = template or files.chat_template
    whole = loaded.config if share is None or not folders else files.config
    lora = {name: load_adapter(folder, whole, backend, **shared) for name, folder in folders.items()}
    embedding = files.embedding_settings(loaded.config, None if template is None else template.source)
    return Parts(backend, loaded, own, defaults, helping, template, lora, helper_backend, embedding, path)


def named_tokenizer(tokenizer: Name | Tokenizer) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer that a user names, and the chat template beside it.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer, None
    path = find_tokenizer(tokenizer)
    if path.is_file() and not is_model_file(path):
        return Tokenizer.from_path(path), open_model(path.parent).chat_template
    files = open_model(path)
    return files.need_tokenizer(), files.chat_template


def _load_helper(name: str, where: Name, config: ModelConfig, backend: Backend) -> Model:
    """Load a draft or amateur model, which must have the main model's vocabulary."""
    helper = load_model(find_model(where), backend)
    if helper.config.vocab_size != config.vocab_size:
        raise ParameterError(
            f"{name} {os.fspath(where)!r:.100} has a vocabulary of {helper.config.vocab_size} tokens, the model one of "
            f"{config.vocab_size}: they should be equal"
        )
    if bool(helper.config.encoder_layers) != bool(config.encoder_layers):
        raise ParameterError(f"{name} {os.fspath(where)!r:.100} and the model should both have an encoder, or neither")
    return helper


def affordable_pages(
    config: ModelConfig,
    backend: Backend,
    sequences: int,
    budget: int | None,
    others: Iterable[ModelConfig] = (),
    processes: int = 1,
    tokens: int | None = None,
) -> int:
    """Number of pages for `sequences` full contexts plus a few guesses, or as many as the budget allows.

    By default they take at most one byte in `Memory.cache_share` of the free memory, or one full context if that is
    more, for which half of the memory may be taken.

    Args:
        config: the model's shape
        backend: decides the page size
        sequences: number that run at once
        budget: bytes; None for the default
        others: shapes of further models; each needs as many pages
        processes: number of them that share this machine's memory
        tokens: the most new tokens of a pass: layers with a window then keep what `sequences` see. None: they keep all

    Raises:
        ParameterError: the budget is less than one page.
    """
    memory = backend.memory
    concurrency = None if tokens is None else Concurrency(sequences, tokens)
    models = (config, *others)
    states = sequences * sum(SLOTS_PER_SEQUENCE * state_bytes(model.layer_states) for model in models)
    snapshots = sum(snapshot_bytes(model, backend) for model in models)

    def size(pages: int) -> int:
        return states + pages * snapshots + sum(_cache_bytes(model, memory, pages, concurrency) for model in models)

    page = size(1)
    context = config.max_positions // memory.page_size + 1
    if config.encoder_layers:
        context += config.max_source_positions // memory.page_size + 1
    if budget is None:
        free = memory.free_bytes() // processes
        free = memory.free_bytes() // processes
        budget = max(page, free // memory.cache_share, min(size(context), free // 2))
    if budget < page:
        beside = f", and states of {sequences} sequences" if states else ""
        raise ParameterError(
            f"cache_bytes should be at least {page} (one page of {memory.page_size}{beside}), found {budget}"
        )
    return bisect_right(range(1, sequences * context + 1), budget, key=size)


def _cache_bytes(config: ModelConfig, memory: Memory, pages: int, concurrency: Concurrency | None) -> int:
    """Bytes that a cache of so many pages takes at most, without states."""
    total = 0
    for group in config.kv_groups:
        group_pages = pages
        if group.window is not None and concurrency is not None:
            group_pages = concurrency.parts(group.window, pages, memory.page_size)
        position = len(group.layers) * memory.position_bytes(group.num_kv_heads, group.head_dim, group.value_dim)
        total += group_pages * memory.page_size * position
    return total
