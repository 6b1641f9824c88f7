"""Qwen3.5's text model with experts: its configuration and the experts' tensors."""

from typing import Any

import numpy as np

from minillm.models import qwen3_5_moe_text

from ..tiny import Held, tiny_tensors
from .test_qwen3_next import DELTA_NETS

CONFIG: dict[str, Any] = DELTA_NETS | {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "three of six": CONFIG,
    "two of four, tied": CONFIG | {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    "biases": CONFIG | {"attention_bias": True, "linear_num_key_heads": 4, "num_experts_per_tok": 2},
}

PARAMETERS = {"qwen3.5-35b-a3b": 34_660_610_688}
"""Of the text model, as its configuration says."""


def test_all_layers_have_experts_and_a_shared_one() -> None:
    config = qwen3_5_moe_text.read_config(CONFIG | {"norm_topk_prob": False})  # which transformers does not read
    assert (config.sparse, config.normalised, config.shared_size) == ((True,) * 2, True, 20)


def test_a_checkpoint_has_the_experts_in_one_tensor_or_one_by_one() -> None:
    apart = {name: Held(tensor.load()) for name, tensor in tiny_tensors(CONFIG).items()}
    fused = {name: tensor for name, tensor in apart.items() if ".experts." not in name}
    for layer in range(2):
        stem = f"layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([apart[f"{stem}.{i}.{kind}_proj.weight"].values for i in range(6)])
            for kind in ("gate", "up", "down")
        )
        fused |= {f"{stem}.gate_up_proj": Held(np.concatenate([gate, up], axis=1)), f"{stem}.down_proj": Held(down)}
    read = qwen3_5_moe_text.NAMES.canonical({f"model.{name}": t for name, t in fused.items()}, tied_head=False)
    assert read.keys() == apart.keys()
    for name, tensor in apart.items():
        np.testing.assert_array_equal(read[name].load(), tensor.values, err_msg=name)
