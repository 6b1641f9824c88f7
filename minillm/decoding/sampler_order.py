"""The order in which samplers change the scores, where a request gives one: their names, and what must be in it.

The names and the order `llama.cpp` are those of llama.cpp's option --samplers; its other names, its separator and its
letters are read too. What the samplers do stays as it is here: penalties, for example, count the whole text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import listed, shown
from .values import RefusedError, reader

TRANSFORMERS = (
    *("penalties", "dry", "temperature", "top_h", "top_n_sigma", "top_k", "top_p", "min_p", "typ_p"),
    *("epsilon_cutoff", "eta_cutoff", "xtc"),
)
LLAMA_CPP = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
ORDERS = {"transformers": TRANSFORMERS, "llama.cpp": LLAMA_CPP}
"""Orders that have a name"""
LETTERS = dict(zip("edskypmxt", LLAMA_CPP, strict=True))
OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p", "nucleus": "top_p", "temp": "temperature"}
FIELDS_OF = {name: (name,) for name in TRANSFORMERS} | {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "dry": ("dry_multiplier",),
    "typ_p": ("typical_p",),
    "xtc": ("xtc_probability",),
}
"""Sampler -> the fields that switch it on"""


@reader("names of samplers in order, such as ['top_k', 'top_p', 'temperature'], 'transformers' or 'llama.cpp'")
def sampler_names(value: object) -> tuple[str, ...]:
    """Values of samplers: names, a text of names with separators, llama.cpp's letters, or the name of an order."""
    if isinstance(value, str):
        if value in ORDERS:
            return ORDERS[value]
        words: Sequence[object] = [word for word in re.split(r"[;,\s]+", value) if word]
        if len(words) == 1 and not _known(words[0]) and LETTERS.keys() >= {*value}:
            words = [LETTERS[letter] for letter in value]
    elif isinstance(value, list | tuple):
        words = value
    else:
        raise ValueError
    names = []
    for word in words:
        name = _known(word)
        if name is None:
            raise RefusedError(f"{shown(word)} is no sampler: expected names of {listed(TRANSFORMERS)}")
        if name in names:
            raise RefusedError(f"{name} is there twice: leave one out")
        names.append(name)
    return tuple(names)


def _known(word: object) -> str | None:
    """The sampler that a word names."""
    name = word.replace("-", "_") if isinstance(word, str) else ""
    name = OTHER_NAMES.get(name, name)
    return name if name in TRANSFORMERS else None


def unnamed(samplers: Sequence[str]) -> list[tuple[str, str]]:
    """Fields of the samplers that an order leaves out, each with its sampler's name."""
    return [(field, name) for name in TRANSFORMERS if name not in samplers for field in FIELDS_OF[name]]


def check_order(given: Mapping[str, object], resolved: Mapping[str, Any]) -> None:
    """Check that an order names every sampler that a request sets.

    Args:
        given: the fields that the user and the checkpoint set
        resolved: every field

    Raises:
        ContradictionError: one is set and not in the order.
    """
    from .fields import FIELDS
    from .searches import ContradictionError

    for field, name in unnamed(resolved["samplers"]):
        off = 0 if field == "top_k" else FIELDS[field].default
        if field in given and resolved[field] != off:
            raise ContradictionError(
                f"{field}={shown(resolved[field])} has no effect: samplers does not name {name}; add it there, or"
                f" leave {field} out",
                field,
            )
