"""Requests made from prompts and generation parameters, and their results: events, completions, scores."""

import copy
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .decoding.continuation import FinishReason, Progress, StopStrings, TextStream, TopLogProbs
from .decoding.guided import Guide, GuideMaker
from .decoding.resolving import new_token_limit, resolve
from .decoding.settings import GenerationConfig, Settings
from .decoding.strategy import Request
from .errors import ParameterError, PromptError, listed, shown
from .tokenizer import LAYOUTS, Tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
"""Text; or token ids: a list, tuple, range or other sequence of integers, or a 1-d NumPy array."""


def is_prompt(value: Any) -> bool:
    """True if a value is one prompt, False if it is a list of prompts; never raises.

    A list of prompts is a sequence or an array whose first member is text, a sequence or an array, or an empty one.
    Anything else counts as a prompt, which `encode_prompt` may refuse.
    """
    return not _is_series(value) or bool(_length(value) and not (isinstance(value[0], str) or _is_series(value[0])))


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig, *, room: int = 0, begin: bool = True
) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: text or token ids
        tokenizer: for text
        config: vocabulary and context
        room: number of tokens to leave free in the context after the prompt
        begin: replace an empty prompt by the model's beginning-of-sequence token

    Raises:
        PromptError: it is neither text nor token ids, is empty without a BOS token, is too long, or has an id outside
                the vocabulary.
    """
    if not begin and (isinstance(prompt, str) or _is_series(prompt)) and not _length(prompt):
        raise PromptError("the prompt is empty: give at least one token")
    if isinstance(prompt, str):
        ids = encode_text(prompt, tokenizer, config, room=room)
    else:
        ids = _token_ids(prompt, config, room)
    outside = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if outside is not None:
        raise PromptError(f"token id {shown(outside)} is outside the vocabulary of {config.vocab_size}")
    if not ids:
        if config.bos_token_id is None:
            raise PromptError("the prompt is empty, and the model has no BOS token: give at least one token")
        ids = [config.bos_token_id]
    _check_length(len(ids), config, room)
    return ids


def encode_text(
    text: str, tokenizer: Tokenizer | None, config: ModelConfig, *, room: int = 0, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text. One far too long for the context is refused without tokenizing most of it.

    Raises:
        PromptError: there is no tokenizer, the text is not valid UTF-8, or it is far too long.
    """
    tokenizer = need_tokenizer(tokenizer)
    if tokenizer.exceeds(text, config.max_positions):
        raise _too_long(f"more than {config.max_positions} tokens ({len(text)} characters)", config, room)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or an error if there is none.

    Raises:
        PromptError: there is none; the message lists the files it could be in.
    """
    if tokenizer is None:
        raise PromptError(
            "this model has no tokenizer: give the prompt as token ids, or name a tokenizer by Engine(tokenizer=...), "
            f"such as a folder with {LAYOUTS}"
        )
    return tokenizer


def _is_series(value: Any) -> bool:
    """True if its members may be token ids or prompts; not so for bytes and 0-d arrays."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _length(value: Any) -> int:
    try:
        return len(value)
    except OverflowError:  # a range
        return sys.maxsize


def _token_ids(prompt: Any, config: ModelConfig, room: int) -> list[int]:
    if not _is_series(prompt):
        raise PromptError(f"a prompt should be text or a list of token ids, found {shown(prompt)}")
    _check_length(_length(prompt), config, room)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or (prompt.dtype.kind not in "iuO" and prompt.size):
            kind = f"{prompt.ndim} dimensions of {prompt.dtype}"
            raise PromptError(f"an array of token ids should have one dimension of integers, found {kind!s:.60}")
        prompt = prompt.tolist()
    for value in prompt:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise PromptError(f"a prompt should be text or a list of token ids, found {shown(value)} in it")
    return [int(value) for value in prompt]


def _check_length(tokens: int, config: ModelConfig, room: int) -> None:
    if tokens + room > config.max_positions:
        raise _too_long(f"{tokens} tokens", config, room)


def _too_long(length: str, config: ModelConfig, room: int) -> PromptError:
    more = f", which must leave room for {room} more" if room else ""
    return PromptError(f"the prompt has {length}; the context holds {config.max_positions}{more}")


@dataclass(frozen=True)
class Event:
    """New tokens and text of one continuation of a request after a step."""

    request_id: int
    index: int
    """Index among the request's returned sequences"""
    text: str
    """New final text: whole characters, no part of a stop string. The result is the concatenation over events"""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Natural logarithm of each token's probability under the model; only if requested"""
    top_logprobs: tuple[TopLogProbs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in the last event: "stop" (end-of-sequence token or stop string), "length", "abort" or "error\""""
    score: float | None = None
    """Score of a beam: summed log-probability / length ** length_penalty"""
    error: Exception | None = None
    """The cause if `finish_reason` is "error": an exception of your logits processor, a guide that no token satisfies,
    NaN in the logits"""

    @classmethod
    def of(cls, request_id: int, progress: Progress) -> "Event":
        """The event for a continuation's progress."""
        return cls(
            request_id,
            progress.index,
            progress.text,
            progress.token_ids,
            progress.log_probs,
            progress.top_log_probs,
            progress.finish_reason,
            progress.score,
            progress.error,
        )


@dataclass
class Completion:
    """One returned sequence, without the prompt unless `echo` asked for it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogProbs] | None = None
    score: float | None = None
    finish_reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        """Append the contents of an event."""
        self.text += event.text
        self.token_ids += event.token_ids
        if event.logprobs:
            self.logprobs = [*(self.logprobs or []), *event.logprobs]
        if event.top_logprobs:
            self.top_logprobs = [*(self.top_logprobs or []), *event.top_logprobs]
        self.score = event.score
        self.finish_reason = event.finish_reason


@dataclass
class Generation:
    """Result of one prompt."""

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float | None] | None = None
    """With `echo` and `logprobs`: log-probability of each prompt token given those before it; None for the first"""

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's tokens."""
        return self.completions[0].token_ids


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a text's tokens."""

    token_ids: list[int]
    logprobs: list[float | None]
    """Natural logarithms; None for the first token"""

    @property
    def total(self) -> float:
        """Summed log-probability of all tokens after the first."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp(-mean log-probability); 1 for fewer than two tokens."""
        return math.exp(-self.total / max(1, len(self.token_ids) - 1))


logger = logging.getLogger("minillm")

PROMPT_TAIL = 8
"""Prompt tokens given to a text stream as context, for a character split at the prompt's end."""


@dataclass(frozen=True)
class RequestMaker:
    """Makes the requests of one model."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    defaults: Mapping[str, Any]
    """Fields of the checkpoint's generation_config.json"""
    models: tuple[str, ...] = ()
    """Additional models loaded: "draft", "amateur" """
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters for single requests"""

    def make(self, prompt: Prompt, wanted: GenerationConfig, *, batch_id: int = 0) -> Request:
        """Encode the prompt and resolve every field. `batch_id` is its index in a list of prompts.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ParameterError: a field is unknown, impossible or without effect.
        """
        ids = encode_prompt(prompt, self.tokenizer, self.config, room=1)
        settings = self._settle(wanted, len(ids))
        if self.tokenizer is not None:
            settings = _stopping_at_special_tokens(self.tokenizer, settings, self.config.vocab_size)
            stream, guide = _stream_maker(self.tokenizer, ids, settings), self._guide_maker(settings)
            return Request(ids, settings, stream, batch_id, guide)
        needy = "stop_strings" if settings.stop_strings else settings.guide[0] if settings.guide else None
        if needy is not None:
            raise ParameterError(
                f"{needy} needs a tokenizer, and this model has none: name one by Engine(tokenizer=...)"
            )
        return Request(ids, settings, batch_id=batch_id)

    @cached_property
    def _guides(self) -> GuideMaker:
        assert self.tokenizer is not None
        return GuideMaker(self.tokenizer.to_json(), self.tokenizer.vocab_size)

    def _guide_maker(self, settings: Settings) -> Callable[[], Guide] | None:
        """A factory of guides for continuations; None without a guide."""
        if settings.guide is None:
            return None
        return self._guides.maker(*settings.guide, settings.eos_token_ids, self.config.vocab_size)

    def _settle(self, wanted: GenerationConfig, prompt_length: int) -> Settings:
        """Resolved settings, with max_new_tokens limited to the context."""
        settings = resolve(
            wanted,
            self.defaults,
            vocab_size=self.config.vocab_size,
            eos_token_id=self.config.eos_token_ids,
            models=self.models,
        )
        guessing = ("prompt_lookup_num_tokens", "lookahead_window")
        refuse_guesses(self.config, {name: getattr(settings, name) for name in guessing})
        if prompt_length > 1 and "forced_bos_token_id" in settings.explicit:
            raise ParameterError(
                f"forced_bos_token_id={settings.forced_bos_token_id} has no effect on a prompt of {prompt_length}"
                " tokens, only on a prompt of one: leave it out"
            )
        check_lora(settings.lora, self.adapters)
        limit, room = new_token_limit(settings, prompt_length), self.config.max_positions - prompt_length
        if limit > room:
            context = self.config.max_positions
            logger.warning("%d new tokens exceed the context of %d: %d fit after the prompt", limit, context, room)
        return replace(settings, max_new_tokens=min(limit, room), max_length=None)

    def prompt_text(self, request: Request) -> str:
        """The prompt as text; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(request.prompt_ids)


def check_lora(name: str | None, adapters: Sequence[str]) -> None:
    """Refuse the name of an adapter that the engine has not.

    Raises:
        ParameterError: there is none of this name; the message lists those that there are.
    """
    if name is not None and name not in adapters:
        known = f"expected one of {listed(adapters)}" if adapters else "load some: Engine(..., adapters={name: folder})"
        raise ParameterError(f"lora={shown(name)}: the engine has no adapter of this name; {known}")


def refuse_guesses(config: ModelConfig, wanted: Mapping[str, object]) -> None:
    """Refuse speculation if tokens computed together differ from those computed one by one.

    Raises:
        ParameterError: a field of `wanted` is set; the message names it.
    """
    for name, value in wanted.items():
        if value and config.keys_follow_length:
            raise ParameterError(
                f"{name} would change the results: with this rotary scaling, keys depend on how many tokens run "
                "together; leave it out"
            )


def _stopping_at_special_tokens(tokenizer: Tokenizer, settings: Settings, vocab_size: int) -> Settings:
    """Add special tokens spelled by stop strings to eos_token_ids, since decoded text does not contain them."""
    if not settings.stop_strings:
        return settings
    spelled = {tokenizer.token(token): token for token in sorted(tokenizer.special_ids) if token < vocab_size}
    ends = dict.fromkeys([*settings.eos_token_ids, *(spelled[s] for s in settings.stop_strings if s in spelled)])
    return replace(settings, eos_token_id=tuple(ends))


def _stream_maker(tokenizer: Tokenizer, ids: list[int], settings: Settings) -> Callable[[], TextStream]:
    """A factory of text streams for the continuations of one prompt."""
    tail = ids[-max(PROMPT_TAIL, *(len(stop.encode()) for stop in settings.stop_strings), 0) :]
    stops = None
    if settings.stop_strings:
        stops = StopStrings(settings.stop_strings, tokenizer.decode(tail), settings.include_stop)

    def make() -> TextStream:
        return TextStream(tokenizer.stream(tail), copy.copy(stops))  # the copies share the trie

    return make
