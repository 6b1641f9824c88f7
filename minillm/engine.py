"""The library's public API: load a model, generate, stream, chat, inspect logits."""

import dataclasses
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from .arguments import read, refuse_unknown
from .cache import PagedCache
from .chat import RENDER_ARGUMENTS, Messages, refuse_tools
from .config import ModelConfig
from .decoding.resolving import strategy_for
from .decoding.settings import GenerationConfig
from .decoding.strategy import Request
from .errors import EngineStateError, PromptError
from .inspect import all_logits, score_tokens
from .loading import Parts, Placement, affordable_pages, choose_backend, load_parts
from .loop import Limits, StepLoop
from .models import random_model
from .request import (
    Completion,
    Event,
    Generation,
    Prompt,
    RequestMaker,
    Score,
    check_lora,
    encode_prompt,
    encode_text,
    is_prompt,
    refuse_guesses,
)
from .runner import Runner
from .stats import Stats
from .tokenizer import Tokenizer
from .turns import Turns, interrupts

if TYPE_CHECKING:
    from .footprint import Footprint


logger = logging.getLogger("minillm")

PREFILL_CHUNK = 512


class Engine:
    """A model ready to generate.

    Several threads may use one engine: their requests run in one batch. Ctrl-C takes effect after the current step and
    leaves the engine as it was before the call. `close()` or a `with` block frees its memory.

    On a CPU weights may be memory-mapped from the checkpoint's files: while the engine is open, do not write to or
    truncate them (see `minillm.checkpoint`); replacing them by renaming new files is safe.
    """

    config: ModelConfig
    load_seconds: float
    _loop: StepLoop
    _turns: Turns
    _closed: bool

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        backend: str = "auto",
        cache_dtype: str = "auto",
        threads: int | None = None,
        max_batch_size: int = 16,
        cache_bytes: int | None = None,
        prefix_cache: bool = False,
        draft: str | os.PathLike[str] | None = None,
        amateur: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
        adapter: str | os.PathLike[str] | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: a checkpoint folder, a GGUF file or a Hugging Face hub id (owner/name, or owner/name/file.gguf); by
                default the small model that ships with minillm
            revision: branch, tag or commit on the hub
            dtype: of the weights in memory: "float32", "float16", "bfloat16", "int8" or "int4"; by default the fastest
                lossless one, and the stored one for a quantised checkpoint. On "cuda" also of activations and the K/V
                cache: one of the first three, by default the checkpoint's
            device: "cpu", or "cuda": an NVIDIA GPU, which needs the extra "cuda13" or "cuda12"
            backend: on a CPU: "cpu", kernels in C, which a C compiler compiles at first use, or "numpy". By default
                "cpu" where there is a compiler or a stored build (MINILLM_BACKEND in the environment names another)
            cache_dtype: of the K/V cache: "float32" (the default), "bfloat16" or "int8"
            threads: number of CPU threads, for the whole process; by default the number of cores
            max_batch_size: sequences that run at once; further ones are queued
            cache_bytes: memory for the K/V cache; by default enough for `max_batch_size` full contexts, but at most
                half of the free memory
            prefix_cache: keep the K/V of finished sequences for prompts with the same prefix (a chat)
            draft: a smaller model with the same vocabulary, for speculative decoding
            amateur: a weaker model with the same vocabulary, for contrastive decoding
            tokenizer: replaces the checkpoint's own, if any: a folder, a tokenizer.json, a GGUF file, a hub id or a
                `minillm.tokenizer.Tokenizer`. A chat template in its folder is used too. Without a tokenizer prompts
                are token ids
            adapter: a LoRA adapter, merged into the weights: a folder that PEFT has written, or a hub id. The sum is
                formed in float32, then converted to `dtype`; "auto" rounds it to the 16 bits of the checkpoint, and
                keeps it in float32 where the checkpoint is quantised
            adapters: LoRA adapters for single requests, by the names that the field `lora` takes; requests with
                different ones, or none, share a batch

        Raises:
            ModelError: the model cannot be loaded (see `errors`).
            DeviceError: the dtype or device is not offered here.
            ParameterError: another argument is impossible.
        """
        began = time.perf_counter()
        model, revision, tokenizer = read("model", model), read("revision", revision), read("tokenizer", tokenizer)
        named = {"draft": read("draft", draft), "amateur": read("amateur", amateur)}
        helpers = {name: where for name, where in named.items() if where is not None}
        size, cache_bytes = read("max_batch_size", max_batch_size), read("cache_bytes", cache_bytes)
        adapter, adapters = read("adapter", adapter), read("adapters", adapters)
        prefix_cache, threads = read("prefix_cache", prefix_cache), read("threads", threads)
        placement = Placement(device=device, dtype=dtype, backend=backend, cache_dtype=cache_dtype, threads=threads)
        parts = load_parts(model, revision, helpers, choose_backend(placement, size), tokenizer, adapter, adapters)
        self._set_up(parts, size, cache_bytes, prefix_cache=prefix_cache)
        self.load_seconds = time.perf_counter() - began

    @classmethod
    def random(
        cls,
        shape: str,
        *,
        seed: int = 0,
        std: float = 0.02,
        max_batch_size: int = 16,
        cache_bytes: int | None = None,
        **placement: Any,
    ) -> "Engine":
        """A model of a published shape ("opt-125m") with normal random weights and no tokenizer: prompts are token ids.

        `placement` is `dtype`, `device`, `backend`, `cache_dtype` and `threads`, as in the constructor.

        Raises:
            ParameterError: the shape is unknown; the message lists the known ones. Or an argument is impossible.
            DeviceError: the dtype or device is not offered here.
        """
        began = time.perf_counter()
        refuse_unknown(placement, tuple(field.name for field in dataclasses.fields(Placement)))
        placement["threads"] = read("threads", placement.get("threads"))
        seed, std = read("seed", seed), read("std", std)
        size, cache_bytes = read("max_batch_size", max_batch_size), read("cache_bytes", cache_bytes)
        engine = cls.__new__(cls)
        backend = choose_backend(Placement(**placement), size)
        engine._set_up(Parts(backend, random_model(shape, seed, std, backend)), size, cache_bytes)
        engine.load_seconds = time.perf_counter() - began
        return engine

    # --- generating --------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: Prompt, config: GenerationConfig | None = None, **fields: Any) -> Generation: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], config: GenerationConfig | None = None, **fields: Any
    ) -> list[Generation]: ...

    def generate(
        self, prompts: Prompt | Sequence[Prompt], config: GenerationConfig | None = None, **fields: Any
    ) -> Generation | list[Generation]:
        """Continue one prompt, or each prompt of a list.

        Args:
            prompts: text or token ids, or a list of such; lengths may differ
            config: generation parameters
            **fields: fields of `GenerationConfig`, which win over `config`

        Returns:
            A `Generation`, or a list of them in the order of the prompts.

        Raises:
            As `add`, before anything is run.
            Exception: the error that ended a request (`Event.error`), once the other prompts are done.
        """
        merged = merge(config, fields)
        if is_prompt(prompts):
            return self._generate([prompts], merged)[0]  # type: ignore[list-item]
        return self._generate(list(prompts), merged)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, config: GenerationConfig | None = None, **fields: Any) -> "EventStream":
        """Continue one prompt and yield the new text after each step. Closing the iterator aborts the request.

        Raises:
            As `add`, immediately. The iterator raises the error that ends the request (`Event.error`).
        """
        request = self.request(prompt, config, **fields)
        prompt_text = self._maker.prompt_text(request) if request.settings.echo else None
        events = EventStream(self, request.settings.num_return_sequences)
        try:
            with self._turn():
                events.open(self._submit(request), prompt_text)
        except KeyboardInterrupt:
            events.close()
            raise
        return events

    # --- conversations -------------------------------------------------------------------------------------------

    def chat(self, messages: Messages, config: GenerationConfig | None = None, **fields: Any) -> Generation:
        """Answer a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first
            config: generation parameters
            **fields: fields of `GenerationConfig`, which win over `config`, and arguments of `render_chat`

        Raises:
            As `render_chat` and `add`, before anything is run.
        """
        prompt, fields = self._chat_prompt(messages, fields)
        return self.generate(prompt, config, **fields)

    def stream_chat(self, messages: Messages, config: GenerationConfig | None = None, **fields: Any) -> "EventStream":
        """Answer a conversation and yield the new text after each step; `chat` as a stream.

        Raises:
            As `chat`, immediately.
        """
        prompt, fields = self._chat_prompt(messages, fields)
        return self.stream(prompt, config, **fields)

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation by the checkpoint's chat template, special tokens spelled out.

        To use it as a prompt, encode it with `tokenizer.encode(text, add_special_tokens=False)`.

        Args:
            messages: as for `chat`
            add_generation_prompt: end with the prefix of an answer; by default unless continue_final_message is set
            continue_final_message: continue the last message instead of answering it
            chat_template_kwargs: further variables for the template, such as Qwen3's "enable_thinking"

        Raises:
            PromptError: the model has no chat template, the messages are malformed, or the template refuses them.
            CheckpointError: the template is broken, or violates the sandbox.
            ParameterError: the arguments contradict each other, or the template does not use a variable.
        """
        if self.chat_template is None:
            raise PromptError("this model has no chat template: give a prompt to `generate` or `stream`")
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    # --- a look inside -------------------------------------------------------------------------------------------

    def forward(self, prompt: Prompt, *, lora: str | None = None) -> NDArray[np.float32]:
        """The logits of every position. [T] -> [T, V] float32

        Row i holds the next-token logits after tokens 0 to i. Text is encoded as in `generate`. `lora` names one of the
        engine's adapters.

        Raises:
            PromptError: the prompt is empty, too long, not a single prompt, or has ids outside the vocabulary.
            ParameterError: there is no adapter of this name.
            NumericalError: the logits contain NaN or infinity.
        """
        ids = encode_prompt(prompt, self.tokenizer, self.config, begin=False)
        check_lora(lora, self._maker.adapters)
        return all_logits(self._open_runner, ids, self._turn, lora)

    def score(self, prompt: Prompt, *, lora: str | None = None) -> Score:
        """Log-probability of each token given the tokens before it.

        Raises:
            As `forward`.
        """
        ids = encode_prompt(prompt, self.tokenizer, self.config, begin=False)
        check_lora(lora, self._maker.adapters)
        return Score(ids, score_tokens(self._open_runner, ids, self._turn, lora))

    # --- the step loop -------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, config: GenerationConfig | None = None, **fields: Any) -> int:
        """Queue a request. Returns the id under which `step` reports on it.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ParameterError: a field is unknown, impossible or without effect.
            CacheFullError: the request does not fit into the cache even alone.
        """
        request = self.request(prompt, config, **fields)
        submitted: list[int] = []
        try:
            with self._turn():
                submitted.append(self._submit(request))
        except KeyboardInterrupt:
            self._drop(submitted)
            raise
        return submitted[0]

    def request(self, prompt: Prompt, config: GenerationConfig | None = None, **fields: Any) -> Request:
        """The request that `add` would queue, for tools that run it themselves.

        Raises:
            As `add`.
        """
        return self._maker.make(prompt, merge(config, fields))

    def step(self) -> list[Event]:
        """Advance all requests by one forward pass. Returns the events of those made by `add`.

        A request that fails (a logits processor of yours raised, a guide allows no token, the logits contain NaN) ends
        with an event whose `finish_reason` is "error" and which holds the error. The others continue.
        """
        events: list[Event] = []
        try:
            with self._turn():
                self._advance()
                while self._unclaimed:
                    events.append(self._unclaimed.popleft())
        except KeyboardInterrupt:
            self._unclaimed.extendleft(reversed(events))  # for the next call
            raise
        return events

    def abort(self, request_id: int) -> None:
        """Abort a request and free its memory; the next `step` reports its end with the reason "abort".

        A finished or unknown request is ignored.

        Raises:
            ParameterError: `request_id` is not an integer.
        """
        request_id = read("request_id", request_id)
        with self._turn():
            self._unclaimed += (Event.of(request_id, progress) for progress in self._loop.abort(request_id))

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or has events from another thread's step for `step`."""
        self._drop_forgotten()
        return self._loop.busy or any(event.finish_reason != "abort" for event in self._unclaimed)

    @property
    def stats(self) -> Stats:
        """Tokens and seconds of prefill and decode since the engine was made."""
        return self._loop.stats

    @property
    def device_memory(self) -> "list[Footprint]":
        """Bytes used on the GPU by kind, measured and predicted from the model's shape; empty on a CPU."""
        from .footprint import footprints

        return footprints(self._loop.runners.values())

    def close(self) -> None:
        """Abort all requests and free weights and cache. May be called twice.

        Calls in progress in other threads, and unfinished streams, raise EngineStateError.
        """
        with self._turns.take():
            if not self._closed:
                self._closed = True
                self._loop = StepLoop({}, self._loop.scheduler.limits)
                self._mail.clear()
                self._unclaimed.clear()
                del self.runner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def _set_up(
        self, parts: Parts, max_batch_size: int, cache_bytes: int | None, *, prefix_cache: bool = False
    ) -> None:
        self.config = parts.model.config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        helpers = [helper.config for helper in parts.helpers.values()]
        refuse_guesses(self.config, {"draft": "draft" in parts.helpers})
        if prefix_cache and any(config.keys_follow_length for config in (self.config, *helpers)):
            logger.warning("the prefix cache is off: with this rotary scaling, keys depend on the text's length")
            prefix_cache = False
        context = min(config.max_positions for config in (self.config, *helpers))
        self._maker = RequestMaker(
            replace(self.config, max_positions=context),
            parts.tokenizer,
            dict(parts.defaults),
            tuple(parts.helpers),
            tuple(parts.adapters),
        )
        pages = affordable_pages(self.config, parts.backend, max_batch_size, cache_bytes, helpers)
        runners = {
            name: Runner(model, parts.backend, PagedCache(model.config, parts.backend, pages))
            for name, model in {"target": parts.model, **parts.helpers}.items()
        }
        self.runner = runners["target"]
        self.runner.adapters = parts.adapters
        self._loop = StepLoop(runners, Limits(max_batch_size, PREFILL_CHUNK), prefix_cache=prefix_cache)
        self._mail: dict[int, deque[Event]] = {}  # events of requests that a generate or stream is waiting for
        self._unclaimed: deque[Event] = deque()  # events of requests made by `add`
        self._streams: dict[int, weakref.ref[EventStream]] = {}  # by request; a dead one is to be dropped
        self._turns = Turns()
        self._closed = False

    @property
    def _open_runner(self) -> Runner:
        with self._turn():
            return self.runner

    def _submit(self, request: Request) -> int:
        return self._loop.add(request, strategy_for(request.settings))

    def _drop(self, request_ids: Iterable[int]) -> None:
        with self._turns.take():
            for request_id in request_ids:
                self._loop.abort(request_id)
                self._mail.pop(request_id, None)
                self._streams.pop(request_id, None)

    def _drop_forgotten(self) -> None:
        """Abort the requests whose streams were garbage collected: in any thread, perhaps in the middle of a step."""
        if forgotten := [request_id for request_id, stream in list(self._streams.items()) if stream() is None]:
            self._drop(forgotten)

    def _advance(self) -> None:
        """Run one step and deliver its events to the waiting calls."""
        for request_id, progress in self._loop.step():
            self._mail.get(request_id, self._unclaimed).append(Event.of(request_id, progress))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Serialise calls in order of arrival, and refuse them after `close`."""
        self._drop_forgotten()
        with self._turns.take():
            if self._closed:
                raise EngineStateError("the engine is closed")
            try:
                yield
            except Exception:
                raise
            except BaseException:  # a second Ctrl-C, somewhere in the middle
                self._loop.reset()
                raise

    def _chat_prompt(self, messages: Messages, arguments: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """A conversation as token ids, and the arguments that are not for `render_chat`."""
        refuse_tools(arguments)
        options = {name: arguments.pop(name) for name in RENDER_ARGUMENTS if name in arguments}
        text = self.render_chat(messages, **options)
        if not text:
            raise PromptError("the chat template renders these messages as an empty text")
        # the template has written the special tokens
        return encode_text(text, self.tokenizer, self.config, add_special_tokens=False), arguments

    def _generate(self, prompts: list[Prompt], config: GenerationConfig) -> list[Generation]:
        wanted = [self._maker.make(prompt, config, batch_id=i) for i, prompt in enumerate(prompts)]
        requests: dict[int, Request] = {}
        mail: dict[int, deque[Event]] = {}
        with interrupts.deferred():
            try:
                with self._turn():
                    for request in wanted:
                        request_id = self._submit(request)
                        requests[request_id] = request
                        self._mail[request_id] = mail[request_id] = deque()
                while self._step_for(requests):
                    interrupts.check()
                return [self._collect(request, mail[i]) for i, request in requests.items()]
            finally:
                self._drop(requests)

    def _step_for(self, request_ids: Iterable[int]) -> bool:
        """Run one step, of all requests, unless these are done. Returns whether a step was run."""
        with self._turn():
            waiting = any(self._loop.knows(request_id) for request_id in request_ids)
            if waiting:
                self._advance()
        return waiting

    def _collect(self, request: Request, events: Iterable[Event]) -> Generation:
        """Merge all events of a finished request."""
        settings = request.settings
        completions = [Completion() for _ in range(settings.num_return_sequences)]
        for event in events:
            if event.error is not None:
                raise event.error
            completions[event.index].add(event)
        completions = [c for c in completions if c.finish_reason is not None]  # beam search may return fewer
        generation = Generation(request.prompt_ids, completions)
        if settings.echo:
            for completion in completions:
                completion.text = self._maker.prompt_text(request) + completion.text
            if settings.logprobs:
                generation.prompt_logprobs = score_tokens(
                    self._open_runner, request.prompt_ids, self._turn, settings.lora
                )
        return generation


class EventStream(Iterator[Event]):
    """Iterator over the events of one request. Each `next` runs steps until there is an event.

    Closing it, or dropping all references to it, aborts the request.
    """

    _open = False

    def __init__(self, engine: Engine, sequences: int) -> None:
        self._engine = engine
        self._growing = sequences
        self._mail: deque[Event] = deque()

    def open(self, request_id: int, prompt_text: str | None) -> None:
        """Attach to a request that was just queued; the prompt's text comes first, if requested."""
        self._request_id = request_id
        self._open = True
        self._engine._mail[request_id] = self._mail
        self._engine._streams[request_id] = weakref.ref(self)
        if prompt_text is not None:
            self._mail += (Event(request_id, index, prompt_text, ()) for index in range(self._growing))

    def __next__(self) -> Event:
        """The next event.

        Raises:
            StopIteration: the request is done, or the stream closed.
            EngineStateError: the engine was closed before the end.
            Exception: the error that ended the request.
        """
        with interrupts.deferred():
            while self._open and not self._mail and self._engine._step_for([self._request_id]):
                interrupts.check()
            if not (self._open and self._mail):
                self.close()
                raise StopIteration
            event = self._mail.popleft()
            self._growing -= event.finish_reason is not None
            if event.error is not None or not self._growing:
                self.close()
            if event.error is not None:
                raise event.error
            return event

    def close(self) -> None:
        """Abort the request, if it is not done."""
        if self._open:
            self._engine._drop([self._request_id])
            self._open = False


def merge(config: GenerationConfig | None, fields: Mapping[str, Any]) -> GenerationConfig:
    """A configuration with some fields replaced."""
    config = read("config", config)
    return GenerationConfig.from_dict(fields) if config is None else config.merged(**fields)
