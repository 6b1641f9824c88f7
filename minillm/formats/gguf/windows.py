"""Sliding windows of some layers in GGUF files of OLMo 3, which are `olmo2` with windows, and of EXAONE 4 (`exaone4`).

Files say of each layer whether it has a window, or every which layer has none.

Source: https://github.com/ggml-org/llama.cpp (`src/models/olmo2.cpp`, `exaone4.cpp`; `src/llama-hparams.cpp`,
`set_swa_pattern`; `conversion/olmo.py`, `exaone.py`).
"""

from collections.abc import Mapping
from typing import Any

from ...config import Fields
from ...errors import CheckpointError
from ...models.olmo2 import Olmo2Config
from ...models.rotary import read_rotary
from .file import GGUF
from .translation import Keys, Translation

PATTERN = "attention.sliding_window_pattern"
EVERY = 4
"""Every which layer has no window if files do not say"""
WINDOWED, WINDOW = 64, 4096
"""Layers of the one EXAONE 4 that has windows, and their width if files do not say"""


def layer_types(gguf: GGUF, layers: Any) -> dict[str, Any]:
    """The field with the kind of each layer, of a model in which some have a window.

    Raises:
        CheckpointError: the file does not say it of each layer.
    """
    key = Keys(gguf)
    if key.is_array(PATTERN):
        slides = [bool(number) for number in key.each(PATTERN)]
        if type(layers) is not int or len(slides) < layers:
            raise CheckpointError(
                f"{gguf.path}: {key.prefix}.{PATTERN} should be one of each of {layers!r:.40} layers, "
                f"found {len(slides)}"
            )
        slides = slides[:layers]
    else:
        every = key.size(PATTERN, EVERY)
        slides = [(i + 1) % every > 0 for i in range(key.size("block_count"))][:layers]
    return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


def pattern(config: Olmo2Config) -> dict[str, Any]:
    """The entry that `layer_types` reads; none without windows."""
    slides = [window is not None for window in config.windows]
    return {PATTERN: slides if any(slides) else None}


class Olmo2Translation(Translation):
    """OLMo 2, and OLMo 3 where there is a window."""

    keys = frozenset({PATTERN})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The family, and which layers have a window."""
        if raw.get("sliding_window") is None:
            return {}
        return layer_types(gguf, raw["num_hidden_layers"]) | {"model_type": "olmo3"}

    def refusals(self, config: Olmo2Config, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        local, windowed = config.local, any(config.windows)
        return {
            "with rotary embedding of one base alone": windowed
            and local is not None
            and local.base != config.rotary.base,
            "without rotary scaling in layers with a window": windowed
            and local is not None
            and (local.scale != 1 or local.frequencies != self._plain(config)),
        }

    def _plain(self, config: Olmo2Config) -> tuple[float, ...]:
        width = 2 * len(config.rotary.frequencies)
        fields = Fields({"rope_theta": config.rotary.base})
        return read_rotary(fields, width, config.max_positions).frequencies

    def entries(self, config: Olmo2Config, table: Fields, where: str) -> dict[str, Any]:
        """Which layers have a window."""
        return pattern(config)


class Exaone4Translation(Translation):
    """EXAONE 4: llama.cpp has windows in the model of 64 layers, and in no other."""

    keys = frozenset({PATTERN})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The window, and which layers have it."""
        if raw["num_hidden_layers"] != WINDOWED:
            return {"sliding_window": None}
        return layer_types(gguf, WINDOWED) | {"sliding_window": raw.get("sliding_window", WINDOW)}

    def refusals(self, config: Olmo2Config, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        return {
            f"with sliding windows in models of {WINDOWED} layers, and in all of these, alone": any(config.windows)
            != (config.num_layers == WINDOWED)
        }

    def entries(self, config: Olmo2Config, table: Fields, where: str) -> dict[str, Any]:
        """Which layers have a window."""
        return pattern(config)
