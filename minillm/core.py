"""The core of an engine: a model, its cache, and a step loop that the threads which wait for it drive in turns."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .arguments import read
from .cache import PagedCache, affordable_pages
from .config import ModelConfig
from .decoding.parameters import GenerationConfig
from .decoding.select import strategy_for
from .decoding.strategy import Request
from .errors import EngineStateError
from .loading import Parts
from .loop import Stats, StepLoop
from .prompts import Prompt
from .requests import RequestMaker, refuse_guesses
from .results import Event
from .runner import Runner
from .scheduler import Limits
from .turns import Turns

if TYPE_CHECKING:
    from .footprint import Footprint

logger = logging.getLogger("minillm")

PREFILL_CHUNK = 512


class EngineCore:
    """What `Engine` stands on: requests in line, one forward pass after the other, what is new of each."""

    load_seconds: float

    def _set_up(
        self, parts: Parts, max_batch_size: int, cache_bytes: int | None, *, prefix_cache: bool = False
    ) -> None:
        self.config: ModelConfig = parts.model.config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        helpers = [helper.config for helper in parts.helpers.values()]
        refuse_guesses(self.config, {"draft": "draft" in parts.helpers})
        if prefix_cache and any(config.keys_follow_length for config in (self.config, *helpers)):
            logger.warning("no prefix cache: with dynamic rotary scaling a text's keys are its own")
            prefix_cache = False
        context = min(config.max_positions for config in (self.config, *helpers))
        self._maker = RequestMaker(
            replace(self.config, max_positions=context), parts.tokenizer, dict(parts.defaults), tuple(parts.helpers)
        )
        pages = affordable_pages(self.config, parts.backend, max_batch_size, cache_bytes, helpers)
        runners = {
            name: Runner(model, parts.backend, PagedCache(model.config, parts.backend, pages))
            for name, model in {"target": parts.model, **parts.helpers}.items()
        }
        self.runner = runners["target"]
        self._loop = StepLoop(runners, Limits(max_batch_size, PREFILL_CHUNK), prefix_cache=prefix_cache)
        self._mail: dict[int, deque[Event]] = {}  # of requests that a generate or stream is waiting for
        self._unclaimed: deque[Event] = deque()  # of requests that `add` made
        self._forgotten: deque[int] = deque()  # requests whose streams nobody reads any more
        self._turns = Turns()
        self._closed = False

    # --- the step loop -------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, config: GenerationConfig | None = None, **fields: Any) -> int:
        """Put a request in line. Returns the id under which `step` reports on it.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ParameterError: a field is unknown, impossible or without effect.
            CacheFullError: the cache could not hold the request even alone.
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
        """What `add` puts in line, for tools that run a request by themselves.

        Raises:
            As `add`.
        """
        return self._maker.make(prompt, merge(config, fields))

    def step(self) -> list[Event]:
        """Advance all requests by one forward pass. Returns what is new of those made by `add`.

        A request that cannot go on (a logits processor of yours raised, a guide allows nothing, the model gave NaN)
        ends with an event whose `finish_reason` is "error" and which holds the error. The others go on.
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
        """Drop a request and free its memory; the next `step` reports its end, for the reason "abort".

        One that is done or unknown is left alone.

        Raises:
            ParameterError: it is no number of a request.
        """
        request_id = read("request_id", request_id)
        with self._turn():
            self._unclaimed += (Event.of(request_id, progress) for progress in self._loop.abort(request_id))

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or has news that another thread's step brought for `step`."""
        self._drop_forgotten()
        return self._loop.busy or any(event.finish_reason != "abort" for event in self._unclaimed)

    @property
    def stats(self) -> Stats:
        """Tokens and seconds of prefill and decode since the engine was made."""
        return self._loop.stats

    @property
    def device_memory(self) -> "list[Footprint]":
        """Bytes taken on the GPU, kind by kind, beside what the model's shape predicts; empty on a CPU."""
        from .footprint import footprints

        return footprints(self._loop.runners.values())

    def close(self) -> None:
        """Drop all requests and free weights and cache. Closing twice is no error.

        A call that another thread is in, and a stream that was not at its end, raise EngineStateError.
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

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            self._drop([self._forgotten.popleft()])

    def _advance(self) -> None:
        """One step; its events go to whoever waits for them."""
        for request_id, progress in self._loop.step():
            self._mail.get(request_id, self._unclaimed).append(Event.of(request_id, progress))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time, in the order in which they came, and none after `close`."""
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


def merge(config: GenerationConfig | None, fields: Mapping[str, Any]) -> GenerationConfig:
    """A configuration with some fields said anew."""
    config = read("config", config)
    return GenerationConfig.from_dict(fields) if config is None else config.merged(**fields)
