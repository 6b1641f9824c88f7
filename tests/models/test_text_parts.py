"""The text models of checkpoints with a vision tower: their configurations, and what they compute."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.models import config_of, family_of, gemma3_text, llama, qwen2, qwen3
from minillm.models.text_parts import TEXT_PARTS, text_config, text_tensors

from ..tiny import logits_of, runner_of, std_of, tiny_tensors
from . import test_llama, test_qwen3_5_moe_text, test_qwen3_5_text

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}}
TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4}
QWEN_TOWER |= {"intermediate_size": 16}
DEEP = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
PERCEIVER = {"resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}

GEMMA_4 = TEXT | {"head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "pad_token_id": 0}
GEMMA_4 |= {"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True}

WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 5},
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": GEMMA_4
        | {"model_type": "gemma4_text", "vocab_size_per_layer_input": 96}
        | {"hidden_size_per_layer_input": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": TOWER | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 4},
        "audio_config": None,
    },
    "gemma4_unified": {
        "text_config": GEMMA_4 | {"model_type": "gemma4_unified_text"},
        "vision_config": {"model_type": "gemma4_unified_vision", "patch_size": 2, "mm_embed_dim": 32}
        | {"mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": None,
    },
    "qwen2_vl": {
        "text_config": TEXT | M_ROPE,
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    },
    "qwen2_5_vl": {"text_config": TEXT | M_ROPE, "vision_config": QWEN_TOWER, "tie_word_embeddings": True},
    "qwen3_vl": {"text_config": TEXT | M_ROPE | {"head_dim": 8}, "vision_config": QWEN_TOWER | DEEP},
    "qwen3_5": {
        "text_config": test_qwen3_5_text.CONFIGS["M-RoPE, tied"],
        "vision_config": QWEN_TOWER | {"num_position_embeddings": 16},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "text_config": test_qwen3_5_moe_text.CONFIG,
        "vision_config": QWEN_TOWER | {"num_position_embeddings": 16},
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 8, "sliding_window": 5},
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 4},
    },
    "smolvlm": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, "scale_factor": 2},
    "idefics2": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": TOWER,
        "perceiver_config": PERCEIVER | {"num_key_value_heads": 2},
    },
    "idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, "scale_factor": 2},
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model"},
    },
    "llava_next": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": TOWER | {"model_type": "clip_vision_model"},
    },
    "llava_onevision": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
    },
    "internvl": {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": TOWER},
}
"""A tiny whole model of each kind"""


def test_each_kind_has_a_model_here() -> None:
    assert set(WHOLE) == set(TEXT_PARTS)


@pytest.mark.reference
@pytest.mark.parametrize("kind", WHOLE)
def test_text_of_a_model_of_text_and_images(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved by transformers with its vision tower: its logits for text, and a line that says what was left out."""
    torch = pytest.importorskip("torch", reason="needs the reference extra")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    from .. import huggingface

    config = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(WHOLE[kind])))
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, std_of(name, {"model_type": kind}), generator=generator)
            if parameter.ndim == 1 and name.endswith(".weight") and kind != "gemma3":
                parameter.add_(1)
    huggingface.save(model, tmp_path)
    line = np.random.default_rng(2).integers(3, 90, 30).tolist()
    with caplog.at_level(logging.WARNING):
        ours = logits_of(runner_of(load_model(tmp_path, NumpyBackend())), line)
    theirs = huggingface.logits(model, line)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
    assert np.abs(theirs).max() > 0.5
    assert "a model of text and images, of which minillm reads the text model alone" in caplog.text


def test_a_text_model_without_m_rope_is_the_family_itself() -> None:
    """Text has one position in time, height and width: sections of them change nothing."""
    sections = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 500.0}
    plain = TEXT | {"rope_theta": 500.0, "tie_word_embeddings": False}
    inside = {"model_type": "qwen3_vl", "text_config": TEXT | {"model_type": "qwen3_vl_text"} | sections}
    assert family_of(inside) is qwen3 and config_of(inside) == config_of({"model_type": "qwen3"} | plain)
    flat = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}} | TEXT | sections  # as published
    assert family_of(flat) is qwen2 and config_of(flat) == config_of(
        {"model_type": "qwen2", "rms_norm_eps": 1e-5} | plain
    )


def test_what_text_config_leaves_out_is_transformers_own() -> None:
    """As the published files of LLaVA 1.5, LLaVA-NeXT and Gemma 3 do."""
    llava = config_of({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32_064}})
    assert (llava.hidden_size, llava.num_layers, llava.num_kv_heads, llava.vocab_size) == (4096, 32, 32, 32_064)
    assert (llava.intermediate_size, llava.max_positions, llava.tied_head) == (11_008, 2048, False)
    newer = config_of({"model_type": "llava_next", "text_config": {"model_type": "mistral", "sliding_window": None}})
    assert (newer.num_heads, newer.num_kv_heads, newer.intermediate_size) == (32, 8, 14_336)
    gemma = config_of({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}})
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim, gemma.vocab_size) == (8, 4, 256, 262_208)
    assert isinstance(gemma, gemma3_text.GemmaConfig) and gemma.tied_head


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({"model_type": "mistral3"}, {}, True),
        ({"model_type": "mistral3", "tie_word_embeddings": False}, {}, False),
        ({"model_type": "llava"}, {}, False),
        ({"model_type": "llava", "tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ({"model_type": "smolvlm", "tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
    ],
)
def test_the_whole_model_says_whether_the_head_is_tied(outer: Any, inner: Any, tied: bool) -> None:
    assert text_config(outer | {"text_config": inner})["tie_word_embeddings"] is tied


def test_a_stored_head_is_taken_though_nothing_says_that_it_is_not_the_embedding(tmp_path: Path) -> None:
    """As in Mistral Small 3.1."""
    from safetensors.numpy import save_file

    raw = test_llama.CONFIG | {"tie_word_embeddings": False}
    arrays = {name: tensor.load() for name, tensor in tiny_tensors(raw).items()}
    stored = {f"language_model.{'model.' * (name != 'lm_head.weight')}{name}": a for name, a in arrays.items()}
    save_file(stored | {"vision_tower.patch_conv.weight": np.ones((3, 3), np.float32)}, tmp_path / "model.safetensors")
    inner = {name: value for name, value in raw.items() if name != "tie_word_embeddings"}
    outer = {"model_type": "mistral3", "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    model = load_model(tmp_path, NumpyBackend())
    assert not model.config.tied_head
    np.testing.assert_array_equal(model.head.weight.data, arrays["lm_head.weight"])


def test_a_tensor_under_two_prefixes_is_refused() -> None:
    tensors: Any = dict.fromkeys(("model.language_model.norm.weight", "language_model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"holds tensor norm\.weight twice"):
        text_tensors({"model_type": "llava"}, tensors)


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        ({"model_type": "llava", "text_config": 5}, CheckpointError, "text_config should be a table, found 5"),
        (
            {"model_type": "llava", "text_config": {"model_type": "nonsense"}},
            UnsupportedModelError,
            "model_type is 'nonsense'; minillm runs",
        ),
        ({"model_type": "qwen3_vl"}, CheckpointError, "num_hidden_layers is missing"),
    ],
)
def test_an_impossible_text_model_is_named(raw: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        config_of(raw)


def test_a_model_of_text_alone_is_left_as_it_is() -> None:
    assert text_config(test_llama.CONFIG) is test_llama.CONFIG
    assert family_of(test_llama.CONFIG) is llama
    tensors: Any = {"model.norm.weight": None}
    assert text_tensors(test_llama.CONFIG, tensors) is tensors
