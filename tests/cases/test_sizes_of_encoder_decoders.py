"""Sizes that config.json of an encoder-decoder says under two names, and layers that are not run."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import config_of

from ..seq2seq import CONFIGS

OTHER_NAMES = {
    "bart": {"encoder_attention_heads": "num_attention_heads", "d_model": "hidden_size"},
    "t5": {"d_model": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
    | {"d_kv": "head_dim"},
}
FAMILIES = {family: "t5" if family in ("t5", "mt5") else "bart" for family in CONFIGS}
CASES = [(family, name) for family, kind in FAMILIES.items() for name in OTHER_NAMES[kind]]


def first_of(family: str) -> dict[str, Any]:
    return dict(next(iter(CONFIGS[family].values())))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_size_under_another_name_is_the_same_size_or_refused(family: str, name: str) -> None:
    raw, other = first_of(family), OTHER_NAMES[FAMILIES[family]][name]
    assert config_of(raw | {other: raw[name]}) == config_of(raw)
    assert config_of({field: raw[field] for field in raw if field != name} | {other: raw[name]}) == config_of(raw)
    with pytest.raises(CheckpointError, match=f"{name} is {raw[name]} and {other}, its other name, {2 * raw[name]}:"):
        config_of(raw | {other: 2 * raw[name]})


@pytest.mark.reference
@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_other_name_is_that_of_transformers(family: str, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw, other = first_of(family), OTHER_NAMES[FAMILIES[family]][name]
    assert transformers.AutoConfig.for_model(family).attribute_map[other] == name
    assert raw[name]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_transformers_would_give_the_cache_is_refused(family: str, field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field} is 3"):
        config_of(first_of(family) | {field: 3})
