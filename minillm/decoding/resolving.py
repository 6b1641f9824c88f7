"""Resolution of a GenerationConfig into Settings: every field is decided and checked, alone and against the others."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import ParameterError, shown
from .fields import MODELS, NEEDS, RULES, read_field
from .modes import settle_contrastive, settle_groups, settle_search
from .parameters import GenerationConfig, Settings
from .settling import check_guide, settle_guides, settle_mirostat, settle_tokens


def resolve(
    config: GenerationConfig,
    defaults: Mapping[str, object],
    *,
    vocab_size: int,
    eos_token_id: int | Sequence[int] | None,
    models: Collection[str] = (),
) -> Settings:
    """Resolve every field.

    Args:
        config: the user's fields.
        defaults: the checkpoint's fields, from `read_generation_config`.
        vocab_size: number of tokens that the model scores.
        eos_token_id: of the model's own configuration; `config` and `defaults` take precedence.
        models: which of "draft" and "amateur" the engine has.

    Raises:
        ParameterError: a field has the wrong type or value, cannot have an effect, or contradicts another. max_length
            together with max_new_tokens is such a contradiction (transformers warns and ignores max_length); either
            replaces both of the checkpoint's. The same holds for the minima.
    """
    said = {name: value for name in RULES if (value := getattr(config, name)) is not None}
    inherited = {"eos_token_id": eos_token_id} | {k: v for k, v in defaults.items() if v is not None}
    _settle_pair("max_new_tokens", "max_length", said, inherited)
    _settle_pair("min_new_tokens", "min_length", said, inherited)
    settle_guides(said, inherited)
    values: dict[str, Any] = {
        name: name in models if name in MODELS else read_field(name, said, inherited)
        for name in NEEDS
        if name in MODELS or RULES[name].needs is None
    }
    settle_groups(values, said, inherited)
    settle_contrastive(values, said, inherited)
    settle_search(values, said, inherited)
    for name, rule in RULES.items():
        if name in values:
            continue
        if rule.needs is None or NEEDS[rule.needs].met(values[rule.needs]):
            values[name] = read_field(name, said, inherited)
        elif name in said:
            need = NEEDS[rule.needs].words
            raise ParameterError(
                f"{name}={shown(said[name])} has no effect without {need}: set that, or leave {name} out"
            )
        else:
            values[name] = rule.default
    _settle_end(values, said, vocab_size)
    check_guide(values, said)
    _settle_results(values, said, vocab_size)
    settle_tokens(values, said, vocab_size)
    settle_mirostat(values, said)
    if values["seed"] is None:
        values["seed"] = int.from_bytes(os.urandom(8), "little") if values["do_sample"] else 0
    if not values.pop("draft"):
        values["num_assistant_tokens"] = 0
    return Settings(eos_token_ids=values.pop("eos_token_id"), **values, explicit=frozenset(said))


def _settle_pair(first: str, second: str, said: Mapping[str, object], inherited: dict[str, Any]) -> None:
    """Settle two names of one limit: one set by the user replaces both of the checkpoint's; of these the first wins."""
    if first in said and second in said:
        both = f"{first}={shown(said[first])} and {second}={shown(said[second])}"
        raise ParameterError(f"{both} are two names of one limit: leave one of them out")
    if first in said or second in said:
        inherited.pop(first, None)
    if first in said or second in said or first in inherited:
        inherited.pop(second, None)


def _settle_end(values: dict[str, Any], said: Mapping[str, object], vocab_size: int) -> None:
    """Settle end-of-sequence tokens and length limits."""
    outside = [token for token in values["eos_token_id"] if not 0 <= token < vocab_size]
    if outside and "eos_token_id" in said:
        raise ParameterError(f"eos_token_id: {outside[0]} is not in the vocabulary of {vocab_size} tokens")
    values["eos_token_id"] = tuple(token for token in values["eos_token_id"] if token not in outside)

    if values["max_new_tokens"] is None and values["max_length"] is None:
        values["max_new_tokens"] = 20
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        if least not in said or values[least] == 0:
            continue
        if not values["eos_token_id"]:
            raise ParameterError(f"{least}={values[least]} has no effect without eos_token_id: nothing to hold back")
        if values[most] is not None and values[least] > values[most]:
            raise ParameterError(f"{least}={values[least]} is more than {most}={values[most]}")


def _settle_results(values: dict[str, Any], said: Mapping[str, object], vocab_size: int) -> None:
    """Settle the number of results and the log-probabilities returned with them."""
    count, num_beams = values["num_return_sequences"], values["num_beams"]
    if count > num_beams and (num_beams > 1 or not values["do_sample"]):
        if "num_return_sequences" in said:
            raise ParameterError(
                f"num_return_sequences={count} is more than num_beams={num_beams}: there are no more results than"
                " beams; raise num_beams, or set do_sample=True and leave num_beams out"
            )
        values["num_return_sequences"] = 1

    count = values["top_logprobs"]
    if count > vocab_size:
        raise ParameterError(f"top_logprobs={count} is more than the vocabulary has tokens ({vocab_size})")
    if count > 0 and said.get("logprobs") is False:
        raise ParameterError(f"top_logprobs={count} has no effect with logprobs=False: leave one of them out")
    values["logprobs"] = values["logprobs"] or count > 0
