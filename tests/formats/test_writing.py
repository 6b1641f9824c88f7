"""Safetensors files written row by row: what the library of that name reads, aligned; shards and their index."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from minillm.formats import open_checkpoint
from minillm.formats.safetensors import Entry, SafetensorsFile, index_of, read_safetensors, spread

RNG = np.random.default_rng(0)
ARRAYS = {
    "odd": RNG.standard_normal((3, 5)).astype(np.float16),  # 30 bytes: not a multiple of 64
    "rows": RNG.standard_normal((40, 16)).astype(np.float32),
    "bits": RNG.standard_normal((8, 32)).astype(ml_dtypes.bfloat16),
    "small": RNG.integers(-127, 128, (4, 32), dtype=np.int8),
    "vector": RNG.standard_normal(16).astype(np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "bytes": RNG.integers(0, 256, (64,), dtype=np.uint8),
}


def entries() -> list[Entry]:
    return [Entry(name, array.dtype.name, array.shape) for name, array in ARRAYS.items()]


def write_all(path: Path) -> None:
    with SafetensorsFile(path, entries()) as file:
        for name, array in reversed(ARRAYS.items()):  # in any order, and in pieces
            for first in range(0, len(array), 3):
                file.write(name, array[first : first + 3], first)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    write_all(tmp_path / "m.safetensors")
    read = load_file(tmp_path / "m.safetensors")
    assert set(read) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(read[name], array, strict=True)


def test_tensors_of_whole_lines_begin_at_64_bytes_and_keep_their_order(tmp_path: Path) -> None:
    write_all(tmp_path / "m.safetensors")
    stored = read_safetensors(tmp_path / "m.safetensors")
    whole = [name for name, array in ARRAYS.items() if array.nbytes % 64 == 0 and array.size]
    assert [stored[name].offset % 64 for name in whole] == [0] * len(whole) and len(whole) == 5
    assert sorted(whole, key=lambda name: stored[name].offset) == whole
    assert all(stored[name].map() is not None for name in whole)


def test_shards_hold_whole_groups_within_the_limit(tmp_path: Path) -> None:
    groups = [[Entry(f"{i}.a", "float32", (16,)), Entry(f"{i}.b", "uint8", (36,))] for i in range(7)]  # 100 bytes each
    shards = spread(groups, limit=250)
    assert list(shards) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert [len(shard) for shard in shards.values()] == [4, 4, 4, 2]
    for name, inside in shards.items():
        with SafetensorsFile(tmp_path / name, inside) as file:
            for entry in inside:
                file.write(entry.name, np.full(entry.shape, int(entry.name[0]), entry.dtype))
    index = index_of(shards)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert index["metadata"] == {"total_size": 700}
    opened = open_checkpoint(tmp_path)
    assert len(opened) == 14
    assert all((opened[f"{i}.a"].load() == i).all() for i in range(7))
    assert list(spread(groups, 10**9)) == ["model.safetensors"]
    assert [len(shard) for shard in spread(groups, limit=50).values()] == [2] * 7, "a group is never torn apart"
