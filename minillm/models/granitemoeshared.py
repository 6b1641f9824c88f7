"""Granite 3's mixtures with an MLP that all tokens share, beside the experts that are chosen (IBM, 2025)."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .granitemoe import NAMES, GraniteMoeConfig, build, read_mixture
from .llama import TOKENS

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> GraniteMoeConfig:
    """The configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    return read_mixture(Fields(TOKENS | dict(raw)), "granitemoeshared", shared=True)
