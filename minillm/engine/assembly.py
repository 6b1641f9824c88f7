"""Options of an engine, checked, and the parts that follow from them: backend, model, request maker, caches."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ..backends.formats import CACHE_FORMATS, FLOAT32
from ..backends.operations import Backend
from ..backends.placement import AS_WEIGHTS, NARROW_CACHE, Placement, choose_backend
from ..backends.storage import format_of
from ..backends.stored_vectors import WIDEST
from ..cache import Concurrency, PagedCache, PrefixCache, new_cache
from ..cache.prefix_store import StoringPrefixCache, trusted_folder
from ..config import ModelConfig
from ..decoding.conversation_ends import warn_of_turn_ends
from ..decoding.request import RequestMaker, refuse_guesses
from ..distributed.ranks import Ranks, joined
from ..errors import DeviceError, ParameterError
from ..models.base import stored_format, weights_of
from ..progress import showing
from .arguments import refuse_task
from .loading import Parts, affordable_pages
from .scheduler import Limits

logger = logging.getLogger("minillm")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model runs, checked: `EngineKeywords`, and what follows from them."""

    placement: Placement
    max_batch_size: int
    max_batched_tokens: int | None
    cache_bytes: int | None
    prefix_cache: bool
    prefix_store: Path | None
    """Folder of the prefix caches' pages"""
    prefix_store_bytes: int | None
    ranks: Ranks | None
    """The processes that share the model; None if this one is alone"""
    progress: bool
    """True if this process shows bars"""

    @classmethod
    def of(cls, values: Mapping[str, Any], *, prefix_cache: bool) -> Self:
        """Join the processes that share the model.

        Args:
            values: by `read_options`
            prefix_cache: as in `Engine`

        Raises:
            ParameterError: there is another number of processes; prefixes cannot be stored, or not in this folder.
            DeviceError: there is no MPI, or no NCCL, for several processes.
        """
        store, store_bytes = values.get("prefix_store"), values.get("prefix_store_bytes")
        if store is not None and not prefix_cache:
            raise ParameterError("prefix_store keeps what the prefix cache has, and prefix_cache is off: leave one out")
        if store is None and store_bytes is not None:
            raise ParameterError("prefix_store_bytes is for prefix_store: name its folder, or leave it out")
        ranks = joined(values["parallel"], values["communicator"], values["device"])
        if values["deterministic"] and ranks is not None:
            raise ParameterError(
                "deterministic=True is not offered where several processes share the model: leave it out"
            )
        if store is not None and ranks is not None:
            raise ParameterError("prefix_store is not offered where several processes share the model: leave it out")
        return cls(
            placement=Placement(**{field.name: values[field.name] for field in fields(Placement)}),
            max_batch_size=values["max_batch_size"],
            max_batched_tokens=values["max_batched_tokens"],
            cache_bytes=values["cache_bytes"],
            prefix_cache=prefix_cache,
            prefix_store=None if store is None else trusted_folder(store),
            prefix_store_bytes=store_bytes,
            ranks=ranks,
            progress=values["progress"] and (ranks is None or ranks.rank == 0),
        )


def build_parts(options: EngineOptions, build: Callable[[Backend], Parts]) -> Parts:
    """The parts that `build` makes on the backend of the options; each of several processes builds its share.

    Raises:
        ModelError: the model cannot be loaded (see `errors`).
        RankError: it cannot be loaded on another rank, or differs there, as may the cache's dtype.
        DeviceError: the dtype or device is not offered here, or the cache's dtype for this model.
    """
    ranks = options.ranks

    def build_here() -> Parts:
        placement = options.placement if ranks is None else ranks.placed(options.placement)
        backend = choose_backend(placement, options.max_batch_size)
        if ranks is not None:
            backend.join(ranks.group)
        parts = build(backend)
        for config in (parts.model.config, *(helper.config for helper in parts.helpers.values())):
            _check_cache(config, backend)
        return parts

    with showing(options.progress):
        parts = build_here() if ranks is None else ranks.agree(build_here)
    if ranks is not None:
        dtypes = {name: getattr(options.placement, name) for name in ("cache_dtype", "compute_dtype")}
        ranks.check_equal(**dtypes, replays=parts.backend.replays)
    if options.placement.cache_dtype == AS_WEIGHTS:
        _narrow_cache(parts, ranks)
    if (compute := options.placement.compute_dtype) != FLOAT32.name and not _has_format(parts.model, compute):
        words = "compute_dtype %r is without effect: it is for matrices of %s, which dtype=%r makes"
        logger.warning(words, compute, compute, compute)
    return parts


def _has_format(model: Any, name: str) -> bool:
    """Whether a matrix has this format in memory."""
    return any(weight.data is not None and format_of(weight.data).name == name for weight in weights_of(model))


def _check_cache(config: ModelConfig, backend: Backend) -> None:
    """Refuse a K/V cache that rotates vectors where values are parts of keys.

    Raises:
        DeviceError: the cache has 4 bits, and the model latent attention or heads wider than its kernel's.
    """
    if not backend.memory.cache.group:
        return
    for group in config.kv_groups:
        if group.value_dim or group.head_dim > WIDEST:
            what = "latent attention" if group.value_dim else f"heads of {group.head_dim} numbers"
            raise DeviceError(
                f"cache_dtype 'int4' is not for {what} ({config.model_type}): take 'int8', 'bfloat16' or 'float32'"
            )


def _narrow_cache(parts: Parts, ranks: Ranks | None) -> None:
    """Have the caches, none of which is made yet, in 16 bits if no process has most of its weights in more.

    Only those of generated text, and those of helpers: keys and values of a whole text take the memory of one layer.
    """
    bits = stored_format(parts.model).bits
    bits = bits if ranks is None else -ranks.least(lambda: -bits)
    if parts.model.config.output == "tokens" and bits <= 16:
        for backend in (parts.backend, parts.helper_backend):
            if backend is not None and backend.name == "cpu":
                backend.memory.cache = CACHE_FORMATS[NARROW_CACHE]


def request_maker(parts: Parts, config: ModelConfig) -> RequestMaker:
    """The maker of requests for a model with this configuration and its helpers, whose smallest context counts.

    Raises:
        TaskError: there are helpers, and the model generates no text.
        ParameterError: there is a draft model, and guesses would change the results.
    """
    helpers = [helper.config for helper in parts.helpers.values()]
    if helpers:
        refuse_task(config, "tokens", next(iter(parts.helpers)))
    refuse_guesses(config, {"draft": "draft" in parts.helpers})
    context = min(model.max_positions for model in (config, *helpers))
    source = min(model.max_source_positions for model in (config, *helpers))
    smallest = replace(config, max_positions=context, max_source_positions=source)
    maker = RequestMaker(smallest, parts.tokenizer, dict(parts.defaults), tuple(parts.helpers), tuple(parts.adapters))
    maker = replace(maker, checkpoint_ends=maker.eos_token_ids())
    if parts.chat_template is not None:
        warn_of_turn_ends(maker, str(parts.path), parts.chat_template.source)
    return maker


def cache_maker(parts: Parts, config: ModelConfig, options: EngineOptions) -> Callable[..., PagedCache]:
    """The maker of the models' caches, with what all of them have in common."""
    tokens = _tokens_of_windows(parts, config, options)
    common: dict[str, Any] = {"sequences": options.max_batch_size}
    if tokens is not None:
        common["concurrency"] = Concurrency(options.max_batch_size, tokens)
    plain = partial(new_cache, PagedCache, **common)
    if not options.prefix_cache:
        return plain
    if any(model.keys_follow_length for model in (config, *(helper.config for helper in parts.helpers.values()))):
        logger.info("the prefix cache is off: with this rotary scaling, keys depend on the text's length")
        return plain
    kind = PrefixCache if options.prefix_store is None else StoringPrefixCache
    frugal = options.cache_bytes is None and parts.backend.memory.committed_late
    return partial(new_cache, kind, frugal=frugal, **common)


def _tokens_of_windows(parts: Parts, config: ModelConfig, options: EngineOptions) -> int | None:
    """The most new tokens of a pass, if layers with a window keep no more than they see; None: they keep all."""
    windowed = [model for model in (config, *(h.config for h in parts.helpers.values())) if len(model.kv_groups) > 1]
    if not windowed:
        return None
    if options.ranks is not None:
        logger.info("layers with a sliding window keep all positions: several processes share the model")
        return None
    limits = Limits.of(parts.backend.memory, options.max_batch_size, options.max_batched_tokens)
    return limits.max_prompt_tokens


def num_pages(parts: Parts, config: ModelConfig, options: EngineOptions) -> int:
    """Pages of each cache: as many as the memory of every process holds; 1 if no text is generated.

    Raises:
        ParameterError: `cache_bytes` is less than one page.
        RankError: the processes differ in their dtypes or batch sizes.
    """
    ranks, backend, size = options.ranks, parts.backend, options.max_batch_size
    if ranks is not None:
        ranks.check_equal(dtype=str(backend.loader.formats), max_batch_size=size)
        ranks.note_weights(parts.model)
    if config.output != "tokens":
        return 1
    helpers = [helper.config for helper in parts.helpers.values()]
    if ranks is None:
        tokens = _tokens_of_windows(parts, config, options)
        return affordable_pages(config, backend, size, options.cache_bytes, helpers, tokens=tokens)
    own, beside = ranks.stage_config(parts.model.config), ranks.world.on_this_machine
    return ranks.least(partial(affordable_pages, own, backend, size, options.cache_bytes, helpers, processes=beside))
