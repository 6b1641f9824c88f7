"""GGUF files that `quantize` writes: read again, and run by llama.cpp, of every family that it knows."""

import dataclasses
import json
import re
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from safetensors.numpy import save_file

from minillm import Engine
from minillm.backends.loader import RandomTensor
from minillm.errors import CheckpointError, ModelNotFoundError, ParameterError, UnsupportedModelError
from minillm.formats import open_checkpoint
from minillm.formats.gguf.architectures import ARCHITECTURES
from minillm.formats.gguf.file import read_gguf
from minillm.formats.gguf.read_metadata import read_gguf_config, read_gguf_model
from minillm.formats.gguf.write import write_gguf
from minillm.formats.gguf.write_metadata import gguf_fields
from minillm.models import family_of, gemma4_text
from minillm.models.building import tensor_shapes
from minillm.reference import quantize as ours

from .. import families
from ..encoders import CONFIGS as ENCODERS
from ..terminal import Screen
from ..tiny import TOKENIZER, std_of

SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {family: dict(configs) for family, configs in families.CONFIGS.items()}
CONFIGS["llama"] |= {
    "linear": CONFIGS["llama"]["grouped"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": CONFIGS["llama"]["grouped"] | {"rope_scaling": SCALED},
    "yarn, its own scale": CONFIGS["llama"]["grouped"] | {"rope_scaling": SCALED | {"attention_factor": 0.8}},
    "llama3": CONFIGS["llama"]["grouped"]
    | {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
}
LLAMA3_FIELDS = {name: CONFIGS["llama"]["llama3"][name] for name in ("rope_theta", "rope_scaling")}
CONFIGS["llama"]["wide"] = CONFIGS["llama"]["grouped"] | {"head_dim": 16}
CONFIGS["qwen2"]["plain"] = CONFIGS["llama"]["grouped"] | {"model_type": "qwen2"}
CONFIGS["qwen3"]["plain"] = CONFIGS["llama"]["wide"] | {"model_type": "qwen3"}
CONFIGS["gpt_neox"]["tied"] = next(iter(CONFIGS["gpt_neox"].values())) | {"tie_word_embeddings": True}

_CAPPED = CONFIGS["gemma2"]["caps"] | {"query_pre_attn_scalar": 12, "final_logit_softcapping": 20.0}
_GEMMA3 = CONFIGS["gemma3_text"]["two bases"] | {"query_pre_attn_scalar": 12, "final_logit_softcapping": 20.0}
CONFIGS["gemma2"] = {
    "caps": _CAPPED,
    "every third": _CAPPED
    | {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "rope_theta": 500.0},
    "every layer": _CAPPED | {"layer_types": ["sliding_attention"] * 2},
}
CONFIGS["gemma3_text"] = {
    "two bases": _GEMMA3,
    "its own period and bases, untied, capped": {
        n: v for n, v in _GEMMA3.items() if not n.startswith(("rope", "sliding"))
    }
    | {"num_hidden_layers": 7, "tie_word_embeddings": False, "sliding_window": 9},
    "tables": CONFIGS["gemma3_text"]["tables, untied"]
    | {"query_pre_attn_scalar": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "every layer": _GEMMA3 | {"layer_types": ["sliding_attention"] * 2},
}
_LONG = {"max_position_embeddings": 512, "original_max_position_embeddings": 256}  # llama.cpp's shortest context
CONFIGS["phi3"] = {
    name: config | (_LONG if "rope_scaling" in config else {}) for name, config in CONFIGS["phi3"].items()
}
CONFIGS["phi3"]["longer than its original length"] = CONFIGS["phi3"]["longrope"] | {
    "original_max_position_embeddings": 8
}
CONFIGS["phi3"]["plain"] = CONFIGS["llama"]["grouped"] | {"model_type": "phi3", "pad_token_id": 0}
CONFIGS["smollm3"] = {
    "every fourth": CONFIGS["llama"]["grouped"] | {"model_type": "smollm3", "num_hidden_layers": 5},
    "tied": CONFIGS["llama"]["grouped"]
    | {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True},
}
CONFIGS["lfm2"]["tied, wide"] = CONFIGS["lfm2"]["as it is"] | {"conv_L_cache": 5, "tie_word_embeddings": True}
CONFIGS["lfm2_moe"]["tied"] = CONFIGS["lfm2_moe"]["three of six"] | {"tie_word_embeddings": True, "num_dense_layers": 0}
CONFIGS["gpt_oss"]["plain"] = CONFIGS["gpt_oss"]["two of four"] | {"rope_parameters": {"rope_type": "default"}}
CONFIGS["granite"]["llama3"] = CONFIGS["granite"]["factors"] | LLAMA3_FIELDS
CONFIGS["qwen3_moe"]["tied"] = CONFIGS["qwen3_moe"]["three of six"] | {"tie_word_embeddings": True}
CONFIGS["olmoe"] = {
    name: config | {"num_key_value_heads": 4, "norm_topk_prob": False} for name, config in CONFIGS["olmoe"].items()
}

_WITHOUT_BIASES = {"attention_bias": False, "mlp_bias": False}
CONFIGS["deepseek_v2"]["two shared, tied"] = CONFIGS["deepseek_v2"]["two shared, tied, biases"] | _WITHOUT_BIASES
CONFIGS["deepseek_v3"]["full rank"] = CONFIGS["deepseek_v3"]["queries of full rank, halves"] | _WITHOUT_BIASES
_LONG_FACTORS = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 4.0, 8.0]}
CONFIGS["minicpm3"]["as it is"] = {
    name: value for name, value in CONFIGS["minicpm3"]["factors"].items() if "scale_" not in name and "base" not in name
}
CONFIGS["minicpm3"]["longrope"] = CONFIGS["minicpm3"]["as it is"] | _LONG | {"rope_scaling": _LONG_FACTORS}
_EQUAL = {"linear_value_head_dim": 8, "rms_norm_eps": 1e-6}
CONFIGS["qwen3_next"]["as llama.cpp has it"] = CONFIGS["qwen3_next"]["three of six"] | _EQUAL
CONFIGS["qwen3_5_text"]["in turn"] = CONFIGS["qwen3_5_text"]["grouped"] | _EQUAL | {"num_hidden_layers": 4}
CONFIGS["qwen3_5_text"]["in turn"] |= {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
CONFIGS["qwen3_5_text"]["tied, all rotated"] = CONFIGS["qwen3_5_text"]["M-RoPE, tied"] | _EQUAL
CONFIGS["qwen3_5_text"]["tied, all rotated"] |= {
    "linear_num_value_heads": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
}
CONFIGS["qwen3_5_moe_text"]["in turn"] = CONFIGS["qwen3_5_moe_text"]["three of six"] | _EQUAL
_MAMBA = {"mamba_expand": 2, "mamba_conv_bias": True}
CONFIGS["granitemoehybrid"]["as llama.cpp has it"] = CONFIGS["granitemoehybrid"]["two groups"] | _MAMBA
CONFIGS["granitemoehybrid"]["experts"] = CONFIGS["granitemoehybrid"]["one group, experts, rotation"] | _MAMBA
CONFIGS["nemotron_h"]["experts"] = CONFIGS["nemotron_h"]["one of each"] | {
    "layers_block_type": ["mamba", "attention", "moe"]
}
CONFIGS["nemotron_h"]["MLPs"] = CONFIGS["nemotron_h"]["wide heads"] | {"mlp_hidden_act": "relu2", "mlp_bias": True}
CONFIGS["falcon_h1"]["one factor, tied"] = CONFIGS["falcon_h1"]["all factors"] | {
    "embedding_multiplier": 0.5,
    "tie_word_embeddings": True,
}
CONFIGS["falcon_h1"]["a norm, no factors"] = CONFIGS["falcon_h1"]["norm after the gate, no factors"] | {
    "mamba_conv_bias": True,
    "tie_word_embeddings": True,
}
CONFIGS["gemma4_text"]["per-layer embeddings"] = CONFIGS["gemma4_text"]["per-layer embeddings"] | {
    "final_logit_softcapping": 20.0
}
CONFIGS["gemma4_text"]["keys are values"] = CONFIGS["gemma4_text"]["keys are values"] | {"num_kv_shared_layers": 0}
_MERGED = CONFIGS["gemma4_text"]["keys are values"] | {"attention_bias": False}
CONFIGS["gemma4_text"]["keys are values, without biases"] = _MERGED | {"rope_parameters": gemma4_text.ROTARY}
CONFIGS["gemma4_text"]["scaled"] = _MERGED
CONFIGS["glm4_moe"]["a dense layer first, norms, biases"] = CONFIGS["glm4_moe"]["a dense layer first"] | {
    "use_qk_norm": True,
    "attention_bias": True,
}
CONFIGS["qwen2_moe"]["no biases, tied"] = CONFIGS["qwen2_moe"]["three of six"] | {
    "qkv_bias": False,
    "tie_word_embeddings": True,
}
CONFIGS["ernie4_5_moe"]["none shared after the first"] = CONFIGS["ernie4_5_moe"]["none shared"] | {
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
}
_SIXTY_FOUR = {"num_hidden_layers": 64, "intermediate_size": 8, "layer_types": None}
CONFIGS["exaone4"]["of 64 layers"] = CONFIGS["exaone4"]["windows"] | _SIXTY_FOUR
CONFIGS["exaone4"]["llama3"] = CONFIGS["exaone4"]["full, tied"] | LLAMA3_FIELDS
CONFIGS["olmo3"]["yarn, tied"] = CONFIGS["olmo3"]["window then full"] | {
    "tie_word_embeddings": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_scaling": SCALED,
}
_YARN = CONFIGS["ministral3"]["yarn"]["rope_parameters"]
CONFIGS["ministral3"] |= {
    "other factors": CONFIGS["ministral3"]["yarn"] | {"rope_parameters": _YARN | {"mscale_all_dim": 0.5}},
    "its own factor": CONFIGS["ministral3"]["yarn"]
    | {"rope_parameters": _YARN | {"attention_factor": 0.9, "llama_4_scaling_beta": 0.0}},
    "a factor alone": CONFIGS["ministral3"]["yarn"]
    | {"rope_parameters": {name: value for name, value in _YARN.items() if "mscale" not in name}},
    "without a window": CONFIGS["ministral3"]["wide heads, window"] | {"sliding_window": None},
}
CONFIGS["glm4"]["whole heads"] = CONFIGS["glm4"]["not grouped"] | {"partial_rotary_factor": 1.0}
CONFIGS["glm4_moe"]["whole heads"] = CONFIGS["glm4_moe"]["groups, scaled"] | {"partial_rotary_factor": 1.0}
_FULL = {"num_key_value_heads": 4, "sliding_window": None}
CONFIGS["dots1"]["not grouped"] = CONFIGS["dots1"]["not normalised"] | _FULL
CONFIGS["dots1"]["a dense layer first, scaled"] = CONFIGS["dots1"]["a dense layer first, window"] | _FULL
_ONE = {"mscale": 1.0, "mscale_all_dim": 1.0}
_ALIKE, _GROUPS = (
    CONFIGS["mistral4"][name] | {"rope_parameters": CONFIGS["mistral4"][name]["rope_parameters"] | _ONE}
    for name in ("not normalised, tied", "yarn and groups")
)
CONFIGS["mistral4"] = {"as llama.cpp has it": _ALIKE, "groups": _GROUPS} | CONFIGS["mistral4"]
CONFIGS["mistral4"]["without the factor"] = _GROUPS | {
    "rope_parameters": _GROUPS["rope_parameters"] | {"llama_4_scaling_beta": 0.0}
}

REFUSED = {
    ("llama", "wide heads"): "with silu alone, not gelu_new",
    ("qwen2", "window in the upper layer"): "without sliding windows",
    ("qwen3", "with biases, tied"): "with qkv_bias False alone",
    ("qwen3", "window in the upper layer"): "without sliding windows",
    ("qwen3_moe", "in the upper layer, not normalised"): "with qkv_bias False alone",
    ("qwen3_moe", "not in the upper layer, window"): "with mixed_layers False alone",
    ("olmoe", "normalised, with biases"): "with qkv_bias False alone",
    ("gpt2", "untied, narrow"): "with gelu_new alone, not gelu",
    ("gpt2", "scaled by layer"): "with gelu_new alone, not relu",
    ("gpt_neox", "in turn, without biases"): "with attention_bias True alone",
    ("gpt_neox", "tied, all turns"): "with gelu alone, not gelu_new",
    ("starcoder2", "no biases, untied"): "with biases True alone",
    ("starcoder2", "wide heads"): "with gelu_new alone, not gelu",
    ("gpt_oss", "no biases, no windows"): "with qkv_bias True alone",
    ("lfm2", "wide convolutions with biases, tied"): "with conv_bias False alone",
    ("lfm2_moe", "scaled, not normalised, tied"): "with normalised True alone",
    ("lfm2_moe", "wide convolutions with biases"): "with conv_bias False alone",
    ("olmo2", "with biases"): "with bias False alone",
    ("gemma", "untied, with biases"): "with bias False alone",
    ("gemma", "silu"): "with gelu_new alone, not silu",
    ("seed_oss", "other biases, tied"): "with out_bias False alone",
    ("seed_oss", "all biases"): "with out_bias False alone",
    ("ernie4_5", "with biases, untied"): "with qkv_bias False alone",
    ("cohere", "untied, with biases"): "with bias False alone",
    ("cohere2", "window then full"): "with rotary embedding in all but each layer of 4 alone",
    ("cohere2", "untied, with biases"): "with rotary embedding in all but each layer of 4 alone",
    ("hunyuan_v1_dense", "with biases, wide heads"): "with qkv_bias False alone",
    ("phi", "grouped, tied"): "with tied_head False alone",
    ("phi", "relu"): "with gelu_new alone, not relu",
    ("olmo2", "wide heads"): "with silu alone, not gelu_new",
    ("deepseek_v2", "queries of low rank, groups"): "with qkv_bias False alone",
    ("deepseek_v2", "two shared, tied, biases"): "with mlp_bias False alone",
    ("deepseek_v3", "queries of full rank, halves"): "with qkv_bias False alone",
    ("glm4_moe_lite", "a dense layer last"): "with qkv_bias False alone",
    ("minicpm3", "factors"): "with scale_emb 12, scale_depth 1.4, dim_model_base 256 alone",
    ("minicpm3", "without factors"): "with scale_emb 12, scale_depth 1.4, dim_model_base 256 alone",
    ("minicpm3", "queries of full rank, biases"): "with qkv_bias False alone",
    ("qwen3_next", "three of six"): "with keys and values of delta nets of one width alone",
    ("qwen3_next", "in the upper layer, tied"): "with normalised True alone",
    ("qwen3_next", "biases, half rotated"): "with qkv_bias False alone",
    ("qwen3_5_text", "grouped"): "with keys and values of delta nets of one width alone",
    ("qwen3_5_text", "M-RoPE, tied"): "with keys and values of delta nets of one width alone",
    ("qwen3_5_text", "biases"): "with qkv_bias False alone",
    ("qwen3_5_moe_text", "three of six"): "with keys and values of delta nets of one width alone",
    ("qwen3_5_moe_text", "two of four, tied"): "with keys and values of delta nets of one width alone",
    ("qwen3_5_moe_text", "biases"): "with qkv_bias False alone",
    ("gemma4_text", "keys are values"): "with bias False alone",
    ("granitemoehybrid", "two groups"): "with mamba_expand 2 alone",
    ("granitemoehybrid", "one group, experts, rotation"): "with biases of Mamba's convolutions alone",
    ("granitemoehybrid", "attention alone"): "with Mamba-2 in some of its layers alone",
    ("nemotron_h", "one of each"): "with MLPs or with experts, not with both",
    ("nemotron_h", "one group, biases"): "with biases of Mamba's convolutions alone",
    ("nemotron_h", "wide heads"): "with relu2 alone, not silu",
    ("falcon_h1", "norm before the gate, biases"): "with qkv_bias False alone",
    ("falcon_h1", "norm after the gate, no factors"): "with biases of Mamba's convolutions alone",
    ("qwen2_moe", "in the upper layer, normalised"): "with normalised False alone",
    ("qwen2_moe", "not in the upper layer, window"): "with experts in all of its layers alone",
    ("ernie4_5_moe", "none shared"): "with MLPs in its first layers alone",
    ("exaone4", "window then full"): "with sliding windows in models of 64 layers, and in all of these, alone",
    ("exaone4", "windows"): "with sliding windows in models of 64 layers, and in all of these, alone",
    ("olmo3", "tables, tied"): "with bias False alone",
    ("olmo3", "full"): "with heads of width E / H alone",
    ("ministral3", "wide heads, window"): "without sliding windows",
    ("dots1", "not normalised"): "with as many key/value heads as heads alone",
    ("dots1", "a dense layer first, window"): "with as many key/value heads as heads alone",
    ("dots1", "with biases, two shared"): "with as many key/value heads as heads alone",
    ("mistral4", "yarn and groups"): "with yarn and mscale_all_dim 1 alone",
    ("mistral4", "queries of full rank, halves"): "with qkv_bias False alone",
    ("mistral4", "not normalised, tied"): "with yarn and mscale_all_dim 1 alone",
    ("youtu", "halves, yarn, biases"): "with qkv_bias False alone",
}
"""Configurations that llama.cpp would run otherwise, or not at all"""
WRITTEN = [each for each in ARCHITECTURES.values() if not each.bidirectional]
KNOWN = {family for each in WRITTEN for family in (each.model_type, *each.kin)}
CASES = [(family, name) for family in CONFIGS if family in KNOWN for name in CONFIGS[family]]
CASES = [case for case in CASES if case not in REFUSED]
OLDER = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "bloom", "starcoder2")
QUICK = [
    pytest.param(*case, marks=[] if case[0] in OLDER or case[1] == next(iter(CONFIGS[case[0]])) else [pytest.mark.slow])
    for case in CASES
]
"""All in the long tests; in the quick ones the first of each family whose layers are of more kinds"""


SAME = {"glm4_moe_lite": "deepseek_v3", "granitemoe": "granitemoeshared"}
"""Families that files do not tell from others, which compute the same"""


def write_folder(folder: Path, raw: dict) -> Path:
    """A checkpoint folder as the family publishes them, with the small tokenizer, which begins with BOS."""
    folder.mkdir()
    raw = raw | {name: 512 for name in ("vocab_size", "vocab_size_per_layer_input") if name in raw}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    family = family_of(raw)
    shapes = tensor_shapes(family.build, family.read_config(raw), as_built=False)
    tensors = {name: RandomTensor(name, shape, 0, std_of(name, raw)).load() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {"default": "{{ bos_token }}{{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"}
    settings |= {"add_bos_token": True, "chat_template": [{"name": n, "template": t} for n, t in named.items()]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def written(folder: Path, raw: dict, dtype: str = "float32") -> tuple[Path, Path]:
    """A checkpoint folder and the GGUF file made of it."""
    source = write_folder(folder / "source", raw)
    target = folder / "m.gguf"
    write_gguf(source, target, dtype)
    return source, target


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_the_errors_are_those_of_the_file(dtype: str, tmp_path: Path) -> None:
    """Errors of the weights as the package gguf reads them; of experts, one error for those of a layer."""
    source, exact = written(tmp_path, CONFIGS["qwen3_moe"]["three of six"])
    found = {one.name: one for one in write_gguf(source, tmp_path / "small.gguf", dtype)}
    values = [
        {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
        for path in (exact, tmp_path / "small.gguf")
    ]
    for name, array in values[0].items():
        error = np.linalg.norm(values[1][name] - array) / np.linalg.norm(array)
        assert found[name].error == pytest.approx(error, rel=1e-4) if name in found else error == 0
    assert any("_exps" in name for name in found)


def test_writing_shows_one_bar_unless_it_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.progress_bar.BAR_DELAY", 0)
    source = write_folder(tmp_path / "source", CONFIGS["gpt2"]["gelu by tanh"])
    with redirect_stderr(Screen()) as screen:
        write_gguf(source, tmp_path / "a.gguf", "int8", progress=False)
        assert screen.getvalue() == ""
        write_gguf(source, tmp_path / "b.gguf", "int8")
    assert [line[:19] for line in screen.lines] == ["writing int8: 100%|"]


def prompt_of(engine: Engine) -> list[int]:
    return np.random.default_rng(0).integers(5, 90, 12).tolist()


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("family", "name"), QUICK)
def test_a_file_written_in_float32_gives_the_same_logits(tmp_path, family, name):
    source, target = written(tmp_path, CONFIGS[family][name])
    with Engine(source, backend="numpy") as before, Engine(target, backend="numpy") as after:
        prompt = prompt_of(before)
        plain = family == "mistral" and not any(before.config.windows)  # which is Llama
        assert after.config.model_type == ("llama" if plain else SAME.get(family, family))
        np.testing.assert_allclose(after.forward(prompt), before.forward(prompt), rtol=1e-4, atol=1e-4)
        assert after.config.max_positions == before.config.max_positions
        assert after.tokenizer.encode("Hello there</s>") == before.tokenizer.encode("Hello there</s>")


@pytest.mark.reference
@pytest.mark.parametrize(("family", "name"), CASES)
def test_llama_cpp_gives_the_same_logits(tmp_path, caplog, family, name):
    package = pytest.importorskip("llama_cpp")
    source, target = written(tmp_path, CONFIGS[family][name])
    windowed = "gemma" in family or family in ("cohere2", "exaone4", "gpt_oss", "olmo3")
    if family == "gpt_oss" and name != "plain":
        assert "llama.cpp rounds the ends of YaRN's ramp" in caplog.text
        return
    if (CONFIGS[family][name].get("sliding_window") or 64) < 64 and not windowed:
        assert "llama.cpp runs this family without its sliding window" in caplog.text
        return
    with Engine(source, backend="numpy") as engine:
        prompt = prompt_of(engine)
        ours = engine.forward(prompt)
    cache = {"type_k": 0, "type_v": 0} if name == "of 64 layers" else {}  # in 32 bits, where roundings add up
    options = {"logits_all": True, "verbose": False, "n_threads": 1, "flash_attn": False}
    llama = package.Llama(str(target), n_ctx=64, **options, **cache)
    llama.eval(prompt)
    theirs = llama.scores[: len(prompt)]
    assert np.abs(ours - theirs).max() < 0.01 * np.abs(ours).max()  # its cache has 16 bits


@pytest.mark.reference
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("glm4_moe", "groups, scaled"),
        ("qwen2_moe", "three of six"),
        ("ernie4_5_moe", "a dense layer first"),
        ("exaone4", "full, tied"),
        ("olmo3", "window then full"),
        ("ministral3", "yarn"),
        ("glm4", "half of each head"),
        ("dots1", "a dense layer first, scaled"),
        ("minimax_m2", "half of each head"),
        ("granitemoe", "two of four"),
        ("granitemoeshared", "shared"),
        ("mistral4", "groups"),
    ],
)
def test_llama_cpp_chooses_the_same_tokens(tmp_path, family, name):
    package = pytest.importorskip("llama_cpp")
    _, target = written(tmp_path, CONFIGS[family][name])
    with Engine(target, backend="numpy") as engine:
        prompt = prompt_of(engine)
        tokens = engine.generate(prompt, max_new_tokens=8, eos_token_id=[], do_sample=False).completions[0].token_ids
    llama = package.Llama(str(target), n_ctx=64, verbose=False, n_threads=1, flash_attn=False)
    chosen = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
    assert tokens == [next(chosen) for _ in range(8)]


@pytest.mark.reference
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma2", "caps"),
        ("gemma3_text", "its own period and bases, untied, capped"),
        ("phi3", "plain"),
        ("qwen3_moe", "three of six"),
    ],
)
def test_transformers_reads_the_same_model(tmp_path, family, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source, target = written(tmp_path, CONFIGS[family][name])
    config = transformers.AutoConfig.from_pretrained(source, attn_implementation="eager", pad_token_id=0)
    options = {"gguf_file": target.name, "config": config, "dtype": torch.float32}  # it reads no caps and no windows
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    with Engine(source, backend="numpy") as engine:
        prompt = prompt_of(engine)
        ours = engine.forward(prompt)
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([prompt])).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max()


@pytest.mark.parametrize(("dtype", "bits", "size"), [("int8", 8, 34), ("int4", 4, 18)])
def test_blocks_hold_our_integers_and_scales(tmp_path, dtype, bits, size):
    raw = CONFIGS["qwen2"]["plain"] | {"intermediate_size": 64}
    source, target = written(tmp_path, raw, dtype)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    up = tensors["blk.1.ffn_up.weight"]
    expected = open_checkpoint(source)["layers.1.mlp.up_proj.weight"].load()
    whole = ours.quantize(expected, bits)
    assert up.data.shape == (64, size)
    assert np.array_equal(dequantize(up.data, up.tensor_type), ours.dequantize(whole))
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"
    assert tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    with Engine(target, dtype="auto", backend="numpy") as engine:
        held = engine.runner.model.layers[1].mlp.gate_up.data
        assert held.bits == bits
        assert np.array_equal(held.values[64:], whole.values)
        assert np.array_equal(held.scales[64:], whole.scales)


def test_experts_are_parts_of_one_tensor(tmp_path):
    raw = CONFIGS["mixtral"]["two of four"] | {"intermediate_size": 64}
    source, target = written(tmp_path, raw, "int8")
    whole = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}["blk.1.ffn_down_exps.weight"]
    stored = open_checkpoint(source)
    experts = [ours.quantize(stored[f"layers.1.block_sparse_moe.experts.{i}.w2.weight"].load(), 8) for i in range(4)]
    assert whole.data.shape == (4, 32, 68)
    expected = np.stack([ours.dequantize(each) for each in experts])
    assert np.array_equal(dequantize(whole.data, whole.tensor_type), expected)
    _, tensors, inside = read_gguf_model(read_gguf(target))
    located = [tensors[f"layers.1.block_sparse_moe.experts.{i}.w2.weight"].data.offset for i in range(4)]
    assert located == [inside[whole.name].data.offset + i * 32 * 68 for i in range(4)]
    with Engine(target, dtype="auto", backend="numpy") as engine:
        held = engine.runner.model.layers[1].mlp.down.data.matrices
        assert all(np.array_equal(ours.dequantize(each), expected[i]) for i, each in enumerate(held))


def test_a_number_of_experts_that_is_not_the_tensors_is_refused(tmp_path):
    _, target = written(tmp_path, CONFIGS["mixtral"]["two of four"])
    key = b"llama.expert_count" + (4).to_bytes(4, "little")  # the type of the value that follows
    data = target.read_bytes()
    assert data.count(key) == 1
    target.write_bytes(data.replace(key + (4).to_bytes(4, "little"), key + (5).to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match=re.escape("for 5 experts, found [4, 40, 32]")):
        read_gguf_model(read_gguf(target))


def test_rows_that_are_not_whole_groups_have_16_bits(tmp_path):
    _, target = written(tmp_path, CONFIGS["llama"]["grouped"], "int4")  # an MLP of width 40
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
    assert (types["blk.0.ffn_up.weight"], types["blk.0.ffn_down.weight"]) == ("Q4_0", "F16")


def test_the_file_has_the_template_and_special_tokens(tmp_path):
    source, target = written(tmp_path, CONFIGS["llama"]["grouped"], "float16")
    with Engine(source) as before, Engine(target) as after:
        messages = [{"role": "user", "content": "Hi there"}]
        assert after.render_chat(messages) == before.render_chat(messages) == "</s>Hi there"
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert after.render_chat(messages, tools=tools) == before.render_chat(messages, tools=tools) == "1 tools"
        assert after.tokenizer.encode("a</s> b") == before.tokenizer.encode("a</s> b")
        assert after.tokenizer.special_ids >= {after.tokenizer.eos_token_id}


@pytest.mark.longer
def test_a_gguf_file_is_written_again_in_another_dtype(tmp_path):
    _, target = written(tmp_path, CONFIGS["llama"]["llama3"])
    write_gguf(target, tmp_path / "again.gguf", "float32")
    write_gguf(target, tmp_path / "small.gguf", "int8")
    first, again = gguf.GGUFReader(target), gguf.GGUFReader(tmp_path / "again.gguf")
    assert {t.name: t.data.tobytes() for t in first.tensors} == {t.name: t.data.tobytes() for t in again.tensors}
    assert {k: f.contents() for k, f in first.fields.items()} == {k: f.contents() for k, f in again.fields.items()}
    assert (tmp_path / "small.gguf").stat().st_size < target.stat().st_size / 2


@pytest.mark.parametrize(
    ("raw", "dtype", "group", "error", "message"),
    [
        (families.CONFIGS["opt"]["pre-norm"], "int8", None, UnsupportedModelError, "no GGUF file is written of 'opt'"),
        (
            ENCODERS["electra"],
            "int8",
            None,
            UnsupportedModelError,
            "no GGUF file is written of 'electra', but of bert, gemma3_text, jina_bert_v2, modernbert, nomic_bert",
        ),
        (
            CONFIGS["llama"]["grouped"],
            "int3",
            None,
            ParameterError,
            "dtype 'int3' is none of a GGUF file",
        ),
        (CONFIGS["llama"]["grouped"], "int8", 64, ParameterError, "GGUF files have groups of 32 weights"),
        (
            CONFIGS["llama"]["grouped"] | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "int8",
            None,
            UnsupportedModelError,
            "llama.cpp runs this family without dynamic rotary scaling",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, raw, dtype, group, error, message):
    source = write_folder(tmp_path / "source", raw)
    with pytest.raises(error, match=message):
        write_gguf(source, tmp_path / "m.gguf", dtype, group)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        *((family, CONFIGS[family][name], message) for (family, name), message in REFUSED.items()),
        ("gemma2", {"query_pre_attn_scalar": 20}, "with attention scaled by 1 / sqrt 12 alone"),
        ("gemma2", {"attn_logit_softcapping": None}, "with score_cap alone"),
        ("gemma2", {"tie_word_embeddings": False}, "with tied_head True alone"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "with windows in all but each n-th layer alone"),
        ("gemma3_text", {"attention_bias": True}, "with bias False alone"),
        ("smollm3", {"no_rope_layer_interval": 2}, "with rotary embedding in all but each layer of 4 alone"),
        ("smollm3", {"attention_bias": True}, "with qkv_bias False alone"),
        ("dots1", _FULL | {"attention_bias": True}, "with qkv_bias False alone"),
        ("dots1", _FULL | {"sliding_window": 7, "max_window_layers": 1}, "without sliding windows"),
        ("olmo2", {"head_dim": 16}, "with heads of width E / H alone"),
        ("olmoe", {"num_key_value_heads": 2}, "with as many key/value heads as heads alone"),
        ("qwen3_moe", {"norm_topk_prob": False}, "with normalised True alone"),
        ("olmo2", LLAMA3_FIELDS, "without rotary scaling 'llama3'"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(family, fields, message):
    raw = next(iter(CONFIGS[family].values())) | fields
    with pytest.raises(UnsupportedModelError, match=f"^m: llama.cpp runs this family {message}$"):
        gguf_fields(raw, family_of(raw).read_config(raw), "m")


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("granite", "granite.rope.scaling.finetuned", False, "Granite 4 without positions; minillm runs Granite 3"),
        ("gemma2", "gemma2.attention.sliding_window_pattern", 0, "sliding_window_pattern should be"),
    ],
)
def test_a_later_family_under_the_same_name_is_refused(tmp_path, family, key, value, message):
    _, target = written(tmp_path, next(iter(CONFIGS[family].values())))
    found = read_gguf(target)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        raw = read_gguf_config(dataclasses.replace(found, metadata=found.metadata | {key: value}))
        family_of(raw).read_config(raw)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(KNOWN - set(OLDER)))
def test_odd_metadata_is_read_or_refused_in_one_line(tmp_path, family):
    name = next(name for name in CONFIGS[family] if (family, name) not in REFUSED)
    _, target = written(tmp_path, CONFIGS[family][name])
    found = read_gguf(target)
    for key in (key for key in found.metadata if not key.startswith(("tokenizer.", "general."))):
        for value in ("x", -1, 0, 1e300, float("nan"), True, 2**70, 3.5):
            try:
                raw, _, _ = read_gguf_model(dataclasses.replace(found, metadata=found.metadata | {key: value}))
                family_of(raw).read_config(raw)
            except (CheckpointError, UnsupportedModelError) as error:
                assert "\n" not in str(error)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    source = write_folder(tmp_path / "source", CONFIGS["llama"]["grouped"])
    for name in ("vocab.json", "merges.txt"):
        (source / name).unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no tokenizer: looked for tokenizer\.json"):
        write_gguf(source, tmp_path / "m.gguf", "int8")
