"""The block formats of GGUF files, against the package `gguf`."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from minillm.reference import blocks as ours
from minillm.reference.blocks import BLOCK_FORMATS, CODE_BOOKS, BlockMatrix, dequantize_blocks, in_pairs

IN_FILES = [form for form in BLOCK_FORMATS.values() if form.name not in ("NVFP4", "Q5_0X2", *CODE_BOOKS)]
"""The formats of GGUF files; the others are compared in tests/formats/test_published_reference.py"""


@pytest.mark.parametrize("form", IN_FILES, ids=lambda form: form.name)
def test_any_bytes_are_the_weights_that_the_package_gguf_says(form, monkeypatch):
    monkeypatch.setattr(ours, "CHUNK", 1024)  # several chunks
    assert (form.numbers, form.bytes) == gguf.GGML_QUANT_SIZES[Type[form.name]]
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (300, 3 * 256 // form.numbers * form.bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(stored, Type[form.name])
    matrix = BlockMatrix(stored, form)
    assert matrix.shape == (300, 768) and matrix.nbytes == 300 * form.row_bytes(768)
    weights = dequantize_blocks(matrix)
    assert weights.dtype == np.float32 and np.isfinite(weights).mean() > 0.5
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(dequantize_blocks(matrix, np.array([7, 0, 7])), expected[[7, 0, 7]])
    for rows in (slice(3, 9), slice(0, 0)):
        np.testing.assert_array_equal(dequantize_blocks(matrix, rows), expected[rows])


def test_pairs_of_blocks_have_the_weights_of_these_blocks():
    stored = np.random.default_rng(2).integers(0, 256, (30, 6 * 22), np.uint8)
    pairs = in_pairs(stored)
    assert pairs.shape == stored.shape and not np.array_equal(pairs, stored)
    with np.errstate(all="ignore"):
        expected = dequantize(stored, Type.Q5_0)
    np.testing.assert_array_equal(dequantize_blocks(BlockMatrix(pairs, BLOCK_FORMATS["Q5_0X2"])), expected)


@pytest.mark.parametrize("form", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_the_integers_of_a_block_are_small_and_share_its_scales(form):
    rng = np.random.default_rng(1)
    stored = rng.integers(0, 256, (40, form.bytes), np.uint8)
    with np.errstate(all="ignore"):
        scales, integers, offsets = form.split(stored)
    groups = form.numbers // form.group
    assert scales.shape == (40, groups) and integers.shape == (40, form.numbers)
    assert integers.dtype == (np.float32 if form.name in CODE_BOOKS else np.int8)
    assert offsets is None or offsets.shape == scales.shape
    bounds = {
        "Q4_K": (0, 15), "Q5_K": (0, 31), "Q6_K": (-32, 31), "Q5_0": (-16, 15), "Q5_1": (0, 31), "IQ4_NL": (-127, 113),
        "MXFP4": (-12, 12), "IQ4_XS": (-127, 113), "Q3_K": (-4, 3), "Q2_K": (0, 3),
        "NVFP4": (-12, 12), "Q5_0X2": (-16, 15), "NF4": (-1, 1), "FP4": (-1, 1),
    }  # fmt: skip
    assert (integers.min(), integers.max()) == bounds[form.name]
