"""OLMo 3 (Team OLMo, 2025): OLMo 2 with a sliding window in three of four layers.

Scaling of positions for longer texts is that of the layers without a window.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .gemma2 import layer_windows
from .olmo2 import END_OF_TEXT, NAMES, Olmo2Config, build, read_olmo
from .reading import read_grouped_heads
from .rotary import read_rotaries, refuse_partial

__all__ = ["NAMES", "build", "read_config"]

WINDOW, EVERY = 4096, 4
"""Sliding window, and every which layer has none, if config.json has neither"""

BASE = 500_000.0
"""Base of rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> Olmo2Config:
    """OLMo 3's configuration from config.json.

    Raises:
        As `olmo2.read_config`.
    """
    fields = Fields({"eos_token_id": END_OF_TEXT, "sliding_window": WINDOW} | dict(raw))
    windows = layer_windows(fields, every=EVERY)
    refuse_partial(fields)
    head_dim, positions = read_grouped_heads(fields)["head_dim"], fields.size("max_position_embeddings", 2048)
    base = fields.number("rope_theta", BASE, above=1)
    full, local = read_rotaries(fields, head_dim, positions, base=base, local_base=base)
    return read_olmo(fields, "olmo3", full, local=local, windows=windows, rotated=(True,) * len(windows))
