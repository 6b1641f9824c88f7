"""nomic-bert and GTE: the fields of published configurations, and rotary scaling, against formulas and transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from minillm.backends.numpy import NumpyBackend
from minillm.errors import UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models import config_of
from minillm.models.rotary_encoder import RotaryEncoderConfig

from ..encoders import CONFIGS, runner_over, states, texts

PUBLISHED = {
    "model_type": "nomic_bert",
    "vocab_size": 90,
    "pad_vocab_size_multiple": 16,
    "n_embd": 32,
    "n_inner": 40,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "type_vocab_size": 2,
    "qkv_proj_bias": False,
}
"""nomic-embed's config.json, with sizes of `CONFIGS`"""


def test_published_words_of_nomic_bert_say_what_transformers_words_say() -> None:
    assert config_of(PUBLISHED) == config_of(CONFIGS["nomic_bert"])


def test_published_words_of_gte_scale_frequencies_by_the_ntk_formula() -> None:
    raw = CONFIGS["gte"] | {"model_type": "new", "rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    del raw["rope_parameters"]
    config = config_of(raw)
    assert isinstance(config, RotaryEncoderConfig)
    assert config.model_type == "gte"
    expected = [(8 * 500.0) ** (-2 * j / 8) / 8 ** (2 / 8) for j in range(4)]
    np.testing.assert_allclose(config.rotary.frequencies, expected, rtol=1e-6)
    with pytest.raises(UnsupportedModelError, match=r"mixed_b is 0.5; minillm runs ntk without"):
        config_of(raw | {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}})


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.01), ("int8", 0.15)])
def test_gates_stored_below_ups_are_written_in_few_bits(dtype: str, tolerance: float, tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "golden_encoders" / "gte"
    write_checkpoint(source, tmp_path / dtype, dtype, progress=False)
    with safe_open(tmp_path / dtype / "model.safetensors", "np") as file:
        together = any(name.endswith("layer.0.mlp.up_gate_proj.weight") for name in file.keys())  # noqa: SIM118
    assert together == (dtype == "float16")
    backend, [ids] = NumpyBackend(), texts(1)
    exact, rounded = (
        states(runner_over(load_model(folder, backend), backend), [ids])[0] for folder in (source, tmp_path / dtype)
    )
    assert 0 < np.abs(exact - rounded).mean() < tolerance


@pytest.mark.reference
@pytest.mark.parametrize(
    ("fields", "theirs"),
    [
        (
            PUBLISHED | {"rotary_scaling_factor": 2.0, "max_trained_positions": 16},
            CONFIGS["nomic_bert"]
            | {"max_position_embeddings": 16}
            | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}},
        ),
        (
            {name: value for name, value in CONFIGS["gte"].items() if name != "rope_parameters"}
            | {"model_type": "new", "rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 8.0}},
            CONFIGS["gte"]
            | {"rope_parameters": {"rope_type": "linear", "factor": 8 ** (2 / 8), "rope_theta": 8 * 500.0}},
        ),
    ],
    ids=["dynamic", "ntk"],
)
def test_scaled_rotation_is_transformers(fields: dict[str, Any], theirs: dict[str, Any], tmp_path: Path) -> None:
    """A text longer than in training, then one that is shorter, each in a model that has seen no other."""
    torch = pytest.importorskip("torch", reason="needs the reference extra")
    pytest.importorskip("transformers", reason="needs the reference extra")
    from .. import huggingface

    huggingface.build_encoder(theirs).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    backend = NumpyBackend()
    runner = runner_over(load_model(tmp_path, backend), backend)
    lines = [list(range(5, 45)), [7, 8, 9]]
    for line, ours in zip(lines, states(runner, lines), strict=True):
        with torch.no_grad():
            types = torch.tensor([[int(i >= len(line) // 2) for i in range(len(line))]])
            given = {"token_type_ids": types} if fields["type_vocab_size"] == 2 else {}
            model = huggingface.build_encoder(theirs)
            expected = model(torch.tensor([line]), **given).last_hidden_state[0].numpy()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
