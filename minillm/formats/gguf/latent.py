"""Latent attention in GGUF files: DeepSeek-V2, V3 and R1, GLM-4.7-Flash, Youtu (`deepseek2`), and MiniCPM3.

Files have the expansion of the latent in one of two forms: absorbed, as the model runs it and as it is written here,

    attn_k_b [H, C, n], attn_v_b [H, V, C]    with key_length_mla r + n and value_length_mla V

or, older ones and MiniCPM3's, whole, as checkpoints have it:

    attn_kv_b [H (n + V), C]                  with key_length r + n and value_length V

Rotated numbers are each head's last, and pairs stand side by side. C is the latent's width, r and n are the numbers of
a query that are rotated and that are not, V is the width of values.

Source: https://github.com/ggml-org/llama.cpp (`src/models/deepseek2.cpp`, `minicpm3.cpp`; `conversion/deepseek.py`).
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Rearranged, Tensor
from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ...models.deepseek_v2 import LATENT_EPSILON, LatentConfig
from ...models.parameters import HeadOrder
from ...models.rotary import yarn_scale
from .experts import ROUTED_KEYS, SIGMOID, SOFTMAX, dense_layers, routed_entries, routed_fields, routed_refusals
from .file import GGUF
from .tensors import as_rows
from .translation import Keys, Rewritten, Translation, Written, check_shape, layer_name, renamed

logger = logging.getLogger("minillm")

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""A tenth of `mscale_all_dim`"""
FACTORS = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256.0}
"""MiniCPM3-4B's, which llama.cpp has for all MiniCPM3"""
QUERIES = {"attn_q.weight": "self_attn.q_proj.weight", "attn_q_b.weight": "self_attn.q_b_proj.weight"}
LATENTS = {"attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight"}
KEYS, VALUES = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
_OURS = {ours: file for file, ours in (QUERIES | LATENTS).items()}


class LatentTranslation(Translation):
    """Latent attention, expanded by `attn_kv_b`."""

    keys = frozenset({
        "attention.head_count_kv",
        "attention.key_length",
        "attention.kv_lora_rank",
        "attention.q_lora_rank",
        "attention.value_length",
        "nextn_predict_layers",  # whose layers are left out, with a warning
    })  # fmt: skip
    own_heads = True
    absorbed = False
    """Files are written with `attn_k_b` and `attn_v_b`"""
    paired = True
    """The numbers of each rotated pair stand side by side; else a half after the other"""

    def _orders(self, r: int, n: int, C: int) -> tuple[HeadOrder, HeadOrder]:
        """The order of rows in files: of each head's queries, and of the latent with the rotated key."""
        return HeadOrder(r + n, r, last=True, paired=self.paired), HeadOrder(C + r, r, last=True, paired=self.paired)

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Widths of latent attention."""
        key = Keys(gguf)
        H, C, r = raw["num_attention_heads"], key.size("attention.kv_lora_rank"), key.size("rope.dimension_count")
        rank = key.size("attention.q_lora_rank", 0, least=0)
        usual = raw["hidden_size"] // H
        keys, values = key.size("attention.key_length", usual), key.size("attention.value_length", usual)
        of_latent = key.has("attention.key_length_mla") or key.has("attention.value_length_mla")
        stored, heads = (keys, values), key.size("attention.head_count_kv", H)
        if of_latent:
            keys, values = key.size("attention.key_length_mla"), key.size("attention.value_length_mla")
        expected = (1, (C + r, C)) if of_latent else (H, stored)
        if (heads, stored) != expected or keys <= r:
            raise CheckpointError(
                f"{gguf.path}: {heads} key/value heads of {stored[0]} and {stored[1]} numbers are no latent attention "
                f"of {H} heads with {keys} numbers, {r} of them rotated, a latent of {C} and values of {values}"
            )
        fields = {"kv_lora_rank": C, "q_lora_rank": rank or None, "qk_rope_head_dim": r, "absorbed": of_latent}
        return fields | {"qk_nope_head_dim": keys - r, "v_head_dim": values, "num_key_value_heads": H}

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The projections of attention."""
        rest, order = layer_name(name, "blk") or "", self._orders(*(raw[f] for f in _WIDTHS))
        H, C, n, V = (raw[f] for f in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
        for names, head_order in zip((QUERIES, LATENTS), order, strict=True):
            if rest in names:
                if not tensor.shape or tensor.shape[0] % head_order.width:
                    raise CheckpointError(f"{where} should have whole heads of {head_order.width} rows")
                return {renamed(name, names[rest]): Rearranged(tensor, head_order.arranged)}
        if rest in ("attn_k_b.weight", "attn_v_b.weight"):
            shape, ours = ((H, C, n), KEYS) if rest == "attn_k_b.weight" else ((H, V, C), VALUES)
            check_shape(tensor, shape, where)
            return {renamed(name, ours): as_rows(tensor)} if raw["absorbed"] else None
        if rest != "attn_kv_b.weight" or raw["absorbed"]:
            return None
        check_shape(tensor, (H * (n + V), C), where)

        def keys(rows: NDArray[Any]) -> NDArray[Any]:
            part = rows.reshape(H, n + V, C)[:, :n]  # [H (n + V), C] -> [H, n, C]
            return part.transpose(0, 2, 1).reshape(H * C, n)  # [H, n, C] -> [H, C, n] -> [H C, n]

        def values(rows: NDArray[Any]) -> NDArray[Any]:
            by_head = rows.reshape(H, n + V, *rows.shape[1:])[:, n:]  # [H (n + V), ...] -> [H, V, ...]
            return by_head.reshape(H * V, *rows.shape[1:])  # [H, V, ...] -> [H V, ...]

        return {renamed(name, KEYS): Rewritten(tensor, keys), renamed(name, VALUES): Rearranged(tensor, values)}

    def entries(self, config: LatentConfig, table: Fields, where: str) -> dict[str, Any]:
        """Widths of latent attention."""
        C, r, n, V = config.value_dim, config.rope_dim, config.nope_dim, config.expanded_dim
        epsilon = self.epsilon(config)
        if abs(epsilon - LATENT_EPSILON) > 1e-9:
            logger.warning(
                "%s: llama.cpp adds %g to the mean square in the norms of latents, and the model %g",
                where, epsilon, LATENT_EPSILON
            )  # fmt: skip
        return {
            "attention.layer_norm_rms_epsilon": epsilon,
            "attention.q_lora_rank": config.query_rank,
            "attention.kv_lora_rank": C,
            "attention.head_count_kv": 1 if self.absorbed else config.num_heads,
            "attention.key_length": C + r if self.absorbed else r + n,
            "attention.value_length": C if self.absorbed else V,
        }

    def epsilon(self, config: LatentConfig) -> float:
        """Added to the mean square in norms of the residual sum, as files have it."""
        return config.epsilon

    def written(self, name: str, tensors: Mapping[str, Written], config: LatentConfig) -> dict[str, Written] | None:
        """The projections of attention, in llama.cpp's order."""
        rest, whole = layer_name(name, "layers") or "", tensors[name]
        H, C, n, V = config.num_heads, config.value_dim, config.nope_dim, config.expanded_dim
        if rest in _OURS:
            orders = self._orders(config.rope_dim, n, C)
            order = orders[0] if _OURS[rest] in QUERIES else orders[1]
            parts: list[Tensor] = [Rearranged(part, undone(order)) for part in whole.parts]
            return {renamed(name, _OURS[rest], "blk"): replace(whole, parts=parts)}
        if rest not in (KEYS, VALUES):
            return None
        if self.absorbed:
            file, shape = ("attn_k_b.weight", (H, C, n)) if rest == KEYS else ("attn_v_b.weight", (H, V, C))
            return {renamed(name, file, "blk"): replace(whole, shape=shape)}
        if rest == VALUES:
            return {}  # beside the keys
        values = tensors[renamed(name, VALUES)].parts[0]
        by_head: list[Tensor] = []
        for i in range(H):
            transposed = Rewritten(whole.parts[0].part(0, i * C, (i + 1) * C), np.transpose)  # [C, n] -> [n, C]
            by_head += [transposed, values.part(0, i * V, (i + 1) * V)]
        return {renamed(name, "attn_kv_b.weight", "blk"): replace(whole, parts=by_head, shape=(H * (n + V), C))}


_WIDTHS = ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank")


def undone(order: HeadOrder) -> Any:
    """Rows in the model's order as files have them. [H D, ...] -> [H D, ...]"""
    back = np.argsort(order.arranged(np.arange(order.width)))

    def arrange(rows: NDArray[Any]) -> NDArray[Any]:
        return rows.reshape(-1, order.width, *rows.shape[1:])[:, back].reshape(rows.shape)

    return arrange


class MiniCPM3Translation(LatentTranslation):
    """Latent attention with one MLP in each layer; files do not say the factors of MiniCPM3-4B, which llama.cpp has."""

    paired = False

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Widths of latent attention, and the factors."""
        return super().fields(gguf, raw) | FACTORS

    def refusals(self, config: LatentConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        usual = FACTORS["scale_emb"] / _residual(config), FACTORS["dim_model_base"] / config.hidden_size
        scales = config.embedding_scale, config.logit_scale
        score = (config.rope_dim + config.nope_dim) ** -0.5
        return {
            f"with {', '.join(f'{name} {value:g}' for name, value in FACTORS.items())} alone": not np.allclose(
                scales, usual, rtol=1e-9
            ),
            "with queries of low rank alone": not config.query_rank,
            f"with attention scaled by 1 / sqrt {config.rope_dim + config.nope_dim} alone": not np.isclose(
                config.score_scale or score, score, rtol=1e-9
            ),
        }

    def epsilon(self, config: LatentConfig) -> float:
        """As `LatentTranslation.epsilon`; the configuration has it divided by the square of the sums' factor."""
        return float(f"{config.epsilon * _residual(config) ** 2:.7g}")


def _residual(config: LatentConfig) -> float:
    """The factor of what MiniCPM3's layers add to the residual sum."""
    return FACTORS["scale_depth"] / math.sqrt(config.num_layers)


class DeepSeekTranslation(LatentTranslation):
    """Latent attention and experts; without experts, Youtu."""

    absorbed = True
    keys = (
        LatentTranslation.keys
        | ROUTED_KEYS
        | {"attention.key_length_mla", "attention.value_length_mla", LOG_MULTIPLIER}
    )

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Widths of latent attention, the experts, and the factor of scores with YaRN."""
        fields, key = super().fields(gguf, raw) | _scores(gguf, raw), Keys(gguf)
        experts = key.size("expert_count", 0, least=0)
        if not experts:
            return fields | {"model_type": "youtu"}
        sigmoid = key.size("expert_gating_func", 0, least=0)
        if sigmoid not in (0, SOFTMAX, SIGMOID):
            raise UnsupportedModelError(
                f"{gguf.path}: {key.prefix}.expert_gating_func is {sigmoid}; minillm runs {SOFTMAX} (softmax) and "
                f"{SIGMOID} (sigmoid)"
            )
        if not sigmoid:  # files from before the key: GLM-4.7-Flash by its size, as llama.cpp has it
            is_glm = raw["num_hidden_layers"] == 47 and raw["vocab_size"] == 154_880
            sigmoid = SIGMOID if is_glm else SOFTMAX
        routed = routed_fields(gguf)
        method = "noaux_tc" if sigmoid == SIGMOID else "group_limited_greedy" if routed["n_group"] > 1 else "greedy"
        model_type = "deepseek_v3" if sigmoid == SIGMOID else "deepseek_v2"
        return fields | routed | {"model_type": model_type, "topk_method": method}

    def refusals(self, config: LatentConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        weight = table.get("mscale_all_dim", 0.0)
        scaled = table.raw.get("rope_type", table.raw.get("type")) == "yarn"
        usual = (config.rope_dim + config.nope_dim) ** -0.5
        factor = yarn_scale(float(table.number("factor")), weight) ** 2 if scaled else 1.0
        others = abs((config.score_scale or usual) - usual * factor) > 1e-9 * usual
        return routed_refusals(config) | {
            "with equal mscale and mscale_all_dim alone": others
            or (scaled and (not weight or abs(config.rotary.scale - 1) > 1e-9)),
        }

    def entries(self, config: LatentConfig, table: Fields, where: str) -> dict[str, Any]:
        """Widths of latent attention, the experts, and the factor of scores."""
        entries = super().entries(config, table, where) | {
            "attention.key_length_mla": config.rope_dim + config.nope_dim,
            "attention.value_length_mla": config.expanded_dim,
            "leading_dense_block_count": dense_layers(config.sparse),
            "expert_feed_forward_length": config.expert_size or config.intermediate_size,
            "expert_shared_count": 0,
            "rope.scaling.attn_factor": None,
        }
        if weight := table.get("mscale_all_dim", 0.0):
            entries[LOG_MULTIPLIER] = weight / 10
        return entries | (routed_entries(config) if config.num_experts else {})


def _scores(gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The table of YaRN with the weight of its factor of scores; nothing without rotary scaling.

    Raises:
        UnsupportedModelError: another kind of scaling, or scores with another factor than published models have.
    """
    key, table = Keys(gguf), raw.get("rope_scaling")
    if table is None:
        return {}
    weight = round(10 * key.number(LOG_MULTIPLIER, 0.0), 6)
    if table["rope_type"] != "yarn" or not weight or key.number("rope.scaling.attn_factor", 1.0) != 1:
        raise UnsupportedModelError(
            f"{gguf.path}: with latent attention minillm runs {key.prefix}.rope.scaling.type yarn with "
            f"{LOG_MULTIPLIER} and without attn_factor"
        )
    return {"rope_scaling": table | {"mscale": weight, "mscale_all_dim": weight}}
