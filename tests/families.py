"""Tiny models of every family: what `test_<family>.py` beside the models' tests lists as its `CONFIGS`.

A family that is added to the registry is tested by all that runs over these cases; without its module nothing runs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import pytest

from minillm.models import FAMILIES

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    family: import_module(f"tests.models.test_{family}").CONFIGS for family in FAMILIES
}
"""Family -> name of a configuration -> its config.json, with which transformers builds the same model"""

PARAMETERS: dict[str, int] = {
    shape: count
    for family in FAMILIES
    for shape, count in import_module(f"tests.models.test_{family}").PARAMETERS.items()
}
"""Published shape -> numbers of its checkpoint"""

CASES = [(family, name) for family, configs in CONFIGS.items() for name in configs]
IDS = [f"{family}-{name}".replace(" ", "-") for family, name in CASES]

_SWITCHES = """
ernie4_5 gemma glm glm4 helium hunyuan_v1_dense internlm3 ministral3 olmo3 seed_oss stablelm cohere qwen2_moe dots1
minimax_m2 ernie4_5_moe gpt_oss qwen3_next qwen3_5_moe_text
deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 granitemoe granitemoeshared bamba nemotron_h falcon_h1 lfm2_moe mistral4
"""
_QUICK = {"opt": 3, "qwen3_moe": 0, "olmoe": 0} | dict.fromkeys(_SWITCHES.split(), 0)
"""The number of configurations that the ordinary tests run of a family, if it is not 1: the long tests run all. Those
with experts take long; the others differ from a family that is run in a switch."""


def has_experts(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration's tokens choose experts, so that a small difference may choose others."""
    return bool({"num_experts_per_tok", "moe_k", "top_k_experts"} & raw.keys())


_ONCE = (
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "falcon_h1",
    "lfm2_moe",
    "mistral4",
)
"""Families of which the long tests run the first configuration; the others run before a release, but for transformers'
logits."""


def marks_of(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """The marks of a case in tests that are long: some run before a release alone."""
    family, name = case
    return [pytest.mark.exhaustive] if family in _ONCE and name != next(iter(CONFIGS[family])) else []


LIKE_GRANITES = ("granitemoe", "granitemoeshared", "bamba")
"""Families whose layers are those of Granite 4's hybrids"""


def marks_of_further(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """The marks of a case in tests of something else than a family's mathematics: the first configuration runs."""
    return [] if case[1] == next(iter(CONFIGS[case[0]])) else [pytest.mark.exhaustive]


def in_turn(values: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Each value with one of the other after the other, in turn; all other pairs are exhaustive.

    For what is made of two parts that know nothing of each other: each value of both is shown with some of the other.
    """
    return [
        pytest.param(
            *pair,
            marks=[] if (i - j) % len(other) == 0 else pytest.mark.exhaustive,
            id=re.sub(r"[^\w.]+", "-", str(pair)).strip("-"),
        )
        for i, value in enumerate(values)
        for j, pair in enumerate((value, partner) for partner in other)
    ]


def one_in(share: int, values: Iterable[Any]) -> list[Any]:
    """Every `share`-th value; the others are exhaustive, since another test shows each of them."""
    return [pytest.param(v, marks=pytest.mark.exhaustive if i % share else []) for i, v in enumerate(values)]


def each_of(cases: list[tuple[str, str]]) -> list[Any]:
    """Cases as parameters of tests, some of them for the long tests alone."""
    quick = {(family, name) for family in FAMILIES for name in list(CONFIGS[family])[: _QUICK.get(family, 1)]}
    return [
        pytest.param(
            case,
            marks=[] if case in quick else marks_of(case) or [pytest.mark.slow],
            id="-".join(case).replace(" ", "-"),
        )
        for case in cases
    ]


GOLDEN_CASES = [(f, name) for f, configs in CONFIGS.items() for name in (configs if f == "opt" else list(configs)[:1])]
"""Those with a folder in tests/golden: every variant of OPT, and of each other family the first."""
GOLDEN_IDS = [f"{family}-{name}".replace(" ", "-") for family, name in GOLDEN_CASES]
