"""The face of the library: load a model, generate, stream, look at its logits."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .backends.base import Backend
from .cache import PagedCache, affordable_pages
from .checkpoint import find_model
from .config import ModelConfig
from .decoding.continuation import Progress, TextStream
from .decoding.parameters import GenerationConfig, Settings, read_generation_config, resolve
from .decoding.select import strategy_for
from .decoding.stopping import StopStrings
from .decoding.strategy import Request
from .devices import choose_backend
from .errors import EngineStateError, ParameterError
from .loop import Stats, StepLoop
from .models import load_model, random_model
from .models.base import Model
from .prompts import Prompt, encode_prompt, is_prompt
from .results import Completion, Event, Generation, Score
from .runner import Runner
from .scheduler import Limits
from .scoring import all_logits, score_tokens
from .tokenizer import Tokenizer

logger = logging.getLogger("minillm")

DEMO_MODEL = Path(__file__).parent / "assets" / "demo-opt"
PREFILL_CHUNK = 512
PROMPT_TAIL = 8
"""Prompt tokens that a new stream of text looks back on, for a character or word split at the prompt's end."""


class Engine:
    """A model ready to generate.

    One engine belongs to one thread at a time. `close()` or a `with` block frees its memory.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        max_batch_size: int = 16,
        cache_bytes: int | None = None,
        prefix_cache: bool = False,
    ) -> None:
        """Load a model.

        Args:
            model: a checkpoint folder or a Hugging Face hub id; by default the small model that ships with minillm
            revision: branch, tag or commit on the hub
            dtype: how weights are stored in memory: "auto" or "float32"
            device: "cpu"
            max_batch_size: sequences that run at once; what is beyond waits
            cache_bytes: memory for the K/V cache; by default what `max_batch_size` full contexts take, but at most
                half of the free memory
            prefix_cache: keep what finished, for prompts that begin the same way (a chat)

        Raises:
            ModelError: the model cannot be had (see `errors`).
            DeviceError: the dtype or device is not offered here.
            ParameterError: another argument is impossible.
        """
        began = time.perf_counter()
        folder = DEMO_MODEL if model is None else find_model(model, revision=revision)
        if model is None and revision is not None:
            raise ParameterError("revision belongs to a hub id, and no model is named")
        ops = choose_backend(device, dtype, max_batch_size)
        tokenizer = Tokenizer.from_folder(folder)
        self._set_up(
            load_model(folder, ops), ops, tokenizer, read_generation_config(folder),
            max_batch_size=max_batch_size, cache_bytes=cache_bytes, prefix_cache=prefix_cache,
        )  # fmt: skip
        self.load_seconds = time.perf_counter() - began

    @classmethod
    def random(
        cls,
        shape: str,
        *,
        seed: int = 0,
        std: float = 0.02,
        dtype: str = "auto",
        device: str = "cpu",
        max_batch_size: int = 16,
        cache_bytes: int | None = None,
    ) -> "Engine":
        """A published shape ("opt-125m") with normal random weights and no tokenizer: prompts are token ids.

        Raises:
            ParameterError: the shape is not known; the message lists those that are.
        """
        began = time.perf_counter()
        engine = cls.__new__(cls)
        ops = choose_backend(device, dtype, max_batch_size)
        model = random_model(shape, seed, std, ops)
        engine._set_up(model, ops, None, {}, max_batch_size=max_batch_size, cache_bytes=cache_bytes)
        engine.load_seconds = time.perf_counter() - began
        return engine

    def _set_up(
        self,
        model: Model,
        ops: Backend,
        tokenizer: Tokenizer | None,
        defaults: Mapping[str, Any],
        *,
        max_batch_size: int,
        cache_bytes: int | None,
        prefix_cache: bool = False,
    ) -> None:
        if max_batch_size < 1:
            raise ParameterError(f"max_batch_size should be at least 1, found {max_batch_size}")
        self.config: ModelConfig = model.config
        self.tokenizer = tokenizer
        self.defaults = dict(defaults)
        """What the checkpoint's generation_config.json says"""
        cache = PagedCache(model.config, ops, affordable_pages(model.config, ops, max_batch_size, cache_bytes))
        self.runner = Runner(model, ops, cache)
        self._loop = StepLoop({"target": self.runner}, Limits(max_batch_size, PREFILL_CHUNK), prefix_cache=prefix_cache)
        self._mail: dict[int, deque[Event]] = {}  # of requests that a generate or stream is waiting for
        self._unclaimed: list[Event] = []  # of requests that `add` made
        self._lock = threading.Lock()
        self._closed = False

    # --- the step loop -------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, config: GenerationConfig | None = None, **fields: Any) -> int:
        """Put a request in line. Returns the id under which `step` reports on it.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ParameterError: a field is unknown, impossible or without effect.
            CacheFullError: the cache could not hold the request even alone.
        """
        with self._exclusive():
            request_id, _ = self._submit(prompt, _merge(config, fields))
        return request_id

    def step(self) -> list[Event]:
        """Advance all requests by one forward pass. Returns what is new of those made by `add`."""
        with self._exclusive():
            self._advance()
            events, self._unclaimed = self._unclaimed, []
        return events

    def abort(self, request_id: int) -> None:
        """Drop a request and free its memory. One that is done or unknown is left alone."""
        with self._exclusive():
            self._loop.abort(request_id)

    @property
    def busy(self) -> bool:
        """Some request waits or runs."""
        return self._loop.busy

    @property
    def stats(self) -> Stats:
        """Tokens and seconds of prefill and decode since the engine was made."""
        return self._loop.stats

    # --- loops over it -------------------------------------------------------------------------------------------

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
            config: what is wanted
            **fields: fields of `GenerationConfig`, which win over `config`

        Returns:
            A `Generation`, or a list of them in the order of the prompts.

        Raises:
            As `add`; nothing has run then.
        """
        merged = _merge(config, fields)
        if is_prompt(prompts):
            return self._generate([prompts], merged)[0]  # type: ignore[list-item]
        return self._generate(list(prompts), merged)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, config: GenerationConfig | None = None, **fields: Any) -> Iterator[Event]:
        """Continue one prompt and yield what is new after each step. Closing the iterator drops the request.

        Raises:
            As `add`, at once and not with the first step.
        """
        with self._exclusive():
            request_id, request = self._submit(prompt, _merge(config, fields))
            self._mail[request_id] = deque()
        return self._stream(request_id, request)

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits of every position. [T] -> [T, V] float32

        Row i says what the model expects after the tokens 0 to i.
        """
        ids = encode_prompt(token_ids, None, self.config)
        with self._exclusive():
            return all_logits(self.runner, ids)

    def score(self, text: Prompt) -> Score:
        """Log-probability of each token given what precedes it."""
        ids = encode_prompt(text, self.tokenizer, self.config)
        with self._exclusive():
            return Score(ids, score_tokens(self.runner, ids))

    # --- inside --------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Prompt], config: GenerationConfig) -> list[Generation]:
        requests: dict[int, Request] = {}
        try:
            with self._exclusive():
                for prompt in prompts:
                    request_id, request = self._submit(prompt, config)
                    requests[request_id] = request
                    self._mail[request_id] = deque()
            waiting = set(requests)
            while waiting:
                with self._exclusive():
                    self._advance()
                waiting -= {i for i in waiting if not self._loop.knows(i)}
            return [self._collect(request, self._mail[i]) for i, request in requests.items()]
        finally:
            self._drop(requests)

    def _stream(self, request_id: int, request: Request) -> Iterator[Event]:
        mail = self._mail[request_id]
        try:
            if request.settings.echo:
                yield Event(request_id, 0, self._prompt_text(request), ())
            while self._loop.knows(request_id) or mail:
                while mail:
                    yield mail.popleft()
                if self._loop.knows(request_id):
                    with self._exclusive():
                        self._advance()
        finally:
            self._drop([request_id])

    def _drop(self, request_ids: Mapping[int, Request] | list[int]) -> None:
        for request_id in request_ids:
            self._loop.abort(request_id)
            self._mail.pop(request_id, None)

    def _advance(self) -> None:
        """One step; its events go to whoever waits for them."""
        for request_id, progress in self._loop.step():
            event = _event(request_id, progress)
            if request_id in self._mail:
                self._mail[request_id].append(event)
            else:
                self._unclaimed.append(event)

    def _submit(self, prompt: Prompt, config: GenerationConfig) -> tuple[int, Request]:
        ids = self._encode(prompt)
        settings = self._settings(config, len(ids))
        stream = None
        if self.tokenizer is not None:
            stream = self._text_stream_of(self.tokenizer, ids, settings)
        elif settings.stop_strings:
            raise ParameterError("stop_strings needs a tokenizer, and this model has none")
        request = Request(ids, settings, stream)
        return self._loop.add(request, strategy_for(settings)), request

    def _settings(self, config: GenerationConfig, prompt_length: int) -> Settings:
        """The request's settings, cut to the room that the context leaves."""
        settings = resolve(
            config, self.defaults, vocab_size=self.config.vocab_size, eos_token_id=self.config.eos_token_ids
        )
        limit = settings.new_token_limit(prompt_length)
        room = self.config.max_positions - prompt_length
        if limit > room:
            logger.warning(
                "%d new tokens go past the context of %d: %d are left after the prompt",
                limit, self.config.max_positions, room,
            )  # fmt: skip
        return replace(settings, max_new_tokens=min(limit, room), max_length=None)

    def _text_stream_of(self, tokenizer: Tokenizer, ids: list[int], settings: Settings) -> Any:
        tail = ids[-max(PROMPT_TAIL, *(len(stop.encode()) for stop in settings.stop_strings), 0) :]

        def make() -> TextStream:
            stops = None
            if settings.stop_strings:
                stops = StopStrings(settings.stop_strings, tokenizer.decode(tail), settings.include_stop)
            return TextStream(tokenizer.stream(tail), stops)

        return make

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(prompt, self.tokenizer, self.config, room=1)

    def _prompt_text(self, request: Request) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(request.prompt_ids)

    def _collect(self, request: Request, events: Iterable[Event]) -> Generation:
        """All events of a finished request, put together."""
        settings = request.settings
        completions = [Completion() for _ in range(settings.num_return_sequences)]
        for event in events:
            completions[event.index].add(event)
        generation = Generation(request.prompt_ids, completions)
        if settings.echo:
            for completion in completions:
                completion.text = self._prompt_text(request) + completion.text
            if settings.logprobs:
                with self._exclusive():
                    generation.prompt_logprobs = score_tokens(self.runner, request.prompt_ids)
        return generation

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time, and none after `close`."""
        if self._closed:
            raise EngineStateError("the engine is closed")
        if not self._lock.acquire(blocking=False):
            raise EngineStateError("the engine is in use by another thread: give each thread an engine of its own")
        try:
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        """Free weights and cache. The engine cannot be used afterwards; closing twice is no error."""
        if not self._closed:
            self._closed = True
            del self.runner, self._loop
            self._mail.clear()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _merge(config: GenerationConfig | None, fields: Mapping[str, Any]) -> GenerationConfig:
    return GenerationConfig.from_dict(fields) if config is None else config.merged(**fields)


def _event(request_id: int, progress: Progress) -> Event:
    return Event(
        request_id,
        progress.index,
        progress.text,
        progress.token_ids,
        progress.log_probs,
        progress.top_log_probs,
        progress.finish_reason,
        progress.score,
    )
