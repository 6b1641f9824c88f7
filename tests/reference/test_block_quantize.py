"""Rounding to the block formats of GGUF files, as the package gguf reads them, beside llama.cpp's own rounding."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from minillm.engine.loading import DEMO_MODEL
from minillm.errors import ParameterError
from minillm.formats import open_checkpoint
from minillm.reference.block_quantize import ENCODERS, quantize_blocks
from minillm.reference.blocks import BLOCK_FORMATS

LLAMA_CPP = {
    "Q4_K": 0.07147,
    "Q5_K": 0.03619,
    "Q6_K": 0.01778,
    "Q5_0": 0.04283,
    "Q5_1": 0.03793,
    "IQ4_NL": 0.07623,
    "IQ4_XS": 0.07682,
    "MXFP4": 0.11415,
}
"""Relative rms error of llama.cpp's rounding on normal numbers"""


def normal(rows: int = 256, width: int = 1024) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, (rows, width)).astype(np.float32)


def read(blocks: np.ndarray, name: str) -> np.ndarray:
    return dequantize(blocks, GGMLQuantizationType[name]).astype(np.float64)


def error_of(weight: np.ndarray, values: np.ndarray) -> float:
    return float(np.linalg.norm(values - weight) / np.linalg.norm(weight.astype(np.float64)))


def test_every_format_has_its_figure() -> None:
    assert set(ENCODERS) == set(LLAMA_CPP)


@pytest.mark.parametrize("name", ENCODERS)
def test_normal_numbers_are_rounded_at_least_as_well_as_by_llama_cpp(name: str) -> None:
    weight = normal()
    values = read(quantize_blocks(weight, BLOCK_FORMATS[name]).blocks, name)
    assert error_of(weight, values) < LLAMA_CPP[name] * 1.001


@pytest.mark.reference
@pytest.mark.parametrize("name", ENCODERS)
def test_real_weights_are_rounded_at_least_as_well_as_by_llama_cpp(name: str) -> None:
    package = pytest.importorskip("llama_cpp")
    library = ctypes.CDLL(str(next(Path(package.__file__).parent.glob("lib/libggml-base.*"))))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    stored = open_checkpoint(DEMO_MODEL)
    for tensor in (tensor for tensor in stored.values() if len(tensor.shape) > 1):
        weight = tensor.load()
        weight = np.ascontiguousarray(weight[: len(weight) // 4 * 4].reshape(-1, weight.shape[1] * 4))
        ours = quantize_blocks(weight, BLOCK_FORMATS[name]).blocks
        theirs = np.zeros_like(ours)
        kind = GGMLQuantizationType[name].value
        library.ggml_quantize_chunk(kind, weight.ctypes.data, theirs.ctypes.data, 0, *weight.shape, None)
        errors = [error_of(weight, read(blocks, name)) for blocks in (ours, theirs)]
        assert errors[0] <= errors[1] * 1.005


@pytest.mark.parametrize("name", ENCODERS)
def test_a_block_is_as_good_alone_as_among_others(name: str) -> None:
    form, weight = BLOCK_FORMATS[name], normal(2, 1024)
    alone = [quantize_blocks(block[None], form).blocks for block in weight.reshape(-1, form.numbers)]
    assert np.array_equal(np.concatenate(alone).ravel(), quantize_blocks(weight, form).blocks.ravel())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(
    ("value", "within"),
    [(0.0, 0.0), (1.0, 0.04), (-3.0, 0.04), (1e-42, 1.01e-42), (-1e-30, 1.01e-30), (4e4, 0.04 * 4e4)],
)
def test_equal_weights_stay_nearly_what_they_are(name: str, value: float, within: float) -> None:
    """Also if they are 0, or too small for any scale, and then become 0."""
    weight = np.full((2, 256), value, np.float32)
    values = read(quantize_blocks(weight, BLOCK_FORMATS[name]).blocks, name)
    assert np.isfinite(values).all()
    assert np.abs(values - weight).max() <= within * (5 if name == "MXFP4" else 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ENCODERS)
def test_one_large_weight_costs_only_its_own_block(name: str) -> None:
    form, weight = BLOCK_FORMATS[name], normal(1, 1024)
    weight[0, 300] = -50.0
    values = read(quantize_blocks(weight, form).blocks, name)
    first = 300 // form.numbers * form.numbers
    others = np.r_[0:first, first + form.numbers : 1024]
    assert error_of(weight[:, others], values[:, others]) < LLAMA_CPP[name] * 1.1
    assert values[0, 300] == pytest.approx(-50, rel=0.2)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 5e5])
def test_weights_that_no_scale_holds_are_refused(name: str, value: float) -> None:
    weight = normal(2, 256)
    weight[1, 7] = value
    with pytest.raises(ParameterError, match="must be finite and below"):
        quantize_blocks(weight, BLOCK_FORMATS[name])
