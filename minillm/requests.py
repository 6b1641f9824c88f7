"""From a prompt and what the user said to a request that can run."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .config import ModelConfig
from .decoding.continuation import TextStream
from .decoding.guided import Guide, GuideMaker
from .decoding.parameters import GenerationConfig, Settings
from .decoding.resolving import resolve
from .decoding.stopping import StopStrings
from .decoding.strategy import Request
from .errors import ParameterError
from .prompts import Prompt, encode_prompt
from .tokenizer import Tokenizer

logger = logging.getLogger("minillm")

PROMPT_TAIL = 8
"""Prompt tokens that a stream of text looks back on, for a character that is split at the prompt's end."""


@dataclass(frozen=True)
class RequestMaker:
    """What every request of one model has in common."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    defaults: Mapping[str, Any]
    """What the checkpoint's generation_config.json says"""
    models: tuple[str, ...] = ()
    """Which of "draft" and "amateur" are there"""

    def make(self, prompt: Prompt, wanted: GenerationConfig, *, batch_id: int = 0) -> Request:
        """Encode the prompt and settle every field. `batch_id` is its place in a list of prompts.

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
            raise ParameterError(f"{needy} needs a tokenizer, and this model has none")
        return Request(ids, settings, batch_id=batch_id)

    @cached_property
    def _guides(self) -> GuideMaker:
        assert self.tokenizer is not None
        return GuideMaker(self.tokenizer.to_json(), self.tokenizer.vocab_size)

    def _guide_maker(self, settings: Settings) -> Callable[[], Guide] | None:
        """What makes a new guide for each continuation; None where the user wants none."""
        if settings.guide is None:
            return None
        return self._guides.maker(*settings.guide, settings.eos_token_ids, self.config.vocab_size)

    def _settle(self, wanted: GenerationConfig, prompt_length: int) -> Settings:
        """Settings with a number of new tokens that the context has room for."""
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
                " tokens: it follows a prompt of one; leave it out"
            )
        limit, room = settings.new_token_limit(prompt_length), self.config.max_positions - prompt_length
        if limit > room:
            context = self.config.max_positions
            logger.warning("%d new tokens go past the context of %d: %d fit after the prompt", limit, context, room)
        return replace(settings, max_new_tokens=min(limit, room), max_length=None)

    def prompt_text(self, request: Request) -> str:
        """The prompt as text; empty where there is no tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(request.prompt_ids)


def refuse_guesses(config: ModelConfig, wanted: Mapping[str, object]) -> None:
    """Refuse speculation where tokens that are run together are not what they would be one by one.

    Raises:
        ParameterError: one of what is `wanted`, by name.
    """
    for name, value in wanted.items():
        if value and config.keys_follow_length:
            raise ParameterError(
                f"{name} would change what the model says: with dynamic rotary scaling keys depend on how many tokens "
                "are run; leave it out"
            )


def _stopping_at_special_tokens(tokenizer: Tokenizer, settings: Settings, vocab_size: int) -> Settings:
    """Let a stop string that spells a special token mean that token too, which no text has: it ends the sequence."""
    if not settings.stop_strings:
        return settings
    spelled = {tokenizer.token(token): token for token in sorted(tokenizer.special_ids) if token < vocab_size}
    ends = dict.fromkeys([*settings.eos_token_ids, *(spelled[s] for s in settings.stop_strings if s in spelled)])
    return replace(settings, eos_token_ids=tuple(ends))


def _stream_maker(tokenizer: Tokenizer, ids: list[int], settings: Settings) -> Callable[[], TextStream]:
    """What makes a new stream of text for each continuation of one prompt."""
    tail = ids[-max(PROMPT_TAIL, *(len(stop.encode()) for stop in settings.stop_strings), 0) :]
    stops = None
    if settings.stop_strings:
        stops = StopStrings(settings.stop_strings, tokenizer.decode(tail), settings.include_stop)

    def make() -> TextStream:
        return TextStream(tokenizer.stream(tail), copy.copy(stops))  # the copies share what the strings became

    return make
