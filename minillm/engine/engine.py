"""The library's public API: texts from prompts, one by one, as streams, or step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, overload

from ..decoding.event import Event
from ..decoding.fields import GenerationFields
from ..decoding.hooks import Hook
from ..decoding.keywords import RequestFields, with_fields
from ..decoding.prompts import Prompt, is_prompt
from ..decoding.settings import GenerationConfig
from ..decoding.strategy import Request
from ..progress import showing
from ..text.chat.reasoning import Thoughts
from .arguments import read, refuse_task
from .conversations import EngineConversations
from .results import Generation
from .stream import EventStream


class Engine(EngineConversations):
    """A model ready to generate; or, as its checkpoint is made for it, to embed or classify texts.

    Several threads may use one engine: their requests run in one batch. Ctrl-C takes effect after the current step and
    leaves the engine as it was before the call. `close()` or a `with` block frees its memory.

    On a CPU weights may be memory-mapped from the checkpoint's files: while the engine is open, do not write to or
    truncate them (see `minillm.formats`); replacing them by renaming new files is safe.

    Example:
        >>> with Engine(max_batch_size=4) as engine:
        ...     engine.generate("A list of colors: red,", max_new_tokens=2).text
        ' orange,'
    """

    # --- generating --------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is a sequence of texts too
        self,
        prompts: Prompt,
        config: GenerationConfig | None = None,
        *,
        progress: bool = True,
        **fields: Unpack[RequestFields],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt] | None = None,
        config: GenerationConfig | None = None,
        *,
        progress: bool = True,
        **fields: Unpack[RequestFields],
    ) -> list[Generation]: ...

    @with_fields
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        config: GenerationConfig | None = None,
        *,
        progress: bool = True,
        **fields: Unpack[RequestFields],
    ) -> Generation | list[Generation]:
        """Continue one prompt, or each prompt of a list.

        Args:
            prompts: text or token ids, or a list of such; lengths may differ. An empty one begins with the model's
                beginning-of-sequence token. Of an encoder-decoder they are what the encoder reads, and the results are
                the decoder's texts, which begin with `decoder_prompt`
            config: generation parameters
            progress: show a bar on a terminal or in a notebook
            **fields: fields of `GenerationConfig`, which win over `config`. With one `seed` the prompts of a list draw
                differently, the first as it does alone. Besides:
                priority: requests with a smaller one are served first, those with the same (0) in order of arrival
                timeout: seconds from now after which a request ends with what there is, for the reason "timeout"
                defaults: fields in the place of `generation_defaults`
                thoughts: how the answer tells its thoughts, of a conversation that you have rendered yourself
                watch: names of points inside the model (`names`), whose rows come with the result as `watched`
                hooks: names of points and functions that change their rows: see `hooks`
                inputs_embeds: vectors in the place of the embeddings of a prompt's tokens, [T, E] (of a list of prompts
                    a list of these), as in transformers; an array of any library. Without `prompts` the prompt's ids
                    are the BOS token's, and fields that read them are refused

        Returns:
            A `Generation`, or a list of them in the order of the prompts.

        Raises:
            MinillmError: as `add`, before anything is run.
            Exception: the error that ended a request (`Event.error`), once the other prompts are done.

        Example:
            >>> engine.generate("A list of colors: red,", max_new_tokens=4).text
            ' orange, yellow,'
            >>> [answer.text for answer in engine.generate(["1, 2,", "Monday,"], max_new_tokens=4)]
            [' 1, 0.', ' Tuesday, Wednesday,']
        """
        rows = fields.get("inputs_embeds")
        single = is_prompt(prompts) if prompts is not None or rows is None else getattr(rows, "ndim", None) == 2
        requests = self.requests([prompts] if single else prompts, config, **fields)  # type: ignore[list-item, arg-type]
        with showing(read("progress", progress)):
            results = self.run(requests)
        return results[0] if single else results

    @with_fields
    def stream(
        self, prompt: Prompt | None = None, config: GenerationConfig | None = None, **fields: Unpack[RequestFields]
    ) -> EventStream:
        """Continue one prompt and yield the new text after each step. Closing the iterator aborts the request.

        Arguments as of `generate`.

        Raises:
            MinillmError: as `add`, immediately. The iterator raises the error that ends the request (`Event.error`).

        Example:
            >>> [event.text for event in engine.stream("Count from 3 to 9:", max_new_tokens=4)]
            [' 3', ',', ' 4', ',']
        """
        return EventStream(self._driver, self.request(prompt, config, **fields))

    # --- the step loop -------------------------------------------------------------------------------------------

    def add(
        self, prompt: Prompt | None = None, config: GenerationConfig | None = None, **fields: Unpack[RequestFields]
    ) -> int:
        """Queue a request; arguments as of `generate`. Returns the id under which `step` reports on it.

        Raises:
            TaskError: the model generates no text.
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ParameterError: a field is unknown, impossible or without effect.
            CacheFullError: the request does not fit into the cache even alone.

        Example:
            >>> engine.add("A list of colors: red,", max_new_tokens=1) in {event.request_id for event in engine.step()}
            True
        """
        return self.submit([self.request(prompt, config, **fields)])[0]

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests made by `request` or `chat_request`: all of them, or none if one is refused.

        Returns their ids, as `add`.

        Raises:
            ParameterError, CacheFullError: as `add`.
        """
        return self._driver.submit(requests)

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        """The results of requests made by `request` or `chat_request`, which run side by side.

        Raises:
            ParameterError, CacheFullError: as `add`, before anything is run.
            Exception: the error that ended a request, once the others are done.

        Example:
            >>> requests = [engine.request("Monday,", max_new_tokens=n) for n in (1, 2)]
            >>> [answer.text for answer in engine.run(requests)]
            [' Tuesday', ' Tuesday,']
        """
        mail = zip(requests, self._driver.run(requests), strict=True)
        return [Generation.of(request.given_ids, events, self.tokenizer, request.thoughts) for request, events in mail]

    def request(
        self, prompt: Prompt | None = None, config: GenerationConfig | None = None, **fields: Unpack[RequestFields]
    ) -> Request:
        """The request that `add` would queue, for `submit`, and for tools that run it themselves.

        It is checked against the model, not against the batch and the cache, in any thread, without waiting for a step.

        Raises:
            PromptError, ParameterError: as `add`.
        """
        return self.requests([prompt], config, **fields)[0]

    def requests(
        self,
        prompts: Sequence[Prompt | None] | None,
        config: GenerationConfig | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        defaults: Mapping[str, Any] | None = None,
        watch: Sequence[str] | None = None,
        hooks: Mapping[str, Hook] | None = None,
        thoughts: Thoughts | None = None,
        inputs_embeds: Any = None,
        **fields: Unpack[GenerationFields],
    ) -> list[Request]:
        """The requests that `generate` would run for a list of prompts; as `request`."""
        refuse_task(self.config, "tokens", "generate")
        inside = None if watch is None and hooks is None else self._hooks_of(() if watch is None else watch, hooks)
        if inside is not None and not (inside.watched or inside.functions):
            inside = None  # an ordinary request
        config, priority, timeout = read("config", config), read("priority", priority), read("timeout", timeout)
        config = GenerationConfig.from_dict(fields) if config is None else config.merged(**fields)
        maker = self._maker if defaults is None else replace(self._maker, defaults=read("defaults", defaults))
        make: Any = partial(maker.make, generation_config=config, priority=priority, timeout=timeout, thoughts=thoughts)
        if inputs_embeds is not None:
            return self._embedded(prompts, inputs_embeds, make, inside)
        return [make(prompt, batch_id=i, hooks=inside) for i, prompt in enumerate(() if prompts is None else prompts)]

    def fitted(self, request: Request) -> Request:
        """A request, with no more new tokens than the K/V cache holds for it alone; unchanged if it asks for fewer.

        Example:
            >>> request = engine.request("Once upon a time", max_new_tokens=8)
            >>> engine.fitted(request) is request
            True
        """
        return self._driver.fitted(request)

    def step(self) -> list[Event]:
        """Advance all requests by one forward pass. Returns the events of those made by `add`.

        A request that fails (a logits processor of yours raised, a guide allows no token, the logits contain NaN) ends
        with an event whose `finish_reason` is "error" and which holds the error. The others continue.

        Example:
            >>> request_id, text = engine.add("A list of colors: red,", max_new_tokens=4), ""
            >>> while engine.busy:
            ...     text += "".join(event.text for event in engine.step() if event.request_id == request_id)
            >>> text
            ' orange, yellow,'
        """
        return self._driver.step()

    def abort(self, request_id: int) -> None:
        """Abort a request and free its memory; the next `step` reports its end with the reason "abort".

        A finished or unknown request is ignored.

        Raises:
            ParameterError: `request_id` is not an integer.

        Example:
            >>> engine.abort(engine.add("A list of colors: red,"))
            >>> [event.finish_reason for event in engine.step()]
            ['abort']
        """
        self._driver.abort(read("request_id", request_id))
