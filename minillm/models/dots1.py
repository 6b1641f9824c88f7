"""dots.llm1 (rednote-hilab, arXiv 2506.05767): Qwen3 with experts chosen by sigmoids, and shared ones."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .glm4_moe import build, read_shared_experts
from .llama import NAMES, read_kin
from .mixtral import ExpertConfig
from .reading import merge_names, read_layer_kinds, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

WINDOW, FIRST_WINDOW = 4096, 62
"""Sliding window, and the first layer that has one, if config.json has neither"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """dots.llm1's configuration from config.json; `sliding_window` null means full attention.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields({"sliding_window": WINDOW} | merge_names(raw, {"n_routed_experts": "num_local_experts"}))
    refuse_other_layers(fields, windows=True)
    window = None if fields.raw["sliding_window"] is None else fields.size("sliding_window")
    first = fields.get("max_window_layers", FIRST_WINDOW)
    slides = read_layer_kinds(fields, lambda i: window is not None and i >= first)
    if any(slides):
        window = fields.size("sliding_window")
    bias = fields.get("attention_bias", False)
    return read_kin(
        fields,
        "dots1",
        kind=ExpertConfig,
        windows=tuple(window if slide else None for slide in slides),
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        normalised=fields.get("norm_topk_prob", False),
        **read_shared_experts(fields, experts=None, default_width=1408),
    )
