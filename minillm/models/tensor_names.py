"""The names of tensors in a family's published checkpoints, and the tensors by the names that its `build` asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.loader import RandomTensor, Rearranged, Tensor
from ..errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Names:
    """How a family's published checkpoints name the tensors that its `build` asks for."""

    prefixes: tuple[str, ...]
    """Prefixes that some checkpoints use; they are stripped one after the other"""
    left_out: tuple[str, ...] = ()
    """Suffixes of tensors that are computed instead, such as masks and frequencies"""
    heads: tuple[str, ...] = ()
    """Prefixes of heads' tensors; some checkpoints have more heads than are run"""
    masked_head: str = ""
    """A tensor of the head of masked tokens; "": the family has none"""
    other_masked_head: str = ""
    """Likewise, of the family's other head of masked tokens"""
    renamed: tuple[tuple[str, str], ...] = ()
    """Older names of tensors: an ending, and what stands for it today"""
    expert_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Endings of tensors that hold one matrix of each expert [X, rows, columns] -> those of equal parts of an expert's
    rows, with * for its number; without it of one matrix's rows [rows, columns]"""
    other_parts: tuple[str, ...] = ()
    """Prefixes of tensors that are no part of the text model, such as a vision tower's"""
    embedding: str = "embed_tokens.weight"
    head: str = "lm_head.weight"
    """The LM head; "lm_head.weight", transformers' name in memory, is read in every family"""
    copies: tuple[str, ...] = ()
    """Other names of the embedding: copies in an encoder and a decoder that share it"""
    zeros: str | None = None
    """A bias of logits, [1, V], which is zeros where a checkpoint lacks it"""
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Tensors of all experts of a layer, and the projections whose outputs alternate in them (`stacked_experts.py`)"""
    head_decides: bool = False
    """The head is tied unless a checkpoint stores another, as transformers has it in the T5 families, whatever
    config.json says"""

    def short(self, name: str) -> str:
        """A published tensor's name as `build` asks for it."""
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        for older, today in self.renamed:
            name = f"{name.removesuffix(older)}{today}" if name.endswith(older) else name
        return self.head if name == "lm_head.weight" else name

    def unstacked(self, short: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor of this `short` name; or if it is one of `expert_tensors`, the matrices in it by their names."""
        ending = next((ending for ending in self.expert_tensors if short.endswith(ending)), None)
        if ending is None:
            return {short: tensor}
        stem, parts = short.removesuffix(ending), self.expert_tensors[ending]
        axes = 3 if "*" in parts[0] else 2
        if len(tensor.shape) != axes or tensor.shape[axes - 2] % len(parts):
            return {short: tensor}
        rows, matrices = tensor.shape[axes - 2] // len(parts), dict[str, Tensor]()
        for i in range(tensor.shape[0] if axes == 3 else 1):
            matrix = _item(tensor, i) if axes == 3 else tensor  # [X, rows, columns] -> [rows, columns]
            for j, part in enumerate(parts):
                own = matrix if len(parts) == 1 else matrix.part(0, j * rows, (j + 1) * rows)
                matrices[stem + part.replace("*", str(i))] = own
        return matrices

    def ties_head(self, stored: Mapping[str, Tensor], configured: bool) -> bool:
        """Whether the head is the embedding, where config.json says `configured`."""
        if not self.head_decides:
            return configured
        short = {self.short(name): tensor for name, tensor in stored.items()}
        head, embedding = short.get(self.head), short.get(self.embedding)
        return head is None or embedding is None or _equal(embedding, head)

    def canonical(self, stored: Mapping[str, Tensor], *, tied_head: bool) -> dict[str, Tensor]:
        """Tensors by the names that `build` asks for.

        The stored copy of a tied head is dropped; if only the head is stored, it is the embedding. So it is with the
        `copies` of the embedding.

        Raises:
            CheckpointError: a tensor occurs twice, with a prefix and without; the LM head is the embedding by
                config.json, and the stored ones differ: releases of transformers disagree on which to use then; or
                a copy of the embedding differs.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in stored.items():
            short = self.short(name)
            if short.endswith(self.left_out) or short.startswith(self.other_parts):
                continue
            for own, matrix in self.unstacked(short, tensor).items():
                if own in tensors:
                    raise CheckpointError(f"the checkpoint holds tensor {own} twice, once as {name}: leave one out")
                tensors[own] = matrix
        copied = tensors.pop(self.head, None) if tied_head else None
        if copied is not None and not _equal(tensors.setdefault(self.embedding, copied), copied):
            raise CheckpointError(
                f"config.json: tie_word_embeddings says that the LM head is the embedding, but {self.head} and "
                f"{self.embedding} differ: set it to false, or leave the former out"
            )
        for name in self.copies:
            copied = tensors.pop(name, None)
            if copied is not None and not _equal(tensors.setdefault(self.embedding, copied), copied):
                raise CheckpointError(
                    f"{name} and {self.embedding} differ; minillm runs an encoder and a decoder with one embedding"
                )
        if self.zeros is not None and self.zeros not in tensors and self.embedding in tensors:
            tensors[self.zeros] = RandomTensor(self.zeros, (1, tensors[self.embedding].shape[0]), seed=0, std=0)
        return tensors


def _item(tensor: Any, index: int) -> Any:
    """A tensor's number `index` along the first axis; of one in a file the rest is not read."""
    return tensor.item(index) if hasattr(tensor, "item") else Rearranged(tensor, lambda whole: whole[index])


def _equal(a: Tensor, b: Tensor) -> bool:
    """True if two matrices have the same values; compared in chunks of rows."""
    return a is b or (a.shape == b.shape and len(a.shape) == 2 and all(map(np.array_equal, a.chunks(), b.chunks())))
