"""Experts in GGUF files: how they are chosen, and those that all tokens share.

Source: https://github.com/ggml-org/llama.cpp (`src/llama-graph.cpp`, `build_moe_ffn`; `src/models/glm4-moe.cpp`,
`qwen2moe.cpp`; `conversion`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...backends.loader import Rearranged, Tensor
from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ...models.mixtral import ExpertConfig
from .file import GGUF
from .translation import Keys, Rewritten, Translation, Written, head_width, layer_name, renamed, unrounded, whole_heads

SOFTMAX, SIGMOID = 1, 2
"""`expert_gating_func`"""
ROUTED_KEYS = frozenset({
    "expert_count",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "leading_dense_block_count",
    "nextn_predict_layers",  # whose layers are left out, with a warning
})  # fmt: skip
"""Keys that `routed_fields` reads"""
SHARED_GATE, SHARED_GATE_FILE = "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"


def routed_fields(gguf: GGUF) -> dict[str, Any]:
    """Experts that are chosen among groups, and shared ones: fields of config.json, as DeepSeek and GLM name them.

    Raises:
        CheckpointError: an entry is missing or invalid.
    """
    key = Keys(gguf)
    groups = key.size("expert_group_count", 1)
    return {
        "n_routed_experts": key.size("expert_count"),
        "num_experts_per_tok": key.size("expert_used_count"),
        "moe_intermediate_size": key.size("expert_feed_forward_length"),
        "n_shared_experts": key.size("expert_shared_count", 0, least=0),
        "first_k_dense_replace": key.size("leading_dense_block_count", 0, least=0),
        "n_group": groups,
        "topk_group": key.size("expert_group_used_count", 1) if groups > 1 else 1,
        "norm_topk_prob": gguf.get(f"{key.prefix}.expert_weights_norm", bool, False),
        "routed_scaling_factor": key.number("expert_weights_scale", 1.0) or 1.0,
        "num_nextn_predict_layers": 0,
    }


def routed_entries(config: ExpertConfig) -> dict[str, Any]:
    """The inverse of `routed_fields`, of a model with experts."""
    router = config.router
    groups = {"expert_group_count": router.groups, "expert_group_used_count": router.chosen_groups}
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_feed_forward_length": config.expert_size,
        "expert_shared_count": config.shared_size // config.expert_size,
        "expert_gating_func": SIGMOID if router.sigmoid else SOFTMAX,
        "expert_weights_norm": config.normalised,
        "expert_weights_scale": float(router.scale),
        "leading_dense_block_count": dense_layers(config.sparse),
        **(groups if router.groups > 1 else {}),
    }


def dense_layers(sparse: Sequence[bool]) -> int:
    """The number of layers before the first with experts."""
    return [*sparse, True].index(True)


def routed_refusals(config: ExpertConfig) -> dict[str, bool]:
    """Choices and layers that llama.cpp has in one way alone, as `Translation.refusals`."""
    router = config.router
    return {
        "with MLPs in its first layers alone": not all(config.sparse[dense_layers(config.sparse) :]),
        "with experts that all tokens share alone": bool(config.num_experts) and not config.shared_size,
        "with groups of experts chosen by their two best experts alone": router.groups > 1 and router.group_best != 2,
        "with a part of its groups of experts alone": router.groups == router.chosen_groups > 1,
    }


def check_sigmoids(gguf: GGUF) -> None:
    """Refuse experts that are chosen otherwise than by sigmoids, which is what a missing entry means too.

    Raises:
        UnsupportedModelError: they are.
    """
    key = Keys(gguf)
    if (function := key.size("expert_gating_func", SIGMOID, least=0)) != SIGMOID:
        raise UnsupportedModelError(
            f"{gguf.path}: {key.prefix}.expert_gating_func is {function}; in this architecture minillm runs "
            f"{SIGMOID} (sigmoid)"
        )


class SigmoidExpertTranslation(Translation):
    """GLM-4.5's experts (`glm4moe`): chosen by sigmoids among groups, and shared, after layers with one MLP."""

    keys = ROUTED_KEYS

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts."""
        check_sigmoids(gguf)
        return routed_fields(gguf) | whole_heads(raw)

    def refusals(self, config: ExpertConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        return routed_refusals(config)

    def entries(self, config: ExpertConfig, table: Fields, where: str) -> dict[str, Any]:
        """The experts."""
        return routed_entries(config)


def read_shared_gate(name: str, tensor: Any) -> dict[str, Tensor] | None:
    """The factor of the shared expert's result by its published name; None: it is another tensor.

    Files have it as a vector [E] or as the checkpoint does, [1, E].
    """
    if layer_name(name, "blk") != SHARED_GATE_FILE:
        return None
    is_vector = len(tensor.shape) == 1
    gate = Rewritten(tensor, lambda stored: stored[None]) if is_vector else tensor  # [E] -> [1, E]
    return {renamed(name, SHARED_GATE): gate}


def written_shared_gate(name: str, whole: Written) -> dict[str, Written] | None:
    """The inverse of `read_shared_gate`."""
    if layer_name(name, "layers") != SHARED_GATE:
        return None
    return {renamed(name, SHARED_GATE_FILE, "blk"): unrounded(Rearranged(whole.parts[0], np.ravel))}


class SharedGateTranslation(Translation):
    """Qwen2-MoE's shared expert (`qwen2moe`), whose result has a factor of its own."""

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The factor."""
        return read_shared_gate(name, tensor)

    def refusals(self, config: ExpertConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        return {"with experts in all of its layers alone": not all(config.sparse)}

    def entries(self, config: ExpertConfig, table: Fields, where: str) -> dict[str, Any]:
        """The width of the shared expert."""
        return {"expert_shared_feed_forward_length": config.shared_size}

    def written(self, name: str, tensors: Mapping[str, Written], config: ExpertConfig) -> dict[str, Written] | None:
        """The factor."""
        return written_shared_gate(name, tensors[name])


class ErnieExpertTranslation(Translation):
    """ERNIE 4.5's experts (`ernie4_5-moe`): chosen by shares of the softmax, after layers with one MLP."""

    keys = frozenset({
        "expert_count",
        "expert_feed_forward_length",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "expert_used_count",
        "interleave_moe_layer_step",
        "leading_dense_block_count",
    })  # fmt: skip

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts.

        Raises:
            CheckpointError: an entry is missing or invalid, or shared experts are no whole number of them.
            UnsupportedModelError: not all layers behind the first have experts.
        """
        key = Keys(gguf)
        if (step := key.size("interleave_moe_layer_step", 1)) != 1:
            raise UnsupportedModelError(
                f"{gguf.path}: {key.prefix}.interleave_moe_layer_step is {step}; minillm, like llama.cpp, runs 1"
            )
        width, together = key.size("expert_feed_forward_length"), "expert_shared_feed_forward_length"
        shared = key.size(together, 0, least=0)
        if shared % width:
            raise CheckpointError(f"{gguf.path}: {key.prefix}.{together} {shared} should be a multiple of {width}")
        return {
            "moe_num_experts": key.size("expert_count"),
            "num_experts": key.size("expert_count"),
            "moe_k": key.size("expert_used_count"),
            "moe_intermediate_size": width,
            "moe_num_shared_experts": shared // width,
            "moe_layer_start_index": key.size("leading_dense_block_count", 0, least=0),
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        }

    def refusals(self, config: ExpertConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        return {"with MLPs in its first layers alone": not all(config.sparse[dense_layers(config.sparse) :])}

    def entries(self, config: ExpertConfig, table: Fields, where: str) -> dict[str, Any]:
        """The experts."""
        return {
            "expert_shared_count": config.shared_size // config.expert_size,
            "expert_shared_feed_forward_length": config.shared_size,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": dense_layers(config.sparse),
        }


class Dots1Translation(SigmoidExpertTranslation):
    """The experts of dots.llm1 (`dots1`), which is run without windows."""

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts."""
        return super().fields(gguf, raw) | {"sliding_window": None}


class MiniMaxTranslation(Translation):
    """MiniMax-M2 (`minimax-m2`): experts chosen by sigmoids in all layers."""

    keys = frozenset({"expert_gating_func"})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The width of an expert, and how much of each head is rotated."""
        check_sigmoids(gguf)
        key = Keys(gguf)
        head_dim = head_width(raw)
        return {"rotary_dim": key.size("rope.dimension_count", head_dim), "head_dim": head_dim}

    def entries(self, config: ExpertConfig, table: Fields, where: str) -> dict[str, Any]:
        """How experts are chosen."""
        return {"expert_gating_func": SIGMOID}


class GraniteExpertTranslation(Translation):
    """Granite 3's mixtures (`granitemoe`): gate and up of the MLP that all tokens share, if any, are two tensors."""

    keys = frozenset({"expert_shared_feed_forward_length"})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The shared MLP, and the factor of scores where the file has none."""
        shared = Keys(gguf).size("expert_shared_feed_forward_length", 0, least=0)
        head_dim = head_width(raw)
        return {
            "shared_intermediate_size": shared,
            "shared_mlp_apart": True,
            "attention_multiplier": raw.get("attention_multiplier") or head_dim**-0.5,
        }

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The shared MLP."""
        ours = _SHARED_MLP.get((layer_name(name, "blk") or "").removesuffix("_shexp.weight"))
        return None if ours is None else {renamed(name, f"shared_mlp.{ours}.weight"): tensor}

    def entries(self, config: ExpertConfig, table: Fields, where: str) -> dict[str, Any]:
        """The width of the shared MLP."""
        return {"expert_shared_feed_forward_length": config.shared_size or None}

    def written(self, name: str, tensors: Mapping[str, Written], config: ExpertConfig) -> dict[str, Written] | None:
        """The shared MLP."""
        own = (layer_name(name, "layers") or "").removeprefix("shared_mlp.").removesuffix(".weight")
        whole, F = tensors[name], config.shared_size
        if own == "input_linear":
            rows = {"ffn_gate": whole.parts[0].part(0, 0, F), "ffn_up": whole.parts[0].part(0, F, 2 * F)}
        else:
            rows = {file: whole.parts[0] for file, ours in _SHARED_MLP.items() if ours == own}
        written = {f"{file}_shexp.weight": replace(whole, parts=[part]) for file, part in rows.items()}
        return {renamed(name, rest, "blk"): part for rest, part in written.items()} or None


_SHARED_MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "output_linear"}
