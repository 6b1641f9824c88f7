"""The search strategies: which fields select them, and which of these exclude each other."""

from collections.abc import Mapping
from typing import Any

from ..errors import shown
from .fields import FIELDS, GUIDES
from .settings import is_on

SEARCHES = {
    "num_beams": "set num_beams=1",
    "guidance_scale": "leave guidance_scale out",
    "dola_layers": "leave dola_layers out",
    "penalty_alpha": "leave penalty_alpha out",
    "prompt_lookup_num_tokens": "leave prompt_lookup_num_tokens out",
    "lookahead_window": "leave lookahead_window out",
    "num_assistant_tokens": "set num_assistant_tokens=0 to leave the draft model out",
    "num_particles": "leave num_particles out",
    "amateur": "use an engine without an amateur",
    "strategy": "leave strategy out",
}
"""Exclusive search strategies (a request has at most one) -> how to leave each out."""

FILTERS = (
    "top_h",
    "top_n_sigma",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "xtc_probability",
    "samplers",
)

NO_FILTER = {name: FIELDS[name].default for name in FILTERS} | {"top_k": 0}
"""Fields that Mirostat replaces -> the value without effect."""


class ContradictionError(Exception):
    """Fields contradict each other; the first of `fields` that is the checkpoint's gives way."""

    def __init__(self, message: str, *fields: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.fields, self.advice = fields, advice


def check_searches(user: Mapping[str, object], given: Mapping[str, object], resolved: dict[str, Any]) -> None:
    """Check that a request has one search, with what it needs; Mirostat's filters lose their effect.

    Args:
        user: the fields that the user set
        given: these, and the checkpoint's
        resolved: every field

    Raises:
        ContradictionError: fields contradict each other.
    """
    _check_contrastive_search(given, resolved)
    _check_exclusive(resolved)
    _check_decoder_only(resolved)
    _check_groups(resolved)
    _check_constraints(resolved)
    _check_particles(resolved)
    _check_mirostat(user, resolved)


def _searches(resolved: Mapping[str, Any]) -> list[str]:
    """Names of SEARCHES that are on."""
    return [name for name in SEARCHES if is_on(name, resolved[name])]


def _check_contrastive_search(given: Mapping[str, object], resolved: Mapping[str, Any]) -> None:
    """Contrastive search chooses among top_k tokens, without sampling and without beams."""
    alpha, num_beams = resolved["penalty_alpha"], resolved["num_beams"]
    if not alpha:
        return
    if resolved["do_sample"]:
        message = f"penalty_alpha={alpha} with do_sample=True: contrastive search does not sample; leave one out"
        raise ContradictionError(message, "penalty_alpha", "do_sample")
    if num_beams > 1:
        message = f"penalty_alpha={alpha} with num_beams={num_beams}: leave one of them out"
        raise ContradictionError(message, "penalty_alpha", "num_beams")
    top_k = resolved["top_k"] if "top_k" in given else 0
    if top_k < 2:
        actual = f"found {top_k}" if "top_k" in given else "none is set"
        message = f"penalty_alpha={alpha} needs top_k, the number of candidates, of at least 2; {actual}"
        raise ContradictionError(message, "penalty_alpha")


def _check_exclusive(resolved: Mapping[str, Any]) -> None:
    """At most one strategy that excludes others. The engine's models win over the checkpoint's fields."""
    names = _searches(resolved)
    if {"num_beams", "guidance_scale"} <= {*names}:  # beams by the scores of guidance
        names.remove("num_beams" if len(names) > 2 else "guidance_scale")
    if len(names) > 1:
        both = " and ".join(f"{name}={resolved[name]}" for name in names[:2])
        leave = ", or ".join(SEARCHES[name] for name in names[:2])
        raise ContradictionError(f"{both} each select a strategy, and a request has one: {leave}", *names)


def _check_decoder_only(resolved: Mapping[str, Any]) -> None:
    """Classifier-free guidance and DoLa are of decoders; the first goes with plain beams."""
    for name in ("guidance_scale", "dola_layers"):
        if resolved["encoder"] and is_on(name, resolved[name]):
            message = f"{name}={shown(resolved[name])} is not offered with an encoder-decoder: leave it out"
            raise ContradictionError(message, name)
    scale, groups = resolved["guidance_scale"], resolved["num_beam_groups"]
    if scale != 1 and groups > 1:
        message = f"guidance_scale={scale:g} with num_beam_groups={groups}: leave one of them out"
        raise ContradictionError(message, "guidance_scale", "num_beam_groups")


def _check_groups(resolved: Mapping[str, Any]) -> None:
    """Groups of beams are equally large, do not sample, and have a penalty."""
    groups, num_beams = resolved["num_beam_groups"], resolved["num_beams"]
    if groups == 1:
        return
    if num_beams % groups:
        message = f"num_beam_groups={groups} does not divide num_beams={num_beams}: choose one that does"
        raise ContradictionError(message, "num_beam_groups")
    if resolved["do_sample"]:
        message = f"num_beam_groups={groups} with do_sample=True: groups of beams do not sample; leave one out"
        raise ContradictionError(message, "num_beam_groups", "do_sample")
    if resolved["diversity_penalty"] == 0.0:
        message = f"num_beam_groups={groups} needs a diversity_penalty above 0: without one all groups are equal"
        raise ContradictionError(message, "num_beam_groups")


def _check_constraints(resolved: Mapping[str, Any]) -> None:
    """Beams with constraints do not sample, and have neither groups nor guidance."""
    for name in ("constraints", "force_words_ids", "force_words"):
        for other, off in (("do_sample", False), ("num_beam_groups", 1), ("guidance_scale", 1)):
            if resolved[name] and resolved[other] != off:
                message = f"{name} with {other}={resolved[other]}: beams with constraints are plain ones; leave one out"
                raise ContradictionError(message, name, other)


def _check_particles(resolved: Mapping[str, Any]) -> None:
    """Particles have a potential or a guide, and no fewer of them come back than are asked for."""
    count, returned = resolved["num_particles"], resolved["num_return_sequences"]
    if count and resolved["potential"] is None and all(resolved[name] is None for name in GUIDES):
        message = f"num_particles={count} needs a potential or a guide, which weigh the texts: set one, or leave it out"
        raise ContradictionError(message, "num_particles")
    if count and returned > count:
        message = f"num_return_sequences={returned} is more than num_particles={count}: there are no more results"
        raise ContradictionError(message, "num_return_sequences", advice="raise num_particles")


def _check_mirostat(user: Mapping[str, object], resolved: dict[str, Any]) -> None:
    """Mirostat draws one token at a time and replaces the filters."""
    if not resolved["mirostat"]:
        return
    filters = [name for name in NO_FILTER if name in user and resolved[name] != NO_FILTER[name]]
    filters += ["watermarking_config"] if resolved["watermarking_config"] is not None else []
    for name in [*filters, *reversed(_searches(resolved))]:  # beams last: they give way to Mirostat
        raise ContradictionError(
            f"{name}={shown(resolved[name])} with mirostat=2: Mirostat draws one token at a time, by a rule of"
            f" its own; leave {name} or mirostat out",
            *(("num_beams", "mirostat") if name == "num_beams" else ("mirostat", name)),
        )
    resolved |= NO_FILTER
