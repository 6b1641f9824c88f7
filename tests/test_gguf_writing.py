"""GGUF files that `quantize` writes: read again, and run by llama.cpp, of every family that it knows."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from safetensors.numpy import save_file

from minillm import Engine
from minillm.backends.weights import RandomTensor
from minillm.checkpoint import open_checkpoint
from minillm.errors import ModelNotFoundError, ParameterError, UnsupportedModelError
from minillm.gguf_writing import write_gguf
from minillm.models import family_of
from minillm.models.gguf import ARCHITECTURES
from minillm.models.sources import tensor_shapes
from minillm.reference import quantize as ours

from . import families
from .tiny import TOKENIZER, std_of

SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {family: dict(configs) for family, configs in families.CONFIGS.items()}
CONFIGS["llama"] |= {
    "linear": CONFIGS["llama"]["grouped"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": CONFIGS["llama"]["grouped"] | {"rope_scaling": SCALED},
    "llama3": CONFIGS["llama"]["grouped"]
    | {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
}
CONFIGS["llama"]["wide"] = CONFIGS["llama"]["grouped"] | {"head_dim": 16}
CONFIGS["qwen2"]["plain"] = CONFIGS["llama"]["grouped"] | {"model_type": "qwen2"}
CONFIGS["qwen3"]["plain"] = CONFIGS["llama"]["wide"] | {"model_type": "qwen3"}
CONFIGS["gpt_neox"]["tied"] = next(iter(CONFIGS["gpt_neox"].values())) | {"tie_word_embeddings": True}

KNOWN = {each.model_type for each in ARCHITECTURES.values() if each.written} | {"mistral"}
CASES = [(family, name) for family, configs in CONFIGS.items() if family in KNOWN for name in configs]


def write_folder(folder: Path, raw: dict) -> Path:
    """A checkpoint folder as the family publishes them, with the small tokenizer, which begins with BOS."""
    folder.mkdir()
    raw = raw | {"vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    family = family_of(raw)
    shapes = tensor_shapes(family.build, family.read_config(raw), as_built=False)
    tensors = {name: RandomTensor(name, shape, 0, std_of(name, raw)).load() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"add_bos_token": True, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def written(folder: Path, raw: dict, dtype: str = "float32") -> tuple[Path, Path]:
    """A checkpoint folder and the GGUF file made of it; the file is skipped where llama.cpp does not run the model."""
    source = write_folder(folder / "source", raw)
    target = folder / "m.gguf"
    try:
        write_gguf(source, target, dtype)
    except UnsupportedModelError as error:
        if "llama.cpp" not in str(error) and "not written here" not in str(error):
            raise
        pytest.skip(str(error))
    return source, target


def prompt_of(engine: Engine) -> list[int]:
    return np.random.default_rng(0).integers(5, 90, 12).tolist()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_file_written_in_float32_gives_the_same_logits(tmp_path, family, name):
    source, target = written(tmp_path, CONFIGS[family][name])
    with Engine(source, backend="numpy") as before, Engine(target, backend="numpy") as after:
        prompt = prompt_of(before)
        plain = family == "mistral" and not any(before.config.windows)  # which is Llama
        assert after.config.model_type == ("llama" if plain else family)
        assert np.array_equal(after.forward(prompt), before.forward(prompt))
        assert after.config.max_positions == before.config.max_positions
        assert after.tokenizer.encode("Hello there</s>") == before.tokenizer.encode("Hello there</s>")


@pytest.mark.reference
@pytest.mark.parametrize(("family", "name"), CASES)
def test_llama_cpp_gives_the_same_logits(tmp_path, caplog, family, name):
    package = pytest.importorskip("llama_cpp")
    source, target = written(tmp_path, CONFIGS[family][name])
    if (CONFIGS[family][name].get("sliding_window") or 64) < 64:
        assert "llama.cpp runs this family without its sliding window" in caplog.text
        return
    with Engine(source, backend="numpy") as engine:
        prompt = prompt_of(engine)
        ours = engine.forward(prompt)
    llama = package.Llama(str(target), n_ctx=64, logits_all=True, verbose=False, n_threads=1, flash_attn=False)
    llama.eval(prompt)
    theirs = llama.scores[: len(prompt)]
    assert np.abs(ours - theirs).max() < 0.01 * np.abs(ours).max()  # its cache has 16 bits


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


def test_rows_that_are_not_whole_groups_have_16_bits(tmp_path):
    _, target = written(tmp_path, CONFIGS["llama"]["grouped"], "int4")  # an MLP of width 40
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
    assert (types["blk.0.ffn_up.weight"], types["blk.0.ffn_down.weight"]) == ("Q4_0", "F16")


def test_the_file_has_the_template_and_special_tokens(tmp_path):
    source, target = written(tmp_path, CONFIGS["llama"]["grouped"], "float16")
    with Engine(source) as before, Engine(target) as after:
        messages = [{"role": "user", "content": "Hi there"}]
        assert after.render_chat(messages) == before.render_chat(messages) == "</s>Hi there"
        assert after.tokenizer.encode("a</s> b") == before.tokenizer.encode("a</s> b")
        assert after.tokenizer.special_ids >= {after.tokenizer.eos_token_id}


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
        (families.CONFIGS["opt"]["pre-norm"], "int8", None, UnsupportedModelError, "llama.cpp does not run 'opt'"),
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
            "llama.cpp has no dynamic rotary scaling",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, raw, dtype, group, error, message):
    source = write_folder(tmp_path / "source", raw)
    with pytest.raises(error, match=message):
        write_gguf(source, tmp_path / "m.gguf", dtype, group)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    source = write_folder(tmp_path / "source", CONFIGS["llama"]["grouped"])
    for name in ("vocab.json", "merges.txt"):
        (source / name).unlink()
    with pytest.raises(ModelNotFoundError, match="holds no tokenizer, which a GGUF file needs"):
        write_gguf(source, tmp_path / "m.gguf", "int8")
