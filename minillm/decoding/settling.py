"""Checks of fields that depend on others: Mirostat, guides, and fields that hold token ids."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ParameterError, shown
from .fields import SEARCHES
from .guided import GUIDES

DRAFTED = "num_assistant_tokens"
"""A field without effect unless the engine has a draft model."""

TRUNCATION: dict[str, Any] = {
    "top_h": None,
    "top_n_sigma": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Filters replaced by Mirostat -> the value without effect."""


def settle_mirostat(values: dict[str, Any], said: Mapping[str, object]) -> None:
    """Settle Mirostat, which truncates by its own rule and draws one token at a time.

    Raises:
        ParameterError: the user sets it together with beams or another truncation.
    """
    if not values["mirostat"]:
        return
    others = [name for name, neutral in TRUNCATION.items() if name in said and values[name] != neutral]
    others += ["num_beams"] if "num_beams" in said and values["num_beams"] > 1 else []
    others += [
        name for name in SEARCHES if name != "num_beams" and values[name] and (name != DRAFTED or values["draft"])
    ]
    if others and any(name.startswith("mirostat") for name in said):
        raise ParameterError(
            f"{others[0]}={shown(values[others[0]])} with mirostat=2: Mirostat draws one token at a time, by a rule of"
            f" its own; leave {others[0]} or mirostat out"
        )
    if others:  # drop the checkpoint's Mirostat
        values["mirostat"] = 0
    else:
        values.update(TRUNCATION, num_beams=1)


def settle_guides(said: Mapping[str, object], inherited: dict[str, Any]) -> None:
    """Settle on one guide: the user's, or the checkpoint's first.

    Raises:
        ParameterError: the user sets two.
    """
    mine = [name for name in GUIDES if name in said]
    if len(mine) > 1:
        both = " and ".join(f"{name}={shown(said[name])}" for name in mine[:2])
        raise ParameterError(f"{both}: one text has one guide; leave one of them out")
    theirs = [name for name in GUIDES if name in inherited]
    for name in theirs if mine else theirs[1:]:
        del inherited[name]


def check_guide(values: Mapping[str, Any], said: Mapping[str, object]) -> None:
    """Check that a guided text can end.

    Raises:
        ParameterError: no token ends it, or it ends before the minimum that the user set.
    """
    name = next((name for name in GUIDES if values[name] is not None), None)
    if name is not None and not values["eos_token_id"]:
        raise ParameterError(f"{name} needs an eos_token_id: a token that says where the text ends")
    if name == "guided_choice" and "min_new_tokens" in said:
        longest = max(len(text.encode()) for text in values[name])
        if values["min_new_tokens"] > longest:
            raise ParameterError(
                f"min_new_tokens={values['min_new_tokens']} is more than the longest guided_choice can have ({longest})"
            )


def settle_tokens(values: dict[str, Any], said: Mapping[str, object], vocab_size: int) -> None:
    """Check that token ids are in the vocabulary and that a sequence can still end.

    Raises:
        ParameterError: a field set by the user has an id outside the vocabulary, or cannot have an effect.
    """

    def keep(name: str, ids_of: Callable[[Any], tuple[int, ...]]) -> None:
        """Refuse entries with an id outside the vocabulary; drop them if they come from the checkpoint."""
        kept = []
        for value in values[name]:
            outside = [token for token in ids_of(value) if token >= vocab_size]
            if outside and name in said:
                raise ParameterError(f"{name}: {outside[0]} is not in the vocabulary of {vocab_size} tokens")
            kept += [] if outside else [value]
        values[name] = tuple(kept)

    for name in ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        keep(name, lambda token: (token,))
    keep("sequence_bias", lambda pair: pair[0])
    keep("bad_words_ids", lambda word: word)
    beginning = values["forced_bos_token_id"]
    values["forced_bos_token_id"] = () if beginning is None else (beginning,)
    keep("forced_bos_token_id", lambda token: (token,))
    values["forced_bos_token_id"] = next(iter(values["forced_bos_token_id"]), None)
    _settle_end_tokens(values, said)
    forbidden = {*values["suppress_tokens"], *(word[0] for word in values["bad_words_ids"] if len(word) == 1)}
    forbidden |= {ids[0] for ids, bias in values["sequence_bias"] if len(ids) == 1 and bias == -math.inf}
    if len(forbidden) == vocab_size:
        raise ParameterError("suppress_tokens, bad_words_ids and sequence_bias leave no token of the vocabulary")


def _settle_end_tokens(values: dict[str, Any], said: Mapping[str, object]) -> None:
    """Settle fields that depend on the EOS tokens; as in transformers, bad_words_ids alone does not forbid those."""
    eos = values["eos_token_id"]
    words = tuple(word for word in values["bad_words_ids"] if not (len(word) == 1 and word[0] in eos))
    if values["bad_words_ids"] and not words and "bad_words_ids" in said:
        raise ParameterError(
            f"bad_words_ids={shown(said['bad_words_ids'])} has no effect: eos_token_id is not forbidden by it;"
            " use suppress_tokens or min_new_tokens"
        )
    values["bad_words_ids"] = words
    name = "exponential_decay_length_penalty"
    if name in said and not eos:
        raise ParameterError(f"{name}={shown(said[name])} has no effect without eos_token_id: nothing to make likelier")
