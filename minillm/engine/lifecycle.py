"""The life of an engine: it is opened, described and closed; `assembly` makes its parts, `engine` has its calls."""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from ..backends import compile_seconds, working_time
from ..backends.memory_use import trim_heap
from ..backends.operations import Backend
from ..backends.placement import choose_backend
from ..cache.prefix_store import PrefixStore
from ..config import ModelConfig
from ..decoding.conversation_ends import chat_defaults, turn_ends
from ..decoding.keywords import with_fields
from ..decoding.request import RequestMaker
from ..decoding.stats import Stats
from ..distributed.ranks import Ranks
from ..errors import EngineStateError
from ..models import published_config, random_model, tensor_shapes
from ..models.base import weights_of
from ..runner.runner import Runner
from ..tasks.embedding import TextPasses
from ..text.display import brief, table_html
from .arguments import read
from .assembly import EngineOptions, build_parts, cache_maker, num_pages, request_maker
from .driver import Driver
from .load import Load
from .loading import Parts, load_parts
from .loop import StepLoop
from .options import HELPERS, EngineKeywords, LoadKeywords, read_options, with_options
from .origins import open_stores
from .scheduler import Limits

if TYPE_CHECKING:
    from ..distributed.runner import Follower, Leader
    from .footprint import Footprint, Stored


class EngineLifecycle:
    """How an engine begins, what it is, and how it ends; `Engine` adds its calls."""

    name: str
    """The model as it was asked for: a folder, a file, a hub id, a published shape, "demo" """
    path: Path | None
    """The checkpoint's folder or GGUF file on this machine; None of random weights"""
    config: ModelConfig
    load_seconds: float
    _maker: RequestMaker
    _driver: Driver
    _ranks: Ranks | None
    _leader: "Leader | None"
    _follower: "Follower | None"
    _text_passes: TextPasses | None
    runner: Runner

    @with_options
    def __init__(self, model: str | os.PathLike[str] | None = None, **given: Unpack[LoadKeywords]) -> None:
        """Load a model.

        Args:
            model: a checkpoint folder, a GGUF file or a Hugging Face hub id (owner/name, or owner/name/file.gguf); by
                default the small model that ships with minillm
            {options}

        Raises:
            ModelError: the model cannot be loaded (see `errors`).
            RankError: it cannot be loaded on another rank, or differs there.
            DeviceError: the dtype or device is not offered here.
            ParameterError: another argument is impossible.
        """
        began, compiled = working_time(), compile_seconds()
        model = read("model", model)
        self.name = "demo" if model is None else str(model)
        values = read_options(LoadKeywords, given, inspect.signature(type(self)).parameters)
        options = EngineOptions.of(values, prefix_cache=values["prefix_cache"])
        helpers = {name: values[name] for name in HELPERS if values[name] is not None}
        named = {name: values[name] for name in ("revision", "tokenizer", "adapter", "adapters")}

        def build(backend: Backend) -> Parts:
            if options.ranks is None:
                return load_parts(model, helpers=helpers, backend=backend, **named)
            here = helpers if options.ranks.rank == 0 else {}
            alone = choose_backend(options.placement, options.max_batch_size) if here else None
            share = options.ranks.share
            return load_parts(model, helpers=here, backend=backend, share=share, helper_backend=alone, **named)

        self._open(options, build, began, compiled)

    @classmethod
    @with_fields
    def random(
        cls,
        shape: str,
        *,
        seed: int = 0,
        std: float = 0.02,
        **given: Unpack[EngineKeywords],
    ) -> Self:
        """A model of a published shape ("opt-125m") with normal random weights and no tokenizer: prompts are token ids.

        It is for measurements, so it has no prefix cache. Options as in the constructor.

        Raises:
            ParameterError: the shape is unknown; the message lists the known ones. Or an argument is impossible.
            DeviceError: the dtype or device is not offered here.

        Example:
            >>> with Engine.random("pythia-70m", max_batch_size=1, cache_bytes=2**22) as engine:
            ...     engine.forward([1, 2, 3]).shape
            (3, 50304)
        """
        began, compiled = working_time(), compile_seconds()
        seed, std = read("seed", seed), read("std", std)
        values = read_options(EngineKeywords, given, inspect.signature(cls.random).parameters)
        options = EngineOptions.of(values, prefix_cache=False)

        def build(backend: Backend) -> Parts:
            share = {} if options.ranks is None else options.ranks.share_of(published_config(shape))
            return Parts(backend, random_model(shape, seed, std, backend, **share))

        engine = cls.__new__(cls)
        engine.name = shape
        engine._open(options, build, began, compiled)
        return engine

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or has events from another thread's step for `step`."""
        return self._driver.busy

    @property
    def context(self) -> int:
        """Positions of the longest text, prompt and new tokens together: what the model takes and the K/V cache holds.

        With helper models the smallest counts. Of an encoder-decoder it is the decoder's, and
        `config.max_source_positions` the longest prompt.
        """
        longest, fits = self._maker.config.max_positions, self._driver.loop.longest
        return longest if fits is None or self.config.output != "tokens" else min(longest, fits)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels that `classify` scores; empty if the model is none for this."""
        return self.embedding.labels(self.config.labels if self.config.output == "labels" else ())

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Generation fields of requests that do not set them: the checkpoint's, unless others are assigned."""
        return dict(self._maker.defaults)

    @generation_defaults.setter
    def generation_defaults(self, fields: Mapping[str, Any]) -> None:
        self._maker = replace(self._maker, defaults=dict(fields))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, unless a request says others."""
        return self._maker.eos_token_ids()

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn of a conversation, unless a request says others: `eos_token_ids`, and those by
        which tokenizers and templates end one, such as `<|im_end|>`.
        """
        return turn_ends(self._maker)

    @property
    def chat_defaults(self) -> dict[str, Any]:
        """`generation_defaults` of a conversation, which ends at `turn_end_ids`."""
        return chat_defaults(self._maker)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that the field `lora` takes."""
        return self._maker.adapters

    @property
    def stats(self) -> Stats:
        """Tokens and seconds of prefill and decode since the engine was made."""
        return self._driver.loop.stats

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place in the batch."""
        return self._driver.waiting

    def load(self) -> Load:
        """Requests that wait and run, and the pages of the K/V cache, after the last step."""
        return self._driver.load()

    @property
    def device_memory(self) -> "list[Footprint]":
        """Bytes used on the GPU by kind, measured and predicted from the model's shape; empty on a CPU."""
        from .footprint import footprints

        return footprints(self._driver.loop.runners.values())

    def trim_memory(self) -> None:
        """Give memory that nothing uses back to the system: free pages of the K/V cache, and space for results.

        The next requests take as much of it as they need. Texts that ended stay in the prefix cache, unless they are
        more than a new engine would keep (`PrefixCache`). On a GPU, and of other processes that share the model, all is
        kept. An `AsyncEngine`, and so a server, does this when it has been idle for some 10 seconds.

        Raises:
            EngineStateError: the engine is closed, or this is called from inside a step.

        Example:
            >>> engine.trim_memory()
        """
        with self._driver.turn():
            if not self._driver.loop.busy:
                for runner in self._driver.loop.runners.values():
                    runner.trim()
                if self._text_passes is not None:
                    self._text_passes.trim()
        trim_heap()

    @cached_property
    def stored(self) -> "Stored":
        """The bytes of the model's files, their format, and the format of their numbers."""
        from .footprint import stored

        return stored(self.path, self.runner.model)

    def summary(self) -> dict[str, Any]:
        """The model and how it runs, by name, as `repr` and a notebook show it.

        Raises:
            EngineStateError: the engine is closed.

        Example:
            >>> engine.summary()["context"], engine.summary()["parameters"]
            (512, 3161472)
        """
        loop = self._driver.loop  # not in a turn, which a thread that a debugger has stopped may hold
        if self._driver.closed:
            raise EngineStateError("the engine is closed")
        facts = {
            "name": self.name,
            "family": self.config.model_type,
            "parameters": sum(math.prod(shape) for shape in tensor_shapes(self.config).values()),
            "context": self.context,
            "max_batch_size": loop.scheduler.limits.max_batch_size,
            "chat_template": self.chat_template is not None,
            "adapters": self.adapters or None,
            "helpers": self._maker.models or None,
            "rank": None if self._ranks is None else f"{self.rank} of {self._ranks.parallel.devices}",
        }
        if (runner := loop.runners.get("target")) is not None:  # of this rank, if several share the model
            facts["weight_bytes"] = sum(weight.nbytes for weight in weights_of(runner.model))
            facts["cached_tokens"] = runner.cache.num_pages * runner.cache.page_size
            facts["cache_bytes"] = runner.cache.backed_bytes
            facts["cached_states"] = runner.cache.num_states or None
            facts["backend"] = runner.backend.name
        return facts

    def __repr__(self) -> str:
        try:
            return brief("Engine", **self.summary())
        except EngineStateError:
            return f"Engine(name={self.name!r}, closed=True)"

    def _repr_html_(self) -> str:
        return repr(self) if self._driver.closed else table_html("Engine", self.summary())

    def close(self) -> None:
        """Abort all requests and free weights and cache. May be called twice.

        Calls in progress in other threads, and unfinished streams, raise EngineStateError.
        """
        if self._driver.close():
            if self._leader is not None:
                self._leader.close()
                self._leader = None
            for store in self._stores:
                store.close()
            self._follower = None
            self._text_passes = None
            if self.rank == 0:
                del self.runner

    @property
    def rank(self) -> int:
        """This process's number among those that share the model; 0 if it is alone."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def ranks(self) -> Ranks | None:
        """The processes that share the model, and what each has of it; None if this one is alone."""
        return self._ranks

    def follow(self) -> None:
        """Compute this rank's share of what rank 0 runs, until rank 0 closes its engine; for every rank but 0.

        A `with` block of these ranks does so at its end.

        Raises:
            EngineStateError: this is rank 0, or the engine is closed.
            RankError: a rank has failed.
        """
        if self._follower is None:
            raise EngineStateError(
                "the engine is closed" if self._driver.closed else "rank 0 takes the requests: others follow"
            )
        follower, self._follower = self._follower, None
        follower.follow()
        follower.part.ranks.close()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._follower is not None:
            self.follow()
        self.close()

    def _open(self, options: EngineOptions, build: Callable[[Backend], Parts], began: float, compiled: float) -> None:
        """Build the model and what runs it; `began` and `compiled` are the seconds worked and compiled before."""
        parts = build_parts(options, build)
        self._ranks, self.path = options.ranks, parts.path
        self.config = parts.model.config if options.ranks is None else options.ranks.config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.embedding = parts.embedding
        self._maker = request_maker(parts, self.config)
        make_cache = cache_maker(parts, self.config, options)
        limits = Limits.of(parts.backend.memory, options.max_batch_size, options.max_batched_tokens)
        pages = num_pages(parts, self.config, options)
        self._leader, self._follower = None, None
        if options.ranks is None:
            self.runner = Runner(parts.model, parts.backend, make_cache(self.config, parts.backend, pages))
            self.runner.adapters = parts.adapters
        else:
            from ..distributed.runner import Follower, Leader, LeadingRunner, Part

            part = Part(options.ranks, parts.model, parts.backend, parts.adapters)
            if options.ranks.rank == 0:
                self._leader = Leader(part)
                cache = make_cache(parts.model.config, parts.backend, pages, layers=options.ranks.layers)
                self.runner = LeadingRunner(self._leader, cache)
            else:
                self._follower = Follower(part)
        runners = {"target": self.runner} if self._follower is None else {}
        backend = parts.helper_backend or parts.backend
        runners |= {
            name: Runner(helper, backend, make_cache(helper.config, backend, pages))
            for name, helper in parts.helpers.items()
        }
        self._stores: list[PrefixStore] = []
        if options.prefix_store is not None:
            self._stores = open_stores(runners, options.prefix_store, options.prefix_store_bytes)
        self._driver = Driver(StepLoop(runners, limits), rank=self.rank)
        self._text_passes = None
        if self._follower is None:
            budget, turn = limits.max_prompt_tokens, self._driver.turn
            self._text_passes = TextPasses(
                self.runner, self.tokenizer, parts.embedding, budget, turn, parts.chat_template
            )
        self.load_seconds, self.stats.compile_seconds = working_time() - began, compile_seconds() - compiled
