"""Fields of DeBERTa's configurations, and projections of relative positions, which both generations share.

The projections of the table of positions are the same in every pass, so they are computed once, when a model is built.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..backends.storage import expand
from ..backends.weights import Weight
from ..config import Fields
from ..errors import UnsupportedModelError
from ..layers.norm import LayerNorm
from ..reference.disentangled import RelativePositions
from .encoder import EncoderConfig, EncoderNames, read_encoder
from .encoder_heads import MaskedNames
from .reading import read_activation

LM_PREDICTIONS = MaskedNames(
    "lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "", "lm_predictions.lm_head.bias"
)
"""The head of masked tokens without `legacy`, always tied to the embedding"""
TERMS = ("c2p", "p2c")
"""Names of the terms of a score: content to position, and position to content"""


@dataclass(frozen=True, kw_only=True)
class DisentangledConfig(EncoderConfig):
    """An encoder's fields, and those of attention by content and relative position."""

    terms: tuple[str, ...]
    """The members of `TERMS` that scores have; they are scaled by 1 / sqrt(D (1 + their number))"""
    relative: bool
    """Whether there are relative positions; without them the terms are no more than a part of the scale"""
    most_relative: int
    """Distance from which on positions are one"""
    buckets: int = 0
    """Half the rows of the table: large distances share rows; 0: each distance has its own"""
    normed: bool = False
    """Whether a norm follows the table"""
    head_activation: str
    legacy: bool
    """Whether the head of masked tokens has BERT's names and may have a matrix of its own"""

    @property
    def score_scale(self) -> float:
        """Factor of all terms of a score."""
        return float((self.head_dim * (1 + len(self.terms))) ** -0.5)

    @property
    def rows(self) -> int:
        """R, rows of the table."""
        return 2 * (self.buckets or self.most_relative)


def read_disentangled(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The fields of `DisentangledConfig` that both generations have, from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, another kind of term, or embeddings of another width.
    """
    fields = Fields({"layer_norm_eps": 1e-7} | {name: value for name, value in raw.items() if value is not None})
    base = read_encoder({**fields.raw, "type_vocab_size": 1}, model_type)
    E = base.hidden_size
    for name in ("embedding_size", "pooler_hidden_size"):
        if (width := fields.size(name, E)) != E:
            raise UnsupportedModelError(f"config.json: {name} is {width}; in this family minillm runs hidden_size, {E}")
    stored = fields.raw.get("pos_att_type") or []
    named = [word.strip() for word in stored.lower().split("|")] if isinstance(stored, str) else stored
    if not isinstance(named, list) or not all(term in TERMS for term in named):
        raise UnsupportedModelError(f"config.json: pos_att_type is {stored!r:.60}; minillm runs {' and '.join(TERMS)}")
    most = fields.get("max_relative_positions", -1)
    types = fields.get("type_vocab_size", 0)
    return vars(base) | {
        "has_position_table": fields.get("position_biased_input", True),
        "token_types": types and fields.size("type_vocab_size"),
        "terms": tuple(term for term in TERMS if term in named),
        "relative": fields.get("relative_attention", False),
        "most_relative": fields.size("max_relative_positions") if most > 0 else base.max_positions,
        "legacy": fields.get("legacy", True),
        "head_activation": read_activation(fields, "pooler_hidden_act", "gelu"),
    }


def masked_parts(config: DisentangledConfig, names: EncoderNames) -> tuple[DisentangledConfig, EncoderNames]:
    """The configuration and the names of the head of masked tokens, of which there are two by `legacy`."""
    if config.legacy:
        return config, names
    return replace(config, tied_head=True), replace(names, masked=LM_PREDICTIONS)


def rows_of(distances: NDArray[np.int64], config: DisentangledConfig) -> NDArray[np.int64]:
    """The row of each distance from a key to its query, in the table of relative positions.

    Half the table is for keys after the query. With buckets, distances up to a quarter of its rows have rows of their
    own, and larger ones share theirs by logarithm (arXiv 2111.09543).
    """
    half, places = config.rows // 2, distances
    if config.buckets:
        mid = config.buckets // 2
        back = np.maximum(np.abs(distances), mid).astype(np.float32)
        # float32 throughout, as in transformers: distances at a boundary depend on the rounding
        ratio = np.log(back / np.float32(mid)) / np.log(np.float32((config.most_relative - 1) / mid))
        shared = np.ceil(ratio * np.float32(mid - 1)).astype(np.int64) + mid
        places = np.where(np.abs(distances) <= mid, distances, np.sign(distances) * shared)
    return np.clip(places + half, 0, 2 * half - 1)


def relative_positions(
    config: DisentangledConfig,
    table: Weight,
    norm: LayerNorm | None,
    project: Callable[[Any], Mapping[str, Any]],
    name: str,
    parameters: tuple[Weight, ...],
    backend: Backend,
) -> RelativePositions:
    """A layer's relative positions.

    Args:
        config: the model's
        table: vectors of relative positions [R, E]
        norm: of the table, or None
        project: gives the positions' "c2p" keys and "p2c" queries, of this rank's heads, of those there are.
            [R, E] -> [R, H D]
        name: the layer's, for its weights
        parameters: further ones by which `project` projects
        backend: computes them
    """
    weights: dict[str, Weight] = {}
    with backend.memory.apart():
        x = expand(table.data, backend.xp.arange(config.rows)).astype(backend.memory.arena.dtype)  # [R] -> [R, E]
        for term, projected in project(x if norm is None else norm(backend, x)).items():
            scaled = projected * config.score_scale if term == "p2c" else projected
            by_head = scaled.reshape(config.rows, -1, config.head_dim).swapaxes(0, 1)  # [R, H D] -> [H, R, D]
            weights[term] = backend.loader.copied(f"{name}.{term}", by_head)
    M = config.max_positions - 1
    rows = rows_of(np.arange(-M, M + 1), config)
    sources = (table, *parameters) if norm is None else (table, norm.weight, *parameters)
    return RelativePositions(weights.get("c2p"), weights.get("p2c"), rows, sources)
