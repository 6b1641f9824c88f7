"""GGUF files: their headers and tensors against the package `gguf`, and what is refused."""

import re
import sys
from itertools import pairwise

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from minillm import Engine
from minillm.backends.cpu.compiling import available
from minillm.backends.formats import INT4_OFFSETS, STORED_FORMATS
from minillm.backends.loader import gather
from minillm.backends.storage import expand
from minillm.errors import CheckpointError, UnsupportedModelError, install
from minillm.formats.gguf.file import TYPES, read_gguf
from minillm.formats.gguf.tensors import open_tensors
from minillm.measure.precision import relative_error
from minillm.models.base import weights_of
from minillm.reference import quantize as ours
from minillm.reference.blocks import BLOCK_FORMATS, with_offsets

from ..gguf_files import LLAMA, add_tensor, finish, write_llama

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32", "TQ1_0", "TQ2_0")
"""Types that the package writes; of others random bytes are valid blocks."""


def write(path, stored, kind):
    """A file of one matrix "a", of blocks as they are stored."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("a", stored, raw_dtype=kind)
    finish(writer)


def test_every_type_has_the_size_that_the_package_says():
    for code, kind in TYPES.items():
        assert tuple(kind) == (Type(code).name, *gguf.GGML_QUANT_SIZES[Type(code)])


@pytest.mark.sampled(8)
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
    if tensor.dtype in STORED_FORMATS and STORED_FORMATS[tensor.dtype].scale_bits:
        places = []
        copied = tensor.copied(lambda shape, dtype: places.append(np.zeros(shape, dtype)) or places[-1])
        assert np.array_equal(expand(copied), expected) and places
        for part, values in ((tensor.part(0, 1, 4), expected[1:4]), (tensor.part(1, 256, 512), expected[:, 256:])):
            assert np.array_equal(expand(part.copied()), values)
    if kind.name in BLOCK_FORMATS:
        assert (
            tensor.stored().blocks.base is not None and tensor.stored().blocks.tobytes() == stored.tobytes()
        )  # mapped
        for part, values in ((tensor, expected), (tensor.part(0, 1, 4), expected[1:4])):
            assert np.array_equal(expand(part.stored()), values)
        assert np.array_equal(expand(tensor.part(1, 256, 512).stored()), expected[:, 256:])


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


def test_q4_1_is_taken_bit_for_bit(tmp_path):
    values = np.random.default_rng(1).normal(0.3, 1, size=(6, 96)).astype(np.float32)
    write(tmp_path / "m.gguf", quantize(values, Type.Q4_1), Type.Q4_1)
    tensor = open_tensors(read_gguf(tmp_path / "m.gguf"))["a"]
    stored, blocks = tensor.stored(), quantize(values, Type.Q4_1).reshape(6, 3, 20)
    assert tensor.dtype == "int4 with offsets"
    for array, part in ((stored.scales, blocks[..., :2]), (stored.offsets, blocks[..., 2:4])):
        assert array.tobytes() == np.ascontiguousarray(part).tobytes()
    assert stored.values.tobytes() == np.ascontiguousarray(blocks[..., 4:]).tobytes()
    exact = dequantize(quantize(values, Type.Q4_1), Type.Q4_1)
    assert np.array_equal(ours.dequantize(stored), exact) and np.array_equal(tensor.load(), exact)
    for part, expected in ((tensor.part(0, 2, 5), exact[2:5]), (tensor.part(1, 32, 96), exact[:, 32:])):
        assert np.array_equal(ours.dequantize(part.stored()), expected)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1])
def test_blocks_are_copied_some_rows_at_a_time_whose_pages_are_given_back(tmp_path, kind, monkeypatch):
    """A matrix of 170 MB would else be in memory twice while it is copied."""
    values = np.random.default_rng(1).normal(size=(11, 96)).astype(np.float32)
    write(tmp_path / "m.gguf", quantize(values, kind), kind)
    tensor = open_tensors(read_gguf(tmp_path / "m.gguf"))["a"]
    whole, row = tensor.stored(), quantize(values, kind).shape[1]
    released = []
    monkeypatch.setattr("minillm.formats.gguf.tensors.COPIED", 3 * row)
    monkeypatch.setattr(type(tensor.file), "release", lambda file, start, stop: released.append((start, stop)))
    parts = tensor.stored()
    for name in ("values", "scales", "offsets"):
        assert np.array_equal(getattr(parts, name), getattr(whole, name))
    ends = [tensor.data.offset + row * rows for rows in (0, 3, 6, 9, 11)]
    assert released == list(pairwise(ends))


def random_q4_k(rows, blocks):
    """Valid blocks: any integers, scales and offsets of a size that weights have."""
    rng = np.random.default_rng(2)
    stored = rng.integers(0, 256, (rows, blocks, 144), np.uint8)
    stored[..., :4] = rng.uniform(1e-4, 1e-3, (rows, blocks, 2)).astype("<f2").view(np.uint8)
    return stored.reshape(rows, -1)


def test_q4_k_as_int4_has_the_files_integers_and_scales_and_offsets_rounded_once(tmp_path):
    blocks = random_q4_k(5, 2)
    write(tmp_path / "m.gguf", blocks, Type.Q4_K)
    tensor = open_tensors(read_gguf(tmp_path / "m.gguf"))["a"]
    stored, exact = with_offsets(tensor.stored()), dequantize(blocks, Type.Q4_K)
    assert tensor.dtype == "Q4_K" and stored.nbytes == 5 * 512 * 5 // 8
    assert np.array_equal(tensor.load(), exact)  # float32 is not rounded
    grouped = exact.reshape(5, 16, 32).astype(np.float64)
    q = (ours.unpack(stored.values) + 8).reshape(5, 16, 32)
    fits = [np.polyfit(x, y, 1) for x, y in zip(q.reshape(-1, 32), grouped.reshape(-1, 32), strict=True)]
    scales, offsets = np.array(fits).T.reshape(2, 5, 16)
    assert np.allclose(scales[..., None] * q + offsets[..., None], grouped, atol=1e-7)  # a line: the same integers
    for array, found in ((stored.scales, scales), (stored.offsets, offsets)):
        assert np.allclose(array, found, rtol=2**-11, atol=1e-6)
    most = (np.abs(stored.scales) * np.float64(15) + np.abs(stored.offsets))[..., None]
    moved = np.abs(ours.dequantize(stored).reshape(5, 16, 32) - grouped)
    assert moved.max() > 0 and (moved <= 2**-11 * most + 1e-7).all()
    for whole in (tensor, *map(tensor.part, (0, 1), (1, 256), (4, 512))):
        assert np.array_equal(gather([whole], INT4_OFFSETS).values, with_offsets(whole.stored()).values)


@pytest.mark.parametrize("spoilt", [0, 2])
def test_scales_of_q4_k_that_float16_does_not_hold_are_refused(tmp_path, spoilt):
    blocks = random_q4_k(2, 1)
    blocks[1, spoilt : spoilt + 2] = np.array([60000], "<f2").view(np.uint8)
    blocks[1, 4:16] = 63
    write(tmp_path / "m.gguf", blocks, Type.Q4_K)
    with pytest.raises(CheckpointError, match=r"tensor a holds a scale or an offset that is not finite"):
        gather([open_tensors(read_gguf(tmp_path / "m.gguf"))["a"]], INT4_OFFSETS)


@pytest.mark.skipif(not available(), reason="the kernels in C are not compiled here")
def test_the_kernels_in_c_compute_a_model_in_q4_1_as_numpy_does(tmp_path):
    """But for activations, which they round to 8 bits. Its default keeps the offsets, of the embedding too."""
    write_llama(tmp_path / "m.gguf", type_of=lambda name: Type.Q4_1)
    line = [5, 70, 200, 31, 31, 8]
    with Engine(tmp_path / "m.gguf", backend="cpu") as c, Engine(tmp_path / "m.gguf", backend="numpy") as plain:
        assert {
            str(w.data.offsets.dtype) for w in weights_of(c.runner.model) if isinstance(w.data, ours.Quantized)
        } == {"float16"}
        assert relative_error(c.forward(line), plain.forward(line)) < 0.03
        with Engine(tmp_path / "m.gguf", backend="numpy", dtype="float32") as exact:
            assert relative_error(plain.forward(line), exact.forward(line)) < 1e-6


MIXTURES = {
    "Q4_K beside Q6_K, as llama.cpp's Q4_K_M": {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"},
    "three kinds": {"q_proj": "Q5_K", "k_proj": "F16", "v_proj": "Q8_0", "up_proj": "Q4_1", "embed_tokens": "Q5_0"},
    "code books": {"q_proj": "IQ4_XS", "v_proj": "IQ4_NL", "gate_proj": "MXFP4", "down_proj": "MXFP4"},
    "few bits": {"q_proj": "Q2_K", "k_proj": "Q3_K", "v_proj": "Q5_1", "down_proj": "Q3_K", "embed_tokens": "Q2_K"},
}


@pytest.fixture(params=MIXTURES)
def mixture(request, tmp_path):
    """A Llama of which each matrix has a type of its own, Q4_K where the mixture names none."""
    types = MIXTURES[request.param]
    raw = LLAMA | {"hidden_size": 256, "intermediate_size": 512}
    write_llama(tmp_path / "m.gguf", raw, type_of=lambda name: Type[types.get(name.split(".")[-2], "Q4_K")])
    return tmp_path / "m.gguf"


@pytest.mark.longer
@pytest.mark.skipif(not available(), reason="the kernels in C are not compiled here")
def test_the_kernels_in_c_compute_a_mixture_of_blocks_as_numpy_does(mixture):
    """But for activations, which they round to 8 bits; every matrix stays as it is in the file."""
    line = [5, 70, 200, 31, 31, 8]
    with Engine(mixture, backend="cpu") as c, Engine(mixture, backend="numpy") as plain:
        weights = [w for w in weights_of(c.runner.model) if w.data is not None and len(w.shape) == 2]
        stored = [tensor for tensor in open_tensors(read_gguf(mixture)).values() if len(tensor.shape) == 2]
        assert sum(w.nbytes for w in weights) == sum(
            tensor.data.shape[0] * tensor.data.shape[1]
            if hasattr(tensor, "type")
            else 2 * tensor.shape[0] * tensor.shape[1]
            for tensor in stored
        )
        many, one = c.forward(line), c.forward(line[:1])
        assert relative_error(many, plain.forward(line)) < 0.06
        assert np.array_equal(many[:1], one)
        with Engine(mixture, backend="numpy", dtype="float32") as exact:
            assert relative_error(plain.forward(line), exact.forward(line)) < 1e-6


def test_without_the_package_only_types_that_need_it_are_refused(tmp_path, monkeypatch):
    types = {"up_proj": Type.TQ2_0, "q_proj": Type.Q8_0, "k_proj": Type.Q4_0, "v_proj": Type.Q4_1, "o_proj": Type.F16}
    raw = LLAMA | {"hidden_size": 256, "intermediate_size": 256}
    write_llama(tmp_path / "q.gguf", raw, type_of=lambda name: types.get(name.split(".")[-2], Type.BF16))
    del types["up_proj"]
    write_llama(tmp_path / "m.gguf", type_of=lambda name: types.get(name.split(".")[-2], Type.BF16))
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    with Engine(tmp_path / "m.gguf") as engine:
        assert np.isfinite(engine.forward([1, 2])).all()
    with pytest.raises(UnsupportedModelError, match=f"is stored as TQ2_0, .* {re.escape(install('gguf'))}"):
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
