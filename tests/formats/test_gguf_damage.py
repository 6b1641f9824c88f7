"""Damaged and hostile GGUF files: each is refused in one line, within the memory that its size allows, or works."""

import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from minillm import Engine
from minillm.errors import CheckpointError, MinillmError, UnsupportedModelError
from minillm.formats.gguf.file import read_gguf

from ..gguf_files import LLAMA, write_llama
from .test_fuzz import damage

MOST_MEMORY = 64 * 2**20
"""Bytes that reading a file of 200 kB may take, an engine and its cache included"""
EXTREMES = [0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1]


@pytest.fixture
def whole(tmp_path):
    types = {"q_proj": Type.Q8_0, "k_proj": Type.Q4_0, "v_proj": Type.Q4_1, "up_proj": Type.Q5_0, "gate_proj": Type.F16}
    path = tmp_path / "whole.gguf"
    write_llama(
        path,
        LLAMA | {"num_hidden_layers": 1},
        type_of=lambda name: types.get(name.split(".")[-2], Type.F32),
        tokenizer={"token_type": [1] * 256 + [3] * 64, "bos_token_id": 256, "add_bos_token": True},
        rope__dimension_count=16,
    )
    return path


def use(path):
    """Load a file and compute with it."""
    with Engine(path, backend="numpy", max_batch_size=1) as engine:
        engine.forward([1, 2, 3])
        if engine.tokenizer is not None:
            engine.tokenizer.encode("a text")
        assert engine.chat_template is None or engine.chat_template.source is not None


@pytest.mark.parametrize("cut", [0, 3, 4, 8, 16, 24, 31, 100, 1000, -1, -1000])
def test_a_truncated_file_is_refused(whole, cut):
    whole.write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"truncated|not a GGUF file"):
        read_gguf(whole)


def header(*, magic=b"GGUF", version=3, tensors=0, entries=(), count=None, infos=b""):
    """A file made by hand; `entries` are bytes of metadata."""
    counts = struct.pack("<QQ", tensors, len(entries) if count is None else count)
    return magic + struct.pack("<I", version) + counts + b"".join(entries) + infos


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def info(name, shape, kind=0, offset=0):
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


LONG = struct.pack("<Q", 2**60) + b"abc"
ENTRY = text("k")
PAD = bytes(96)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (header(magic=b"GGML"), CheckpointError, "is not a GGUF file: its first bytes should be GGUF"),
        (header(version=1), UnsupportedModelError, "is a GGUF file of version 1; minillm reads 2 and 3"),
        (header(version=3 << 24), UnsupportedModelError, "is a big-endian GGUF file"),
        (header(count=2**60), CheckpointError, "header goes beyond its end"),
        (header(tensors=2**60), CheckpointError, "header goes beyond its end"),
        (header(entries=[LONG]), CheckpointError, "header goes beyond its end"),
        (header(entries=[ENTRY + struct.pack("<I", 8) + LONG]), CheckpointError, "header goes beyond its end"),
        (header(entries=[ENTRY + struct.pack("<I", 77)]), CheckpointError, "'k' has the type 77, which GGUF does not"),
        (header(entries=[ENTRY + struct.pack("<IIQ", 9, 9, 1)]), CheckpointError, "'k' is an array of type 9"),
        (header(entries=[ENTRY + struct.pack("<IIQ", 9, 0, 2**60)]), CheckpointError, "header goes beyond its end"),
        (header(entries=[ENTRY + struct.pack("<IIQ", 9, 8, 2**60)]), CheckpointError, "header goes beyond its end"),
        (header(entries=[ENTRY + struct.pack("<IB", 0, 1)] * 2), CheckpointError, "has the metadata entry 'k' twice"),
        (header(entries=[text(b"\xff") + struct.pack("<IB", 0, 1)]), CheckpointError, "in its header is not UTF-8"),
        (
            header(entries=[text("general.alignment") + struct.pack("<II", 4, 3)]),
            CheckpointError,
            "general.alignment should be a power of two, found 3",
        ),
        (header(tensors=1, infos=info("a", (4,), 99)), UnsupportedModelError, "tensor 'a' has type 99"),
        (header(tensors=1, infos=info("a", (1,) * 5)), CheckpointError, "'a' has 5 dimensions, expected 4 at most"),
        (header(tensors=1, infos=info("a", ())), CheckpointError, "the shape \\[\\], which it cannot have"),
        (header(tensors=1, infos=info("a", (2**40, 2**40))), CheckpointError, "the shape .* which it cannot have"),
        (header(tensors=1, infos=info("a", (31,), 8)), CheckpointError, "of type Q8_0 at 0 has the shape \\[31\\]"),
        (header(tensors=1, infos=info("a", (4,), 0, 7) + PAD), CheckpointError, "'a' is not aligned to 32 bytes"),
        (header(tensors=1, infos=info("a", (4,), 0, 2**40) + PAD), CheckpointError, "is truncated: tensor 'a' ends at"),
        (
            header(tensors=2, infos=info("a", (9,)) + info("b", (4,)) + PAD),
            CheckpointError,
            "tensors '[ab]' and '[ab]' overlap",
        ),
        (header(tensors=2, infos=info("a", (4,)) * 2 + PAD), CheckpointError, "has the tensor 'a' twice"),
    ],
)
def test_a_hostile_header_is_refused_by_what_is_wrong(tmp_path, data, error, message):
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(error, match=message) as caught:
        read_gguf(tmp_path / "m.gguf")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"block_count": "two"}, "num_hidden_layers should be a whole number"),
        ({"attention__head_count": 0}, "0 heads cannot share a width of 64"),
        ({"attention__head_count": 5}, "tensor blk.0.attn_q.weight has 64 rows, which 5 heads cannot share in pairs"),
        ({"block_count": 2}, "lacks tensors layers.1.input_layernorm.weight, .* which its metadata asks for"),
        ({"feed_forward_length": 97}, "should have shape .* by its metadata"),
        ({"attention__value_length": 8}, "keys have width 16 and values 8"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope'; minillm runs linear, yarn"),
        ({"expert_count": 8}, "lacks tensors layers.0.block_sparse_moe.gate.weight"),
    ],
)
def test_metadata_that_contradict_the_tensors_are_refused(tmp_path, entries, message):
    raw = LLAMA | {"num_hidden_layers": 1}
    write_llama(tmp_path / "m.gguf", raw, **entries)
    with pytest.raises(MinillmError, match=message) as caught:
        Engine(tmp_path / "m.gguf", backend="numpy")
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.add_tensor("w", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture is .mamba.; of GGUF files minillm runs"):
        Engine(tmp_path / "m.gguf")


def mutate(data: bytes, start: int, rng: random.Random) -> bytes:
    """Random damage, mostly of the header, whose end is at byte `start`."""
    if rng.random() < 0.3:
        return damage(data, rng)
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(start)
        match rng.randrange(4):
            case 0:
                changed[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 1:
                changed[at : at + 4] = struct.pack("<I", rng.choice([*range(13), 2**31, 2**32 - 1]))
            case 2:
                changed[at] = rng.randrange(256)
            case _:
                del changed[at : at + rng.choice([1, 2, 4, 8])]
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 10))])
def test_a_hundred_damaged_files_are_refused_or_work(whole, seed, tmp_path):
    data = whole.read_bytes()
    start = min(tensor.offset for tensor in read_gguf(whole).tensors.values())
    rng = random.Random(seed)
    worked = 0
    for number in range(100):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(mutate(data, start, rng))
        tracemalloc.start()
        try:
            use(path)
            worked += 1
        except MinillmError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            path.unlink()
        assert peak < MOST_MEMORY
    assert 0 < worked < 100
