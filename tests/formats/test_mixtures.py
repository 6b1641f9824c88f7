"""Mixtures of types in GGUF files: which tensor has which type, as llama.cpp chooses, and what such a file says."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from minillm import Engine
from minillm.errors import ParameterError
from minillm.formats.gguf.file import FILE_TYPES
from minillm.formats.gguf.mixtures import MIXTURES, Mixture, more_bits
from minillm.formats.gguf.write import write_gguf

from .test_gguf_writing import CONFIGS, write_folder

WIDE = CONFIGS["llama"]["grouped"] | {
    "hidden_size": 256,
    "intermediate_size": 288,
    "num_hidden_layers": 17,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""Rows of whole blocks of 256, and, of the MLP's last matrix, of 32"""
MODELS = {
    "llama": WIDE,
    "tied": WIDE | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "with few layers": WIDE | {"num_hidden_layers": 2, "intermediate_size": 512},
    "narrow": WIDE | {"hidden_size": 160, "intermediate_size": 40, "num_hidden_layers": 9},
    "four of eight experts": CONFIGS["mixtral"]["two of four"]
    | {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8, "num_hidden_layers": 9},
    "experts": CONFIGS["qwen3_moe"]["three of six"]
    | {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 8},
    "latent attention": CONFIGS["deepseek_v3"]["groups"]
    | {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 512, "num_hidden_layers": 9}
    | {"q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32},
    "delta nets": CONFIGS["qwen3_5_text"]["in turn"]
    | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12, "layer_types": None},
    "fused": CONFIGS["gpt2"]["gelu by tanh"] | {"n_embd": 256, "n_layer": 9},
}


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.reference
@pytest.mark.parametrize("model", MODELS)
def test_llama_cpp_gives_each_tensor_the_same_type(tmp_path: Path, model: str) -> None:
    package = pytest.importorskip("llama_cpp")
    source = write_folder(tmp_path / "source", MODELS[model])
    write_gguf(source, tmp_path / "exact.gguf", "float32")
    codes = {name: code for code, name in FILE_TYPES.items()}
    for mixture in MIXTURES:
        if mixture == "MXFP4" and "experts" not in model:
            continue  # llama.cpp rounds experts alone
        write_gguf(source, tmp_path / f"{mixture}.gguf", mixture)
        parameters = package.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = codes.get(mixture, codes["MXFP4_MOE"]), 1
        target = tmp_path / f"llama.cpp {mixture}.gguf"
        failed = package.llama_model_quantize(
            str(tmp_path / "exact.gguf").encode(), str(target).encode(), ctypes.byref(parameters)
        )
        assert not failed
        expected = {name: kind for name, kind in types(target).items() if not name.startswith("rope")}
        assert types(tmp_path / f"{mixture}.gguf") == expected


def config(**fields: int) -> SimpleNamespace:
    return SimpleNamespace(**{"num_layers": 16, "num_heads": 8, "num_kv_heads": 2, "num_experts": 0} | fields)


def test_the_first_and_last_eighth_and_a_third_of_the_others_have_more_bits() -> None:
    assert [layer for layer in range(32) if more_bits(layer, 32)] == [
        0,
        1,
        2,
        3,
        6,
        9,
        12,
        15,
        18,
        21,
        24,
        27,
        *range(28, 32),
    ]


@pytest.mark.parametrize(
    ("mixture", "name", "width", "kind"),
    [
        ("Q4_K_M", "blk.2.attn_v.weight", 512, "Q4_K"),
        ("Q4_K_M", "blk.4.attn_v.weight", 512, "Q6_K"),
        ("Q4_K_M", "blk.4.ffn_down.weight", 512, "Q6_K"),
        ("Q4_K_M", "blk.4.ffn_up.weight", 512, "Q4_K"),
        ("Q4_K_M", "blk.4.ffn_up.weight", 544, "Q5_0"),
        ("Q4_K_M", "blk.4.ffn_down.weight", 544, "Q8_0"),
        ("Q4_K_M", "blk.4.ffn_down.weight", 520, "F16"),
        ("Q4_K_S", "blk.3.attn_v.weight", 512, "Q5_K"),
        ("Q5_K_M", "blk.2.ffn_down.weight", 288, "Q5_1"),
        ("IQ4_XS", "blk.9.attn_v.weight", 512, "Q5_K"),
        ("IQ4_XS", "blk.9.ffn_down.weight", 288, "IQ4_NL"),
        ("Q5_0", "output.weight", 512, "Q6_K"),
        ("MXFP4", "blk.9.ffn_up.weight", 512, "MXFP4"),
        ("MXFP4", "token_embd.weight", 512, "Q8_0"),
    ],
)
def test_types_of_a_few_tensors(mixture: str, name: str, width: int, kind: str) -> None:
    assert Mixture(mixture, config(), "llama", tied=False).type_of(name, width).name == kind


def test_the_embedding_has_the_type_of_the_head_that_it_is() -> None:
    kinds = [
        Mixture("Q4_K_M", config(), "llama", tied).type_of("token_embd.weight", 512).name for tied in (True, False)
    ]
    assert kinds == ["Q6_K", "Q4_K"]


def test_with_experts_only_these_are_in_mxfp4() -> None:
    mixture = Mixture("MXFP4", config(num_experts=4), "llama", tied=True)
    names = ("blk.0.ffn_up_exps.weight", "blk.0.attn_q.weight")
    assert [mixture.type_of(name, 64).name for name in names] == ["MXFP4", "Q8_0"]


@pytest.mark.longer
@pytest.mark.sampled(8)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_file_says_its_mixture_and_gives_the_weights_that_the_package_gguf_reads(
    tmp_path: Path, mixture: str
) -> None:
    raw = WIDE | {"num_hidden_layers": 2, "intermediate_size": 288}
    source = write_folder(tmp_path / "source", raw)
    errors = {one.name: one for one in write_gguf(source, tmp_path / "m.gguf", mixture.lower(), progress=False)}
    write_gguf(source, tmp_path / "exact.gguf", "float32", progress=False)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    code = reader.fields["general.file_type"].contents()
    assert FILE_TYPES[code].removesuffix("_MOE") == mixture
    exact = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "exact.gguf").tensors}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        error = np.linalg.norm(values - exact[tensor.name]) / np.linalg.norm(exact[tensor.name])
        assert error < 0.13
        assert errors[tensor.name].error == pytest.approx(error, rel=1e-4) if tensor.name in errors else error == 0


@pytest.mark.reference
@pytest.mark.parametrize("mixture", MIXTURES)
def test_llama_cpp_gives_the_same_logits(tmp_path: Path, mixture: str) -> None:
    """A model with rows of whole blocks, and one with others."""
    package = pytest.importorskip("llama_cpp")
    for width in (512, 288):
        source = write_folder(tmp_path / f"source {width}", WIDE | {"num_hidden_layers": 1, "intermediate_size": width})
        path = tmp_path / f"{width}.gguf"
        write_gguf(source, path, mixture, progress=False)
        llama = package.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, flash_attn=False)
        with Engine(path, dtype="float32", backend="numpy") as engine:
            prompt = [5, 80, 7, 11, 33, 12, 90, 44]
            ours = engine.forward(prompt)
        llama.eval(prompt)
        theirs = llama.scores[: len(prompt)]
        assert np.linalg.norm(ours - theirs) < 0.15 * np.linalg.norm(ours)  # it rounds activations to 8 bits


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e9])
def test_a_weight_that_no_block_holds_is_named_and_leaves_nothing(tmp_path: Path, value: float) -> None:
    from safetensors.numpy import load_file, save_file

    source = write_folder(tmp_path / "source", WIDE | {"num_hidden_layers": 1})
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    tensors[name][3, 5] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ParameterError, match=r"^tensor blk\.0\.ffn_up\.weight: weights to be quantised must be finite"):
        write_gguf(source, tmp_path / "m.gguf", "Q4_K_M")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_is_told_that_mixtures_are_of_gguf_files(tmp_path: Path) -> None:
    from minillm.formats.write_checkpoint import write_checkpoint

    with pytest.raises(ParameterError, match=r"Q4_K_M is a mixture of types of GGUF files: DST should end in \.gguf"):
        write_checkpoint(tmp_path / "never looked at", tmp_path / "out", "Q4_K_M")


@pytest.mark.longer
def test_a_file_written_again_is_the_same(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", WIDE | {"num_hidden_layers": 2})
    for mixture in ("Q4_K_M", "IQ4_XS", "MXFP4"):
        first, again = tmp_path / f"{mixture}.gguf", tmp_path / f"{mixture} again.gguf"
        write_gguf(source, first, mixture)
        assert write_gguf(first, again, mixture) == []
        assert first.read_bytes() == again.read_bytes()
