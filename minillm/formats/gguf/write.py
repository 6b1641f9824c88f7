"""Writing of GGUF files, which llama.cpp and minillm run: configuration, tokenizer, chat template and weights in one.

    float32, float16, bfloat16    F32, F16, BF16; norms and biases are always F32
    int8                          Q8_0
    int4                          Q4_0, the vocabulary Q8_0
                                  (rows that are not whole groups of 32: F16)

The names are `architectures.py`'s, read backwards. What llama.cpp would compute otherwise is refused
by name. Integers and scales are minillm's own (`reference/quantize.py`), block by block as the format has them. The
package `gguf` (extra "gguf") writes the file.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.formats import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, STORED_FORMATS, WEIGHT_FORMATS, Format
from ...backends.loader import Tensor, gather
from ...backends.weights import expand
from ...errors import ParameterError, UnsupportedModelError, install
from ...output_files import check_absent, new_file
from ...progress import showing, work
from ...reference.quantize import Quantized
from ..load_model import open_model
from ..model_files import ModelFiles
from ..write_checkpoint import Rounding, plan
from .architectures import ARCHITECTURES
from .file import FILE_TYPES as NAMES
from .names import gguf_name, in_file_order, is_convolution
from .tokenizer_entries import gguf_entries
from .write_metadata import gguf_fields, rotary_factors

TYPES = {FLOAT32: "F32", FLOAT16: "F16", BFLOAT16: "BF16", INT8: "Q8_0", INT4: "Q4_0"}
FILE_TYPES = {form.name: code for form, name in TYPES.items() for code, known in NAMES.items() if known == name}
"""dtype -> `general.file_type`"""
GROUP = 32
"""Weights that share a scale in Q8_0 and Q4_0"""
QUANTISATION_VERSION = 2
"""Version of the types' layouts, in files that have such tensors"""


def check_gguf_request(target: Path, dtype: str, group: int | None) -> None:
    """Check the arguments that do not depend on the checkpoint.

    Raises:
        ParameterError: the dtype or the group is not offered, or `target` exists.
        UnsupportedModelError: the package that writes is not installed.
    """
    check_absent(target)
    if dtype not in FILE_TYPES:
        raise ParameterError(f"dtype {dtype!r} is none of a GGUF file: expected one of {', '.join(FILE_TYPES)}")
    if group is not None and group != GROUP:
        raise ParameterError(f"GGUF files have groups of {GROUP} weights: leave the group size {group} out")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedModelError(f"GGUF files are written by the package gguf: {install('gguf')}") from None


def write_gguf(
    source: Path, target: Path, dtype: str, group: int | None = None, *, progress: bool = True
) -> list[Rounding]:
    """Write the model in `source` with its weights in `dtype` to the new file `target`.

    Memory holds one tensor at a time, or one matrix of all experts of a layer. `target` appears when it is complete.
    Returns the rounding errors.

    Args:
        source: a checkpoint folder with a tokenizer, or a GGUF file
        target: a file that does not exist, in a folder that does
        dtype: "float32", "float16", "bfloat16", "int8" or "int4"
        group: 32 if given
        progress: show a bar on a terminal or in a notebook

    Raises:
        ParameterError: as `check_gguf_request`; the checkpoint is quantised already; a weight does not fit the dtype.
        ModelError: `source` cannot be read, llama.cpp would not run it alike, or `target` cannot be written.

    Example:
        >>> roundings = write_gguf(Path("checkpoints/Qwen3-0.6B"), Path("qwen3.gguf"), "int8")  # doctest: +SKIP
    """
    check_gguf_request(target, dtype, group)
    from gguf import GGUFWriter

    files = open_model(source)
    planned = plan(files, WEIGHT_FORMATS[dtype], as_built=True)
    raw, config = files.raw, files.config
    architecture, entries = gguf_fields(raw, config, str(source))
    entries |= _general(files.name, dtype) | _tokenizer_entries(files)
    tensors: dict[str, tuple[list[Tensor], Format]] = {}
    table = ARCHITECTURES[architecture]
    for part in (part for fused in planned for part in fused):
        name = gguf_name(table, part.name)
        tensor = in_file_order(part.tensor, name, table, config)
        form = FLOAT32 if is_convolution(name) else _fitting(part.format, tensor.shape)
        parts, _ = tensors.setdefault(name, ([], form))
        parts.append(tensor)  # of each expert
    if table.needs_output and "output.weight" not in tensors:
        tensors["output.weight"] = tensors["token_embd.weight"]
    factors = rotary_factors(raw, config)
    total, rounded = sum(math.prod(tensor.shape) for parts, _ in tensors.values() for tensor in parts), []
    with showing(progress), work(f"writing {dtype}", total, "parameters") as writing, new_file(target) as partial:
        writer = GGUFWriter(str(partial), architecture)
        _add_entries(writer, entries)
        for name, values in factors.items():
            _announce(writer, name, values.shape, FLOAT32)
        for name, (parts, form) in tensors.items():
            _announce(writer, name, _shape(name, parts), form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in factors.values():
            writer.write_tensor_data(values)
        for name, (parts, form) in tensors.items():
            rounding = Rounding(name, form)
            encoded = [_encoded(tensor, form, rounding) for tensor in parts]
            writer.write_tensor_data(encoded[0] if len(encoded) == 1 else np.concatenate(encoded))
            writing.advance(sum(math.prod(tensor.shape) for tensor in parts))
            rounded += [rounding] if rounding.squared_norm else []
        writer.close()
    return rounded


def _shape(name: str, parts: list[Tensor]) -> tuple[int, ...]:
    """The shape of a tensor in the file: [out, in], or of the experts of a layer [X, out, in]."""
    return (len(parts), *parts[0].shape) if name.endswith("_exps.weight") else parts[0].shape


def _fitting(form: Format, shape: tuple[int, ...]) -> Format:
    """The format that llama.cpp takes a tensor in: vectors are float32, and groups do not end within a row."""
    if len(shape) == 1:
        return FLOAT32
    return FLOAT16 if form.scale_bits and shape[-1] % GROUP else form


def _announce(writer: Any, name: str, shape: tuple[int, ...], form: Format) -> None:
    """Enter a tensor into the header."""
    from gguf import GGMLQuantizationType

    nbytes = math.prod(shape[:-1]) * form.row_bytes(shape[-1])
    kind = np.dtype(np.float32)  # `shape` counts numbers, not bytes
    writer.add_tensor_info(name, shape, kind, nbytes, raw_dtype=GGMLQuantizationType[TYPES[form]])


def _encoded(tensor: Tensor, form: Format, rounding: Rounding) -> NDArray[Any]:
    """A tensor's bytes in the file; if it is rounded for it, `rounding` counts its error.

    Raises:
        ParameterError: a weight does not fit the format.
    """
    if len(tensor.shape) == 1:
        return tensor.load()
    try:
        data = gather([tensor], form)
    except ParameterError as error:
        raise ParameterError(f"tensor {rounding.name}: {error}") from None
    if form == FLOAT16 and not np.isfinite(data).all():
        words = "weights in float16 must be finite and below 65,520: try bfloat16"
        raise ParameterError(f"tensor {rounding.name}: {words}")
    if form not in (FLOAT32, STORED_FORMATS[tensor.dtype]):
        first = 0
        for chunk in tensor.chunks():
            rounding.add(chunk, expand(data, slice(first, first + len(chunk))))
            first += len(chunk)
    if isinstance(data, Quantized):
        scales = np.ascontiguousarray(data.scales).view(np.uint8).reshape(*data.scales.shape, 2)
        values = np.ascontiguousarray(data.values).view(np.uint8).reshape(*data.scales.shape, -1)
        return np.concatenate([scales, values], axis=2)  # [out, in / 32, 2] and [..., 16 or 32] -> [..., 18 or 34]
    return np.ascontiguousarray(data)


def _general(name: str, dtype: str) -> dict[str, Any]:
    """Entries about the file as a whole."""
    entries = {"general.name": name, "general.file_type": FILE_TYPES[dtype]}
    return entries | ({"general.quantization_version": QUANTISATION_VERSION} if dtype in ("int8", "int4") else {})


def _tokenizer_entries(files: ModelFiles) -> dict[str, Any]:
    """Entries of the tokenizer and the chat template.

    Raises:
        ModelNotFoundError: there is no tokenizer.
        ModelError: there is none that GGUF files have.
    """
    tokenizer, template = files.need_tokenizer(), files.chat_template
    entries = gguf_entries(tokenizer, files.config.vocab_size, files.path)
    ends = files.generation_defaults().get("eos_token_id")
    others = [i for i in (ends if isinstance(ends, list) else [ends]) if i not in (None, tokenizer.eos_token_id)]
    entries |= {f"tokenizer.ggml.{name}_token_id": i for name, i in zip(("eot", "eom"), others, strict=False)}
    if template is None:
        return entries
    named = {"tokenizer.chat_template": template.source, "tokenizer.chat_template.tool_use": template.tool_use}
    return entries | {key: source for key, source in named.items() if source is not None}


def _add_entries(writer: Any, entries: dict[str, Any]) -> None:
    """Add metadata of any type: whole numbers as uint32, others as float32."""
    for key, value in entries.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
