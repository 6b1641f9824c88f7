"""Resolution of a GenerationConfig into Settings, and selection of the strategy that these ask for.

A field is decided by the first that sets it: the user, the checkpoint (generation_config.json, without one
config.json), the default. If two fields contradict each other, one of the checkpoint's is dropped; if the user set
both, that is an error.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError, shown
from .fields import FIELDS, GUIDES, MODELS, NEEDS
from .searches import ContradictionError, check_searches
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
    "penalty_alpha": ("contrastive", "ContrastiveSearch"),
    "prompt_lookup_num_tokens": ("speculative", "PromptLookup"),
    "lookahead_window": ("lookahead", "Lookahead"),
    "num_assistant_tokens": ("speculative", "SpeculativeDecoding"),
    "amateur": ("contrastive", "ContrastiveDecoding"),
    "strategy": ("plugged_in", "PluggedIn"),
}
"""Field or additional model -> module and class of the strategy that it selects. The last one that is on counts."""

SYNONYMS = {
    ("max_new_tokens", "max_length"): " are two names of one limit: leave one of them out",
    ("min_new_tokens", "min_length"): " are two names of one limit: leave one of them out",
    GUIDES: ": a text has at most one guide; leave one of them out",
}
"""Exclusive fields -> end of the error message about two of them."""


def _depth(name: str) -> int:
    """The number of fields that a field needs, one through the other."""
    needs = FIELDS[name].needs
    return 1 + _depth(needs) if needs in FIELDS else 0


DEFAULTS = {name: setting.default for name, setting in FIELDS.items()}
READING_ORDER = sorted(FIELDS, key=_depth)
"""The fields, each after those that it needs."""


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
            return _Resolution(user, checkpoint, models, vocab_size).settings()
        except ContradictionError as error:
            dropped = next((name for name in error.fields if name in checkpoint), None)
            if dropped is None:
                raise ParameterError(str(error), field=error.fields[0], advice=error.advice) from None
            del checkpoint[dropped]


class _Resolution:
    """The values of one request's fields, and the checks of fields against each other."""

    def __init__(
        self, user: Mapping[str, object], checkpoint: Mapping[str, object], models: Collection[str], vocab_size: int
    ) -> None:
        self.user, self.given = user, {**checkpoint, **user}
        self.vocab_size = vocab_size
        self.resolved: dict[str, Any] = DEFAULTS | {model: model in models for model in MODELS}
        self.check_synonyms()
        for name in READING_ORDER:
            if name in self.given:
                self.read(name, self.given[name])
        if not self.resolved["draft"]:
            self.resolved["num_assistant_tokens"] = 0

    def settings(self) -> Settings:
        """Check the values against each other. Returns them, with a fresh seed for sampling without one."""
        if [name for name in STRATEGIES if name != "do_sample" and self.on(name)]:
            check_searches(self.user, self.given, self.resolved)
        if self.resolved["samplers"]:
            from .sampler_order import check_order  # seldom needed

            check_order(self.given, self.resolved)
        self.check_token_ids()
        self.check_end()
        self.check_results()
        resolved = self.resolved
        if resolved["seed"] is None:
            resolved["seed"] = int.from_bytes(os.urandom(8), "little") if resolved["do_sample"] else 0
        del resolved["encoder"], resolved["draft"]
        return Settings(**resolved, explicit=frozenset(self.user))

    def read(self, name: str, value: object) -> None:
        """Read a value that is set. One without effect is left at its default if the checkpoint sets it.

        Raises:
            ParameterError: the value is invalid, or the user set a field without effect.
        """
        need = FIELDS[name].needs
        if need is None or self.on(need) or (name == "top_k" and self.on("penalty_alpha")):
            self.resolved[name] = read_field(name, value, "" if name in self.user else " (from the checkpoint)")
        elif name in self.user:
            read_field(name, value)  # an invalid one is refused as such
            raise ParameterError(
                f"{name}={shown(value)} has no effect without {NEEDS.get(need, need)}: set that, or leave {name} out"
            )

    def on(self, name: str) -> bool:
        """True if a field has a value that switches something on, or if the engine has the model of this name."""
        return is_on(name, self.resolved[name])

    def check_synonyms(self) -> None:
        """A request sets one name of each thing; the first of a checkpoint's names counts."""
        for names, end in SYNONYMS.items():
            given = [name for name in names if name in self.given]
            if len(given) > 1:
                both = " and ".join(f"{name}={shown(self.given[name])}" for name in given[:2])
                raise ContradictionError(both + end, *reversed(given))

    def check_token_ids(self) -> None:
        """Token ids are in the vocabulary and do not forbid all of it; a checkpoint's other ids are dropped."""
        resolved = self.resolved

        def keep(name: str, ids_of: Callable[[Any], tuple[int, ...]] = lambda token: (token,)) -> None:
            entries = []
            for entry in resolved[name]:
                outside = [token for token in ids_of(entry) if not 0 <= token < self.vocab_size]
                if outside and name in self.user:
                    raise ParameterError(f"{name}: {outside[0]} is not in the vocabulary of {self.vocab_size} tokens")
                entries += [] if outside else [entry]
            resolved[name] = tuple(entries)

        for name in ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            keep(name)
        keep("sequence_bias", lambda pair: pair[0])
        keep("bad_words_ids", lambda word: word)
        keep("force_words_ids", lambda alternatives: sum(alternatives, ()))
        for name in ("forced_bos_token_id", "decoder_start_token_id"):
            token = resolved[name]
            if token is not None and token >= self.vocab_size:
                message = f"{name}: {token} is not in the vocabulary of {self.vocab_size} tokens"
                raise ContradictionError(message, name)

        ends = {(token,) for token in resolved["eos_token_id"]}
        words = tuple(word for word in resolved["bad_words_ids"] if word not in ends)
        if resolved["bad_words_ids"] and not words and "bad_words_ids" in self.user:
            raise ParameterError(
                f"bad_words_ids={shown(self.user['bad_words_ids'])} has no effect: eos_token_id is not forbidden by it;"
                " use suppress_tokens or min_new_tokens"
            )
        resolved["bad_words_ids"] = words  # as in transformers, these alone do not forbid the end
        forbidden = {*resolved["suppress_tokens"], *(word[0] for word in words if len(word) == 1)}
        forbidden |= {ids[0] for ids, bias in resolved["sequence_bias"] if len(ids) == 1 and bias == -math.inf}
        if len(forbidden) == self.vocab_size:
            raise ParameterError("suppress_tokens, bad_words_ids and sequence_bias leave no token of the vocabulary")

    def check_end(self) -> None:
        """The text can end, within limits that leave room for the user's minimum."""
        resolved, user = self.resolved, self.user
        if resolved["max_new_tokens"] is None and resolved["max_length"] is None:
            resolved["max_new_tokens"] = 20
        if resolved["max_new_tokens"] == 0 and not resolved["echo"]:
            advice = "raise it, or set echo=True for the prompt alone"
            raise ContradictionError("max_new_tokens=0 generates nothing", "max_new_tokens", advice=advice)
        for name, effect in (
            ("min_new_tokens", "hold back"),
            ("min_length", "hold back"),
            ("exponential_decay_length_penalty", "make likelier"),
        ):
            if name in user and resolved[name] != 0 and not resolved["eos_token_id"]:
                given = shown(user[name])
                raise ParameterError(f"{name}={given} has no effect without eos_token_id: nothing to {effect}")
        for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
            if least in user and resolved[most] is not None and resolved[least] > resolved[most]:
                raise ParameterError(f"{least}={resolved[least]} is more than {most}={resolved[most]}")
        guide = next((name for name in GUIDES if resolved[name] is not None), None)
        if guide is not None and not resolved["eos_token_id"]:
            raise ParameterError(f"{guide} needs an eos_token_id: a token that says where the text ends")
        if guide == "guided_choice" and "min_new_tokens" in user:
            longest, least = max(len(text.encode()) for text in resolved[guide]), resolved["min_new_tokens"]
            if least > longest:
                raise ParameterError(
                    f"min_new_tokens={least} is more than the longest guided_choice can have ({longest})"
                )

    def check_results(self) -> None:
        """There are as many results, and log-probabilities of each token, as asked for."""
        resolved = self.resolved
        count, num_beams = resolved["num_return_sequences"], resolved["num_beams"]
        another = resolved["strategy"] is not None and "num_return_sequences" in self.user  # it says whether it obeys
        if count > num_beams and (num_beams > 1 or not resolved["do_sample"]) and not another:
            raise ContradictionError(
                f"num_return_sequences={count} is more than num_beams={num_beams}: there are no more results than"
                " beams",
                "num_return_sequences",
                advice="raise num_beams, or set do_sample=True and leave num_beams out",
            )
        count = resolved["top_logprobs"]
        if count > self.vocab_size:
            raise ParameterError(f"top_logprobs={count} is more than the vocabulary has tokens ({self.vocab_size})")
        if count > 0 and self.user.get("logprobs") is False:
            raise ParameterError(f"top_logprobs={count} has no effect with logprobs=False: leave one of them out")
        resolved["logprobs"] = resolved["logprobs"] or count > 0


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
    kind: type[Strategy] = getattr(import_module(f".{module}", __package__), name)
    return kind
