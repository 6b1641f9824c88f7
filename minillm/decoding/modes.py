"""Strategies that exclude each other, and the further fields that each of them requires."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ParameterError
from .fields import RULES, SEARCHES, read_field


def settle_groups(values: dict[str, Any], said: Mapping[str, object], inherited: Mapping[str, object]) -> None:
    """Check diverse beam search: equal groups, no sampling, a diversity penalty."""
    groups, num_beams = values["num_beam_groups"], values["num_beams"]
    if groups == 1:
        return
    _give_way("num_beam_groups", ("do_sample",), values, said)
    contradiction = None
    if num_beams % groups:
        contradiction = f"num_beam_groups={groups} does not divide num_beams={num_beams}: choose one that does"
    elif values["do_sample"]:
        contradiction = f"num_beam_groups={groups} with do_sample=True: groups of beams do not sample; leave one out"
    elif not (said.get("diversity_penalty") or inherited.get("diversity_penalty")):
        contradiction = f"num_beam_groups={groups} needs a diversity_penalty above 0: without one all groups are equal"
    if contradiction is not None:
        _refuse_if_said("num_beam_groups", contradiction, values, said)


def settle_contrastive(values: dict[str, Any], said: Mapping[str, object], inherited: Mapping[str, object]) -> None:
    """Check contrastive search: needs top_k, and excludes the other strategies."""
    alpha = values["penalty_alpha"] = read_field("penalty_alpha", said, inherited)
    if alpha == 0.0:
        return
    _give_way("penalty_alpha", ("do_sample", "num_beams", "num_beam_groups"), values, said)
    contradiction = None
    top_k = read_field("top_k", said, inherited) if "top_k" in said or "top_k" in inherited else None
    if values["do_sample"]:
        contradiction = f"penalty_alpha={alpha} with do_sample=True: contrastive search does not sample; leave one out"
    elif values["num_beams"] > 1:
        contradiction = f"penalty_alpha={alpha} with num_beams={values['num_beams']}: leave one of them out"
    elif top_k is None or top_k < 2:
        found = "none is set" if top_k is None else f"found {top_k}"
        contradiction = f"penalty_alpha={alpha} needs top_k, the number of candidates, of at least 2; {found}"
    if contradiction is None:
        values["top_k"] = top_k
    else:
        _refuse_if_said("penalty_alpha", contradiction, values, said)


def settle_search(values: dict[str, Any], said: Mapping[str, object], inherited: Mapping[str, object]) -> None:
    """Settle on at most one search strategy. The user's fields and the engine's models win over the checkpoint.

    Raises:
        ParameterError: two are asked for.
    """
    if values["draft"]:
        values["num_assistant_tokens"] = read_field("num_assistant_tokens", said, inherited)
    chosen = [name for name in SEARCHES if (values[name] > 1 if name == "num_beams" else values.get(name))]
    for name in list(chosen):
        if len(chosen) > 1 and name not in said and name in inherited and name != "num_assistant_tokens":
            values[name] = RULES[name].default
            chosen.remove(name)
    if len(chosen) > 1:
        first, second = (f"{name}={values[name]}" for name in chosen[:2])
        raise ParameterError(
            f"{first} and {second} each say how tokens are found: {SEARCHES[chosen[0]]}, or {SEARCHES[chosen[1]]}"
        )


def _give_way(name: str, others: Sequence[str], values: dict[str, Any], said: Mapping[str, object]) -> None:
    """Drop the checkpoint's strategies in favour of the one that the user names."""
    if name in said:
        values.update({other: RULES[other].default for other in others if other not in said})


def _refuse_if_said(name: str, contradiction: str, values: dict[str, Any], said: Mapping[str, object]) -> None:
    """Raise for a contradicting field set by the user; reset it to its default if the checkpoint set it."""
    if name in said:
        raise ParameterError(contradiction)
    values[name] = RULES[name].default
