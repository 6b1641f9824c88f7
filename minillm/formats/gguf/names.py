"""Names of tensors and the order of their rows, from a GGUF file to what `build` asks for and back.

`architectures.py` has the table. llama.cpp rotates neighbouring pairs of a head in some architectures, and its
converter reorders the rows of Q and K for that; `permuted` names them, and here the order is undone and made.
"""

import re

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Rearranged, Tensor
from ...config import ModelConfig
from ...errors import CheckpointError
from .architecture import Architecture

BARE = {".self_attn.sinks": ".weight", ".e_score_correction_bias": ".bias", ".expert_bias": ".bias"}
"""End of the name of a vector in checkpoints -> what its name ends with in files"""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def published_name(architecture: Architecture, name: str) -> str | None:
    """`build`'s name of a tensor in the file, with * for an expert's number; None if there is none."""
    pattern, number, kind = _parts(name)
    if kind not in ("weight", "bias") or pattern not in architecture.tensors:
        return None
    published = _joined(architecture.tensors[pattern], number, kind)
    ending = next((end for bare, end in BARE.items() if published.endswith(bare + end)), "")
    return published.removesuffix(ending)


def gguf_name(architecture: Architecture, name: str) -> str:
    """The name in the file of a tensor that `build` asks for; a layer's experts have one name."""
    ending = next((end for bare, end in BARE.items() if name.endswith(bare)), "")
    pattern, number, kind = _parts(name + ending)
    pattern = _NUMBER.sub("*", pattern)
    return _joined(next(file for file, ours in architecture.tensors.items() if ours == pattern), number, kind)


def _parts(name: str) -> tuple[str, str | None, str]:
    """The pattern, the layer's number and the kind: "blk.N.attn_q", "3" and "weight" of "blk.3.attn_q.weight"."""
    stem, _, kind = name.rpartition(".")
    number = _NUMBER.search(stem)
    return _NUMBER.sub("N", stem, count=1), None if number is None else number[0], kind


def _joined(pattern: str, number: str | None, kind: str) -> str:
    return f"{pattern if number is None else pattern.replace('.N.', f'.{number}.')}.{kind}"


def heads_field(architecture: Architecture, name: str) -> str | None:
    """The field of config.json with the heads of a tensor in the file whose rows llama.cpp reorders; else None."""
    return architecture.permuted.get(_parts(name)[0])


def taps_first(tensor: Tensor) -> Rearranged:
    """The weights of a convolution, each channel's in the file, by the position of the input. [C, k] -> [k C]"""
    return Rearranged(tensor, lambda stored: stored.T.reshape(-1))


def is_convolution(name: str) -> bool:
    """Whether a tensor in the file has the weights of a convolution, which are float32 there."""
    return name.endswith(".shortconv.conv.weight")


def in_halves(tensor: Tensor, heads: int, where: str) -> Rearranged:
    """Rows of each head from llama.cpp's order, pairs side by side, to the checkpoints', a half after the other.

    Raises:
        CheckpointError: the rows are not an even number for each head.
    """
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(f"{where} has {tensor.shape[0]} rows, which {heads!r:.40} heads cannot share in pairs")
    return Rearranged(tensor, lambda rows: _transposed(rows, heads, len(rows) // (2 * heads), 2))


def in_file_order(tensor: Tensor, name: str, architecture: Architecture, config: ModelConfig) -> Tensor:
    """A tensor, by its name in the file, with its numbers as they are there."""
    if is_convolution(name):
        channels = config.hidden_size
        return Rearranged(tensor, lambda taps: taps.reshape(-1, channels).T)  # [k C] -> [C, k]
    counts = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    field = heads_field(architecture, name)
    if field is None:
        return tensor
    heads = counts[field]
    return Rearranged(tensor, lambda rows: _transposed(rows, heads, 2, len(rows) // (2 * heads)))


def _transposed(rows: NDArray[np.generic], heads: int, pairs: int, halves: int) -> NDArray[np.generic]:
    """The rows of each head, as a matrix [pairs, halves], transposed. [H D, ...] -> [H D, ...]"""
    by_head = rows.reshape(heads, pairs, halves, *rows.shape[1:])  # [H D, ...] -> [H, D / 2, 2, ...]
    return by_head.swapaxes(1, 2).reshape(rows.shape)  # [H, D / 2, 2, ...] -> [H, 2, D / 2, ...] -> [H D, ...]
