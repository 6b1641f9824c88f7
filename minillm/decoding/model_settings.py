"""Settings in terms of the model: texts of a request as its tokens, and names of layers as their numbers."""

from dataclasses import replace

from ..config import ModelConfig
from ..errors import ParameterError
from ..text.tokenizer import Tokenizer
from .classifier_free import negative_ids
from .constraints import phrases_of
from .dola import premature_layers
from .dry import with_breakers
from .settings import Settings
from .thinking import with_markers


def in_terms_of(settings: Settings, tokenizer: Tokenizer | None, config: ModelConfig) -> Settings:
    """The settings as strategies and processors of this model read them.

    Raises:
        ParameterError: a text needs a tokenizer, or has no tokens; a layer is none of the model's.
        PromptError: as of the negative prompt.
    """
    if settings.dry_multiplier:
        settings = with_breakers(settings, tokenizer)
    if settings.max_thinking_tokens is not None:
        settings = with_markers(settings, tokenizer, config.vocab_size)
    if settings.force_words:
        if tokenizer is None:
            raise ParameterError(
                "force_words needs a tokenizer, and this model has none: name one by Engine(tokenizer=...)"
            )
        phrases = phrases_of(settings.force_words, tokenizer, config.vocab_size)
        settings = replace(settings, force_words_ids=(*settings.force_words_ids, *phrases))
    if settings.negative_prompt is not None:
        settings = replace(settings, negative_prompt=negative_ids(settings.negative_prompt, tokenizer, config))
    if settings.dola_layers:
        settings = replace(settings, dola_layers=premature_layers(settings.dola_layers, config))
    return settings
