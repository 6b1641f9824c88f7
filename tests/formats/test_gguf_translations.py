"""Forms that GGUF files of one architecture have, such as older ones, against llama.cpp; what is refused; damage."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from minillm import Engine
from minillm.backends.storage import expand
from minillm.errors import CheckpointError, MinillmError, UnsupportedModelError
from minillm.formats import open_checkpoint
from minillm.formats.gguf.file import read_gguf
from minillm.formats.gguf.read_metadata import read_gguf_config, read_gguf_model
from minillm.formats.gguf.write import write_gguf
from minillm.models import config_of
from minillm.reference.blocks import BlockMatrix
from minillm.reference.quantize import Quantized

from ..gguf_files import finish
from .test_gguf_damage import use
from .test_gguf_writing import CONFIGS, prompt_of, write_folder, written

Tensors = dict[str, np.ndarray]
V3 = CONFIGS["deepseek_v3"]["groups"]


def rewritten(source: Path, target: Path, entries: dict[str, Any], change: Callable[[Tensors], Tensors]) -> Path:
    """A float32 file with other tensors and other entries under the architecture's name; None leaves one out."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(str(target), architecture)
    for name, field in reader.fields.items():
        short = name.removeprefix(f"{architecture}.")
        if name.startswith("GGUF.") or name == "general.architecture" or short in entries:
            continue
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None)
    for short, value in entries.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{short}", value)
        elif value is not None:
            kind = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}[type(value)]
            writer.add_key_value(f"{architecture}.{short}", value, kind)
    tensors = {t.name: np.array(t.data).reshape(*reversed(t.shape.tolist())) for t in reader.tensors}
    for name, values in change(tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    finish(writer)
    return target


def logits_of(path: Path) -> np.ndarray:
    """Of one prompt. [T, V]"""
    with Engine(path, backend="numpy") as engine:
        return engine.forward(prompt_of(engine))


def check_llama_cpp(path: Path, ours: np.ndarray) -> None:
    """Compare with llama.cpp's logits of the same file, if it is there."""
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, flash_attn=False)
    with Engine(path, backend="numpy") as engine:
        prompt = prompt_of(engine)
    llama.eval(prompt)
    theirs = llama.scores[: len(prompt)]
    assert np.abs(ours - theirs).max() < 0.01 * np.abs(ours).max()  # its cache has 16 bits


def whole_expansions(tensors: Tensors) -> Tensors:
    """Each head's keys and values of the latent as one matrix, as files had it before April 2025."""
    changed = {name: values for name, values in tensors.items() if "attn_k_b" not in name and "attn_v_b" not in name}
    for name in [name for name in tensors if "attn_k_b" in name]:
        keys, values = tensors[name], tensors[name.replace("attn_k_b", "attn_v_b")]
        whole = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)  # [H, n, C], [H, V, C] -> [H, n + V, C]
        changed[name.replace("attn_k_b", "attn_kv_b")] = whole.reshape(-1, whole.shape[2])
    return changed


OLDER = {
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
    "attention.key_length": 20,
    "attention.value_length": 8,
    "attention.head_count_kv": 4,
}


@pytest.mark.reference
def test_an_older_file_with_whole_expansions_is_the_same_model(tmp_path: Path) -> None:
    _, target = written(tmp_path, V3)
    older = rewritten(target, tmp_path / "older.gguf", OLDER, whole_expansions)
    ours = logits_of(older)
    np.testing.assert_allclose(ours, logits_of(target), rtol=1e-5, atol=1e-5)
    check_llama_cpp(older, ours)
    write_gguf(older, tmp_path / "newer.gguf", "float32")
    np.testing.assert_allclose(logits_of(tmp_path / "newer.gguf"), ours, rtol=1e-5, atol=1e-5)


def fused_experts(tensors: Tensors) -> Tensors:
    """Each expert's gate and up as one matrix, as converters may write them."""
    changed = {name: values for name, values in tensors.items() if "_up_exps" not in name and "_gate_exps" not in name}
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        both = [tensors[name], tensors[name.replace("gate", "up")]]
        changed[name.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    return changed


def further_layer(tensors: Tensors) -> Tensors:
    """A layer at the end that predicts further tokens: a copy of the last."""
    return tensors | {name.replace("blk.1.", "blk.2."): values for name, values in tensors.items() if "blk.1." in name}


def key_heads_together(tensors: Tensors) -> Tensors:
    """A delta net's queries, keys, values and gates key head by key head, as older files of Qwen3-Next have them."""
    changed = {n: values for n, values in tensors.items() if "attn_qkv" not in n and "attn_gate" not in n}
    for name in [name for name in tensors if "attn_qkv" in name]:
        sizes = np.cumsum([2 * 8, 2 * 8, 4 * 8])  # two key heads of 8, four value heads of 8
        blocks = np.split(np.concatenate([tensors[name], tensors[name.replace("qkv", "gate")]]), sizes)
        by_head = [block.reshape(2, -1, block.shape[1]) for block in blocks]
        changed[name.replace("attn_qkv", "ssm_in")] = np.concatenate(by_head, axis=1).reshape(-1, blocks[0].shape[1])
    return changed


@pytest.mark.reference
def test_an_older_file_with_key_heads_together_is_the_same_model(tmp_path: Path) -> None:
    _, target = written(tmp_path, CONFIGS["qwen3_next"]["as llama.cpp has it"])
    older = rewritten(target, tmp_path / "older.gguf", {}, key_heads_together)
    ours = logits_of(older)
    np.testing.assert_allclose(ours, logits_of(target), rtol=1e-5, atol=1e-5)
    check_llama_cpp(older, ours)
    write_gguf(older, tmp_path / "newer.gguf", "float32")
    before, after = (gguf.GGUFReader(path).tensors for path in (target, tmp_path / "newer.gguf"))
    assert {tensor.name: tensor.shape.tolist() for tensor in before} == {t.name: t.shape.tolist() for t in after}
    np.testing.assert_allclose(logits_of(tmp_path / "newer.gguf"), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "Q5_0"])
def test_columns_of_value_heads_are_put_in_order_without_a_second_rounding(tmp_path: Path, dtype: str) -> None:
    """Whole groups with a scale stay integers; other blocks become floats."""
    wide = CONFIGS["qwen3_5_text"]["in turn"] | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    write_gguf(write_folder(tmp_path / "source", wide), tmp_path / "m.gguf", dtype)
    tensor = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}["blk.0.ssm_out.weight"]
    stored = dequantize(tensor.data, tensor.tensor_type).reshape(-1, 2, 2, 32)  # heads of both groups in turn
    expected = stored.swapaxes(1, 2).reshape(len(stored), -1)
    with Engine(tmp_path / "m.gguf", backend="numpy") as engine:
        weight: Any = engine.runner.model.layers[0].delta_net.out
        assert isinstance(weight.data, Quantized) == (dtype == "int8")
        np.testing.assert_allclose(expand(weight.data), expected, rtol=2**-11 if dtype == "Q5_0" else 0, atol=0)


def test_decays_that_grow_are_refused(tmp_path: Path) -> None:
    _, target = written(tmp_path, CONFIGS["qwen3_5_text"]["in turn"])
    growing = rewritten(
        target, tmp_path / "m.gguf", {}, lambda tensors: tensors | {"blk.0.ssm_a": -tensors["blk.0.ssm_a"]}
    )
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor blk\.0\.ssm_a should have no numbers above 0"):
        Engine(growing, backend="numpy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "change"),
    [({}, fused_experts), ({"block_count": 3, "nextn_predict_layers": 1}, further_layer)],
    ids=["gate and up in one tensor", "a layer that predicts further tokens"],
)
def test_another_form_of_a_file_is_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entries: dict[str, Any], change: Callable[[Tensors], Tensors]
) -> None:
    _, target = written(tmp_path, V3)
    other = rewritten(target, tmp_path / "other.gguf", entries, change)
    np.testing.assert_array_equal(logits_of(other), logits_of(target))
    assert ("left out: blk.2, which predicts further tokens" in caplog.text) == bool(entries)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "Q4_K_M"])
def test_expansions_of_latents_are_kept_as_the_file_has_them(tmp_path: Path, dtype: str) -> None:
    wide = V3 | {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    write_gguf(write_folder(tmp_path / "source", wide), tmp_path / "m.gguf", dtype)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with Engine(tmp_path / "m.gguf", backend="numpy") as engine:
        attention: Any = engine.runner.model.layers[1].attention
        for weight, name in ((attention.keys, "k"), (attention.values, "v")):
            tensor = stored[f"blk.1.attn_{name}_b.weight"]
            assert tensor.shape.tolist() == [32, 32, 4]
            assert isinstance(weight.data, Quantized | BlockMatrix)
            np.testing.assert_array_equal(
                expand(weight.data), dequantize(tensor.data, tensor.tensor_type).reshape(-1, 32)
            )


@pytest.mark.parametrize(
    ("family", "name", "entries", "message"),
    [
        ("deepseek_v3", "groups", {"attention.key_length": 20}, "of 20 and 16 numbers are no latent"),
        ("deepseek_v3", "groups", {"attention.head_count_kv": 4}, "4 key/value heads of 24 and 16 numbers"),
        ("deepseek_v3", "groups", {"rope.scaling.yarn_log_multiplier": 0.0}, "yarn with rope.scaling.yarn_log_multip"),
        ("deepseek_v3", "groups", {"rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast is 16.0; in this arch"),
        ("deepseek_v3", "groups", {"attention.temperature_scale": 0.1}, "attention.temperature_scale is 0.1"),
        ("deepseek_v3", "groups", {"expert_gating_func": 4}, r"gating_func is 4; minillm runs 1 \(softmax\) and 2"),
        ("deepseek_v3", "groups", {"expert_group_count": 3}, "n_group 3 should divide 8 experts"),
        ("deepseek_v3", "groups", {"nextn_predict_layers": 2}, "2 of 2 layers cannot predict further tokens"),
        ("qwen3_5_text", "in turn", {"ssm.inner_size": 33}, "4 value heads of a delta net cannot share 33 numbers"),
        ("qwen3_5_text", "in turn", {"ssm.group_count": 3}, "or the keys of 3 heads"),
        ("qwen3_5_text", "in turn", {"attention.scale": 1.0}, "attention.scale is 1.0; in this architecture"),
        ("gemma4_text", "experts", {"attention.value_length": 8}, "value_length is 8; in this architecture"),
        ("gemma4_text", "experts", {"rope.dimension_count_swa": 4}, "rope.dimension_count_swa is 4; in this arch"),
        ("gemma4_text", "experts", {"feed_forward_length": 0}, "feed_forward_length should be a number from 1 on"),
        ("gemma4_text", "experts", {"embedding_scale": 2.0}, "embedding_scale is 2.0; in this architecture"),
        ("glm4_moe", "groups, scaled", {"expert_gating_func": 1}, r"minillm runs 2 \(sigmoid\)"),
        ("glm4_moe", "groups, scaled", {"leading_dense_block_count": 2}, "first_k_dense_replace should be from 0"),
        ("ernie4_5_moe", "one shared, untied", {"interleave_moe_layer_step": 2}, "layer_step is 2; minillm, like"),
        ("ernie4_5_moe", "one shared, untied", {"expert_shared_feed_forward_length": 25}, "should be a multiple of 24"),
        ("qwen2_moe", "three of six", {"expert_weights_norm": True}, "expert_weights_norm is True; in this"),
        ("olmo3", "window then full", {"attention.sliding_window_pattern": 0}, "_pattern should be a number from 1 on"),
        ("olmo3", "window then full", {"block_count": 3}, "should be one of each of 3 layers, found 2"),
        ("glm4", "half of each head", {"rope.dimension_count": 3}, "whole heads of 8 rows, 3 of them in pairs"),
        ("minimax_m2", "half of each head", {"expert_gating_func": 1}, r"minillm runs 2 \(sigmoid\)"),
        ("minimax_m2", "half of each head", {"rope.dimension_count": 16}, "rotary_dim"),
        ("granitemoeshared", "shared", {"expert_gating_func": 2}, "expert_gating_func is 2; in this architecture"),
        ("mistral4", "groups", {"expert_gating_func": 2}, "experts chosen by shares of the softmax"),
        ("mistral4", "groups", {"rope.scaling.yarn_log_multiplier": 0.07}, "by yarn with .*yarn_log_multiplier 0.1"),
        ("mistral4", "groups", {"attention.temperature_length": 9}, "_length should be the original length 64"),
        ("deepseek_v2", "yarn", {"expert_weights_norm": True}, "norm_topk_prob is true; in this family"),
    ],
)
def test_an_entry_that_asks_for_something_else_is_refused(
    tmp_path: Path, family: str, name: str, entries: dict[str, Any], message: str
) -> None:
    _, target = written(tmp_path, CONFIGS[family][name])
    header = read_gguf(target)
    prefix = header.metadata["general.architecture"]
    changed = dict(header.metadata) | {f"{prefix}.{key}": value for key, value in entries.items()}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        raw, _, _ = read_gguf_model(dataclasses.replace(header, metadata=changed))
        config_of(raw)
    assert "\n" not in str(caught.value)


OTHER_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
OTHER_KINDS = [*OTHER_KINDS[:3], "sliding_attention", *OTHER_KINDS[2:]]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 0, "n_shared_experts": 0}, "experts that all tokens share alone"),
        ("deepseek_v3", {"rope_parameters": V3["rope_parameters"] | {"mscale_all_dim": 1.0}}, "equal mscale and"),
        ("deepseek_v3", {"topk_group": 4}, "a part of its groups of experts alone"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "with MLPs in its first layers alone"),
        ("glm4_moe", {"n_shared_experts": 0}, "experts that all tokens share alone"),
        ("gemma4_text", {"num_hidden_layers": 6, "layer_types": OTHER_KINDS}, "last layer of each kind"),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                }
            },
            "with rotary embedding of one base alone",
        ),
        ("exaone4", {"num_hidden_layers": 64, "sliding_window": None, "layer_types": None}, "in all of these, alone"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
            "groups of experts chosen by their two best",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(family: str, fields: dict[str, Any], message: str) -> None:
    from minillm.formats.gguf.write_metadata import gguf_fields

    raw = next(iter(CONFIGS[family].values())) | fields
    with pytest.raises(UnsupportedModelError, match=f"^m: llama.cpp runs this family .*{message}"):
        gguf_fields(raw, config_of(raw), "m")


def damaged(data: bytes, first: int, rng: random.Random) -> bytes:
    """One number or letter is another, among the entries of the model and in the list of tensors.

    Args:
        data: the file
        first: where the numbers of tensors begin
        rng: of the change
    """
    changed = bytearray(data)
    at = rng.choice([*range(24, data.index(b"tokenizer.")), *range(data.index(b"token_embd.weight"), first)])
    if rng.random() < 0.5:
        changed[at] = rng.choice([0, 1, 2, 3, 5, 8, 9, 16, 255, changed[at] ^ 1, rng.randrange(256)])
    else:
        changed[at : at + 4] = rng.choice([*range(13), 16, 24, 2**31 - 1, 2**32 - 1]).to_bytes(4, "little")
    return bytes(changed)


@pytest.mark.parametrize("entry", [4, None])
def test_a_number_says_every_which_layer_has_no_window(tmp_path: Path, entry: int | None) -> None:
    _, target = written(tmp_path, CONFIGS["olmo3"]["window then full"])
    header = read_gguf(target)
    metadata = dict(header.metadata) | {"olmo2.block_count": 6, "olmo2.attention.sliding_window_pattern": entry}
    raw = read_gguf_config(dataclasses.replace(header, metadata={k: v for k, v in metadata.items() if v is not None}))
    assert [kind == "full_attention" for kind in raw["layer_types"]] == [False, False, False, True, False, False]


def test_glm_4_with_rows_for_positions_of_images_is_refused(tmp_path: Path) -> None:
    _, target = written(tmp_path, CONFIGS["glm4"]["half of each head"])
    seeing = rewritten(target, tmp_path / "s.gguf", {"rope.dimension_sections": [1, 1, 0, 0]}, lambda tensors: tensors)
    with pytest.raises(UnsupportedModelError, match=r"dimension_sections is that of a model with M-RoPE"):
        read_gguf_model(read_gguf(seeing))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_5_moe_text"])
def test_the_shared_experts_gate_may_be_a_matrix(tmp_path: Path, family: str) -> None:
    """As llama.cpp's converter writes it."""
    _, target = written(tmp_path, CONFIGS[family]["three of six" if family == "qwen2_moe" else "in turn"])

    def with_matrices(tensors: Tensors) -> Tensors:
        return {name: values[None] if "gate_inp_shexp" in name else values for name, values in tensors.items()}

    other = rewritten(target, tmp_path / "other.gguf", {}, with_matrices)
    np.testing.assert_array_equal(logits_of(other), logits_of(target))


@pytest.mark.slow
def test_without_a_cap_gemma_4_has_llama_cpps(tmp_path: Path) -> None:
    """And keys and values of layers that share those of others are not read."""
    _, target = written(tmp_path, CONFIGS["gemma4_text"]["per-layer embeddings"] | {"tie_word_embeddings": False})
    capped = rewritten(target, tmp_path / "capped.gguf", {"final_logit_softcapping": 30.0}, lambda tensors: tensors)

    def with_unread(tensors: Tensors) -> Tensors:
        return tensors | {f"blk.3.attn_{x}.weight": tensors[f"blk.1.attn_{x}.weight"] for x in ("k", "v", "k_norm")}

    silent = rewritten(target, tmp_path / "silent.gguf", {"final_logit_softcapping": None}, with_unread)
    np.testing.assert_array_equal(logits_of(silent), logits_of(capped))


@pytest.mark.longer
def test_nemotron_h_has_one_epsilon_in_published_files(tmp_path: Path) -> None:
    source, target = written(tmp_path, CONFIGS["nemotron_h"]["experts"])
    without = {"attention.layer_norm_rms_epsilon": None}
    published = rewritten(target, tmp_path / "published.gguf", without, lambda tensors: tensors)
    np.testing.assert_allclose(logits_of(published), logits_of(source), rtol=1e-4, atol=1e-4)
    neither = without | {"attention.layer_norm_epsilon": None}
    bare = rewritten(target, tmp_path / "bare.gguf", neither, lambda tensors: tensors)
    with pytest.raises(CheckpointError, match=r"lacks nemotron_h_moe\.attention\.layer_norm_epsilon"):
        read_gguf_model(read_gguf(bare))


def test_factors_of_falcon_h1_are_in_the_weights_of_a_file(tmp_path: Path) -> None:
    """As llama.cpp's converter has them, by the names of the fields of config.json."""
    raw = CONFIGS["falcon_h1"]["all factors"]
    source, target = written(tmp_path, raw)
    stored = open_checkpoint(source)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(target).tensors}
    z, x, B, C, dt = raw["ssm_multipliers"]
    parts = np.repeat([z, x, B, C, dt], [24, 24, 24, 24, 4])[:, None]
    inside, attention_in = raw["ssm_in_multiplier"], raw["attention_in_multiplier"]
    expected = {
        "token_embd": ("embed_tokens", raw["embedding_multiplier"]),
        "output": ("lm_head", raw["lm_head_multiplier"]),
        "blk.1.attn_q": ("layers.1.self_attn.q_proj", attention_in),
        "blk.1.attn_k": ("layers.1.self_attn.k_proj", attention_in * raw["key_multiplier"]),
        "blk.1.attn_v": ("layers.1.self_attn.v_proj", attention_in),
        "blk.1.attn_output": ("layers.1.self_attn.o_proj", raw["attention_out_multiplier"]),
        "blk.1.ssm_in": ("layers.1.mamba.in_proj", inside * parts),
        "blk.1.ssm_out": ("layers.1.mamba.out_proj", raw["ssm_out_multiplier"]),
        "blk.1.ffn_gate": ("layers.1.mlp.gate_proj", raw["mlp_multipliers"][0]),
        "blk.1.ffn_up": ("layers.1.mlp.up_proj", 1.0),
        "blk.1.ffn_down": ("layers.1.mlp.down_proj", raw["mlp_multipliers"][1]),
    }
    for file, (ours, factor) in expected.items():
        np.testing.assert_allclose(tensors[f"{file}.weight"], stored[f"{ours}.weight"].load() * factor, rtol=3e-7)


@pytest.mark.longer
def test_layers_of_which_the_kinds_are_unlike_are_refused(tmp_path: Path) -> None:
    _, target = written(tmp_path, CONFIGS["nemotron_h"]["MLPs"])
    for entries, message in (
        ({"attention.head_count_kv": [0, 4, 0]}, "should be a number for each of 4 layers"),
        ({"attention.head_count_kv": [2, 4, 0, 0]}, "differs from layer to layer"),
        ({"attention.head_count_kv": [0, 0, 0, 0]}, "more than 0 in one layer at least"),
        ({"ssm.inner_size": 26}, "4 heads of Mamba in 2 groups cannot share 26 channels"),
    ):
        path = rewritten(target, tmp_path / "other.gguf", entries, lambda tensors: tensors)
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            read_gguf_model(read_gguf(path))
        path.unlink()


DAMAGED = [
    ("deepseek_v3", "groups"),
    ("minicpm3", "longrope"),
    ("qwen3_next", "as llama.cpp has it"),
    ("qwen3_5_text", "in turn"),
    ("qwen3_5_moe_text", "in turn"),
    ("gemma4_text", "per-layer embeddings"),
    ("gemma4_text", "experts"),
    ("granitemoehybrid", "experts"),
    ("nemotron_h", "experts"),
    ("falcon_h1", "a norm, no factors"),
    ("glm4_moe", "groups, scaled"),
    ("qwen2_moe", "three of six"),
    ("ernie4_5_moe", "one shared, untied"),
    ("olmo3", "window then full"),
    ("exaone4", "full, tied"),
    ("ministral3", "other factors"),
    ("glm4", "half of each head"),
    ("dots1", "a dense layer first, scaled"),
    ("minimax_m2", "half of each head"),
    ("granitemoeshared", "shared"),
    ("mistral4", "groups"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("family", "name"), DAMAGED)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20))])
def test_fifty_files_with_damaged_headers_are_refused_or_work(
    tmp_path: Path, family: str, name: str, seed: int
) -> None:
    _, target = written(tmp_path, CONFIGS[family][name])
    data = target.read_bytes()
    first = min(tensor.offset for tensor in read_gguf(target).tensors.values())
    rng, worked = random.Random(seed), 0
    for number in range(50):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged(data, first, rng))
        try:
            use(path)
            worked += 1
        except MinillmError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
        finally:
            path.unlink()
    assert 0 < worked < 50
