"""Command R7B, Command A and Aya (Cohere, arXiv 2504.00698): Command R with windows.

Three of four layers have a sliding window; the others do not rotate queries and keys.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .cohere import NAMES, TOKENS, CohereConfig, build, read_cohere
from .gemma2 import layer_windows
from .rotary import BASE

__all__ = ["NAMES", "build", "read_config"]

WINDOW, EVERY = 4096, 4
"""Sliding window, and every which layer has none, if config.json has neither"""


def read_config(raw: Mapping[str, Any]) -> CohereConfig:
    """Command R7B's configuration from config.json.

    Raises:
        As `cohere.read_config`.
    """
    fields = Fields(TOKENS | {"sliding_window": WINDOW} | {n: v for n, v in raw.items() if n != "head_dim"})
    windows = layer_windows(fields, every=fields.size("sliding_window_pattern", EVERY))
    rotated = tuple(window is not None for window in windows)
    mixed = len(set(rotated)) > 1
    return read_cohere(fields, "cohere2", base=BASE, windows=windows, rotated=rotated, mixed_layers=mixed)
