"""Single launches of the kernels in C, with a number of shares and of workers."""

import ctypes
import os
from dataclasses import replace
from typing import Any

import numpy as np

from minillm.backends.cpu import launching
from minillm.backends.cpu.backend import ACTIVATIONS as ACTIVATIONS
from minillm.backends.cpu.backend import GATES as GATES
from minillm.backends.cpu.launching import filled as fill
from minillm.backends.cpu.matrices import BLOCK_CODES
from minillm.reference.quantize import Quantized

from .emulated import emulator

integer = ctypes.c_int64
FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4} | BLOCK_CODES
NormArguments, GluArguments, Table, EmbedArguments = launching.Norm, launching.Glu, launching.Table, launching.Embed
RotaryAnglesArguments, HeadsToRotate, RotaryArguments = launching.Angles, launching.Heads, launching.Rotary
TakeRowsArguments, StoreKVArguments = launching.TakeRows, launching.StoreKV
AddChangesArguments, ScaleLogitsArguments = launching.AddChanges, launching.ScaleLogits
AttentionArguments, ArgmaxArguments = launching.Attention, launching.Argmax
LinearArguments = launching.Linear
Draw, SampleArguments = launching.DRAW, launching.Sample

__all__ = ["ACTIVATIONS", "GATES", "fill", "loaded", "run", "with_offsets"]


TARGET = os.environ.get("MINILLM_TEST_TARGET")
"""Another processor whose kernels are tested: see `emulated.py`"""


def with_offsets(weight: Quantized, kind: str) -> Quantized:
    """The same integers with other "zero points", or with "offsets" as large; "": the matrix itself."""
    if not kind:
        return weight
    zeros = np.random.default_rng(0).integers(0, 16, weight.scales.shape)
    if kind == "zero points":
        return replace(weight, offsets=zeros.astype(np.uint8))
    return replace(weight, offsets=(-weight.scales * (zeros + 0.3)).astype(np.float16))


def loaded() -> Any:
    """The library, or another processor's."""
    return emulator(TARGET) if TARGET else launching.kernels()


def run(name: str, arguments: Any, shares: int = 1, workers: int = 1) -> None:
    """Launch a kernel, with the thread pool if there are several workers."""
    if TARGET:
        emulator(TARGET).run(name, arguments, shares, workers)
        return
    launching.launch_on(workers, name, arguments, shares)
