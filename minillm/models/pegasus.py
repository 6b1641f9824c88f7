"""Pegasus (Zhang et al., arXiv 1912.08777): BART with pre-norm, final norms and sinusoidal positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import bart
from .bart import BartConfig, build, read

__all__ = ["NAMES", "build", "read_config"]

NAMES = replace(bart.NAMES, left_out=(*bart.NAMES.left_out, "embed_positions.weight"))
"""BART's; older checkpoints store the positions, which are computed."""


def read_config(raw: Mapping[str, Any]) -> BartConfig:
    """Pegasus' configuration from config.json; errors as of `bart.read_config`."""
    special = {"eos_token_id": 1, "decoder_start_token_id": 0}
    return read(raw, "pegasus", special, pre_norm=True, embedding_norm=False, learned_positions=False, final_norm=True)
