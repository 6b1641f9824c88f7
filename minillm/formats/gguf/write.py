"""Writing of GGUF files, which llama.cpp and minillm run: configuration, tokenizer, chat template and weights in one.

    float32, float16, bfloat16    F32, F16, BF16; norms and biases are always F32
    int8, or Q8_0                 Q8_0
    int4, or Q4_0                 Q4_0, the vocabulary Q8_0
                                  (rows that are not whole groups of 32: F16)
    Q4_K_M, Q6_K, ...             llama.cpp's mixtures (`mixtures.py`)

The names are `architectures.py`'s, read backwards. What llama.cpp would compute otherwise is refused by name. Integers
and scales are minillm's own (`reference/quantize.py`, `reference/block_quantize.py`), block by block as the format has
them. The package `gguf` (extra "gguf") writes the file.
"""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, INT4, INT8, STORED_FORMATS, WEIGHT_FORMATS, Format
from ...backends.loader import Tensor, gather
from ...backends.storage import expand
from ...config import ModelConfig
from ...errors import ParameterError, UnsupportedModelError, install
from ...models import family_named
from ...output_files import check_absent, new_file
from ...progress import showing, tick, work
from ...reference.block_quantize import quantize_blocks
from ...reference.blocks import BLOCK_FORMATS, dequantize_blocks
from ...reference.quantize import Quantized
from ..load_model import open_model
from ..model_files import ModelFiles
from ..write_checkpoint import Part, Rounding, plan
from .architectures import ARCHITECTURES
from .encoders import embedding_entries, head_entries
from .file import Type
from .mixtures import FILE_TYPE_OF, MIXTURES, TYPE_OF, Mixture
from .names import gguf_name, in_file_order, is_convolution
from .tokenizer_entries import gguf_entries
from .translation import Written
from .translations import translation_of
from .write_metadata import gguf_fields, rotary_factors

TYPES = {FLOAT32: "F32", FLOAT16: "F16", BFLOAT16: "BF16", INT8: "Q8_0", INT4: "Q4_0"}
FORMS = {name: form for form, name in TYPES.items()}
"""Types that are formats of minillm, too"""
DTYPES = (*(form.name for form in TYPES), *MIXTURES)
"""Names of formats and mixtures that a file may have"""
OTHER_NAMES = {"Q8_0": INT8.name, "Q4_0": INT4.name}
"""llama.cpp's names of dtypes"""
GROUP = 32
"""Weights that share a scale in Q8_0 and Q4_0"""
QUANTISATION_VERSION = 2
"""Version of the types' layouts, in files that have such tensors"""


def check_gguf_request(target: Path, dtype: str, group: int | None) -> str:
    """Check the arguments that do not depend on the checkpoint. Returns the dtype as in `DTYPES`.

    Raises:
        ParameterError: the dtype or the group is not offered, or `target` exists.
        UnsupportedModelError: the package that writes is not installed.
    """
    check_absent(target)
    names = {name.lower(): name for name in DTYPES} | {name.lower(): dtype for name, dtype in OTHER_NAMES.items()}
    if dtype.lower() not in names:
        raise ParameterError(f"dtype {dtype!r} is none of a GGUF file: expected one of {', '.join(DTYPES)}")
    if group is not None and group != GROUP:
        raise ParameterError(f"GGUF files have groups of {GROUP} weights: leave the group size {group} out")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedModelError(f"GGUF files are written by the package gguf: {install('gguf')}") from None
    return names[dtype.lower()]


def write_gguf(
    source: Path, target: Path, dtype: str, group: int | None = None, *, tokenizer: bool = True, progress: bool = True
) -> list[Rounding]:
    """Write the model in `source` with its weights in `dtype` to the new file `target`.

    Memory holds one tensor at a time, or one matrix of all experts of a layer. `target` appears when it is complete.
    Returns the rounding errors.

    Args:
        source: a checkpoint folder with a tokenizer, or a GGUF file
        target: a file that does not exist, in a folder that does
        dtype: one of `DTYPES`, or of `OTHER_NAMES`, in any case
        group: 32 if given
        tokenizer: write the tokenizer too; without one the file maps token ids to logits
        progress: show a bar on a terminal or in a notebook

    Raises:
        ParameterError: as `check_gguf_request`; the checkpoint is quantised already; a weight does not fit the dtype.
        ModelError: `source` cannot be read, llama.cpp would not run it alike, or `target` cannot be written.

    Example:
        >>> roundings = write_gguf(Path("checkpoints/Qwen3-0.6B"), Path("qwen3.gguf"), "int8")  # doctest: +SKIP
    """
    dtype = check_gguf_request(target, dtype, group)
    from gguf import GGUFWriter

    files = open_model(source)
    planned = plan(files, WEIGHT_FORMATS["int8" if dtype in MIXTURES else dtype], as_built=True)
    raw, config = files.raw, files.config
    architecture, entries = gguf_fields(raw, config, str(source))
    entries |= _general(files.name, dtype)
    entries |= _tokenizer_entries(files) if tokenizer else {"tokenizer.ggml.model": "no_vocab"}
    entries |= {"tokenizer.ggml.token_type_count": config.token_types} if config.token_types else {}
    table = ARCHITECTURES[architecture]
    tensors = _in_file(planned, architecture, config)
    if table.needs_output and "output.weight" not in tensors:
        tensors["output.weight"] = tensors["token_embd.weight"]
    mixture = Mixture(dtype, config, architecture, "output.weight" not in tensors) if dtype in MIXTURES else None
    kinds = {name: _type(name, whole.parts[0].shape, whole.format, mixture) for name, whole in tensors.items()}
    factors = rotary_factors(raw, config) | translation_of(architecture).factors(config)
    if config.output == "labels" and config.bidirectional:
        entries |= head_entries(files.embedding_settings(config), config, architecture, str(source))
    elif config.bidirectional:
        pooling, projections = embedding_entries(files.embedding_settings(config), architecture, str(source))
        entries, factors = entries | pooling, factors | projections
    total, rounded = sum(_count(whole) for whole in tensors.values()), list[Rounding]()
    with (
        showing(progress),
        work(f"writing {dtype}", total, "parameters") as writing,
        new_file(target) as partial,
        closing(GGUFWriter(str(partial), architecture)) as writer,
    ):
        _add_entries(writer, entries)
        for name, values in factors.items():
            _announce(writer, name, values.shape, TYPE_OF["F32"])
        for name, whole in tensors.items():
            _announce(writer, name, _shape(name, whole), kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in factors.values():
            writer.write_tensor_data(values)
        for name, whole in tensors.items():
            kind = kinds[name]
            rounding = Rounding(name, kind if mixture else FORMS[kind.name])
            encoded = [_encoded(tensor, kind.name, rounding) for tensor in whole.parts]
            writer.write_tensor_data(encoded[0] if len(encoded) == 1 else np.concatenate(encoded))
            writing.advance(_count(whole))
            rounded += [rounding] if rounding.squared_norm else []
    return rounded


def _in_file(planned: list[list[Part]], architecture: str, config: ModelConfig) -> dict[str, Written]:
    """The tensors by their names in the file, with their numbers as they are there."""
    table, own = ARCHITECTURES[architecture], translation_of(architecture)
    built = {part.name: Written([part.tensor], part.format) for fused in planned for part in fused}
    tensors: dict[str, Written] = {}
    headless = config.bidirectional and config.output != "labels"
    heads = family_named(config.model_type).NAMES.heads if headless else ()  # which are not of the file
    for ours, whole in built.items():
        if ours.startswith(heads):
            continue
        rewritten = own.written(ours, built, config)
        if rewritten is not None:
            tensors |= rewritten
            continue
        name = gguf_name(table, ours)
        tensor = in_file_order(whole.parts[0], name, table, config)
        format = FLOAT32 if is_convolution(name) else whole.format
        if name in tensors:
            tensors[name].parts.append(tensor)  # of each expert
        else:
            tensors[name] = Written([tensor], format)
    return tensors


def _count(whole: Written) -> int:
    """Numbers of a tensor."""
    return sum(math.prod(tensor.shape) for tensor in whole.parts)


def _shape(name: str, whole: Written) -> tuple[int, ...]:
    """The shape of a tensor in the file: [out, in], or of the experts of a layer [X, out, in]; of biases without in."""
    parts = whole.parts
    return whole.shape or ((len(parts), *parts[0].shape) if "_exps." in name else parts[0].shape)


def _type(name: str, shape: tuple[int, ...], form: Format, mixture: Mixture | None) -> Type:
    """The type of a tensor: vectors are float32; `form` unless there is a mixture, and where it does not round.

    Groups do not end within a row.
    """
    if len(shape) == 1:
        return TYPE_OF["F32"]
    if mixture is not None and form.scale_bits:
        return mixture.type_of(name, shape[-1])
    return TYPE_OF["F16" if form.scale_bits and shape[-1] % GROUP else TYPES[form]]


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: Type) -> None:
    """Enter a tensor into the header."""
    from gguf import GGMLQuantizationType

    nbytes = math.prod(shape) // kind.numbers * kind.bytes
    numbers = np.dtype(np.float32)  # `shape` counts numbers, not bytes
    writer.add_tensor_info(name, shape, numbers, nbytes, raw_dtype=GGMLQuantizationType[kind.name])


def _encoded(tensor: Tensor, kind: str, rounding: Rounding) -> NDArray[Any]:
    """A tensor's bytes in the file; if it is rounded for it, `rounding` counts its error.

    Raises:
        ParameterError: a weight does not fit the type.
    """
    if len(tensor.shape) == 1:
        return tensor.load()
    try:
        return _grouped(tensor, kind, rounding) if kind in BLOCK_FORMATS else _gathered(tensor, FORMS[kind], rounding)
    except ParameterError as error:
        raise ParameterError(f"tensor {rounding.name}: {error}") from None


def _grouped(tensor: Tensor, kind: str, rounding: Rounding) -> NDArray[np.uint8]:
    """Rows in a block format; those that are in it already stay as they are. [out, bytes of a row]"""
    if tensor.dtype == kind:
        stored: NDArray[np.uint8] = tensor.stored().blocks
        return stored
    form = BLOCK_FORMATS[kind]
    rows, first = np.empty((tensor.shape[0], form.row_bytes(tensor.shape[1])), np.uint8), 0
    for chunk in tensor.chunks():
        matrix = quantize_blocks(chunk, form)
        rounding.add(chunk, dequantize_blocks(matrix))
        rows[first : first + len(chunk)] = matrix.blocks
        first += len(chunk)
        tick()
    return rows


def _gathered(tensor: Tensor, form: Format, rounding: Rounding) -> NDArray[Any]:
    """Rows in a format of minillm."""
    data = gather([tensor], form)
    if form == FLOAT16 and not np.isfinite(data).all():
        raise ParameterError("weights in float16 must be finite and below 65,520: try bfloat16")
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
    recipe = dtype if dtype in MIXTURES else TYPES[FORMATS[dtype]]
    entries = {"general.name": name, "general.file_type": FILE_TYPE_OF[recipe]}
    floats = dtype not in MIXTURES and not FORMATS[dtype].scale_bits
    return entries | ({} if floats else {"general.quantization_version": QUANTISATION_VERSION})


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
            case list() | bytes():
                writer.add_array(key, value)
