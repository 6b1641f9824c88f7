"""Rotary embedding in GGUF files of Ministral 3 (`mistral3`) and GLM-4-0414 (`glm4`).

Source: https://github.com/ggml-org/llama.cpp (`src/models/mistral3.cpp`, `glm4.cpp`; `src/llama-context.cpp` has the
factor of YaRN's cosines and sines; `conversion/mistral3.py`, `glm.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...backends.loader import Rearranged, Tensor
from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ...models.llama import LlamaConfig
from ...models.parameters import HeadOrder
from ...models.rotary import yarn_scale
from .file import GGUF
from .latent import LOG_MULTIPLIER, undone
from .translation import Keys, Translation, Written, head_width, layer_name, renamed, whole_heads

TEMPERATURE, ORIGINAL = "attention.temperature_scale", "rope.scaling.original_context_length"
SECTIONS = "rope.dimension_sections"


class Ministral3Translation(Translation):
    """Ministral 3: queries have a factor beyond YaRN's original length, and cosines and sines have none of YaRN's.

    `LOG_MULTIPLIER` is `mscale_all_dim` here, and `mscale` is 1.
    """

    keys = frozenset({TEMPERATURE, LOG_MULTIPLIER})
    scaling_fields = frozenset({"llama_4_scaling_beta"})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The table of rotary embedding, which config.json always has."""
        key, table = Keys(gguf), {"rope_type": "default"} | raw.get("rope_scaling", {})
        table["llama_4_scaling_beta"] = key.number(TEMPERATURE, 0.0)
        if key.has(ORIGINAL):
            table["original_max_position_embeddings"] = key.size(ORIGINAL)
        weight = key.number(LOG_MULTIPLIER, 0.0)
        if table["rope_type"] == "yarn" and weight:
            table |= {"mscale": 1.0, "mscale_all_dim": weight}
            if "attention_factor" in table:
                table["attention_factor"] /= yarn_scale(table["factor"], weight)
        return {"rope_scaling": table}

    def entries(self, config: LlamaConfig, table: Fields, where: str) -> dict[str, Any]:
        """The factor of queries, and that of cosines and sines beside llama.cpp's."""
        beta, entries = float(table.get("llama_4_scaling_beta", 0.0)), dict[str, Any]()
        if beta:
            original = table.size("original_max_position_embeddings", config.rotary.longest)
            entries = {TEMPERATURE: beta, ORIGINAL: original}
        if table.raw.get("rope_type", table.raw.get("type")) == "yarn":
            factor, weight = float(table.number("factor")), float(table.get("mscale_all_dim", 0.0))
            usual = yarn_scale(factor) / (yarn_scale(factor, weight) if weight else 1.0)
            other = abs(config.rotary.scale - usual) > 1e-9
            entries |= {
                LOG_MULTIPLIER: weight or None,
                "rope.scaling.attn_factor": config.rotary.scale / usual if other else None,
            }
        return entries


class Glm4Translation(Translation):
    """GLM-4-0414: a part of each head is rotated, whose pairs stand side by side in files."""

    keys = frozenset({SECTIONS})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """How much of each head is rotated.

        Raises:
            UnsupportedModelError: rows are in another order, as in files of models that see.
        """
        key = Keys(gguf)
        if any(key.each(SECTIONS)):
            raise UnsupportedModelError(
                f"{gguf.path}: {key.prefix}.{SECTIONS} is that of a model with M-RoPE; minillm runs GLM-4-0414 without"
            )
        return whole_heads(raw)

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """Queries and keys."""
        rest = layer_name(name, "blk") or ""
        if rest not in _ROTATED:
            return None
        D = head_width(raw)
        order = HeadOrder(D, int(D * raw["partial_rotary_factor"]))
        if not tensor.shape or tensor.shape[0] % D or order.rotated % 2 or not 0 < order.rotated <= D:
            raise CheckpointError(f"{where} should have whole heads of {D} rows, {order.rotated} of them in pairs")
        return {renamed(name, _ROTATED[rest]): Rearranged(tensor, order.arranged)}

    def written(self, name: str, tensors: Mapping[str, Written], config: LlamaConfig) -> dict[str, Written] | None:
        """Queries and keys."""
        file = {ours: theirs for theirs, ours in _ROTATED.items()}.get(layer_name(name, "layers") or "")
        if file is None:
            return None
        order = HeadOrder(config.head_dim, 2 * len(config.rotary.frequencies))
        parts: list[Tensor] = [Rearranged(part, undone(order)) for part in tensors[name].parts]
        return {renamed(name, file, "blk"): replace(tensors[name], parts=parts)}


_ROTATED = {f"attn_{x}.{kind}": f"self_attn.{x}_proj.{kind}" for x in "qk" for kind in ("weight", "bias")}
