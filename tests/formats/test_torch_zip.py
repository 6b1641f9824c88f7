"""pytorch_model.bin files put together by hand: what torch writes, and what an attacker would."""

import tracemalloc
import zipfile

import numpy as np
import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.pytorch import read_torch_zip

from . import torch_archive as archive
from .torch_archive import FALSE, ORDERED_DICT, REBUILD, dictionary, integer, name_of, storage, tensor, text, tuple_of

SIX = np.arange(6, dtype=np.float32)


def write(path, content, storages=None, **options):
    return archive.write(path / "model.bin", content, storages or {"0": SIX.tobytes()}, **options)


def refused(path, content, says, storages=None, **options):
    file = write(path, content, storages, **options)
    with pytest.raises(CheckpointError, match=rf"(?=.*model\.bin)(?s:.)*{says}") as raised:
        read_torch_zip(file)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_contiguous_float32_is_mapped(tmp_path):
    weight = read_torch_zip(write(tmp_path, dictionary({"w": tensor()})))["w"]
    assert (weight.shape, weight.dtype) == ((2, 3), "float32")
    np.testing.assert_array_equal(weight.map(), SIX.reshape(2, 3))
    assert not weight.map().flags.writeable and weight.offset % 64 == 0


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "expected"),
    [
        ((3, 2), (1, 3), 0, SIX.reshape(2, 3).T),  # transposed
        ((2, 2), (3, 1), 1, SIX.reshape(2, 3)[:, 1:]),  # some columns
        ((3,), (2,), 1, SIX[1::2]),
        ((1, 3), (77, 1), 3, SIX[None, 3:]),  # the stride of an axis of one never counts
        ((), (), 5, SIX[5]),
        ((0, 3), (3, 1), 6, np.zeros((0, 3))),
        ((3, 0), (0, 0), 0, np.zeros((3, 0))),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [4, 8, 16, 4 * 2**20])
def test_views(tmp_path, monkeypatch, shape, strides, offset, expected, chunk_bytes):
    monkeypatch.setattr("minillm.formats.tensors.CHUNK_BYTES", chunk_bytes)
    content = dictionary({"v": tensor(tuple_of(*shape), tuple_of(*strides), integer(offset))})
    view = read_torch_zip(write(tmp_path, content))["v"]
    np.testing.assert_array_equal(view.load(), expected)
    out = np.full(shape[::-1], np.nan, np.float32).T  # a destination in the other order
    view.read_into(out)
    np.testing.assert_array_equal(out, expected)


def test_tied_weights_share_a_storage_and_attributes_of_the_dictionary_are_dropped(tmp_path):
    metadata = b"}" + text("_metadata") + archive.EMPTY + b"sb"  # as of nn.Module.state_dict
    content = dictionary({"embed": tensor(), "lm_head": tensor()}) + metadata
    tensors = read_torch_zip(write(tmp_path, content))
    assert np.shares_memory(tensors["embed"].map(), tensors["lm_head"].map())


def test_parameters_are_tensors(tmp_path):
    content = name_of("torch._utils", "_rebuild_parameter") + tuple_of(tensor(), archive.TRUE, archive.EMPTY) + b"R"
    np.testing.assert_array_equal(read_torch_zip(write(tmp_path, dictionary({"p": content})))["p"].load().ravel(), SIX)


def test_zip64_and_no_byteorder_record(tmp_path):
    """The data starts behind the extra field of the local header, whose length the directory does not tell."""
    file = write(tmp_path, dictionary({"w": tensor()}), zip64=True)
    np.testing.assert_array_equal(read_torch_zip(file)["w"].load(), SIX.reshape(2, 3))
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "old.bin", "w") as new:
        for info in old.infolist():
            if not info.filename.endswith("byteorder"):
                new.writestr(info.filename, old.read(info))
    np.testing.assert_array_equal(read_torch_zip(tmp_path / "old.bin")["w"].load(), SIX.reshape(2, 3))


def test_types_that_are_not_weights_are_refused_when_read(tmp_path):
    content = dictionary({"ids": tensor(store=storage(kind="LongStorage"))})
    ids = read_torch_zip(write(tmp_path, content, {"0": bytes(48)}))["ids"]
    with pytest.raises(UnsupportedModelError, match=r"'ids'.*int64"):
        ids.load()


@pytest.mark.parametrize(
    "call",
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_tensor"),
    ],
)
def test_a_pickle_that_asks_for_anything_else_is_refused_by_name_and_not_run(tmp_path, call):
    attack = name_of(*call) + tuple_of(text(f"touch {tmp_path}/owned")) + b"R"
    message = refused(tmp_path, dictionary({"w": tensor(), "x": attack}), f"asks for {call[0]}.{call[1]}")
    assert "nothing of it was run" in message and not (tmp_path / "owned").exists()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (ORDERED_DICT + tuple_of(text("x")) + b"R", "damaged, or holds more than tensors: Dictionary"),
        (REBUILD + b")R", "damaged, or holds more than tensors: TensorNote"),
        (name_of("torch._utils", "_rebuild_parameter") + tuple_of(1, FALSE, archive.EMPTY) + b"R", "holds a int"),
        (name_of("torch", "FloatStorage") + b")R", "'StorageType' object is not callable"),
        (text("x") + b")R", "'str' object is not callable"),
        (tensor() + b"}b", "sets attributes of a TensorNote"),
        (tensor() + text("k") + b"Ns", "does not support item assignment"),
        (b"]" + text("k") + b"Ns", "list indices must be integers"),
        (b"}Na", "has no attribute 'append'"),
        (REBUILD + b"}b", "sets attributes of a type"),
        (name_of("torch._utils", "_rebuild_parameter") + b"}b", "sets attributes of a function"),
        (b"})Ns", "dictionary key of type tuple"),
        (ORDERED_DICT + b")\x81", "pickle instruction 0x81"),
        (b"\x82\x01", "pickle instruction 0x82"),
        (b"\x93", "pickle instruction 0x93"),
        (b"ios\nsystem\n", "pickle instruction 0x69"),
        (b"N2", "pickle instruction 0x32"),
        (b"0", "pickle instruction 0x30"),
        (b"h\x07", "damaged"),
        (b"t", "damaged"),
        (b"q\x00", "damaged"),
        (b"NN", "damaged: its pickle ends too early"),
        (b"X\xff\xff\xff\xff", "damaged"),
        (b"\x8e" + b"\xff" * 8, "instruction 0x8e"),
        (b"\xff", "instruction 0xff"),
        (text("0") + b"Q", "no storage of a tensor"),
        (b")Q", "no storage of a tensor"),
        (tuple_of(text("storage"), ORDERED_DICT, text("0"), text("cpu"), 6) + b"Q", "no storage of a tensor"),
        (storage(count=-6), "no storage of a tensor"),
        (storage(count=2**62), "no storage of a tensor"),
        (storage(count=5), "storage '0' .* has 24 bytes, expected 20 for 5 elements of float32"),
        (storage(count=2**40), "storage '0' .* has 24 bytes"),
        (storage(key="1"), "entry 'data/1' .* is missing"),
        (storage(key="../data.pkl"), "is missing"),
        (b"N", "holds a NoneType, expected a dictionary"),
        (tensor(), "holds a TensorNote, expected a dictionary"),
        (
            dictionary({"model": dictionary({"w": tensor()})}),
            "holds a Dictionary under 'model', expected a flat dictionary",
        ),
        (dictionary({"w": tensor(), "step": integer(3)}), "holds a int under 'step'"),
        (archive.EMPTY + integer(3) + tensor() + b"s", "holds a tensor under 3"),
    ],
)
def test_pickles_that_torch_does_not_write(tmp_path, content, says):
    refused(tmp_path, content, says)


@pytest.mark.parametrize(
    ("view", "says"),
    [
        ({"offset": integer(1)}, "reaches to element 7 of a storage of 6"),
        ({"offset": integer(-1)}, "impossible offset"),
        ({"offset": archive.TRUE}, "impossible offset"),
        ({"offset": b"G" + bytes(8)}, "impossible offset"),  # the float 0.0
        ({"offset": integer(2**63)}, "impossible offset"),
        ({"offset": text("0")}, "impossible offset"),
        ({"shape": tuple_of(2, 4)}, "reaches to element 7"),
        ({"shape": tuple_of(-2, -3)}, "impossible offset, shape"),
        ({"shape": tuple_of(2**40, 2**40)}, "impossible offset, shape"),
        ({"shape": tuple_of(2, 3, 1)}, "impossible offset, shape"),
        ({"shape": tuple_of(*[1] * 70), "strides": tuple_of(*[1] * 70)}, "impossible offset, shape"),
        ({"shape": tuple_of(0, 2**62)}, "impossible offset, shape"),
        ({"shape": integer(6)}, "no storage, shape or strides"),
        ({"shape": b"]"}, "no storage, shape or strides"),
        ({"strides": tuple_of(-3, 1)}, "impossible offset, shape or strides"),
        ({"strides": tuple_of(4, 1)}, "reaches to element 7"),
        ({"strides": tuple_of(0, 1)}, "elements share memory"),
        ({"strides": tuple_of(1, 1)}, "elements share memory"),
        ({"shape": tuple_of(2**50), "strides": tuple_of(0)}, "elements share memory"),  # a petabyte out of one number
        ({"shape": tuple_of(0), "strides": tuple_of(1), "offset": integer(7)}, "reaches to element 7"),
        ({"store": b"N"}, "no storage, shape or strides"),
    ],
)
def test_views_that_leave_their_storage(tmp_path, view, says):
    refused(tmp_path, dictionary({"w": tensor(**view)}), rf"tensor 'w' in .*{says}")


@pytest.mark.parametrize(
    "bomb",
    [
        b"N" + b"r\xff\xff\xff\x7f",  # a memo index of 2 thousand million: 16 GB of list in Python's own machine
        b")" + b"\x85" * 200_000,  # a tuple in a tuple in a tuple ...
        b"(" * 200_000,
        b"}" + b")" + b"\x85" * 200_000 + b"Ns",  # ... hashed
        b"N" + b"".join(b"q\x00h\x00h\x00h\x00\x87" for _ in range(1000)),  # 3 ** 1000 Nones, if anyone walked it
    ],
    ids=["memo", "nested", "marks", "hash", "laughs"],
)
@pytest.mark.slow
def test_bombs(tmp_path, bomb):
    tracemalloc.start()
    refused(tmp_path, bomb, "")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20


def test_what_is_not_an_archive_of_torch(tmp_path):
    content = dictionary({"w": tensor()})
    refused(tmp_path, content, "entry 'data/0' .* is compressed or encrypted", compression=zipfile.ZIP_DEFLATED)
    refused(tmp_path, content, "big-endian", byteorder=b"big")
    path = tmp_path / "model.bin"
    for data, says in [
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", r"before version 1\.6.*torch\.save"),
        (b"", "no zip archive"),
        (b"<html>not found</html>", "no zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ]:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"model\.bin.*{says}"):
            read_torch_zip(path)
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("hello.txt", "hello")
    with pytest.raises(CheckpointError, match=r"0 entries data\.pkl"):
        read_torch_zip(path)
    with zipfile.ZipFile(path, "w") as huge:
        huge.writestr("archive/data.pkl", bytes(17 * 2**20))
    with pytest.raises(CheckpointError, match=r"data\.pkl.* has 17825792 bytes, expected 16777216 at most"):
        read_torch_zip(path)


@pytest.mark.longer
def test_each_truncation_is_noticed(tmp_path):
    whole = write(tmp_path, dictionary({"w": tensor()})).read_bytes()
    path = tmp_path / "cut.bin"
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.bin"):
            read_torch_zip(path)
