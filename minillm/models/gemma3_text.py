"""Gemma 3 (Gemma Team, arXiv 2503.19786), the text model.

Gemma 2 with norms of each query and key in place of the soft caps, a sliding window in five of six layers, and two
bases of rotary embedding: one for layers with a window, one for those that see the whole text, whose positions may be
scaled as well.

EmbeddingGemma (arXiv 2509.20354) is this model with attention both ways (`use_bidirectional_attention`): a token sees
half of the window on either side, and the hidden states are read.

Checkpoints with a vision tower (model_type "gemma3") have the text model under names of its own (`text_parts.py`).
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import UnsupportedModelError
from .gemma2 import HEADS, NAMES, TOKENS, GemmaConfig, build, layer_windows, read_gemma
from .reading import read_grouped_heads
from .rotary import read_rotaries

__all__ = ["NAMES", "build", "read_config"]

WINDOW, EVERY = 4096, 6
"""Sliding window, and every which layer has none, if config.json has neither."""

FULL_BASE, LOCAL_BASE = 1_000_000.0, 10_000.0
"""Bases of rotary embedding if config.json has none: without a window, and with one."""


def read_config(raw: Mapping[str, Any]) -> GemmaConfig:
    """Gemma 3's configuration from config.json.

    Raises:
        As `gemma2.read_config`.
    """
    fields = Fields(TOKENS | {"sliding_window": WINDOW} | dict(raw))
    if fields.raw.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError(
            f"config.json: attn_logit_softcapping is {fields.raw['attn_logit_softcapping']!r:.60}; Gemma 3 has no cap "
            "of attention scores: expected null"
        )
    windows = layer_windows(fields, every=fields.size("sliding_window_pattern", EVERY))
    both_ways = fields.get("use_bidirectional_attention", False)
    if both_ways:
        refuse_labels(fields)
        windows = tuple(None if window is None else window // 2 + 1 for window in windows)
    head_dim, positions = (
        read_grouped_heads(fields, **HEADS)["head_dim"],
        fields.size("max_position_embeddings", 131_072),
    )
    full, local = read_rotaries(
        fields, head_dim, positions, base=FULL_BASE, local="rope_local_base_freq", local_base=LOCAL_BASE
    )
    return read_gemma(
        fields,
        "gemma3_text",
        max_positions=positions,
        keys_follow_length=full.stretch is not None or local.stretch is not None,
        rotaries=tuple(full if window is None else local for window in windows),
        windows=windows,
        head_norms=True,
        bidirectional=both_ways,
    )


def refuse_labels(fields: Fields) -> None:
    """Refuse a classification by a model with attention both ways.

    Raises:
        UnsupportedModelError: `architectures` names one.
    """
    for name in fields.get("architectures", []):
        if isinstance(name, str) and name.endswith("Classification"):
            raise UnsupportedModelError(
                f"config.json: architectures is {name!r:.80} and use_bidirectional_attention is true; minillm runs the "
                "hidden states of such a model, and classifications of causal ones"
            )
