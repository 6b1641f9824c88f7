"""Requests made from prompts and generation parameters."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..encoder_input import EncoderInput
from ..errors import ParameterError, listed, shown
from ..reference.philox import fold_in
from ..text.tokenizer import Tokenizer
from .continuation import TextStream
from .guided import Guide, GuideMaker
from .hooks import Hooks
from .prompts import Prompt, encode_prompt
from .resolving import new_token_limit, resolve, strategy_for
from .settings import GenerationConfig, Settings
from .stop_strings import StopStrings
from .strategy import Request

if TYPE_CHECKING:
    from ..text.chat.reasoning import Thoughts

logger = logging.getLogger("minillm")

PROMPT_TAIL = 8
"""Prompt tokens given to a text stream as context, for a character split at the prompt's end."""


@dataclass(frozen=True)
class RequestMaker:
    """Makes the requests of one model."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    defaults: Mapping[str, Any]
    """Generation fields of the checkpoint"""
    models: tuple[str, ...] = ()
    """Additional models loaded: "draft", "amateur" """
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters for single requests"""
    checkpoint_ends: tuple[int, ...] | None = None
    """`eos_token_ids` as the checkpoint has them; others in `defaults` are the user's"""

    def eos_token_ids(self, defaults: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """The tokens that end a text, unless a request says others. `defaults` stand in the place of the maker's.

        Empty if the value is neither an id nor a list of ids: each request that would use it is refused.
        """
        value = (self.defaults if defaults is None else defaults).get("eos_token_id")
        ids = self.config.eos_token_ids if value is None else value
        ids = ids if isinstance(ids, list | tuple) else (ids,)
        return tuple(ids) if all(isinstance(token_id, int) for token_id in ids) else ()

    def make(
        self,
        prompt: Prompt,
        generation_config: GenerationConfig,
        *,
        batch_id: int = 0,
        priority: int = 0,
        timeout: float | None = None,
        hooks: Hooks | None = None,
        thoughts: "Thoughts | None" = None,
    ) -> Request:
        """Encode the prompt and resolve every field.

        Args:
            prompt: text or token ids
            generation_config: the user's fields
            batch_id: index of the prompt in a list of prompts, which is folded into the seed
            priority: as in `Request`; likewise `timeout`
            timeout: in seconds
            hooks: as in `Request`
            thoughts: likewise; a guide begins after them

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ParameterError: a field is unknown, impossible or without effect.
        """
        room = 0 if isinstance(generation_config.max_new_tokens, int) and not generation_config.max_new_tokens else 1
        source: EncoderInput | None = None
        if self.config.encoder_layers:
            from .encoder_prompts import decoder_ids, source_of  # decoders do without

            source, ids = source_of(prompt, self), decoder_ids(self, generation_config, room)
        else:
            ids = encode_prompt(prompt, self.tokenizer, self.config, room=room)
        settings = self._resolve_settings(generation_config, len(ids))
        if source is not None and source.frames is not None:
            from .encoder_prompts import refuse_source_fields

            refuse_source_fields(settings)
        if settings.do_sample and batch_id:
            settings = replace(settings, seed=fold_in(settings.seed, batch_id))
        spelled: dict[int, str] = {}
        functions: dict[str, Any] = {}
        if self.tokenizer is not None:
            spelled = _spelled_by_stop_strings(self.tokenizer, settings, self.config.vocab_size)
            if spelled:  # decoded text does not contain them
                settings = replace(settings, eos_token_id=tuple(dict.fromkeys([*settings.eos_token_ids, *spelled])))
            functions = {
                "text_stream": _stream_maker(self.tokenizer, ids, settings),
                "token_bytes": self.tokenizer.token_bytes,
                "guide": self._guide_maker(settings, thoughts),
            }
        elif settings.stop_strings or settings.guide:
            needy = "stop_strings" if settings.stop_strings or settings.guide is None else settings.guide[0]
            raise ParameterError(
                f"{needy} needs a tokenizer, and this model has none: name one by Engine(tokenizer=...)"
            )
        return Request(
            ids,
            settings,
            strategy_for(settings),
            batch_id=batch_id,
            spelled=spelled,
            priority=priority,
            timeout=timeout,
            hooks=hooks,
            thoughts=thoughts,
            source_ids=None if source is None else source.token_ids,
            frames=None if source is None else source.frames,
            **functions,
        )

    @cached_property
    def _guides(self) -> GuideMaker:
        assert self.tokenizer is not None
        return GuideMaker(self.tokenizer.to_json(), self.tokenizer.vocab_size)

    def _guide_maker(self, settings: Settings, thoughts: "Thoughts | None") -> Callable[[], Guide] | None:
        """A factory of guides for continuations; None without a guide."""
        if settings.guide is None:
            return None
        make = self._guides.maker(*settings.guide, settings.eos_token_ids, self.config.vocab_size)
        markers = None if thoughts is None or self.tokenizer is None else thoughts.markers(self.tokenizer)
        if thoughts is None or markers is None:
            return make
        from .thinking import GuideAfterThoughts  # seldom needed

        (begin, end), opened = markers, thoughts.opened
        return lambda: GuideAfterThoughts(make(), begin, end, opened=opened)

    def resolve_fields(self, generation_config: GenerationConfig) -> Settings:
        """Every field, as it is set by the user, the checkpoint or by default."""
        encoder = ("encoder",) if self.config.encoder_layers else ()
        start = {"decoder_start_token_id": self.config.decoder_start_token_id}
        return resolve(
            generation_config,
            start | {name: value for name, value in self.defaults.items() if value is not None},
            vocab_size=self.config.vocab_size,
            eos_token_id=self.config.eos_token_ids,
            models=(*self.models, *encoder),
        )

    def _resolve_settings(self, generation_config: GenerationConfig, prompt_length: int) -> Settings:
        """Resolved settings, with max_new_tokens limited to the context."""
        settings = self.resolve_fields(generation_config)
        if self.config.encoder_layers and settings.echo:
            raise ParameterError("echo is not offered with an encoder-decoder, whose text does not continue the prompt")
        guessing = ("prompt_lookup_num_tokens", "lookahead_window")
        refuse_guesses(self.config, {name: getattr(settings, name) for name in guessing})
        if prompt_length > 1 and "forced_bos_token_id" in settings.explicit:
            raise ParameterError(
                f"forced_bos_token_id={settings.forced_bos_token_id} has no effect on a prompt of {prompt_length}"
                " tokens, only on a prompt of one: leave it out"
            )
        check_lora(settings.lora, self.adapters)
        named = settings.dry_multiplier or settings.force_words or settings.dola_layers
        if named or settings.max_thinking_tokens is not None or settings.negative_prompt is not None:
            from .model_settings import in_terms_of  # seldom needed

            settings = in_terms_of(settings, self.tokenizer, self.config)
        limit = new_token_limit(settings, prompt_length)
        room = self.config.max_positions - max(prompt_length, len(settings.negative_prompt or ()))
        if limit > room:
            context = self.config.max_positions
            logger.warning("%d new tokens exceed the context of %d: %d fit after the prompt", limit, context, room)
        return replace(settings, max_new_tokens=min(limit, room), max_length=None)


def check_lora(name: str | None, adapters: Sequence[str]) -> None:
    """Refuse the name of an adapter that the engine has not.

    Raises:
        ParameterError: there is none of this name; the message lists those that there are.
    """
    if name is not None and name not in adapters:
        known = f"expected one of {listed(adapters)}" if adapters else "load some: Engine(..., adapters={name: folder})"
        raise ParameterError(f"lora={shown(name)}: the engine has no adapter of this name; {known}")


def refuse_guesses(config: ModelConfig, fields: Mapping[str, object]) -> None:
    """Refuse speculation if tokens computed together differ from those computed one by one.

    Raises:
        ParameterError: a field of `fields` is set; the message names it.
    """
    for name, value in fields.items():
        if value and config.keys_follow_length:
            raise ParameterError(
                f"{name} would change the results: with this rotary scaling, keys depend on how many tokens run "
                "together; leave it out"
            )


def _spelled_by_stop_strings(tokenizer: Tokenizer, settings: Settings, vocab_size: int) -> dict[int, str]:
    """Special tokens spelled by stop strings, in the order of these."""
    if not settings.stop_strings:
        return {}
    special = {tokenizer.token(token): token for token in sorted(tokenizer.special_ids) if token < vocab_size}
    return {special[stop]: stop for stop in settings.stop_strings if stop in special}


def _stream_maker(tokenizer: Tokenizer, ids: list[int], settings: Settings) -> Callable[[], TextStream]:
    """A factory of text streams for the continuations of one prompt."""
    tail = ids[-max(PROMPT_TAIL, *(len(stop.encode()) for stop in settings.stop_strings), 0) :]
    stops = None
    if settings.stop_strings:
        stops = StopStrings(settings.stop_strings, tokenizer.decode(tail), settings.include_stop)
    skip = settings.skip_special_tokens
    prompt = tokenizer.decode(ids, skip_special_tokens=skip) if settings.echo else ""
    hidden = tokenizer.special_ids if skip else tokenizer.special_ids.intersection(settings.eos_token_ids)

    def make() -> TextStream:
        return TextStream(tokenizer.stream(tail, hidden), copy.copy(stops), prompt)  # the copies share the trie

    return make
