"""Matrices below one another, each in its own format: loaded as they are, and multiplied in one launch."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.cpu.selftest import random_blocks
from minillm.backends.formats import BFLOAT16, BLOCKS, FLOAT16, INT8
from minillm.backends.loader import Loader, gather
from minillm.backends.storage import Experts, Joined, expand, format_of, narrow
from minillm.backends.weights import Weight
from minillm.engine.origins import _digest
from minillm.reference.blocks import BLOCK_FORMATS, BlockMatrix
from minillm.reference.quantize import quantize

RNG = np.random.default_rng


class Stored:
    """A tensor in memory, in a block format or float16."""

    def __init__(self, data: Any) -> None:
        self.data, self.shape = data, data.shape
        self.dtype = data.form.name if isinstance(data, BlockMatrix) else "float16"

    def stored(self) -> Any:
        return self.data

    def read_into(self, out: Any) -> None:
        out[...] = self.data

    def chunks(self) -> Any:
        yield expand(self.data)

    def merged_with(self, other: Any) -> None:
        return None


def blocks(kind: str, outputs: int = 20, seed: int = 0) -> BlockMatrix:
    return random_blocks(RNG(seed), BLOCK_FORMATS[kind], outputs, 512)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 70])
def test_each_part_has_the_bits_that_it_has_alone(rows: int, compute: str) -> None:
    rng, backend = RNG(1), CpuBackend(compute=compute)
    plain = rng.standard_normal((9, 512), np.float32)
    parts = (blocks("Q4_K", 32), blocks("Q4_K", 7), blocks("Q6_K"), blocks("IQ4_NL"), plain, narrow(plain, BFLOAT16),
             quantize(plain, 8))  # fmt: skip
    weight = Weight("qkv", Joined(parts), rng.standard_normal(106, np.float32))
    assert weight.shape == (106, 512) and weight.nbytes == sum(part.nbytes for part in parts) + 4 * 106
    x, residual = rng.standard_normal((rows, 512), np.float32), rng.standard_normal((rows, 106), np.float32)
    joined = backend.linear(x, weight, activation="gelu", residual=residual).copy()
    first = 0
    for part in parts:
        columns = slice(first, first + part.shape[0])
        alone = backend.linear(
            x, Weight("", part, weight.bias[columns]), activation="gelu", residual=residual[:, columns].copy()
        )
        np.testing.assert_array_equal(joined[:, columns], alone)
        first = columns.stop
    np.testing.assert_array_equal(expand(weight.data), np.concatenate([expand(part) for part in parts]))


def test_blocks_of_unlike_tensors_stay_apart_and_others_become_one_array() -> None:
    q, v = Stored(blocks("Q4_K", 30)), Stored(blocks("Q6_K"))
    half = Stored(RNG(0).standard_normal((5, 512)).astype(np.float16))
    fused = CpuBackend().loader.prepare("qkv", [q, v, half]).data
    assert fused.parts == (q.data, v.data, half.data) and format_of(fused) == BLOCKS["Q4_K"]
    wide = Loader("float16").prepare("qkv", [q, v, half]).data
    np.testing.assert_array_equal(wide, np.concatenate([expand(t.data).astype(np.float16) for t in (q, v, half)]))
    assert Loader("int8").prepare("qkv", [q, v]).data.bits == INT8.bits
    assert gather([q, v], None, kept=[FLOAT16]).dtype == np.float16  # a backend without blocks


def test_experts_of_one_block_format_are_copied_below_one_another_and_others_are_rounded() -> None:
    gates, ups = ([Stored(blocks("Q5_K", seed=seed + i)) for i in range(3)] for seed in (0, 10))
    loader = CpuBackend().loader
    experts = loader.prepare_experts("experts", list(zip(gates, ups, strict=True))).data
    for i, matrix in enumerate(experts.matrices):
        np.testing.assert_array_equal(matrix.blocks, np.concatenate([gates[i].data.blocks, ups[i].data.blocks]))
    mixed = loader.prepare_experts("experts", [[gates[0], Stored(blocks("Q6_K"))]]).data
    assert isinstance(mixed, Experts) and mixed.matrices[0].dtype == np.float16


def test_the_digest_of_weights_is_that_of_their_blocks() -> None:
    digests = {_digest("", {"w": Weight("w", data)}) for data in (
        blocks("Q4_K"), blocks("Q4_K", seed=1), Joined((blocks("Q4_K"), blocks("Q6_K"))),
        Joined((blocks("Q4_K"), blocks("Q6_K", seed=1))),
    )}  # fmt: skip
    assert len(digests) == 4
    assert _digest("", {"w": Weight("w", blocks("Q4_K"))}) in digests
