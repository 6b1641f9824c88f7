"""Conversion of a checkpoint to smaller weights: 16 bits, or 8 or 4 bits in groups with one scale each.

`backends/formats.py` says the format of each weight: with int4 the vocabulary has 8 bits; norms and biases are not
rounded, nor positions and routers with 8 or 4 bits. The layout of 8 and 4 bits is in `schemes/minillm.py`; 16 bits
give an ordinary checkpoint with the same tensor names and layout. Tensors that a model fuses are stored next to each
other.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.formats import FLOAT16, FLOAT32, FORMATS, STORED_FORMATS, WEIGHT_FORMATS, Format, Role, WeightFormats
from ..backends.loader import Member, Regrouped, Tensor
from ..backends.shapes import ShapeBackend, ShapeLoader
from ..backends.storage import Experts, expand, narrow
from ..backends.weights import Weight
from ..errors import ParameterError, UnsupportedModelError
from ..models import build_model, family_named
from ..models.parameters import Zeros, source_of
from ..models.tensor_names import Names
from ..output_files import check_absent, new_folder
from ..progress import showing, work
from ..reference.quantize import GROUPS, Quantized, quantize
from .folder import Folder
from .gguf.file import Type
from .gguf.mixtures import MIXTURES
from .hub import SMALL_FILES
from .load_model import open_model
from .model_files import ModelFiles
from .safetensors import SHARD_BYTES, Entry, SafetensorsFile, index_of, spread
from .schemes.minillm import METHOD, SCALE
from .static_folder import StaticFolder
from .tensors import FLOATS, StoredTensor

DTYPES = ("int8", "int4", "bfloat16", "float16")
"""Target dtypes of weights."""


@dataclass
class Rounding:
    """The error of a matrix whose numbers were rounded."""

    name: str
    """Name of the matrix"""
    format: Format | Type
    squared_error: float = 0.0
    """Sum of the squared differences"""
    squared_norm: float = 0.0
    """Sum of the squared numbers"""

    def add(self, values: NDArray[np.float32], rounded: Any) -> None:
        """Count some rows, as they were and as they are stored."""
        with np.errstate(all="ignore"):  # infinity and NaN stay what they are in 16 bits
            difference = expand(rounded) - values
            self.squared_error += float(np.vdot(difference, difference))
            self.squared_norm += float(np.vdot(values, values))

    @property
    def error(self) -> float:
        """The Frobenius norm of the difference, relative to the matrix's."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


@dataclass(frozen=True)
class Part:
    """A tensor and its target format."""

    name: str
    tensor: Tensor
    format: Format
    """The stored one if unchanged"""

    def entries(self) -> list[Entry]:
        """Its entries in a file: the values and, for 8 and 4 bits, their scales. Rows are padded to whole groups."""
        form = self.format
        if not form.scale_bits:
            return [Entry(self.name, form.name, self.tensor.shape)]
        outputs, inputs = self.tensor.shape
        groups = -(-inputs // form.group)
        return [
            Entry(self.name, form.dtype.name, (outputs, groups * form.group * form.bits // 8)),
            Entry(self.name + SCALE, "float16", (outputs, groups)),
        ]

    def write(self, file: SafetensorsFile, written: Callable[[int], None]) -> Rounding | None:
        """Round the tensor and write it, some rows at a time; `written` is called with the number of values.

        Returns the error of the rounding; None if the tensor is written as it was.
        """
        if self.format == STORED_FORMATS[self.tensor.dtype]:
            file.write(self.name, self.tensor.stored())
            written(math.prod(self.tensor.shape))
            return None
        first, rounding = 0, Rounding(self.name, self.format)
        for chunk in self.tensor.chunks():
            try:
                rounded = self._round(chunk)
            except ParameterError as error:
                raise ParameterError(f"tensor {self.name}: {error}") from None
            stored = (rounded.values, rounded.scales) if isinstance(rounded, Quantized) else (rounded,)
            for entry, rows in zip(self.entries(), stored, strict=True):
                file.write(entry.name, rows, first)
            rounding.add(chunk, rounded)
            first += len(chunk)
            written(chunk.size)
        return rounding

    def _round(self, chunk: NDArray[np.float32]) -> Any:
        """Round rows, to an array or a `Quantized`."""
        if self.format.scale_bits:
            with np.errstate(invalid="ignore"):  # NaN is refused later
                return quantize(chunk, self.format.bits, self.format.group)
        narrowed = narrow(chunk, self.format)
        if self.format == FLOAT16 and not np.isfinite(narrowed).all():
            raise ParameterError("weights in float16 must be finite and below 65,520: bfloat16 holds larger ones")
        return narrowed


class _Plan(ShapeLoader):
    """Records the tensors and formats of the weights that a model prepares, without storing them."""

    def __init__(self, formats: WeightFormats) -> None:
        super().__init__(formats, FLOAT32)
        self.fused: list[list[tuple[Tensor, Format | None]]] = []
        """For each weight its source tensors, with their formats; None: the stored one"""

    def prepare(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """A placeholder weight of the right shape."""
        matrix = len(tensors[0].shape) > 1
        form = self.formats.of(role) if matrix else None
        self.fused.append([(tensor, form) for tensor in tensors] + [(bias, None) for bias in biases])
        rows = sum(tensor.shape[0] for tensor in tensors)
        return Weight(name, np.broadcast_to(np.float32(0), (rows, *tensors[0].shape[1:])))

    def prepare_experts(
        self, name: str, experts: Sequence[Sequence[Tensor]], biases: Sequence[Sequence[Tensor]] = ()
    ) -> Weight:
        """A placeholder for each expert."""
        pairs = zip_longest(experts, biases, fillvalue=())
        return Weight(name, Experts(tuple(self.prepare(name, *parts).data for parts in pairs)))


def write_checkpoint(
    source: Path,
    target: Path,
    dtype: str,
    group: int | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> list[Rounding]:
    """Write the checkpoint in `source` with its weights in `dtype` to the new folder `target`.

    The configuration, the tokenizer and the generation defaults are copied. Memory holds only a few rows of weights at
    a time. `target` appears when it is complete. Returns the rounding errors.

    Args:
        source: a checkpoint folder, in any format that minillm reads
        target: a folder that does not exist, in one that does
        dtype: one of `DTYPES`
        group: number of weights per scale with 8 and 4 bits: 32 (the default) or 64
        shard_bytes: maximum file size; larger checkpoints are split into several files
        progress: show a bar on a terminal or in a notebook

    Raises:
        ParameterError: the dtype or the group is not offered, the checkpoint is quantised already, `target` exists, or
            a weight does not fit the dtype.
        ModelError: `source` is not a supported model, or `target` cannot be written.

    Example:
        >>> roundings = write_checkpoint(DEMO_MODEL, folder / "demo-int4", "int4")
        >>> f"at most {max(one.error for one in roundings):.0%}"
        'at most 9%'
        >>> Engine(folder / "demo-int4").generate("A list of colors: red,", max_new_tokens=4).text
        ' orange, yellow,'
    """
    group = check_request(target, dtype, group)
    files = open_model(source)
    if isinstance(files, StaticFolder):
        raise UnsupportedModelError(f"{source} has a table of vectors and no matrices: it is not quantised")
    if not isinstance(files, Folder):
        raise UnsupportedModelError(f"{source} is a GGUF file, of which only another is made: DST should end in .gguf")
    as_built = bool(FORMATS[dtype].scale_bits)  # under the names and in the order in which the model is built
    parts = plan(files, WEIGHT_FORMATS[dtype].in_groups(group), as_built=as_built)
    total = sum(math.prod(part.tensor.shape) for fused in parts for part in fused)
    with showing(progress), work(f"writing {dtype}", total, "parameters") as writing, new_folder(target) as folder:
        for name in sorted(SMALL_FILES):
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        config = files.raw | _fields(files.raw, dtype, group)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return _write_weights(folder, parts, shard_bytes, writing.advance)


def check_request(target: Path, dtype: str, group: int | None) -> int:
    """Check the arguments that do not depend on the checkpoint. Returns the group size.

    Raises:
        ParameterError: the dtype or the group is not offered, or `target` exists.
    """
    check_absent(target)
    if dtype.upper() in MIXTURES:
        raise ParameterError(f"{dtype} is a mixture of types of GGUF files: DST should end in .gguf, found {target}")
    if dtype not in DTYPES:
        raise ParameterError(f"dtype {dtype!r} is none to write weights in: expected one of {', '.join(DTYPES)}")
    if group is None:
        return GROUPS[0]
    if not FORMATS[dtype].scale_bits:
        raise ParameterError(f"a group size has no effect on {dtype}: leave it out")
    if group not in GROUPS:
        raise ParameterError(f"a group should have {' or '.join(map(str, GROUPS))} weights, found {group}")
    return group


def _fields(raw: dict[str, Any], dtype: str, group: int) -> dict[str, Any]:
    """Fields of config.json for the dtype."""
    if FORMATS[dtype].scale_bits:
        return {"quantization_config": {"quant_method": METHOD, "bits": FORMATS[dtype].bits, "group_size": group}}
    return {name: dtype for name in ("dtype", "torch_dtype") if name in raw} or {"dtype": dtype}


def plan(files: ModelFiles, formats: WeightFormats, *, as_built: bool) -> list[list[Part]]:
    """The tensors to write, in the order in which the model prepares them; a weight's tensors together.

    Args:
        files: the model's files
        formats: formats of the weights
        as_built: name and order tensors as the model does, not as they are stored

    Raises:
        ParameterError: the checkpoint is quantised already.
        ModelError: the weights cannot be read, or do not fit the configuration.
    """
    if files.quantization is not None:
        title = files.quantization.title
        raise ParameterError(f"{files.path} is already quantised, to {title}: quantise what it was made from")
    config, tensors = files.weights()
    for name, tensor in tensors.items():
        if tensor.dtype not in (FLOATS if isinstance(tensor, StoredTensor) else STORED_FORMATS):
            raise UnsupportedModelError(
                f"tensor {name} is stored as {tensor.dtype}; minillm reads {', '.join(FLOATS[:2])} and {FLOATS[2]}"
            )
    backend = ShapeBackend()
    backend.loader = recorded = _Plan(formats)
    with showing(False):  # nothing is loaded yet
        build_model(config, tensors, backend, as_built=files.as_built)
    named = [*tensors.items(), *(() if as_built else files.stored.items())]  # published names come last, and count
    names = {id(source_of(tensor)): name for name, tensor in named}
    own = {id(tensor): name for name, tensor in tensors.items()} if as_built else {}  # several may have one source

    def part(tensor: Tensor, form: Format | None) -> Part:
        source = source_of(tensor)
        if isinstance(source, Member) and not as_built:
            source = source.whole
        written = tensor if as_built else source
        stored_as = STORED_FORMATS[written.dtype]
        rounded = stored_as.offset_bits or stored_as.block  # what safetensors has no name for
        name = own.get(id(tensor))
        if name is None and as_built and isinstance(tensor, Regrouped):
            name = tensor.name
        name = name or own.get(id(source)) or names[id(source)]
        return Part(name, written, form or (FLOAT16 if rounded else stored_as))

    parts, planned = [], set[str]()
    for fused in recorded.fused:
        stored = [weight for weight in fused if not isinstance(weight[0], Zeros)]
        unwritten = {part.name: part for part in (part(*weight) for weight in stored) if part.name not in planned}
        planned |= unwritten.keys()  # all experts in one tensor are written once
        parts.append([*unwritten.values()])
    if not as_built:
        parts = _whole(parts, files.stored, family_named(config.model_type).NAMES)
    return [part for part in parts if part]


def _whole(parts: list[list[Part]], stored: Mapping[str, Tensor], names: Names) -> list[list[Part]]:
    """The same parts, but matrices of experts that are stored as one tensor of all experts are written as that one."""
    whole: dict[str, str] = {}
    for name, tensor in stored.items() if names.expert_tensors else ():
        short = names.short(name)
        whole |= {matrix: name for matrix in names.unstacked(short, tensor) if matrix != short}
    left, result = set(whole.values()), list[list[Part]]()
    for fused in parts:
        own = [part for part in fused if part.name not in whole]
        for part in fused:
            if part.name in whole and whole[part.name] in left:
                own.append(Part(whole[part.name], stored[whole[part.name]], part.format))
                left.remove(whole[part.name])
        result.append(own)
    return result


def _write_weights(
    folder: Path, fused: list[list[Part]], shard_bytes: int, written: Callable[[int], None]
) -> list[Rounding]:
    """Write all weight files, and an index if there are several. Returns the rounding errors."""
    groups, rounded = [], list[Rounding | None]()
    for parts in fused:
        entries = [part.entries() for part in parts]
        groups.append([entry for i in (0, 1) for several in entries for entry in several[i : i + 1]])  # then scales
    shards = spread(groups, shard_bytes)
    for name, inside in shards.items():
        names = {entry.name for entry in inside}
        with SafetensorsFile(folder / name, inside) as file:
            rounded += [part.write(file, written) for parts in fused for part in parts if part.name in names]
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(shards)), encoding="utf-8")
    return [rounding for rounding in rounded if rounding is not None]
