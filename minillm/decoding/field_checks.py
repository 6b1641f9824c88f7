"""Checks of a request's fields against each other, for requests that ask for more than greedy search or sampling.

`searches.py` has those of search strategies, which exclude each other.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ParameterError, shown
from .fields import GUIDES
from .searches import ContradictionError, check_searches

SYNONYMS = {
    ("max_new_tokens", "max_length"): " are two names of one limit: leave one of them out",
    ("min_new_tokens", "min_length"): " are two names of one limit: leave one of them out",
    GUIDES: ": a text has at most one guide; leave one of them out",
}
"""Exclusive fields -> end of the error message about two of them."""


def check_synonyms(given: Mapping[str, object]) -> None:
    """A request sets one name of each thing; the first of a checkpoint's names counts.

    Args:
        given: the fields that the user and the checkpoint set

    Raises:
        ContradictionError: two names of one thing are set.
    """
    for names, end in SYNONYMS.items():
        several = [name for name in names if name in given]
        if len(several) > 1:
            both = " and ".join(f"{name}={shown(given[name])}" for name in several[:2])
            raise ContradictionError(both + end, *reversed(several))


def check_together(
    user: Mapping[str, object], given: Mapping[str, object], resolved: dict[str, Any], vocab_size: int
) -> None:
    """Check the values of all fields against each other; what the checkpoint sets without effect is dropped.

    Args:
        user: the fields that the user set
        given: these, and the checkpoint's
        resolved: every field
        vocab_size: number of tokens that the model scores

    Raises:
        ContradictionError: fields contradict each other.
        ParameterError: the user set a field without effect, or token ids outside the vocabulary.
    """
    check_searches(user, given, resolved)
    if resolved["samplers"]:
        from .sampler_order import check_order  # seldom needed

        check_order(given, resolved)
    _check_token_ids(user, resolved, vocab_size)
    _check_end(user, resolved)
    _check_results(user, resolved, vocab_size)


def _check_token_ids(user: Mapping[str, object], resolved: dict[str, Any], vocab_size: int) -> None:
    """Token ids are in the vocabulary and do not forbid all of it; a checkpoint's other ids are dropped."""

    def keep(name: str, ids_of: Callable[[Any], tuple[int, ...]] = lambda token: (token,)) -> None:
        entries = []
        for entry in resolved[name]:
            outside = [token for token in ids_of(entry) if not 0 <= token < vocab_size]
            if outside and name in user:
                raise ParameterError(f"{name}: {outside[0]} is not in the vocabulary of {vocab_size} tokens")
            entries += [] if outside else [entry]
        resolved[name] = tuple(entries)

    for name in ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        keep(name)
    keep("sequence_bias", lambda pair: pair[0])
    keep("bad_words_ids", lambda word: word)
    keep("force_words_ids", lambda alternatives: sum(alternatives, ()))
    for name in ("forced_bos_token_id", "decoder_start_token_id"):
        token = resolved[name]
        if token is not None and token >= vocab_size:
            message = f"{name}: {token} is not in the vocabulary of {vocab_size} tokens"
            raise ContradictionError(message, name)

    ends = {(token,) for token in resolved["eos_token_id"]}
    words = tuple(word for word in resolved["bad_words_ids"] if word not in ends)
    if resolved["bad_words_ids"] and not words and "bad_words_ids" in user:
        raise ParameterError(
            f"bad_words_ids={shown(user['bad_words_ids'])} has no effect: eos_token_id is not forbidden by it;"
            " use suppress_tokens or min_new_tokens"
        )
    resolved["bad_words_ids"] = words  # as in transformers, these alone do not forbid the end
    forbidden = {*resolved["suppress_tokens"], *(word[0] for word in words if len(word) == 1)}
    forbidden |= {ids[0] for ids, bias in resolved["sequence_bias"] if len(ids) == 1 and bias == -math.inf}
    if len(forbidden) == vocab_size:
        raise ParameterError("suppress_tokens, bad_words_ids and sequence_bias leave no token of the vocabulary")


def _check_end(user: Mapping[str, object], resolved: Mapping[str, Any]) -> None:
    """The text can end, within limits that leave room for the user's minimum."""
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
            raise ParameterError(f"min_new_tokens={least} is more than the longest guided_choice can have ({longest})")


def _check_results(user: Mapping[str, object], resolved: dict[str, Any], vocab_size: int) -> None:
    """There are as many results, and log-probabilities of each token, as asked for."""
    count, num_beams = resolved["num_return_sequences"], resolved["num_beams"]
    another = resolved["strategy"] is not None and "num_return_sequences" in user  # it says whether it obeys
    if count > num_beams and (num_beams > 1 or not resolved["do_sample"]) and not another:
        raise ContradictionError(
            f"num_return_sequences={count} is more than num_beams={num_beams}: there are no more results than beams",
            "num_return_sequences",
            advice="raise num_beams, or set do_sample=True and leave num_beams out",
        )
    count = resolved["top_logprobs"]
    if count > vocab_size:
        raise ParameterError(f"top_logprobs={count} is more than the vocabulary has tokens ({vocab_size})")
    if count > 0 and user.get("logprobs") is False:
        raise ParameterError(f"top_logprobs={count} has no effect with logprobs=False: leave one of them out")
    resolved["logprobs"] = resolved["logprobs"] or count > 0
