"""Configurations of watermarks, as transformers' `watermarking_config` has them."""

from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..errors import listed, shown
from .values import LARGE, Reader, RefusedError, flag, number, reader, sequence, whole

KEY = 2**63
"""Keys are below this"""
MOST_KEYS = 64
"""Layers of a tournament; each takes a bit of every token of the vocabulary, in every step"""


@dataclass(frozen=True)
class GreenList:
    """A watermark by green lists: transformers' WatermarkingConfig."""

    greenlist_ratio: float = 0.25
    """Share of the vocabulary that is favoured"""
    bias: float = 2.0
    """Added to its logits"""
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    """Seed of a list: "lefthash", the last token, or "selfhash", the candidate too"""
    context_width: int = 1
    """Tokens that seed a list"""


@dataclass(frozen=True)
class SynthId:
    """SynthID's watermark for text: transformers' SynthIDTextWatermarkingConfig."""

    ngram_len: int
    """Tokens that are hashed together, the next one included"""
    keys: tuple[int, ...]
    """One for each layer of the tournament"""
    context_history_size: int = 1024
    """Contexts that are remembered, so that none is watermarked twice"""
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    """Leave the first ngram_len - 1 tokens alone"""


@reader('"lefthash" or "selfhash"')
def _scheme(value: object) -> str:
    if not isinstance(value, str) or value not in ("lefthash", "selfhash"):
        raise ValueError
    return value


READERS: dict[str, Reader[Any]] = {
    "greenlist_ratio": number(0, 1, above=True),
    "bias": number(-LARGE, LARGE),
    "hashing_key": whole(0, KEY),
    "seeding_scheme": _scheme,
    "context_width": whole(1),
    "ngram_len": whole(2),
    "keys": sequence(f"a sequence of 1 to {MOST_KEYS} whole numbers", whole(0, KEY), least=1, most=MOST_KEYS),
    "context_history_size": whole(1, 2**20),
    "sampling_table_seed": whole(0, KEY),
    "sampling_table_size": whole(1, 2**24 + 1),
    "skip_first_ngram_calls": flag,
}


@reader("a watermark's settings by name, such as {'bias': 2.5} or {'ngram_len': 5, 'keys': [654, 400, 836]}")
def watermarking(value: object) -> GreenList | SynthId:
    """Values of watermarking_config: a dict, or transformers' object."""
    from .field_values import options

    value = value.to_dict() if hasattr(value, "to_dict") else value
    if isinstance(value, GreenList | SynthId):
        return value
    given = dict(options(value))
    if not given.get("debug_mode"):
        given.pop("debug_mode", None)
    kind = SynthId if {"ngram_len", "keys"} & given.keys() else GreenList
    names = {field.name for field in fields(kind)}
    read = {}
    for name, member in given.items():
        if name not in names:
            raise RefusedError(f"{shown(name)} is none of its settings, which are {listed(sorted(names))}")
        try:
            read[name] = READERS[name](member)
        except ValueError:
            raise RefusedError(f"{name} should be {READERS[name].expected}, found {shown(member)}") from None
    lacking = [field.name for field in fields(kind) if field.default is MISSING and field.name not in read]
    if lacking:
        raise RefusedError(f"{lacking[0]} is missing: SynthID needs ngram_len and keys")
    if read.get("greenlist_ratio") == 1.0:
        raise RefusedError("greenlist_ratio=1.0 favours every token: expected less")
    return kind(**read)
