"""Gated delta nets in GGUF files: Qwen3-Next (`qwen3next`) and Qwen3.5 (`qwen35`, `qwen35moe`).

    attn_qkv, attn_gate           in_proj_qkv, in_proj_z: queries, keys and values; the gate of the norm
    ssm_beta, ssm_alpha           in_proj_b, in_proj_a
    ssm_ba                        both, key head by key head (Qwen3-Next)
    ssm_conv1d [C, k]             the convolution, oldest input first
    ssm_a                         -exp(A_log)
    ssm_dt.bias, ssm_norm, ssm_out

ggml repeats keys for the value heads of a group in turn: k0 k1 k0 k1. So the value heads of Qwen3.5's files are those
of all groups in turn, and the columns of `ssm_out` with them; here, as in checkpoints, a group's heads stand together.
Qwen3-Next's files have them as checkpoints do. `attn_q` has each head's queries, then its gate.

Source: https://github.com/ggml-org/llama.cpp (`src/models/qwen3next.cpp`, `qwen35.cpp`; `conversion/qwen.py`).
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Rearranged, Tensor
from ...config import Fields
from ...errors import CheckpointError
from ...models.parameters import rows_by_block
from ...models.qwen3_next import INTERVAL, DeltaNetConfig
from ...models.reading import read_layers
from ...reference.delta_rule import EPSILON
from .experts import read_shared_gate, written_shared_gate
from .file import GGUF
from .translation import (
    Columns,
    Keys,
    Rewritten,
    Translation,
    Written,
    check_shape,
    head_width,
    layer_name,
    renamed,
    unrounded,
)

logger = logging.getLogger("minillm")

SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
"""Metadata key -> field of config.json"""
NET = "linear_attn"
GATED = "self_attn.q_proj.weight"
ROWS = {
    "attn_qkv.weight": ("in_proj_qkv.weight", "channels"),
    "attn_gate.weight": ("in_proj_z.weight", "values"),
    "ssm_beta.weight": ("in_proj_b.weight", "V"),
    "ssm_alpha.weight": ("in_proj_a.weight", "V"),
    "ssm_dt.bias": ("dt_bias", "V"),
}
"""Tensors whose rows belong to heads, in the file -> of a delta net, and which of `_Sizes` counts the rows"""
_FILE = {ours: (file, rows) for file, (ours, rows) in ROWS.items()}
_BESIDE = ("in_proj_b.weight", "in_proj_a.weight")
"""Projections that are one tensor, key head by key head, where value heads do not take turns"""


class DeltaNetTranslation(Translation):
    """Delta nets between layers with gated attention."""

    keys = frozenset({
        *SIZES,
        "attention.recurrent_layers",
        "full_attention_interval",
        "nextn_predict_layers",  # whose layers are left out, with a warning
        "rope.dimension_sections",  # of M-RoPE: a text's positions are the same in all
        "ssm.inner_size",
    })  # fmt: skip

    def __init__(self, *, in_turn: bool) -> None:
        """Set whether value heads of all groups take turns in files."""
        self.in_turn = in_turn

    # --- reading ------------------------------------------------------------------------------------------------------

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of delta nets, and which layers have one."""
        key, layers = Keys(gguf), read_layers(Fields(raw, str(gguf.path)))
        fields: dict[str, Any] = {name: key.size(entry) for entry, name in SIZES.items()}
        heads, width = fields["linear_num_value_heads"], key.size("ssm.inner_size")
        if width % heads or heads % fields["linear_num_key_heads"]:
            raise CheckpointError(
                f"{gguf.path}: {heads} value heads of a delta net cannot share {width} numbers, or the keys of "
                f"{fields['linear_num_key_heads']} heads"
            )
        fields["linear_value_head_dim"] = width // heads
        fields["layer_types"] = self._kinds(key, layers)
        fields["projections_apart"] = True
        fields["partial_rotary_factor"] = raw.get("partial_rotary_factor", 1.0)
        return fields

    def _kinds(self, key: Keys, layers: int) -> list[str]:
        """`layer_types`, by a list of the layers with a delta net, or by the distance of those without."""
        linear = [bool(number) for number in key.each("attention.recurrent_layers")]
        if linear and len(linear) < layers:
            raise CheckpointError(
                f"{key.gguf.path}: {key.prefix}.attention.recurrent_layers should have {layers} entries, "
                f"found {len(linear)}"
            )
        every = key.size("full_attention_interval", INTERVAL)
        linear = linear or [(i + 1) % every > 0 for i in range(layers)]
        return ["linear_attention" if is_linear else "full_attention" for is_linear in linear[:layers]]

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The projections, the convolution and the decay of a delta net; queries and gates of attention."""
        rest = layer_name(name, "blk") or ""
        sizes = _Sizes.of_fields(raw)
        if rest == "attn_q.weight":
            H, D = raw["num_attention_heads"], head_width(raw)
            check_shape(tensor, (2 * H * D, raw["hidden_size"]), where)
            return {renamed(name, GATED): Rearranged(tensor, lambda stored: rows_by_block(stored, H, 2))}
        if (gate := read_shared_gate(name, tensor)) is not None:
            return gate
        if rest in ROWS:
            own, rows = ROWS[rest]
            check_shape(tensor, (getattr(sizes, rows), *tensor.shape[1:]), where)
            return {renamed(name, f"{NET}.{own}"): _reordered(tensor, np.argsort(self._order(sizes, rows)))}
        if rest == "ssm_ba.weight":
            check_shape(tensor, (2 * sizes.V, raw["hidden_size"]), where)
            of_key = np.arange(2 * sizes.V).reshape(sizes.K, 2, -1)  # [K, b and a, V / K]
            both = zip("ba", (of_key[:, 0].ravel(), of_key[:, 1].ravel()), strict=True)
            return {renamed(name, f"{NET}.in_proj_{x}.weight"): _reordered(tensor, order) for x, order in both}
        if rest == "ssm_in.weight":  # of older files: each key head's queries, keys, values and gates
            check_shape(tensor, (2 * sizes.keys + 2 * sizes.values, raw["hidden_size"]), where)
            blocks = (sizes.keys, sizes.keys, sizes.values, sizes.values)
            order = rows_by_block(np.arange(sum(blocks)), sizes.K, blocks)
            split = {"in_proj_qkv": order[: -sizes.values], "in_proj_z": order[-sizes.values :]}
            return {renamed(name, f"{NET}.{x}.weight"): _reordered(tensor, part) for x, part in split.items()}
        if rest == "ssm_conv1d.weight":
            check_shape(tensor, (sizes.channels, raw["linear_conv_kernel_dim"]), where)
            back = np.argsort(self._order(sizes, "channels"))
            taps = Rearranged(tensor, lambda stored: stored[back].T.reshape(-1))  # [C, k] -> [k, C] -> [k C]
            return {renamed(name, f"{NET}.conv1d.weight"): taps}
        if rest == "ssm_a":
            check_shape(tensor, (sizes.V,), where)
            back = np.argsort(self._order(sizes, "V"))
            return {renamed(name, f"{NET}.A_log"): Rewritten(tensor, lambda stored: logarithms(stored[back], where))}
        if rest == "ssm_out.weight":
            check_shape(tensor, (raw["hidden_size"], sizes.values), where)
            order = np.argsort(self._order(sizes, "values"))
            own_order = self.in_turn and sizes.K != sizes.V
            return {renamed(name, f"{NET}.out_proj.weight"): Columns(tensor, order) if own_order else tensor}
        return None

    # --- writing ------------------------------------------------------------------------------------------------------

    def refusals(self, config: DeltaNetConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        return {
            "with keys and values of delta nets of one width alone": config.keys[1] != config.values[1],
            "with experts in all layers or in none alone": bool(config.num_experts) and not all(config.sparse),
        }

    def entries(self, config: DeltaNetConfig, table: Fields, where: str) -> dict[str, Any]:
        """The sizes of delta nets, and which layers have one."""
        (K, dk), (V, dv), linear = config.keys, config.values, list(config.linear)
        if abs(config.epsilon - EPSILON) > 1e-9:
            logger.warning(
                "%s: llama.cpp adds %g to the square of a key's length in delta nets, and the model %g",
                where, config.epsilon, EPSILON
            )  # fmt: skip
        every = next((n for n in range(1, len(linear) + 1) if linear == _all_but(n, len(linear))), None)
        pairs = len(config.rotary.frequencies)
        thirds = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
        return {
            "ssm.conv_kernel": config.taps,
            "ssm.state_size": dk,
            "ssm.group_count": K,
            "ssm.time_step_rank": V,
            "ssm.inner_size": V * dv,
            "attention.recurrent_layers": linear,
            "full_attention_interval": every,
            "attention.head_count_kv": config.num_kv_heads,
            "rope.dimension_sections": thirds if self.in_turn else None,
            "expert_shared_feed_forward_length": config.shared_size or None,
        }

    def written(self, name: str, tensors: Mapping[str, Written], config: DeltaNetConfig) -> dict[str, Written] | None:
        """The projections, the convolution and the decay of a delta net; queries and gates of attention."""
        rest, whole = layer_name(name, "layers") or "", tensors[name]
        tensor, H = whole.parts[0], config.num_heads
        if rest == GATED:
            queries = Rearranged(tensor, lambda built: _by_head(built, H))
            return {renamed(name, "attn_q.weight", "blk"): replace(whole, parts=[queries])}
        if (gate := written_shared_gate(name, whole)) is not None:
            return gate
        sizes = _Sizes(*config.keys, *config.values)
        own = rest.removeprefix(f"{NET}.")
        if own == "conv1d.weight":
            order, shape = self._order(sizes, "channels"), (sizes.channels, config.taps)
            taps = Rearranged(tensor, lambda built: built.reshape(-1, sizes.channels).T[order])  # [k C] -> [C, k]
            return {renamed(name, "ssm_conv1d.weight", "blk"): unrounded(taps, shape)}
        if own == "A_log":
            heads = self._order(sizes, "V")
            decay = Rewritten(tensor, lambda built: -np.exp(built[heads], dtype=np.float32))
            return {renamed(name, "ssm_a", "blk"): unrounded(decay)}
        projections = self._projections(own, tensor, sizes) if own != rest else None
        if projections is None and own in _BESIDE:
            b, a = (tensors[renamed(name, f"{NET}.{x}")].parts[0] for x in _BESIDE)
            group = sizes.V // sizes.K
            both = [x.part(0, i, i + group) for i in range(0, sizes.V, group) for x in (b, a)]
            shape = (2 * sizes.V, config.hidden_size)
            return {renamed(name, "ssm_ba.weight", "blk"): replace(whole, parts=both, shape=shape)}
        if projections is None:
            return None
        return {renamed(name, file, "blk"): replace(whole, parts=[part]) for file, part in projections.items()}

    def _projections(self, own: str, tensor: Tensor, sizes: "_Sizes") -> dict[str, Tensor] | None:
        """A delta net's projection, by names in the file; None if it is not one."""
        if own in _FILE and (self.in_turn or own not in _BESIDE):
            file, rows = _FILE[own]
            return {file: _reordered(tensor, self._order(sizes, rows))}
        if own == "in_proj_qkvz.weight":
            stop = 2 * sizes.keys + sizes.values
            return {
                "attn_qkv.weight": tensor.part(0, 0, stop),
                "attn_gate.weight": tensor.part(0, stop, stop + sizes.values),
            }
        if own == "in_proj_ba.weight":
            order = np.arange(2 * sizes.V).reshape(2, sizes.K, -1).swapaxes(0, 1).ravel()  # b, a of each key head
            return {"ssm_ba.weight": _reordered(tensor, order)}
        if own == "out_proj.weight":
            own_order = self.in_turn and sizes.K != sizes.V
            return {"ssm_out.weight": Columns(tensor, self._order(sizes, "values")) if own_order else tensor}
        return None

    def _order(self, sizes: "_Sizes", rows: str) -> NDArray[np.intp]:
        """The number in the model of each row of a tensor in the file, which has as many as `rows` of `_Sizes` says."""
        heads = np.arange(sizes.V)
        if self.in_turn:
            heads = heads.reshape(sizes.K, -1).T.ravel()  # [K, V / K] -> [V / K, K] -> [V]
        if rows == "V":
            return heads
        values = (heads[:, None] * sizes.dv + np.arange(sizes.dv)).ravel()
        return values if rows == "values" else np.concatenate([np.arange(2 * sizes.keys), 2 * sizes.keys + values])


class _Sizes:
    """Heads of a delta net and their widths."""

    def __init__(self, K: int, dk: int, V: int, dv: int) -> None:
        self.K, self.dk, self.V, self.dv = K, dk, V, dv
        self.keys, self.values = K * dk, V * dv
        self.channels = 2 * self.keys + self.values

    @classmethod
    def of_fields(cls, raw: Mapping[str, Any]) -> "_Sizes":
        """The sizes that config.json names."""
        names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
        return cls(*(raw[f"linear_{name}"] for name in names))


def _reordered(tensor: Tensor, order: NDArray[np.intp]) -> Tensor:
    """Rows of a tensor by their numbers; the tensor itself if they are all in turn."""
    if len(order) == tensor.shape[0] and (order == np.arange(len(order))).all():
        return tensor
    return Rearranged(tensor, lambda stored: stored[order])


def _by_head(built: NDArray[Any], heads: int) -> NDArray[Any]:
    """Queries and then gates of all heads, head by head. [2 H D, ...] -> [H 2 D, ...]"""
    return built.reshape(2, heads, -1, *built.shape[1:]).swapaxes(0, 1).reshape(built.shape)


def logarithms(negative: NDArray[Any], where: str) -> NDArray[Any]:
    """The logarithms of decays' factors, which files have as negative numbers. [V]

    Raises:
        CheckpointError: one is above 0, or no number.
    """
    if not (negative <= 0).all():
        raise CheckpointError(f"{where} should have no numbers above 0")
    with np.errstate(divide="ignore"):
        logarithms: NDArray[Any] = np.log(-negative)
    return logarithms


def _all_but(every: int, layers: int) -> list[bool]:
    """Whether each layer has a delta net, if every n-th has attention."""
    return [(i + 1) % every > 0 for i in range(layers)]
