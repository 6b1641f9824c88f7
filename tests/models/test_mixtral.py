"""Mixtral's configuration, and its experts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.formats.lora import per_request, read_adapter
from minillm.models import mixtral

from ..adapters import LORA
from ..tiny import logits_of, runner_of, tiny_tensors
from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "two of four": CONFIG,
    "two of six, window": CONFIG | {"num_local_experts": 6, "sliding_window": 9},
    "all of five, tied": CONFIG | {"num_local_experts": 5, "num_experts_per_tok": 5, "tie_word_embeddings": True},
}

PARAMETERS = {"mixtral-8x7b": 46_702_792_704}
"""As the published checkpoint has them."""


def test_the_numbers_of_experts_are_read_by_either_name() -> None:
    config = mixtral.read_config(CONFIG)
    assert (config.num_experts, config.experts_per_token, config.windows) == (4, 2, (None, None))
    other = {name: value for name, value in CONFIG.items() if name != "num_local_experts"}
    assert mixtral.read_config(other | {"num_experts": 4}) == config
    assert mixtral.read_config(other).num_experts == 8  # transformers' own default
    with pytest.raises(CheckpointError, match="num_experts_per_tok 5 should be at most num_local_experts 4"):
        mixtral.read_config(CONFIG | {"num_experts_per_tok": 5})
    with pytest.raises(CheckpointError, match="num_local_experts is 4 and num_experts, its other name, 8: leave one"):
        mixtral.read_config(CONFIG | {"num_experts": 8})


def test_an_adapter_changes_an_expert_and_the_router(tmp_path: Path) -> None:
    """As the sum by hand, of the modules that PEFT's names mean."""
    rng, scale = np.random.default_rng(0), LORA["lora_alpha"] / LORA["r"]
    tensors = {name: tensor.load() for name, tensor in tiny_tensors(CONFIG).items()}
    changes, summed = {}, dict(tensors)
    for module in ("block_sparse_moe.experts.2.w3", "block_sparse_moe.experts.0.w2", "block_sparse_moe.gate"):
        name = f"layers.1.{module}"
        outputs, inputs = tensors[f"{name}.weight"].shape
        down, up = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((3, inputs), (outputs, 3)))
        changes |= {f"base_model.model.model.{name}.lora_A.weight": down}
        changes |= {f"base_model.model.model.{name}.lora_B.weight": up}
        summed[f"{name}.weight"] = (summed[f"{name}.weight"] + scale * up.astype(np.float64) @ down).astype(np.float32)
    for folder, held in (("base", tensors), ("summed", summed)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        save_file(
            {f"model.{n}" if n != "lm_head.weight" else n: t for n, t in held.items()},
            tmp_path / folder / "model.safetensors",
        )
    (tmp_path / "adapter").mkdir()
    targets = {"target_modules": r"model\.layers\.1\..*(experts\.2\.w3|experts\.0\.w2|gate)"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(LORA | targets), encoding="utf-8")
    save_file(changes, tmp_path / "adapter" / "adapter_model.safetensors")

    def logits(folder: str, adapter: Path | None = None) -> np.ndarray:
        return logits_of(runner_of(load_model(tmp_path / folder, NumpyBackend(), adapter=adapter)), list(range(3, 30)))

    np.testing.assert_allclose(logits("base", tmp_path / "adapter"), logits("summed"), rtol=0, atol=1e-4)
    assert np.abs(logits("base") - logits("summed")).max() > 0.1
    found = read_adapter(tmp_path / "adapter", mixtral.read_config(CONFIG))
    with pytest.raises(
        UnsupportedModelError, match=r"w2, an expert, which cannot be done for single requests: merge it"
    ):
        per_request(found, NumpyBackend())
