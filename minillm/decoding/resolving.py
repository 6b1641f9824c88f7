"""Resolution of a GenerationConfig into Settings, and selection of the strategy that these ask for.

A field is decided by the first that sets it: the user, the checkpoint's generation_config.json, the default. Two
fields of the user that contradict each other are an error; a field of the checkpoint gives way to the user's.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ParameterError, shown
from .settings import FIELDS, GUIDES, MODELS, NEEDS, GenerationConfig, Settings
from .values import RefusedError

if TYPE_CHECKING:
    from .strategy import Strategy


class Choice(NamedTuple):
    """A strategy that a field or an additional model selects."""

    module: str
    kind: str
    leave: str | None = None
    """How a user does without it, if it excludes the others that have this; else it has a rule of its own"""


STRATEGIES = {
    "do_sample": Choice("sampling", "Sampling"),
    "mirostat": Choice("mirostat", "Mirostat"),
    "num_beams": Choice("beam", "BeamSearch", "set num_beams=1"),
    "num_beam_groups": Choice("beam", "DiverseBeamSearch"),
    "penalty_alpha": Choice("contrastive", "ContrastiveSearch", "leave it out"),
    "prompt_lookup_num_tokens": Choice("speculative", "PromptLookup", "leave it out"),
    "lookahead_window": Choice("lookahead", "Lookahead", "leave it out"),
    "num_assistant_tokens": Choice(
        "speculative", "SpeculativeDecoding", "set num_assistant_tokens=0 to leave the draft model out"
    ),
    "amateur": Choice("contrastive", "ContrastiveDecoding", "use an engine without an amateur"),
}
"""Field or model -> the strategy that it selects. The last one switched on counts; without any it is greedy search."""

SEARCHES = tuple(name for name, choice in STRATEGIES.items() if choice.leave is not None)
"""Those of which a request has at most one."""

SYNONYMS = (
    (("max_new_tokens", "max_length"), " are two names of one limit: leave one of them out"),
    (("min_new_tokens", "min_length"), " are two names of one limit: leave one of them out"),
    (GUIDES, ": one text has one guide; leave one of them out"),
)
"""Fields of which a request has at most one, and the end of the error if it has two."""

FILTERS = ("top_h", "top_n_sigma", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
NO_FILTER = {name: FIELDS[name].default for name in FILTERS} | {"top_k": 0}
"""Fields that Mirostat replaces -> the value without effect."""


def is_on(name: str, value: Any) -> bool:
    """True if a value of a field, or of whether a model is loaded, switches something on."""
    return bool(value > 1 if name in ("num_beams", "num_beam_groups") else value)


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
        checkpoint: the fields of its generation_config.json.
        vocab_size: number of tokens that the model scores.
        eos_token_id: of the model's own configuration; `config` and `checkpoint` take precedence.
        models: which of "draft" and "amateur" the engine has.

    Raises:
        ParameterError: a field has the wrong type or value, cannot have an effect, or contradicts another. max_length
            together with max_new_tokens is such a contradiction (transformers warns and ignores max_length); either
            replaces both of the checkpoint's. The same holds for the minima.
    """
    given = {name: value for name, value in checkpoint.items() if value is not None}
    resolution = _Resolution(config, {"eos_token_id": eos_token_id} | given, models)
    resolution.choose_synonyms()
    resolution.check_contrastive_search()
    resolution.choose_search()
    resolution.check_groups()
    resolution.check_mirostat()
    resolution.read_rest()
    resolution.check_vocabulary(vocab_size)
    resolution.check_end()
    resolution.check_results(vocab_size)
    return resolution.settings()


class _Resolution:
    """The fields of one request while they are resolved; the methods run in their order."""

    def __init__(self, config: GenerationConfig, checkpoint: Mapping[str, object], models: Collection[str]) -> None:
        self.user = {name: value for name in FIELDS if (value := getattr(config, name)) is not None}
        self.checkpoint = {k: v for k, v in checkpoint.items() if k in FIELDS and v is not None}
        self.resolved: dict[str, Any] = {model: model in models for model in MODELS}

    def value(self, name: str) -> Any:
        """The value of a field by precedence, checked on its own."""
        setting = FIELDS[name]
        value = self.user.get(name, self.checkpoint.get(name))
        if value is None:
            return setting.default
        try:
            return setting.read(value)
        except ValueError as error:
            origin = "" if name in self.user else " (from the checkpoint)"
            reason = str(error) if isinstance(error, RefusedError) else f"expected {setting.read.expected}"
            raise ParameterError(f"{name}={shown(value)}{origin}: {reason}") from None

    def read(self, *names: str) -> None:
        """Resolve fields to their values by precedence."""
        self.resolved.update({name: self.value(name) for name in names})

    def give_way(self, name: str) -> None:
        """Reset a field to its default unless the user set it."""
        if name not in self.user:
            self.resolved[name] = FIELDS[name].default

    def refuse(self, name: str, contradiction: str) -> None:
        """Raise if the user set the field; otherwise it gives way."""
        if name in self.user:
            raise ParameterError(contradiction)
        self.give_way(name)

    def searches(self) -> list[str]:
        """Those of SEARCHES that are on."""
        return [name for name in SEARCHES if is_on(name, self.resolved.get(name, 0))]

    def choose_synonyms(self) -> None:
        """Of several names of one thing keep the user's, or the first of the checkpoint's."""
        for names, sentence in SYNONYMS:
            given = [name for name in names if name in self.user]
            if len(given) > 1:
                raise ParameterError(" and ".join(f"{n}={shown(self.user[n])}" for n in given[:2]) + sentence)
            inherited = [name for name in names if name in self.checkpoint]
            for name in inherited if given else inherited[1:]:
                del self.checkpoint[name]

    def check_contrastive_search(self) -> None:
        """Contrastive search chooses among top_k tokens, without sampling and without beams."""
        self.read("do_sample", "num_beams", "penalty_alpha")
        alpha = self.resolved["penalty_alpha"]
        if alpha == 0.0:
            return
        if "penalty_alpha" in self.user:
            self.give_way("do_sample")
            self.give_way("num_beams")
        num_beams = self.resolved["num_beams"]
        top_k = self.value("top_k") if "top_k" in self.user or "top_k" in self.checkpoint else None
        if self.resolved["do_sample"]:
            reason = " with do_sample=True: contrastive search does not sample; leave one out"
        elif num_beams > 1:
            reason = f" with num_beams={num_beams}: leave one of them out"
        elif top_k is None or top_k < 2:
            found = "none is set" if top_k is None else f"found {top_k}"
            reason = f" needs top_k, the number of candidates, of at least 2; {found}"
        else:
            return
        self.refuse("penalty_alpha", f"penalty_alpha={alpha}{reason}")

    def choose_search(self) -> None:
        """Keep at most one strategy that excludes others. The user's and the engine's models win over the checkpoint's.

        Raises:
            ParameterError: two are asked for.
        """
        self.read("prompt_lookup_num_tokens", "lookahead_window")
        if self.resolved["draft"]:
            self.read("num_assistant_tokens")
        for name in self.searches():
            if len(self.searches()) > 1 and name in self.checkpoint and name != "num_assistant_tokens":
                self.give_way(name)
        if len(chosen := self.searches()) > 1:
            first, second = (f"{name}={self.resolved[name]}" for name in chosen[:2])
            leave = [STRATEGIES[name].leave for name in chosen[:2]]
            raise ParameterError(f"{first} and {second} each say how tokens are found: {leave[0]}, or {leave[1]}")

    def check_groups(self) -> None:
        """Groups of beams are equally large, do not sample, and have a penalty."""
        self.read("num_beam_groups")
        groups, num_beams = self.resolved["num_beam_groups"], self.resolved["num_beams"]
        if groups == 1:
            return
        if "num_beam_groups" in self.user:
            self.give_way("do_sample")
        if num_beams % groups:
            reason = f" does not divide num_beams={num_beams}: choose one that does"
        elif self.resolved["do_sample"]:
            reason = " with do_sample=True: groups of beams do not sample; leave one out"
        elif "diversity_penalty" not in self.user and not self.checkpoint.get("diversity_penalty"):
            reason = " needs a diversity_penalty above 0: without one all groups are equal"
        else:
            return
        self.refuse("num_beam_groups", f"num_beam_groups={groups}{reason}")

    def check_mirostat(self) -> None:
        """Mirostat draws one token at a time and replaces the filters."""
        if not (self.resolved["do_sample"] and self.value("mirostat")):
            return
        others = [name for name in NO_FILTER if name in self.user and self.value(name) != NO_FILTER[name]]
        others += [name for name in self.searches() if name != "num_beams" or name in self.user]
        if not others:
            self.resolved |= NO_FILTER | {"num_beams": 1}
        elif any(name.startswith("mirostat") for name in self.user):
            value = self.resolved[others[0]] if others[0] in MODELS else self.value(others[0])
            raise ParameterError(
                f"{others[0]}={shown(value)} with mirostat=2: Mirostat draws one token at a time, by a rule of its own;"
                f" leave {others[0]} or mirostat out"
            )
        else:
            self.give_way("mirostat")

    def read_rest(self) -> None:
        """Read the fields that have an effect; the others get their defaults.

        Raises:
            ParameterError: the user set one without effect.
        """
        if self.resolved["penalty_alpha"]:
            self.read("top_k")
        for name, setting in FIELDS.items():
            if name in self.resolved:
                continue
            if setting.needs is None or is_on(setting.needs, self.resolved[setting.needs]):
                self.resolved[name] = self.value(name)
            elif name in self.user:
                given, need = shown(self.user[name]), NEEDS.get(setting.needs, setting.needs)
                raise ParameterError(f"{name}={given} has no effect without {need}: set that, or leave {name} out")
            else:
                self.resolved[name] = setting.default

    def check_vocabulary(self, vocab_size: int) -> None:
        """Token ids are in the vocabulary, and not all of it is forbidden; others of the checkpoint are dropped."""
        resolved = self.resolved

        def keep(name: str, ids_of: Callable[[Any], tuple[int, ...]] = lambda token: (token,)) -> None:
            kept = []
            for entry in resolved[name]:
                outside = [token for token in ids_of(entry) if not 0 <= token < vocab_size]
                if outside and name in self.user:
                    raise ParameterError(f"{name}: {outside[0]} is not in the vocabulary of {vocab_size} tokens")
                kept += [] if outside else [entry]
            resolved[name] = tuple(kept)

        for name in ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            keep(name)
        keep("sequence_bias", lambda pair: pair[0])
        keep("bad_words_ids", lambda word: word)
        name, token = "forced_bos_token_id", resolved["forced_bos_token_id"]
        if token is not None and token >= vocab_size:
            self.refuse(name, f"{name}: {token} is not in the vocabulary of {vocab_size} tokens")

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
        if len(forbidden) == vocab_size:
            raise ParameterError("suppress_tokens, bad_words_ids and sequence_bias leave no token of the vocabulary")

    def check_end(self) -> None:
        """The text can end, within limits that leave room for its minimum.

        Raises:
            ParameterError: it cannot, and the user set what prevents it, or what needs an end.
        """
        resolved, user = self.resolved, self.user
        if resolved["max_new_tokens"] is None and resolved["max_length"] is None:
            resolved["max_new_tokens"] = 20
        for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
            if least not in user or resolved[least] == 0:
                continue
            if not resolved["eos_token_id"]:
                raise ParameterError(
                    f"{least}={resolved[least]} has no effect without eos_token_id: nothing to hold back"
                )
            if resolved[most] is not None and resolved[least] > resolved[most]:
                raise ParameterError(f"{least}={resolved[least]} is more than {most}={resolved[most]}")
        name = "exponential_decay_length_penalty"
        if name in user and not resolved["eos_token_id"]:
            raise ParameterError(
                f"{name}={shown(user[name])} has no effect without eos_token_id: nothing to make likelier"
            )
        guide = next((name for name in GUIDES if resolved[name] is not None), None)
        if guide is not None and not resolved["eos_token_id"]:
            raise ParameterError(f"{guide} needs an eos_token_id: a token that says where the text ends")
        if guide == "guided_choice" and "min_new_tokens" in user:
            longest, least = max(len(text.encode()) for text in resolved[guide]), resolved["min_new_tokens"]
            if least > longest:
                raise ParameterError(
                    f"min_new_tokens={least} is more than the longest guided_choice can have ({longest})"
                )

    def check_results(self, vocab_size: int) -> None:
        """There are as many results, and log-probabilities of each token, as asked for."""
        resolved = self.resolved
        count, num_beams = resolved["num_return_sequences"], resolved["num_beams"]
        if count > num_beams and (num_beams > 1 or not resolved["do_sample"]):
            self.refuse(
                "num_return_sequences",
                f"num_return_sequences={count} is more than num_beams={num_beams}: there are no more results than"
                " beams; raise num_beams, or set do_sample=True and leave num_beams out",
            )
        count = resolved["top_logprobs"]
        if count > vocab_size:
            raise ParameterError(f"top_logprobs={count} is more than the vocabulary has tokens ({vocab_size})")
        if count > 0 and self.user.get("logprobs") is False:
            raise ParameterError(f"top_logprobs={count} has no effect with logprobs=False: leave one of them out")
        resolved["logprobs"] = resolved["logprobs"] or count > 0

    def settings(self) -> Settings:
        """The resolved settings, with a fresh seed if they sample without one."""
        resolved = self.resolved
        if resolved["seed"] is None:
            resolved["seed"] = int.from_bytes(os.urandom(8), "little") if resolved["do_sample"] else 0
        if not resolved.pop("draft"):
            resolved["num_assistant_tokens"] = 0
        return Settings(**resolved, explicit=frozenset(self.user))


def strategy_for(settings: Settings) -> "Strategy":
    """The strategy for a request.

    If one call serves several requests (`Strategy.shared`), those with equal settings get the same object; seed,
    lengths and text settings are handled per request and may differ. A request with user code or a guide gets its own
    object, so that a failure there does not affect others.

    Raises:
        ParameterError: a guide is combined with a strategy that does not choose token by token.
    """
    kind = strategy_class(settings)
    if kind.shared and not (settings.guide or settings.logits_processor or settings.prefix_allowed_tokens_fn):
        alike = replace(settings, seed=0, max_new_tokens=1, stop_strings=(), include_stop=False, echo=False)
        return _shared(kind, alike)
    strategy = kind(settings)
    if settings.guide is not None and not kind.guided:
        name = kind.__name__
        raise ParameterError(f"{settings.guide[0]} goes with greedy search, sampling and beam search, not with {name}")
    return strategy


@lru_cache(maxsize=64)
def _shared(kind: type["Strategy"], settings: Settings) -> "Strategy":
    return kind(settings)


def strategy_class(settings: Settings) -> type["Strategy"]:
    """The strategy class for the settings; its module is loaded on first use."""
    chosen = [choice for name, choice in STRATEGIES.items() if is_on(name, getattr(settings, name))]
    choice = chosen[-1] if chosen else Choice("sampling", "GreedySearch")
    kind: type[Strategy] = getattr(import_module(f".{choice.module}", __package__), choice.kind)
    return kind
