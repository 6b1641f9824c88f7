"""Safetensors files, written by the library of that name, and damaged by hand."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save, save_file

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.safetensors import read_safetensors

RNG = np.random.default_rng(7)


def headed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: object = 0, end: object = 8, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (0, 4), (4, 0)])
def test_values_are_those_the_library_wrote(tmp_path, dtype, shape):
    values = (RNG.standard_normal(shape) * 100).astype(dtype)
    save_file(
        {"a": np.float32([1]), "values": np.asarray(values)}, tmp_path / "m.safetensors", metadata={"format": "pt"}
    )
    tensors = read_safetensors(tmp_path / "m.safetensors")
    assert set(tensors) == {"a", "values"}
    tensor = tensors["values"]
    assert (tensor.shape, tensor.dtype) == (shape, np.dtype(dtype).name)
    expected = values.astype(np.float32)
    assert tensor.load().dtype == np.float32
    np.testing.assert_array_equal(tensor.load(), expected)
    out = np.full(shape, np.nan, np.float32)
    tensor.read_into(out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_each_of_the_65536_values_of_16_bits_is_exact(tmp_path, dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    save_file({"all": values}, tmp_path / "m.safetensors")
    ours = read_safetensors(tmp_path / "m.safetensors")["all"].load()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(ours, values.astype(np.float32))  # NaN equals NaN here


def test_float32_is_mapped_not_copied(tmp_path):
    values = RNG.standard_normal((16, 8)).astype(np.float32)
    save_file({"w": values}, tmp_path / "m.safetensors")
    tensors = read_safetensors(tmp_path / "m.safetensors")
    mapped = tensors["w"].map()
    np.testing.assert_array_equal(mapped, values)
    assert not mapped.flags.writeable and not mapped.flags.owndata and mapped.flags.aligned
    assert np.shares_memory(mapped, tensors["w"].load())  # the same pages each time


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8])
def test_what_is_stored_is_mapped_bit_by_bit(tmp_path, dtype):
    values = (RNG.standard_normal((16, 8)) * 50 + 120).astype(dtype)
    save_file({"w": values}, tmp_path / "m.safetensors")
    stored = read_safetensors(tmp_path / "m.safetensors")["w"].stored((np.dtype(dtype).name,))
    assert stored.tobytes() == values.tobytes() and stored.shape == (16, 8)
    assert not stored.flags.writeable and not stored.flags.owndata
    assert stored.dtype == (np.uint16 if dtype == ml_dtypes.bfloat16 else dtype)


def test_what_is_stored_askew_is_read_bit_by_bit(tmp_path):
    values = np.arange(6, dtype=np.uint16).reshape(2, 3) + 0x3F80
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(headed(header + b" " * (1 - len(header) % 2), values.tobytes()))
    tensor = read_safetensors(path)["w"]
    assert tensor.offset % 2 and tensor.map() is None
    np.testing.assert_array_equal(tensor.stored(), values)


def test_unaligned_float32_is_read(tmp_path):
    values = np.float32([1.5, -2])
    header = json.dumps({"w": entry()}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(headed(header + b" " * (3 - len(header) % 4), values.tobytes()))
    tensor = read_safetensors(path)["w"]
    assert tensor.offset % 4 and tensor.map() is None
    np.testing.assert_array_equal(tensor.load(), values)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu])
def test_each_of_the_256_values_of_8_bits_is_exact(tmp_path, dtype):
    code = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}[dtype.__name__]
    path = tmp_path / "m.safetensors"
    path.write_bytes(headed({"all": entry(dtype=code, shape=(16, 16), end=256)}, bytes(range(256))))
    tensor = read_safetensors(path)["all"]
    expected = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).reshape(16, 16)
    np.testing.assert_array_equal(tensor.load(), expected)  # NaN equals NaN here
    np.testing.assert_array_equal(np.concatenate(list(tensor.part(1, 3, 9).chunks())), expected[:, 3:9])
    np.testing.assert_array_equal(tensor.stored((tensor.dtype,)).reshape(-1), np.arange(256, dtype=np.uint8))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64])
def test_numbers_of_other_types_are_read_where_they_are_asked_for(tmp_path, dtype):
    values = (np.arange(24).reshape(4, 6) * 1_000_003 - 7).astype(dtype)
    save_file({"w": values}, tmp_path / "m.safetensors")
    tensor, name = read_safetensors(tmp_path / "m.safetensors")["w"], np.dtype(dtype).name
    np.testing.assert_array_equal(tensor.stored((name,)), values, strict=True)
    np.testing.assert_array_equal(tensor.part(1, 2, 5).stored((name,)), values[:, 2:5], strict=True)
    for read in (tensor.load, tensor.stored):
        with pytest.raises(UnsupportedModelError, match=f"'w'.*{name}.*float32, float16 and"):
            read()


def test_another_type_is_listed_and_refused_when_read(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(save({"position_ids": np.ones(4, np.bool_)}))
    tensor = read_safetensors(tmp_path / "m.safetensors")["position_ids"]
    assert tensor.shape == (4,)
    for read in (tensor.load, tensor.map, tensor.stored):
        with pytest.raises(UnsupportedModelError, match=r"'position_ids'.*bool.*float32, float16 and"):
            read()


def test_a_type_that_minillm_has_no_name_for_is_refused_when_read(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(headed({"w": entry(dtype="U64", end=16)}, bytes(16)))
    with pytest.raises(UnsupportedModelError, match=r"'w'.*U64"):
        read_safetensors(path)["w"].load()


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    """The library takes the last one."""
    one = json.dumps(entry())
    path = tmp_path / "m.safetensors"
    path.write_bytes(headed(f'{{"w": {one}, "w": {one}}}'.encode(), bytes(8)))
    with pytest.raises(CheckpointError, match=r"m\.safetensors has the key 'w' twice"):
        read_safetensors(path)


def test_another_shape_than_expected_is_named(tmp_path):
    save_file({"w": np.ones((2, 3), np.float16)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"'w'.*shape \[2, 3\], expected \[3, 2\]"):
        read_safetensors(tmp_path / "m.safetensors")["w"].read_into(np.empty((3, 2), np.float32))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header too small"),
        (b"1234567", "header too small"),
        (struct.pack("<Q", 2**63) + b"{}", "header too large"),
        (struct.pack("<Q", 1000) + b"{}", "invalid header length"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS pointer"),
        (headed(b"\xff\xfe"), "invalid UTF-8"),
        (headed(b'{"w": '), "invalid JSON"),
        (headed(b"[" * 100_000), "invalid JSON"),
        (headed(b'{"w": {"shape": [' + b"9" * 5000 + b"]}}"), "invalid JSON"),
        (headed([1]), "invalid JSON"),
        (headed({"w": 1}), "expected struct TensorInfo"),
        (headed({"w": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), "missing field `data_offsets`"),
        (headed({"w": entry(dtype="Q4")}, b"\0" * 8), "unknown variant `Q4`"),
        (headed({"w": entry(shape=[2.0])}, b"\0" * 8), "floating point"),
        (headed({"w": entry(shape=[True, 2])}, b"\0" * 8), "boolean"),
        (headed({"w": entry(shape=[-1, -2])}, b"\0" * 8), "integer `-1`"),
        (headed({"w": entry(shape=[0, 2**62], end=0)}), "'w' in .* has the shape .* which is none"),
        (headed({"w": entry(shape=[1] * 40 + [2])}, b"\0" * 8), "'w' in .* has the shape .* which is none"),
        (headed({"w": entry(begin=-8, end=0)}, b"\0" * 8), "integer `-8`"),
        (headed({"w": entry(begin=8, end=0)}, b"\0" * 8), "offset for tensor `w`"),
        (headed({"w": entry(shape=[3])}, b"\0" * 8), "invalid shape, data type, or offset"),
        (headed({"w": entry()}, b"\0" * 7), "file not fully covered"),
        (headed({"w": entry(), "v": entry()}, b"\0" * 8), "offset for tensor `[vw]`"),
        (headed({"w": entry(), "v": entry(4, 12)}, b"\0" * 12), "offset for tensor `v`"),
        (headed({"w": entry(4, 12)}, b"\0" * 12), "offset for tensor `w`"),
        (headed({"w": entry()}, b"\0" * 11), "file not fully covered"),
    ],
)
def test_a_file_that_breaks_the_format_is_named(tmp_path, content, says):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"(?=.*bad.safetensors).*{says}") as raised:
        read_safetensors(path)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_replaced_after_it_was_checked_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    save_file({"w": np.ones(4, np.float32)}, path)
    check = safetensors.safe_open

    def replaced(*arguments):
        opened = check(*arguments)
        path.write_bytes(headed({"w": {}}))
        return opened

    monkeypatch.setattr("safetensors.safe_open", replaced)
    with pytest.raises(CheckpointError, match=r"m\.safetensors (was changed|is shorter)"):
        read_safetensors(path)


def test_each_truncation_is_noticed(tmp_path):
    whole = save({"v": np.ones(3, np.float32), "w": np.ones((2, 2), np.float16)})
    path = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            read_safetensors(path)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": np.ones(4096, np.float32)}, path)
    tensor = read_safetensors(path)["w"]
    for size in (1000, 0):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match="shorter than when it was opened"):
            tensor.read_into(np.empty(4096, np.float32))
        with pytest.raises(CheckpointError, match="shorter than when it was opened"):
            tensor.map()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        tensor.read_into(np.empty(4096, np.float32))
