"""SmolLM3 (Hugging Face, 2025): Llama with no rotary embedding in every fourth layer (Yang et al., arXiv 2501.18795).

Optionally those layers, or others, have a sliding window.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError
from .llama import NAMES, LlamaConfig, build, read_kin
from .reading import read_layer_kinds, read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"bos_token_id": 128_000, "eos_token_id": 128_001, "num_key_value_heads": 4}
"""BOS and EOS token ids and key/value heads if config.json does not have the fields."""

BASE = 2_000_000.0
"""Base of rotary embedding if config.json has none."""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """SmolLM3's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(DEFAULTS | dict(raw))
    refuse_other_layers(fields, windows=True)
    rotated, bias = rotated_layers(fields), fields.get("attention_bias", False)
    return read_kin(
        fields,
        "smollm3",
        windows=layer_windows(fields, rotated),
        rotated=rotated,
        mixed_layers=len(set(rotated)) > 1,
        tied_head=True,
        base=BASE,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.get("mlp_bias", False),
    )


def rotated_layers(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer rotates queries and keys: by `no_rope_layers`, or all but each `no_rope_layer_interval`-th.

    Despite its name the list has 1 for layers that rotate, and 0 for those that do not.

    Raises:
        CheckpointError: another entry, or fewer entries than layers. Further entries have no effect.
    """
    layers, interval = read_layers(fields), fields.size("no_rope_layer_interval", 4)
    listed = fields.get("no_rope_layers", [(i + 1) % interval != 0 for i in range(layers)])
    if len(listed) < layers or any(entry not in (0, 1) for entry in listed):
        raise CheckpointError(
            f"{fields.source}: no_rope_layers should have 0 or 1 for each of num_hidden_layers {layers}, "
            f"found {listed!s:.60}"
        )
    return tuple(map(bool, listed[:layers]))


def layer_windows(fields: Fields, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Sliding window of each layer: with `use_sliding_window` those in `layer_types`, or those that do not rotate.

    Raises:
        CheckpointError: the list does not have one entry for each layer.
        UnsupportedModelError: another kind of attention, or a windowed layer without a window.
    """
    window = None
    if fields.get("use_sliding_window", False) and fields.raw.get("sliding_window") is not None:
        window = fields.size("sliding_window")
    read_layer_types(fields, ("full_attention",) if window is None else ("full_attention", "sliding_attention"))
    sliding = read_layer_kinds(fields, lambda i: not rotated[i])
    return tuple(window if slides else None for slides in sliding)
