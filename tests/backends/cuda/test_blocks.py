"""GGUF's blocks on a GPU: which bits they are kept in, and that their weights are the file's but for one rounding."""

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.device import Device
from minillm.backends.loader import RandomTensor
from minillm.backends.storage import format_of
from minillm.errors import CheckpointError
from minillm.reference.block_quantize import quantize_blocks
from minillm.reference.blocks import BLOCK_FORMATS, BlockMatrix, dequantize_blocks, in_8_bits
from minillm.reference.quantize import Quantized, dequantize

from .interleaving import on_device
from .launchers import launcher

pytestmark = pytest.mark.usefixtures("emulator")
KEPT = {
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "IQ4_NL": (8, 32, False),
    "IQ4_XS": (8, 32, False),
    "MXFP4": (8, 32, False),
}
"""Bits, group, and whether there are offsets"""
EXACT = {"Q5_0", "Q5_1", "IQ4_NL", "MXFP4"}


class Stored(RandomTensor):
    """A matrix as a file has it in blocks."""

    def __init__(self, form: str) -> None:
        super().__init__(form, (6, 512), 1, 1.0)
        object.__setattr__(self, "dtype", form)

    def stored(self) -> BlockMatrix:
        numbers = RandomTensor("w", self.shape, self.seed, self.std).load()
        return quantize_blocks(numbers, BLOCK_FORMATS[self.dtype])

    def load(self) -> np.ndarray:
        return dequantize_blocks(self.stored())


@pytest.mark.parametrize("form", KEPT)
def test_blocks_are_kept_in_few_bits(form: str) -> None:
    """Scales and offsets are rounded to float16, in which some formats have them."""
    backend = CudaBackend(Device(), launcher(), "auto")
    data = backend.loader.prepare("w", [Stored(form), Stored(form)]).data
    expected = np.concatenate([Stored(form).load()] * 2)
    assert isinstance(data, Quantized)
    assert (data.bits, data.group, data.offsets is not None) == KEPT[form]
    assert format_of(data).row_bytes(512) * 12 == data.nbytes
    weights = dequantize(on_device(data, back=True))
    if form in EXACT:
        np.testing.assert_array_equal(weights, expected)
    else:
        assert np.linalg.norm(weights - expected) < 2**-10 * np.linalg.norm(expected)


def test_a_matrix_of_several_formats_has_16_bits() -> None:
    """Queries in Q4_K beside values in Q6_K, as in files of Q4_K_M."""
    backend = CudaBackend(Device(), launcher(), "auto")
    assert backend.loader.prepare("qkv", [Stored("Q4_K"), Stored("Q6_K")]).data.dtype == np.float16


def test_a_scale_that_float16_does_not_hold_is_refused_by_name() -> None:
    matrix = Stored("Q6_K").stored()
    matrix.blocks[2, 208:210] = [0xFF, 0x7B]  # d = 65,504
    with pytest.raises(CheckpointError, match=r"^tensor blk\.0 holds a scale or an offset that is not finite"):
        in_8_bits(matrix, "blk.0")
