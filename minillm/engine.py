"""The face of the library: load a model, generate, stream, chat, look at its logits."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .chat import RENDER_ARGUMENTS, Messages, refuse_tools
from .core import EngineCore, merge
from .decoding.parameters import GenerationConfig
from .decoding.strategy import Request
from .devices import Placement, choose_backend
from .errors import ParameterError, PromptError
from .loading import Parts, load_parts
from .models import random_model
from .prompts import Prompt, encode_prompt, is_prompt
from .results import Completion, Event, Generation, Score
from .scoring import all_logits, score_tokens


class Engine(EngineCore):
    """A model ready to generate.

    One engine belongs to one thread at a time. `close()` or a `with` block frees its memory.

    On a CPU weights may be memory of the checkpoint's files themselves: while the engine is open, do not write to those
    nor cut them short (see `minillm.checkpoint`); renaming others into their place is safe.
    """

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
    ) -> None:
        """Load a model.

        Args:
            model: a checkpoint folder or a Hugging Face hub id; by default the small model that ships with minillm
            revision: branch, tag or commit on the hub
            dtype: how weights are kept in memory: "float32", "float16", "bfloat16", "int8" or "int4"; by default
                as is fastest without a loss, and as it is stored where the checkpoint is quantised. On "cuda" also how
                results and the K/V cache are kept: one of the first three, by default as the checkpoint stores its
                weights
            device: "cpu", or "cuda": an NVIDIA GPU, which needs the extra "cuda13" or "cuda12"
            backend: what computes on a CPU: "numpy", or "numba", which is the default where it is installed
            cache_dtype: how the K/V cache is kept: "float32" (the default), "bfloat16" or "int8"
            threads: of the processor; by default as many as it has cores. It is a setting of the whole process
            max_batch_size: sequences that run at once; what is beyond waits
            cache_bytes: memory for the K/V cache; by default what `max_batch_size` full contexts take, but at most
                half of the free memory
            prefix_cache: keep what finished, for prompts that begin the same way (a chat)
            draft: a smaller model with the same vocabulary that guesses what this one will say: speculative decoding
            amateur: a weaker one whose expectations are subtracted from this one's: contrastive decoding

        Raises:
            ModelError: the model cannot be had (see `errors`).
            DeviceError: the dtype or device is not offered here.
            ParameterError: another argument is impossible.
        """
        began = time.perf_counter()
        _check_size("max_batch_size", max_batch_size)
        placement = Placement(device=device, dtype=dtype, backend=backend, cache_dtype=cache_dtype, threads=threads)
        ops = choose_backend(placement, max_batch_size)
        helpers = {name: where for name, where in (("draft", draft), ("amateur", amateur)) if where is not None}
        self._set_up(load_parts(model, revision, helpers, ops), max_batch_size, cache_bytes, prefix_cache=prefix_cache)
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
        """A published shape ("opt-125m") with normal random weights and no tokenizer: prompts are token ids.

        `placement` is `dtype`, `device`, `backend`, `cache_dtype` and `threads`, as for a model that is loaded.

        Raises:
            ParameterError: the shape is not known; the message lists those that are.
        """
        began = time.perf_counter()
        _check_size("max_batch_size", max_batch_size)
        engine = cls.__new__(cls)
        ops = choose_backend(Placement(**placement), max_batch_size)
        engine._set_up(Parts(ops, random_model(shape, seed, std, ops)), max_batch_size, cache_bytes)
        engine.load_seconds = time.perf_counter() - began
        return engine

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
        merged = merge(config, fields)
        if is_prompt(prompts):
            return self._generate([prompts], merged)[0]  # type: ignore[list-item]
        return self._generate(list(prompts), merged)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, config: GenerationConfig | None = None, **fields: Any) -> Iterator[Event]:
        """Continue one prompt and yield what is new after each step. Closing the iterator drops the request.

        Raises:
            As `add`, at once and not with the first step.
        """
        with self._exclusive():
            request = self.request(prompt, config, **fields)
            request_id = self._submit(request)
        self._mail[request_id] = deque()
        events = self._stream(request_id, request)
        next(events)  # into its try block, so that closing it drops the request even if nobody has asked it yet
        return events

    # --- conversations -------------------------------------------------------------------------------------------

    def chat(self, messages: Messages, config: GenerationConfig | None = None, **fields: Any) -> Generation:
        """Answer a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first
            config: what is wanted
            **fields: fields of `GenerationConfig`, which win over `config`, and arguments of `render_chat`

        Raises:
            As `render_chat` and `add`; nothing has run then.
        """
        prompt, fields = self._chat_prompt(messages, fields)
        return self.generate(prompt, config, **fields)

    def stream_chat(self, messages: Messages, config: GenerationConfig | None = None, **fields: Any) -> Iterator[Event]:
        """Answer a conversation and yield what is new after each step: `chat` as `stream` does it.

        Raises:
            As `chat`, at once and not with the first step.
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
        """The prompt that the checkpoint's chat template makes of a conversation, special tokens spelled out.

        As a prompt of your own, encode it with `tokenizer.encode(text, add_special_tokens=False)`.

        Args:
            messages: as for `chat`
            add_generation_prompt: end with what begins an answer; by default unless the next is set
            continue_final_message: go on with the last message instead of answering it
            chat_template_kwargs: what else the template is told; Qwen3's knows "enable_thinking"

        Raises:
            PromptError: the model has no chat template, the messages are malformed, or the template refuses them.
            CheckpointError: the template is broken, or reaches for what is kept from it.
            ParameterError: the arguments contradict each other, or the template does not use what it is told.
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

    def _chat_prompt(self, messages: Messages, arguments: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """A conversation as token ids, and those of the arguments that are not about it."""
        refuse_tools(arguments)
        options = {name: arguments.pop(name) for name in RENDER_ARGUMENTS if name in arguments}
        text = self.render_chat(messages, **options)
        if not text:
            raise PromptError("the chat template makes no text of these messages")
        assert self.tokenizer is not None  # a template is loaded with one
        return self.tokenizer.encode(text, add_special_tokens=False), arguments  # the template writes special tokens

    def _generate(self, prompts: list[Prompt], config: GenerationConfig) -> list[Generation]:
        requests: dict[int, Request] = {}
        try:
            with self._exclusive():
                for request in [self._maker.make(prompt, config, batch_id=i) for i, prompt in enumerate(prompts)]:
                    requests[self._submit(request)] = request
                self._mail.update({request_id: deque() for request_id in requests})
                for request_id in requests:
                    while self._loop.knows(request_id):
                        self._advance()
            return [self._collect(request, self._mail[i]) for i, request in requests.items()]
        finally:
            self._drop(requests)

    def _stream(self, request_id: int, request: Request) -> Iterator[Event]:
        mail = self._mail[request_id]
        try:
            yield Event(request_id, 0, "", ())  # taken by `stream`
            if request.settings.echo:
                text = self._maker.prompt_text(request)
                yield from (Event(request_id, i, text, ()) for i in range(request.settings.num_return_sequences))
            while self._loop.knows(request_id) or mail:
                while mail:
                    yield mail.popleft()
                if self._loop.knows(request_id):
                    with self._exclusive():
                        self._advance()
        finally:
            self._drop([request_id])

    def _collect(self, request: Request, events: Iterable[Event]) -> Generation:
        """All events of a finished request, put together."""
        settings = request.settings
        completions = [Completion() for _ in range(settings.num_return_sequences)]
        for event in events:
            completions[event.index].add(event)
        completions = [c for c in completions if c.finish_reason is not None]  # a guide may allow beams fewer results
        generation = Generation(request.prompt_ids, completions)
        if settings.echo:
            for completion in completions:
                completion.text = self._maker.prompt_text(request) + completion.text
            if settings.logprobs:
                generation.prompt_logprobs = score_tokens(self.runner, request.prompt_ids)
        return generation


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ParameterError(f"{name} should be a whole number of at least 1, found {value!r}")
