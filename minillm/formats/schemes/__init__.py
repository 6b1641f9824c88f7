"""Quantised checkpoints: a file for each scheme, and the table of all that are read.

minillm.py   minillm's own: 8 or 4 bits, in the names and the order with which a model is built
matrix.py    numbers with scales and zero points as one tensor; what is exact in our 8 or 4 bits, and what is expanded
codebooks.py codes of 4 bits in the blocks of `reference/blocks.py`
mxfp4.py     gpt-oss's blocks, as GGUF's
the others   config.json's quantization_config -> a `Scheme`: where in which tensors a module's matrix is
"""

from collections.abc import Callable, Mapping
from typing import Any

from ...config import Fields
from ...errors import UnsupportedModelError
from ..tensors import FLOATS
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq, minillm, mlx, mxfp4
from .matrix import Scheme
from .minillm import MinillmScheme
from .mxfp4 import Mxfp4Scheme

Quantization = MinillmScheme | Scheme | Mxfp4Scheme
"""The quantisation of a checkpoint: minillm's own, or a published one"""

SCHEMES: dict[str, Callable[[Fields, str], Scheme | Mxfp4Scheme]] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "modelopt": fp8.read_modelopt,
    "bitsandbytes": bitsandbytes.read,
    "mxfp4": mxfp4.read,
    "mlx": mlx.read,
}
"""quant_method -> the reader of its quantization_config, which also gets the dtype of matrices that are not exact in 8
or 4 bits. It raises CheckpointError for an invalid field and UnsupportedModelError for what is not read; reading a
module raises CheckpointError for a tensor that is missing, ill-shaped or contradicts another."""


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Read quantization_config (`config.read_config`); None if there is none.

    Raises:
        UnsupportedModelError: another quantisation method, or a variant of one that is not read.
        CheckpointError: a field is missing or invalid.
    """
    value = raw.get("quantization_config")
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {}
    method = fields.get("quant_method", value if not fields else None)
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        method = "bitsandbytes"  # as its first releases wrote
    if method == minillm.METHOD:
        return minillm.read(fields)
    if not fields or not isinstance(method, str) or method not in SCHEMES:
        raise UnsupportedModelError(
            f"config.json: the checkpoint is quantised by {method!r:.60}; minillm reads those that are not quantised, "
            f"those quantised by {', '.join(SCHEMES)}, and those that `python -m minillm quantize` has written"
        )
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    source = Fields(fields, fields.get("file", "config.json: quantization_config"))
    return SCHEMES[method](source, dtype if isinstance(dtype, str) and dtype in FLOATS else "float32")
