"""Stored matrices in another order, by every way there is to read them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.backends.formats import FLOAT32
from minillm.backends.loader import Tensor, gather
from minillm.formats import open_checkpoint
from minillm.models.parameters import by_block, source_of, transpose

MATRIX = np.random.default_rng(0).standard_normal((24, 6)).astype(np.float32)
APART = [head * 12 + part * 4 + row for part in range(3) for head in range(2) for row in range(4)]
"""Where the rows of Q, K and V of two heads, four wide, are stored."""


@pytest.fixture
def tensor(tmp_path: Path) -> Tensor:
    save_file({"a": MATRIX}, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path)["a"]


@pytest.mark.parametrize("kind", ["transposed", "apart"])
def test_every_way_to_read_it_gives_the_same(tensor: Tensor, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.backends.loader.CHUNK", 60)  # numbers: ten rows of six, two of 24
    ours, expected = (transpose(tensor), MATRIX.T) if kind == "transposed" else (by_block(tensor, 2), MATRIX[APART])
    assert (ours.shape, ours.dtype, source_of(ours)) == (expected.shape, "float32", tensor)
    read = np.empty(expected.shape, np.float32, order="F")
    ours.read_into(read)
    chunks = list(ours.chunks())
    assert len(chunks) == 3
    for array in (read, ours.load(), ours.stored(), np.concatenate(chunks), gather([ours], FLOAT32, "F")):
        np.testing.assert_array_equal(array, expected, strict=True)
    assert ours.stored().flags.c_contiguous and all(chunk.flags.c_contiguous for chunk in chunks)
    assert ours.merged_with(ours) is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_stay_as_they_are(tmp_path: Path, dtype: Any) -> None:
    values = MATRIX.astype(dtype)
    save_file({"a": values}, tmp_path / "model.safetensors")
    ours = transpose(open_checkpoint(tmp_path)["a"])
    kept, read = np.empty((6, 24), np.float16 if dtype == np.float16 else np.uint16), np.empty((6, 24), np.float32)
    ours.read_into(kept)
    ours.read_into(read)
    np.testing.assert_array_equal(kept.view(dtype), values.T, strict=True)
    np.testing.assert_array_equal(read, values.T.astype(np.float32), strict=True)
