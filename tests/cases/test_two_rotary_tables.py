"""rope_parameters of newer releases beside rope_scaling of older ones: equal in whatever words, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.config import Fields
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import config_of
from minillm.models.rotary import read_rotary

from ..families import CONFIGS

IDS = list(range(3, 50))
LLAMA = next(iter(CONFIGS["llama"].values()))
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    ({"rope_type": "linear", "factor": 2.0, "type": "linear"}, {"rope_type": "linear", "factor": 2.0}),
    ({"type": "default"}, {"rope_type": "default", "rope_theta": 10000}),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 32}, {"type": "yarn", "factor": 2.0, "beta_slow": 1.0}),
    (
        {"rope_type": "llama3", "original_max_position_embeddings": 64} | LLAMA3,
        {"rope_type": "llama3", "attention_factor": None} | LLAMA3,
    ),
]


@pytest.mark.reference
@pytest.mark.parametrize(("older", "newer"), EQUAL)
def test_tables_that_say_the_same_give_the_logits_of_transformers(
    older: dict[str, Any], newer: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from .. import huggingface

    huggingface.save(huggingface.build_model(LLAMA | {"max_position_embeddings": 64}, seed=3), tmp_path)
    path = tmp_path / "config.json"
    plain = {name: value for name, value in json.loads(path.read_text()).items() if name != "rope_parameters"}
    for theta in ({}, {"rope_theta": 10000.0}):
        path.write_text(json.dumps(plain | theta | {"rope_scaling": older, "rope_parameters": newer}))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        with Engine(tmp_path, backend="numpy", progress=False) as engine:
            np.testing.assert_allclose(engine.forward(IDS), huggingface.logits(model, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("older", "newer"), EQUAL)
def test_tables_that_say_the_same_are_read_as_one(older: dict[str, Any], newer: dict[str, Any]) -> None:
    both = read_rotary(Fields({"rope_scaling": older, "rope_parameters": newer}), 16, 64)
    assert both == read_rotary(Fields({"rope_scaling": older}), 16, 64)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.5}),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 2.0}, {"rope_theta": 10000.0}),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}),
        ({"type": "yarn", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2"])
def test_tables_that_contradict_each_other_are_refused(family: str, older: Any, newer: Any) -> None:
    raw = next(iter(CONFIGS[family].values())) | {"rope_scaling": older, "rope_parameters": newer}
    with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling differ: leave one of them out"):
        config_of({name: value for name, value in raw.items() if name not in ("rope_theta", "rotary_emb_base")})


def test_shares_of_the_rotated_heads_that_contradict_each_other_are_refused() -> None:
    default = {"rope_type": "default"}
    for family in ("phi3", "gpt_neox"):
        plain = next(config for config in CONFIGS[family].values() if "rope_scaling" not in config)
        raw = plain | {"rope_scaling": default, "rope_parameters": default | {"partial_rotary_factor": 0.5}}
        raw |= {"partial_rotary_factor": 1.0} if family == "phi3" else {"rotary_pct": 1.0}
        with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling differ"):
            config_of(raw)
    with pytest.raises(UnsupportedModelError, match=r"rope_scaling: partial_rotary_factor is 0\.5"):
        config_of(LLAMA | {"rope_scaling": default | {"partial_rotary_factor": 0.5}, "rope_parameters": default})
