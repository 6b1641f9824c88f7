"""LoRA of the embedding and the LM head with `ensure_weight_tying`, beside PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch
import transformers
from safetensors.torch import load_file, save_file

from minillm import Engine

from .. import huggingface
from ..families import CONFIGS
from .late import Late

peft = Late("peft")

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

IDS = [3, 5, 17, 60, 25, 42, 7]
FIELDS: list[dict[str, Any]] = [
    {},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
]


def base(folder: Path, family: str, *, tied: bool) -> Path:
    raw = next(iter(CONFIGS[family].values())) | {"tie_word_embeddings": tied}
    return huggingface.save(huggingface.build_model(raw, seed=5), folder / "base")


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def train(folder: Path, where: Path, **fields: Any) -> None:
    """An adapter of random numbers, saved by PEFT."""
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    made = peft.get_peft_model(loaded(folder), peft.LoraConfig(**(options | {"ensure_weight_tying": True} | fields)))
    torch.manual_seed(3)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.05
    made.save_pretrained(where)


def assert_equal_logits(folder: Path, adapter: Path) -> None:
    theirs = huggingface.logits(peft.PeftModel.from_pretrained(loaded(folder), adapter).eval(), IDS)
    with Engine(folder, adapter=adapter, backend="numpy", progress=False) as engine:
        np.testing.assert_allclose(engine.forward(IDS), theirs, rtol=0, atol=2e-4)
    assert np.abs(theirs - huggingface.logits(loaded(folder).eval(), IDS)).max() > 0.01


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_tied_adapter_gives_the_logits_of_peft(fields: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    folder = base(tmp_path, "llama", tied=tied)
    train(folder, tmp_path / "adapter", **fields)
    assert_equal_logits(folder, tmp_path / "adapter")


def test_where_the_head_is_not_stored_it_follows_the_embedding(tmp_path: Path) -> None:
    folder = base(tmp_path, "llama", tied=True)
    train(folder, tmp_path / "adapter", **FIELDS[1])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if "lm_head" not in name}, path)
    assert_equal_logits(folder, tmp_path / "adapter")


def test_an_embedding_that_peft_does_not_tie_changes_alone(tmp_path: Path) -> None:
    folder = base(tmp_path, "gpt2", tied=True)
    train(folder, tmp_path / "adapter", target_modules=["c_attn", "wte"])
    assert_equal_logits(folder, tmp_path / "adapter")
