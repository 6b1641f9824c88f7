"""GGUF files: their headers and tensors against the package `gguf`, and what is refused."""

import sys

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from minillm import Engine
from minillm.backends.cpu.compiling import available
from minillm.backends.weights import expand
from minillm.checkpoint.gguf import TYPES, read_gguf
from minillm.errors import UnsupportedModelError
from minillm.models.gguf_tensors import open_tensors
from minillm.precision import relative_error
from minillm.reference import quantize as ours

from ..gguf_files import add_tensor, finish, write_llama

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32", "TQ1_0", "TQ2_0")
"""Types that the package writes; of others random bytes are valid blocks."""


def test_every_type_has_the_size_that_the_package_says():
    for code, kind in TYPES.items():
        assert tuple(kind) == (Type(code).name, *gguf.GGML_QUANT_SIZES[Type(code)])


@pytest.mark.parametrize("kind", [kind for kind in Type if kind in gguf.GGML_QUANT_SIZES and kind.value in TYPES])
def test_values_of_every_type_are_the_packages(tmp_path, kind):
    if kind.name in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"):
        pytest.skip("not a type of weights")
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 512)).astype(np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    if kind.name in QUANTISED:
        stored = quantize(values, kind)
    else:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = rng.integers(0, 0x3C, (5, 512 // block * size), dtype=np.uint8)  # no float16 in it is NaN
    writer.add_tensor("w", stored, raw_dtype=kind)
    finish(writer)
    tensor = open_tensors(read_gguf(tmp_path / "m.gguf"))["w"]
    expected = dequantize(stored, kind)
    assert tensor.shape == (5, 512)
    assert np.array_equal(tensor.load(), expected)
    assert np.array_equal(np.concatenate([chunk.copy() for chunk in tensor.part(0, 1, 4).chunks()]), expected[1:4])
    assert np.array_equal(tensor.part(1, 256, 512).load(), expected[:, 256:])


@pytest.mark.parametrize(("kind", "dtype"), [(Type.Q8_0, "int8"), (Type.Q4_0, "int4")])
def test_q8_0_and_q4_0_are_taken_bit_for_bit(tmp_path, kind, dtype):
    values = np.random.default_rng(1).normal(size=(6, 96)).astype(np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for name in ("a", "b"):
        add_tensor(writer, name, values, kind)
    finish(writer)
    tensors = open_tensors(read_gguf(tmp_path / "m.gguf"))
    stored = tensors["a"].stored()
    assert tensors["a"].dtype == dtype
    blocks = quantize(values, kind).reshape(6, 3, -1)
    assert stored.scales.tobytes() == np.ascontiguousarray(blocks[..., :2]).tobytes()
    assert stored.values.tobytes() == np.ascontiguousarray(blocks[..., 2:]).tobytes()
    assert np.array_equal(ours.dequantize(stored), dequantize(quantize(values, kind), kind))


def test_without_the_package_only_types_that_need_it_are_refused(tmp_path, monkeypatch):
    types = {"up_proj": Type.Q4_1, "q_proj": Type.Q8_0, "k_proj": Type.Q4_0, "gate_proj": Type.F16}
    write_llama(tmp_path / "q.gguf", type_of=lambda name: types.get(name.split(".")[-2], Type.BF16))
    del types["up_proj"]
    write_llama(tmp_path / "m.gguf", type_of=lambda name: types.get(name.split(".")[-2], Type.BF16))
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    with Engine(tmp_path / "m.gguf") as engine:
        assert np.isfinite(engine.forward([1, 2])).all()
    with pytest.raises(UnsupportedModelError, match=r"is stored as Q4_1, .* pip install 'minillm\[gguf\]'"):
        Engine(tmp_path / "q.gguf")


def test_int4_beside_int8_becomes_int8_and_beside_float16_float16(tmp_path):
    kinds = {
        "q_proj": Type.Q4_0,
        "k_proj": Type.Q4_0,
        "v_proj": Type.Q8_0,
        "gate_proj": Type.Q4_0,
        "up_proj": Type.Q4_1,
    }
    types = dict(kinds)
    write_llama(tmp_path / "m.gguf", type_of=lambda name: types.get(name.split(".")[-2], Type.F32))
    exact = open_tensors(read_gguf(tmp_path / "m.gguf"))
    with Engine(tmp_path / "m.gguf", backend="cpu" if available() else "numpy") as engine:
        layer = engine.runner.model.layers[0]
        assert layer.attention.qkv.data.bits == 8
        assert np.array_equal(expand(layer.attention.qkv.data)[96:], exact["blk.0.attn_v.weight"].load())
        assert relative_error(expand(layer.mlp.gate_up.data)[:96], exact["blk.0.ffn_gate.weight"].load()) < 1e-3


def test_metadata_are_the_packages(tmp_path):
    write_llama(tmp_path / "m.gguf", tokenizer={"scores": [0.5] * 320, "add_bos_token": True, "bos_token_id": 3})
    ours, theirs = read_gguf(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        found = ours.metadata[key]
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            found = ours.strings(key) if field.types[1] == gguf.GGUFValueType.STRING else ours.numbers(key).tolist()
        assert found == field.contents(), key
    assert {t.name: (tuple(map(int, t.shape[::-1])), t.data_offset) for t in theirs.tensors} == {
        name: (tensor.shape, tensor.offset) for name, tensor in ours.tensors.items()
    }
