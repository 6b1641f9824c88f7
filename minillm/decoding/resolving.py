"""Resolution of a GenerationConfig into Settings, and selection of the strategy that these ask for.

A field is decided by the first that sets it: the user, the checkpoint (generation_config.json, without one
config.json), the default. If two fields contradict each other, one of the checkpoint's is dropped; if the user set
both, that is an error.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError, shown
from .fields import FIELDS, MODELS, NEEDS
from .searches import ContradictionError
from .settings import GenerationConfig, Settings, is_on
from .values import RefusedError

if TYPE_CHECKING:
    from .strategy import Strategy

STRATEGIES = {
    "do_sample": ("sampling", "Sampling"),
    "mirostat": ("mirostat", "Mirostat"),
    "num_particles": ("monte_carlo", "MonteCarlo"),
    "num_beams": ("beam", "BeamSearch"),
    "num_beam_groups": ("beam", "DiverseBeamSearch"),
    "force_words_ids": ("constrained", "ConstrainedBeamSearch"),
    "force_words": ("constrained", "ConstrainedBeamSearch"),
    "constraints": ("constrained", "ConstrainedBeamSearch"),
    "guidance_scale": ("classifier_free", "ClassifierFreeGuidance"),
    "dola_layers": ("dola", "DoLa"),
    "penalty_alpha": ("contrastive", "ContrastiveSearch"),
    "prompt_lookup_num_tokens": ("speculative", "PromptLookup"),
    "lookahead_window": ("lookahead", "Lookahead"),
    "num_assistant_tokens": ("speculative", "SpeculativeDecoding"),
    "amateur": ("contrastive", "ContrastiveDecoding"),
    "strategy": ("plugged_in", "PluggedIn"),
}
"""Field or additional model -> module and class of the strategy that it selects. The last one that is on counts."""


def _depth(name: str) -> int:
    """The number of fields that a field needs, one through the other."""
    needs = FIELDS[name].needs
    return 1 + _depth(needs) if needs in FIELDS else 0


DEFAULTS = {name: setting.default for name, setting in FIELDS.items()}
READING_ORDER = sorted(FIELDS, key=_depth)
"""The fields, each after those that it needs."""
PLAIN = frozenset({"max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "seed", "eos_token_id"})
"""Fields that contradict none of each other, with a checkpoint's end-of-sequence tokens; `field_checks.py` has all"""


def read_field(name: str, value: object, origin: str = "") -> Any:
    """The value of a field as its type; `origin` stands in the error after the value.

    Raises:
        ParameterError: the field cannot have it.
    """
    reader = FIELDS[name].read
    try:
        return reader(value)
    except ValueError as error:
        reason = str(error) if isinstance(error, RefusedError) else f"expected {reader.expected}"
        problem = f"{name}={shown(value)}{origin}: {reason}"
        raise ParameterError(problem, field=name, advice=FIELDS[name].advice) from None


def resolve(
    config: GenerationConfig,
    checkpoint: Mapping[str, object],
    *,
    vocab_size: int,
    eos_token_id: int | Sequence[int] | None,
    models: Collection[str] = (),
) -> Settings:
    """Resolve every field.

    Args:
        config: the user's fields.
        checkpoint: the generation fields of the checkpoint.
        vocab_size: number of tokens that the model scores.
        eos_token_id: the model's own configuration's; `config` and `checkpoint` take precedence.
        models: which of "draft", "amateur" and "encoder" the engine has.

    Raises:
        ParameterError: a field has the wrong type or value, cannot have an effect, or contradicts another. max_length
            together with max_new_tokens is such a contradiction (transformers warns and ignores max_length); either
            replaces both of the checkpoint's. The same holds for the minima.
    """
    user = {name: value for name, value in vars(config).items() if value is not None}
    checkpoint = {"eos_token_id": eos_token_id} | {name: v for name, v in checkpoint.items() if v is not None}
    checkpoint = {n: v for n, v in checkpoint.items() if v is not None and n in FIELDS and n not in user}
    while True:
        try:
            return _resolved(user, {**checkpoint, **user}, models, vocab_size)
        except ContradictionError as error:
            dropped = next((name for name in error.fields if name in checkpoint), None)
            if dropped is None:
                raise ParameterError(str(error), field=error.fields[0], advice=error.advice) from None
            del checkpoint[dropped]


def _resolved(
    user: Mapping[str, object], given: Mapping[str, object], models: Collection[str], vocab_size: int
) -> Settings:
    """The settings of a request, with a fresh seed for sampling without one.

    Args:
        user: the fields that the user set
        given: these, and the checkpoint's
        models: as of `resolve`
        vocab_size: likewise

    Raises:
        ContradictionError: fields contradict each other.
        ParameterError: a value is invalid, or the user set a field without effect.
    """
    plain = PLAIN.issuperset(given) and "eos_token_id" not in user and not models
    if not plain:
        from .field_checks import check_synonyms  # most requests need none

        check_synonyms(given)
    resolved: dict[str, Any] = DEFAULTS | {model: model in models for model in MODELS}
    for name in READING_ORDER:
        if name in given:
            _read(name, given[name], user, resolved)
    if not resolved["draft"]:
        resolved["num_assistant_tokens"] = 0
    if resolved["max_new_tokens"] is None and resolved["max_length"] is None:
        resolved["max_new_tokens"] = 20
    if plain and resolved["max_new_tokens"]:
        resolved["eos_token_id"] = tuple([token for token in resolved["eos_token_id"] if 0 <= token < vocab_size])
    else:
        from .field_checks import check_together

        check_together(user, given, resolved, vocab_size)
    if resolved["seed"] is None:
        resolved["seed"] = int.from_bytes(os.urandom(8), "little") if resolved["do_sample"] else 0
    del resolved["encoder"], resolved["draft"]
    return Settings(**resolved, explicit=frozenset(user))


def _read(name: str, value: object, user: Mapping[str, object], resolved: dict[str, Any]) -> None:
    """Read a value that is set. One without effect is left at its default if the checkpoint sets it.

    Raises:
        ParameterError: the value is invalid, or the user set a field without effect.
    """
    need = FIELDS[name].needs
    if need is None or is_on(need, resolved[need]) or (name == "top_k" and resolved["penalty_alpha"]):
        resolved[name] = read_field(name, value, "" if name in user else " (from the checkpoint)")
    elif name in user:
        read_field(name, value)  # an invalid one is refused as such
        raise ParameterError(
            f"{name}={shown(value)} has no effect without {NEEDS.get(need, need)}: set that, or leave {name} out"
        )


def new_token_limit(settings: Settings, prompt_length: int) -> int:
    """Maximum number of tokens generated after a prompt of `prompt_length` tokens.

    Raises:
        ParameterError: max_length leaves no room for any, or a minimum that the user set cannot be reached.
    """
    limit: int
    if settings.max_new_tokens is not None:
        name, limit = f"max_new_tokens={settings.max_new_tokens}", settings.max_new_tokens
    else:
        name, limit = f"max_length={settings.max_length}", settings.max_length - prompt_length
    if limit < 1 and settings.max_new_tokens != 0:
        raise ParameterError(
            f"{name} leaves no room for new tokens: the prompt has {prompt_length}; raise it, or set max_new_tokens"
        )
    for minimum, value, least in (
        ("min_new_tokens", settings.min_new_tokens, settings.min_new_tokens),
        ("min_length", settings.min_length, settings.min_length - prompt_length),
    ):
        if least > limit and minimum in settings.explicit:
            raise ParameterError(
                f"{minimum}={value} cannot be reached: {name} allows {limit} new tokens after a prompt of"
                f" {prompt_length}"
            )
    return limit


def strategy_for(settings: Settings) -> "Strategy":
    """The strategy for a request.

    If one call serves several requests (`Strategy.shared`), those with equal settings get the same object; seed,
    lengths and text settings are handled per request and may differ. A request with user code gets its own object, so
    that a failure there does not affect others.

    Raises:
        ParameterError: a guide is combined with a strategy that does not choose token by token.
    """
    kind = strategy_class(settings)
    if kind.shared and not (settings.guide or settings.logits_processor or settings.prefix_allowed_tokens_fn):
        return _shared(
            kind,
            replace(
                settings,
                seed=0,
                max_new_tokens=1,
                stop_strings=(),
                stopping_criteria=(),
                include_stop=False,
                echo=False,
                decoder_prompt=None,
                decoder_start_token_id=None,
                negative_prompt=None,
            ),
        )
    strategy = kind(settings)
    if settings.guide is not None and not kind.guided:
        name = kind.__name__
        fitting = "greedy search, sampling, beam search and particles"
        raise ParameterError(f"{settings.guide[0]} goes with {fitting}, not with {name}")
    return strategy


@lru_cache(maxsize=64)
def _shared(kind: type["Strategy"], settings: Settings) -> "Strategy":
    return kind(settings)


def strategy_class(settings: Settings) -> type["Strategy"]:
    """The strategy class for the settings; its module is loaded on first use."""
    if settings.max_new_tokens == 0:
        from .scoring import Scoring

        return Scoring
    chosen = [name for name in STRATEGIES if is_on(name, getattr(settings, name))]
    module, name = STRATEGIES[chosen[-1] if chosen else "do_sample"]
    if chosen[-2:] == ["num_beams", "guidance_scale"]:
        name = "GuidanceBeamSearch"
    kind: type[Strategy] = getattr(import_module(f".{module}", __package__), name)
    return kind
