"""Every entry of a GGUF file is honoured, without effect, refused, or named in a warning."""

import logging
import math

import numpy as np
import pytest
from gguf import GGUFReader

from minillm import Engine
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats import open_model
from minillm.formats.gguf.file import read_gguf
from minillm.formats.gguf.read_metadata import read_gguf_config

from ..gguf_files import LLAMA, byte_tokens, write_llama

PROMPT = [3, 77, 12, 150, 9, 31, 64]
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16}


def logits(path, **options):
    with Engine(path, **options) as engine:
        return engine.forward(PROMPT)


def test_the_attention_factor_multiplies_yarns_own(tmp_path):
    """llama.cpp: cosines and sines are scaled by attn_factor (1 + 0.1 ln factor); config.json has the product."""
    write_llama(tmp_path / "m.gguf", **YARN, rope__scaling__attn_factor=0.5)
    scaling = read_gguf_config(read_gguf(tmp_path / "m.gguf"))["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


@pytest.mark.reference
@pytest.mark.parametrize("factor", [None, 0.5, 1.0, 1.25])
def test_yarns_attention_factor_gives_the_logits_of_transformers(tmp_path, factor):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    more = {} if factor is None else {"rope__scaling__attn_factor": factor}
    values = write_llama(tmp_path / "m.gguf", **YARN, **more)
    table = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    table |= {} if factor is None else {"attention_factor": factor * (1 + 0.1 * math.log(4))}
    fields = {name: value for name, value in LLAMA.items() if name not in ("model_type", "rope_theta")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, rope_parameters=table)).float().eval()
    prefixed = {name if name.startswith("lm_head") else f"model.{name}": value for name, value in values.items()}
    model.load_state_dict({name: torch.from_numpy(value) for name, value in prefixed.items()})
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0].numpy()
    np.testing.assert_allclose(logits(tmp_path / "m.gguf", dtype="float32"), theirs, atol=2e-4)


def test_an_attention_factor_without_yarn_is_refused(tmp_path):
    write_llama(tmp_path / "m.gguf", rope__scaling__attn_factor=1.5)
    with pytest.raises(UnsupportedModelError, match=r"attn_factor is 1\.5 with rotary scaling 'none'"):
        Engine(tmp_path / "m.gguf")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("logit_scale", 0.5, "0 or 1"),
        ("embedding_scale", 12.0, "0 or 1"),
        ("residual_scale", 0.22, "0 or 1"),
        ("attention.scale", 0.5, "0 or 0.25"),
        ("attention.clamp_kqv", 8.0, "0"),
        ("attention.max_alibi_bias", 8.0, "0"),
        ("attention.key_length_swa", 8, "16"),
        ("attn_logit_softcapping", 50.0, "0"),
        ("final_logit_softcapping", 30.0, "0"),
        ("rope.freq_base_swa", 500000.0, "10000"),
        ("expert_shared_count", 1, "0"),
        ("expert_gating_func", 2, "0 or 1"),
        ("expert_weights_scale", 2.5, "0 or 1"),
        ("nextn_predict_layers", 1, "0"),
        ("embedding_length_out", 32, "64"),
    ],
)
def test_a_value_that_is_not_computed_is_refused_by_its_key(tmp_path, key, value, said):
    write_llama(tmp_path / "m.gguf", **{key.replace(".", "__"): value})
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key} is .*; in this architecture minillm runs {said}$"):
        Engine(tmp_path / "m.gguf")


def test_a_value_that_is_computed_anyway_changes_nothing(tmp_path, caplog):
    values = write_llama(tmp_path / "plain.gguf")
    neutral = {"logit_scale": 1.0, "attention__scale": 0.25, "expert_count": 0, "expert_weights_scale": 1.0}
    neutral |= {"rope__freq_base_swa": 10000.0, "attention__value_length": 16, "vocab_size": 320}
    neutral |= {"rope__scaling__attn_factor": 1.0, "rope__scaling__finetuned": 1}
    write_llama(tmp_path / "said.gguf", values=values, **neutral)
    np.testing.assert_array_equal(logits(tmp_path / "said.gguf"), logits(tmp_path / "plain.gguf"))
    assert "not read" not in caplog.text


def test_keys_that_nobody_knows_are_named_once(tmp_path, caplog):
    tokens = {"tokens": byte_tokens(320), "add_sep_token": True, "no_such_rule": 3, "fim_pre_token_id": 5}
    write_llama(tmp_path / "m.gguf", tokenizer=tokens, attention__no_such_scale=0.1, no_such_key="a")
    with caplog.at_level(logging.WARNING, "minillm"), Engine(tmp_path / "m.gguf"):
        pass
    assert {message.partition("not read: ")[2] for message in caplog.messages} == {
        "llama.attention.no_such_scale, llama.no_such_key",
        "tokenizer.ggml.no_such_rule",  # add_sep_token is about pairs of texts
    }


def test_a_file_of_another_kind_is_no_model(tmp_path):
    write_with(tmp_path / "m.gguf", {"general.type": "adapter"})
    with pytest.raises(UnsupportedModelError, match=r"holds no model but, by general\.type, 'adapter'"):
        Engine(tmp_path / "m.gguf")


def test_the_files_own_sampling_is_the_default(tmp_path, caplog):
    sampling = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.1, "xtc_probability": 0.5}
    write_with(tmp_path / "m.gguf", {f"general.sampling.{key}": value for key, value in sampling.items()})
    assert open_model(tmp_path / "m.gguf").generation_defaults() == {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1
    }  # fmt: skip
    assert caplog.messages == [f"{tmp_path / 'm.gguf'}: not read: general.sampling.xtc_probability"]
    write_with(tmp_path / "greedy.gguf", {"general.sampling.temp": 0.0})
    assert open_model(tmp_path / "greedy.gguf").generation_defaults() == {"do_sample": False}


def test_tokens_that_the_file_suppresses_are_never_produced(tmp_path):
    values = write_llama(tmp_path / "free.gguf")
    with Engine(tmp_path / "free.gguf") as engine:
        [free] = engine.generate([PROMPT], max_new_tokens=4)
    first = free.completions[0].token_ids[0]
    write_llama(tmp_path / "m.gguf", values=values, tokenizer={"suppress_tokens": [first]})
    with Engine(tmp_path / "m.gguf") as engine:
        [result] = engine.generate([PROMPT], max_new_tokens=4)
    assert first not in result.completions[0].token_ids


def test_vectors_are_pooled_as_the_file_says(tmp_path):
    values = write_llama(tmp_path / "last.gguf", pooling_type=3)
    write_llama(tmp_path / "mean.gguf", values=values, pooling_type=1)
    write_llama(tmp_path / "rank.gguf", values=values, pooling_type=4)
    with Engine(tmp_path / "last.gguf") as engine:
        last, named = engine.embed("abc")[0], engine.embed("abc", pooling="mean")[0]
    with Engine(tmp_path / "mean.gguf") as engine:
        mean = engine.embed("abc")[0]
    np.testing.assert_allclose(mean, named, rtol=1e-6)
    assert not np.allclose(mean, last)
    with pytest.raises(UnsupportedModelError, match=r"llama\.pooling_type is 4; minillm runs 0, 1, 2, 3"):
        Engine(tmp_path / "rank.gguf")


def test_a_file_without_tensors_is_a_tokenizer_and_no_model(tmp_path):
    """Nothing follows its header, not even the padding before the first tensor."""
    write_llama(tmp_path / "m.gguf")
    header_alone(tmp_path / "m.gguf", tmp_path / "vocabulary.gguf")
    with (
        Engine(tmp_path / "m.gguf") as engine,
        Engine(tmp_path / "m.gguf", tokenizer=tmp_path / "vocabulary.gguf") as other,
    ):
        assert other.tokenizer.encode("abc") == engine.tokenizer.encode("abc")
    with pytest.raises(CheckpointError, match=r"lacks the tensor token_embd\.weight"):
        Engine(tmp_path / "vocabulary.gguf")


def header_alone(source, target):
    """Write the metadata of a file, and nothing after the last."""
    reader = GGUFReader(source)
    last = list(reader.fields.values())[-1]
    end = last.offset + sum(part.nbytes for part in last.parts)
    data = bytearray(source.read_bytes()[:end])
    data[8:16] = bytes(8)  # the number of tensors
    target.write_bytes(data)


def write_with(path, entries):
    """Write a model with entries that have no architecture's name before them."""
    import gguf

    add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
    original = gguf.GGUFWriter.write_header_to_file

    def with_more(writer, *args):
        for key, value in entries.items():
            getattr(writer, add[type(value)])(key, value)
        original(writer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_more)
        write_llama(path)
