"""Quantised checkpoints whose description, scales or bytes are not where today's releases put them."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.load_model import load_model

from ..published import ALL, rounded, write_pair
from ..tiny import logits_of, runner_of

LINE = [3, 17, 40, 9, 77]


def logits(folder):
    return logits_of(runner_of(load_model(folder, NumpyBackend(weights="float32"))), LINE)


def moved(folder, file, of_file):
    """The folder with its quantization_config in a file of its own."""
    raw = json.loads((folder / "config.json").read_text())
    config = raw.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / file).write_text(json.dumps(of_file(config)))
    return folder


def of_modelopt(config):
    fields = {name: value for name, value in config.items() if name != "quant_method"}
    return {
        "producer": {"name": "modelopt", "version": "0.19.0"},
        "quantization": fields | {"kv_cache_quant_algo": None},
    }


def of_autogptq(config):
    return {name: config[name] for name in ("bits", "group_size", "sym", "desc_act")} | {"damp_percent": 0.01}


def of_autoawq(config):
    return {"w_bit": 4, "q_group_size": config["group_size"], "zero_point": config["zero_point"], "version": "GEMM"}


BESIDE = [
    ("modelopt", "hf_quant_config.json", of_modelopt),
    ("gptq-int4", "quantize_config.json", of_autogptq),
    ("gptq-int4-desc-act", "quantize_config.json", of_autogptq),
    ("awq", "quant_config.json", of_autoawq),
]


@pytest.mark.parametrize(("name", "file", "of_file"), BESIDE, ids=[f"{name} in {file}" for name, file, _ in BESIDE])
def test_a_description_beside_config_json_is_read(tmp_path, name, file, of_file):
    quantised, plain = write_pair(tmp_path, "llama", ALL[name])
    np.testing.assert_allclose(logits(moved(quantised, file, of_file)), logits(plain), atol=1e-4)


def test_config_json_comes_before_a_file_beside_it(tmp_path):
    quantised, plain = write_pair(tmp_path, "llama", ALL["gptq-int4"])
    (quantised / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 7}))
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-4)


def test_an_error_names_the_file(tmp_path):
    quantised, _ = write_pair(tmp_path, "llama", ALL["modelopt"])
    moved(quantised, "hf_quant_config.json", lambda config: {"quantization": {"quant_algo": "W4A8_AWQ"}})
    with pytest.raises(
        UnsupportedModelError, match=r"^hf_quant_config\.json: quant_algo is 'W4A8_AWQ'; minillm runs 'FP8'"
    ):
        load_model(quantised, NumpyBackend())


@pytest.mark.parametrize("parts", [("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.kv_scale",)])
@pytest.mark.parametrize("name", ["fp8-number", "modelopt", "compressed-float8-tensor", "compressed-float8-rows"])
def test_scales_of_a_cache_without_a_scheme_are_left_out_in_one_line(tmp_path, caplog, name, parts):
    def add(tensors):
        tensors |= {f"model.layers.{i}.{part}": np.float32([0.5]) for i in range(2) for part in parts}

    quantised, plain = write_pair(tmp_path, "llama", ALL[name], change=add)
    with caplog.at_level(logging.WARNING, "minillm"):
        ours = logits(quantised)
    np.testing.assert_allclose(ours, logits(plain), atol=1e-4)
    assert sum(f"left out, for the model has no place for them: layers.0.{parts[0]}" in m for m in caplog.messages) == 1


def test_scales_of_a_cache_within_its_projections(tmp_path):
    def add(tensors):
        tensors |= {f"model.layers.0.self_attn.{k}_proj.{k}_scale": np.float32(0.5) for k in "kv"}
        tensors["model.layers.1.self_attn.k_proj.output_scale"] = np.float32([0.25])

    quantised, plain = write_pair(tmp_path, "llama", ALL["fp8-number"], change=add)
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-4)


STORAGES = {"int8": np.int8, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "bitsandbytes-nf4-nested"])
def test_the_packed_bytes_of_nf4_may_be_stored_as_numbers(tmp_path, name, storage):
    def store(tensors):
        for key in [key for key in tensors if f"{key}.quant_map" in tensors]:
            tensors[key] = np.ascontiguousarray(tensors[key]).reshape(-1).view(STORAGES[storage])[:, None]

    quantised, plain = write_pair(tmp_path, "llama", ALL[name], change=store)
    raw = json.loads((quantised / "config.json").read_text())
    raw["quantization_config"]["bnb_4bit_quant_storage"] = storage
    (quantised / "config.json").write_text(json.dumps(raw))
    np.testing.assert_allclose(logits(quantised), logits(plain), atol=1e-5)


@pytest.mark.reference
@pytest.mark.parametrize("storage", ["uint8", "float16", "bfloat16", "float32"])
def test_what_bitsandbytes_packs_in_another_type_means_the_same(tmp_path, storage):
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes").functional
    from safetensors.torch import load_file, save_file

    _, plain = write_pair(tmp_path, "llama", ALL["bitsandbytes-nf4"])
    dense = load_file(plain / "model.safetensors")
    packed, meant = {}, {}
    for name, value in dense.items():
        packed[name] = meant[name] = value.float()
        if name.endswith("_proj.weight"):
            q, state = functional.quantize_4bit(
                value.float(), quant_type="nf4", blocksize=64, quant_storage=getattr(torch, storage)
            )
            parts = state.as_dict(packed=True)
            packed |= {name: q} | {f"{name}.{part}": tensor for part, tensor in parts.items()}
            meant[name] = functional.dequantize_4bit(q, state).float()
    folder = tmp_path / "packed"
    folder.mkdir()
    raw = json.loads((plain / "config.json").read_text()) | {"dtype": "float32"}
    for where, tensors, config in ((folder, packed, ALL["bitsandbytes-nf4"].config), (plain, meant, None)):
        added = {} if config is None else {"quantization_config": config | {"bnb_4bit_quant_storage": storage}}
        (where / "config.json").write_text(json.dumps(raw | added))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, where / "model.safetensors")
    np.testing.assert_allclose(logits(folder), logits(plain), atol=1e-5)


def as_mlx_writes(folder, added=(), also=False):
    """The folder with its description in config.json's `quantization`; `also` in the usual field, without a method."""
    raw = json.loads((folder / "config.json").read_text())
    config = raw.pop("quantization_config")
    del config["quant_method"]
    raw |= dict.fromkeys(["quantization", *["quantization_config"] * also], config | dict(added))
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("also", [False, True])
def test_mlx_describes_it_in_a_field_of_its_own(tmp_path, also):
    quantised, plain = write_pair(tmp_path, "llama", ALL["mlx-int4"])
    np.testing.assert_allclose(logits(as_mlx_writes(quantised, also=also)), logits(plain), atol=1e-4)


def test_modules_of_mlx_may_have_settings_of_their_own(tmp_path):
    wide, plain = ALL["mlx-6-bits"], {}
    gate = "model.layers.1.mlp.gate_proj"

    def change(tensors):
        matrix = np.random.default_rng(2).standard_normal((128, 64)).astype(np.float32)
        parts, meant = wide.write(matrix)
        plain[f"{gate}.weight"] = rounded(meant.astype(np.float32), "bfloat16")
        tensors |= {f"{gate}.{part}": array for part, array in parts.items()}

    quantised, folder = write_pair(tmp_path, "llama", ALL["mlx-int4"], change=change)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | plain, folder / "model.safetensors")
    as_mlx_writes(quantised, {gate: {"group_size": 64, "bits": 6}, "model.embed_tokens": False})
    np.testing.assert_allclose(logits(quantised), logits(folder), atol=1e-4)


@pytest.mark.parametrize(
    ("added", "error", "message"),
    [
        ({"mode": "mxfp8"}, UnsupportedModelError, "quantization: mode is 'mxfp8'; minillm runs 'affine'"),
        ({"bits": 7}, UnsupportedModelError, "quantization: bits is 7; minillm reads 2 and 3 and 4 and 5 and 6 and 8"),
        ({"model.norm": 3}, CheckpointError, "settings of model.norm should be group_size and bits, or false, found 3"),
        ({"model.layers.0.mlp.up_proj": False}, CheckpointError, r"up_proj are quantised, but config\.json says"),
        ({"group_size": 16}, CheckpointError, r"scales should be .* of shape .* by MLX, .* found"),
    ],
)
def test_what_mlx_could_mean_otherwise_is_refused(tmp_path, added, error, message):
    quantised, _ = write_pair(tmp_path, "llama", ALL["mlx-int4"])
    with pytest.raises(error, match=message):
        logits(as_mlx_writes(quantised, added))
