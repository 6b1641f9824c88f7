"""LoRA adapters of random numbers in PEFT's folders, without torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

TARGETS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.v_proj": (32, 32),
    "fc1": (40, 32),
    "fc2": (32, 40),
}
"""Modules of the tiny OPT of `tiny.py` -> the shape [out, in] of their matrices"""

LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 3,
    "lora_alpha": 6,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "v_proj", "fc1", "fc2"],
    "bias": "none",
    "base_model_name_or_path": "tiny/opt",
}
"""adapter_config.json; the scale is 6 / 3"""


def write_adapter(
    folder: Path, *, seed: int = 0, change: Callable[[Tensors], None] | None = None, std: float = 0.3, **fields: Any
) -> Path:
    """An adapter of the tiny OPT; `fields` replace those of adapter_config.json."""
    rng = np.random.default_rng(seed)
    r = fields.get("r", 3)
    tensors: Tensors = {}
    for layer in range(2):
        for name, (outputs, inputs) in TARGETS.items():
            module = f"base_model.model.model.decoder.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = rng.normal(0, std, (r, inputs)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = rng.normal(0, std, (outputs, r)).astype(np.float32)
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(LORA | fields), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_by_hand(tensors: Tensors, adapter: Path, scale: float = 2.0) -> None:
    """Add an adapter of `write_adapter` to the tensors of a tiny OPT: W + scale B A, in float64."""
    from safetensors.numpy import load_file

    stored = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in stored if name.endswith("lora_A.weight")]:
        a, b = stored[name].astype(np.float64), stored[name.replace("lora_A", "lora_B")].astype(np.float64)
        target = name.removeprefix("base_model.model.model.decoder.").replace("lora_A.", "")
        tensors[target] = (tensors[target] + scale * (b @ a)).astype(np.float32)
