"""The text models of checkpoints that also read images, such as Qwen3-VL: their configurations and their tensors.

The text model is one of the families, whose config.json is the field `text_config` (in older files of Qwen2-VL and
Qwen2.5-VL, the file itself), and whose tensors have prefixes; what sees images is left out. M-RoPE (Wang et al., arXiv
2409.12191, section 2.1) gives each rotated pair one of three positions, in time, height and width. Those of a text
token are the same number, so for text it is plain rotary position embedding.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.loader import Tensor
from ..config import Fields
from .rotary import TABLES
from .tensor_names import Names

TEXT_PARTS: dict[str, tuple[str, bool]] = {
    "gemma3": ("gemma3_text", True),
    "gemma4": ("gemma4_text", True),
    "gemma4_unified": ("gemma4_text", True),
    "qwen2_vl": ("qwen2", False),
    "qwen2_5_vl": ("qwen2", False),
    "qwen3_vl": ("qwen3", False),
    "mistral3": ("mistral", True),
    "smolvlm": ("llama", False),
    "idefics2": ("mistral", False),
    "idefics3": ("llama", False),
    "llava": ("llama", False),
    "llava_next": ("llama", False),
    "llava_onevision": ("qwen2", False),
    "internvl": ("qwen2", True),
    "qwen3_5": ("qwen3_5_text", False),
    "qwen3_5_moe": ("qwen3_5_moe_text", False),
}
"""model_type of a model of text and images -> its text model's family, unless `text_config` names another, and whether
its head is tied if config.json does not say"""

FAMILY_OF_TEXT = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
FAMILY_OF_TEXT |= {"gemma4_unified_text": "gemma4_text"}
"""model_type of a `text_config` -> the family that it is"""

_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32_000}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"intermediate_size": 11_008, "max_position_embeddings": 2048},
    "mistral": _LLAMA | {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "gemma3_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    | {"vocab_size": 262_208},
    "gemma4_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8}
    | {"vocab_size": 262_144},
}
"""Fields that `text_config` leaves out where they are transformers' defaults of the family"""

_QWEN_VL = ("qwen2_vl", "qwen2_5_vl")
_QWEN_VL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80}
_UNIFIED = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144}
"""Fields that `text_config` of "gemma4_unified" leaves out, where its defaults are not those of "gemma4" """

_NAMES = Names(
    prefixes=("model.", "language_model.", "text_model."),
    other_parts=(
        *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline"),
        *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
    ),
)
"""(model.)(language_model.)layers.0... of the text model, and the prefixes of the rest"""


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config.json; `raw` itself if it is that of no model of text and images.

    Raises:
        CheckpointError: a field is of another type than expected.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return raw
    family, tied = TEXT_PARTS[kind]
    outer = Fields(raw)
    text = outer.get("text_config", {}) or (dict(raw) if kind in _QWEN_VL else {})
    named = text.get("model_type")
    if named is not None and named != kind:
        family = FAMILY_OF_TEXT.get(named, named)
    if raw.get("tie_word_embeddings") is not None:
        tied = outer.get("tie_word_embeddings", tied)
    tied = tied or Fields(text, "config.json, text_config").get("tie_word_embeddings", tied)
    usual = _QWEN_VL_DEFAULTS if kind in _QWEN_VL else DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    usual = usual | (_UNIFIED if kind == "gemma4_unified" else {})
    return usual | without_mrope(text) | {"model_type": family, "tie_word_embeddings": tied}


def without_mrope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's config.json without M-RoPE, in which the positions of text are all the same."""
    return dict(raw) | {name: _plain(raw[name]) for name in TABLES if isinstance(raw.get(name), dict)}


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """A table of rotary position embedding without M-RoPE."""
    plain = {name: value for name, value in table.items() if name not in ("mrope_section", "mrope_interleaved")}
    return plain | {name: "default" for name in ("type", "rope_type") if plain.get(name) == "mrope"}


def text_tensors(raw: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The text model's tensors by the names of its family; all of them if `raw` is that of a text model.

    Raises:
        CheckpointError: a tensor occurs twice, under two prefixes.
    """
    return _NAMES.canonical(stored, tied_head=False) if raw.get("model_type") in TEXT_PARTS else stored
