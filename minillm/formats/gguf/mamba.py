"""Layers of Mamba-2 in GGUF files: Granite 4 (`granitehybrid`), Nemotron-H (`nemotron_h`, `nemotron_h_moe`), Falcon-H1.

    ssm_in, ssm_out               in_proj, out_proj
    ssm_conv1d [C, k]             the convolution, oldest input first; llama.cpp adds its bias in any case
    ssm_a [H, 1], ssm_d [H, 1]    -exp(A_log), D
    ssm_dt.bias                   dt_bias
    ssm_norm [G, H P / G]         the norm after the gate

Which layers have Mamba-2 follows from the key/value heads of each layer, 0 there, and in Nemotron-H from the widths of
the layers' MLPs, too. Falcon-H1's factors are in the weights: llama.cpp has none of them.

Source: https://github.com/ggml-org/llama.cpp (`src/models/mamba-base.cpp`, `granite-hybrid.cpp`, `nemotron-h.cpp`,
`falcon-h1.cpp`; `conversion/granite.py`, `nemotron.py`, `falcon_h1.py`).
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Rearranged, Tensor
from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ...models.falcon_h1 import FIELDS as FALCON_FIELDS
from ...models.falcon_h1 import FalconH1Config
from ...models.granitemoehybrid import GraniteHybridConfig
from ...models.mamba import FieldNames, MambaConfig
from ...models.nemotron_h import FIELDS as NEMOTRON_FIELDS
from ...models.nemotron_h import NemotronHConfig
from ...models.reading import read_layers
from ...reference.selective_scan import UNLIMITED
from ..tensors import ComputedTensor
from .delta_nets import logarithms
from .file import GGUF
from .translation import Keys, Rewritten, Translation, Written, check_shape, head_width, layer_name, renamed, unrounded

logger = logging.getLogger("minillm")

SIZES = {
    "ssm.conv_kernel": "taps",
    "ssm.state_size": "state_size",
    "ssm.group_count": "groups",
    "ssm.time_step_rank": "heads",
}
"""Metadata key -> field of `FieldNames`"""
VECTORS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_norm.weight": "norm.weight"}
"""Vectors in the file -> of a layer of Mamba-2"""
_FILE = {ours: file for file, ours in VECTORS.items()}
CONVOLUTION = "conv1d.weight"
HALVES = {"ffn_gate": "gate_proj", "ffn_up": "up_proj"}
"""Tensors that are one, `input_linear`, in Granite's checkpoints"""
NO_STEP = 1e-30
"""A least step of Mamba-2 that changes nothing: llama.cpp has none"""
FALCON_NORM = "post_attention_layernorm.weight"
"""The one norm whose name in files, `ffn_norm`, does not end with ".weight" """


class MambaTranslation(Translation):
    """Layers of Mamba-2."""

    stem = "mamba"
    """The layer's name in checkpoints"""
    names = FieldNames()
    """The names of its sizes in config.json"""
    keys = frozenset({*SIZES, "ssm.inner_size", "attention.head_count_kv"})

    # --- reading ------------------------------------------------------------------------------------------------------

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of Mamba-2, and the number of key/value heads of layers with attention."""
        key, names = Keys(gguf), self.names
        fields: dict[str, Any] = {getattr(names, size): key.size(entry) for entry, size in SIZES.items()}
        heads, inner = fields[names.heads], key.size("ssm.inner_size")
        if inner % heads or inner % fields[names.groups]:
            raise CheckpointError(
                f"{gguf.path}: {heads} heads of Mamba in {fields[names.groups]} groups cannot share {inner} channels"
            )
        fields[names.head_dim] = inner // heads
        fields[names.conv_bias] = any(name.endswith(".ssm_conv1d.bias") for name in gguf.tensors)
        heads_of_layers = by_layer(key, "attention.head_count_kv", read_layers(Fields(raw, str(gguf.path))))
        return fields | {"num_key_value_heads": the_one(key, "attention.head_count_kv", heads_of_layers)}

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The convolution, the decay and other vectors of a layer of Mamba-2."""
        rest = layer_name(name, "blk") or ""
        names = self.names
        H, P, G, N, k = (
            raw[field] for field in (names.heads, names.head_dim, names.groups, names.state_size, names.taps)
        )
        if rest == "ssm_conv1d.weight":
            check_shape(tensor, (H * P + 2 * G * N, k), where)
            taps = Rearranged(tensor, lambda stored: stored.T.reshape(-1))  # [C, k] -> [k, C] -> [k C]
            return {renamed(name, f"{self.stem}.{CONVOLUTION}"): taps}
        if rest not in VECTORS:
            return None
        shapes = {"ssm_dt.bias": (H,), "ssm_norm.weight": (G, H * P // G)}
        check_shape(tensor, shapes.get(rest, (H, 1)), where)
        vector: Tensor = Rearranged(tensor, np.ravel)
        if rest == "ssm_a":
            vector = Rewritten(tensor, lambda stored: logarithms(stored.ravel(), where))
        return {renamed(name, f"{self.stem}.{VECTORS[rest]}"): vector}

    # --- writing ------------------------------------------------------------------------------------------------------

    def refusals(self, config: Any, table: Fields) -> dict[str, bool]:
        """Differences of Mamba-2 from llama.cpp's."""
        mamba: MambaConfig | None = config.mamba
        if mamba is None or not any(config.layer_states):
            return {"with Mamba-2 in some of its layers alone": True}
        return {
            "with biases of Mamba's convolutions alone": not mamba.conv_bias,
            "without biases of Mamba's projections": mamba.bias or mamba.out_bias,
            "with silu after Mamba's convolutions alone": mamba.activation != "silu",
            "with the norm of Mamba after its gate alone": mamba.normed and mamba.norm_first,
            "with steps of Mamba of any size alone": mamba.limits[1] != UNLIMITED[1],
        }

    def entries(self, config: Any, table: Fields, where: str) -> dict[str, Any]:
        """The sizes of Mamba-2."""
        mamba: MambaConfig = config.mamba
        if mamba.limits[0] > NO_STEP:
            logger.warning(
                "%s: llama.cpp has no least step of Mamba-2, which is %g in the model", where, mamba.limits[0]
            )
        return {
            "ssm.conv_kernel": mamba.taps,
            "ssm.state_size": mamba.state_size,
            "ssm.group_count": mamba.groups,
            "ssm.time_step_rank": mamba.num_heads,
            "ssm.inner_size": mamba.inner,
        }

    def written(self, name: str, tensors: Mapping[str, Written], config: Any) -> dict[str, Written] | None:
        """The convolution, the decay and other vectors of a layer of Mamba-2."""
        own = (layer_name(name, "layers") or "").removeprefix(f"{self.stem}.")
        tensor, mamba = tensors[name].parts[0], config.mamba
        if own == CONVOLUTION:
            taps = Rearranged(tensor, lambda built: built.reshape(-1, mamba.channels).T)  # [k C] -> [k, C] -> [C, k]
            shape = (mamba.channels, mamba.taps)
            return {renamed(name, "ssm_conv1d.weight", "blk"): unrounded(taps, shape)}
        if own not in _FILE or not name.endswith(f".{self.stem}.{own}"):
            return None
        if own == "A_log":
            tensor = Rewritten(tensor, lambda built: -np.exp(built, dtype=np.float32))
        shapes = {"dt_bias": (mamba.num_heads,), "norm.weight": (mamba.groups, mamba.inner // mamba.groups)}
        return {renamed(name, _FILE[own], "blk"): unrounded(tensor, shapes.get(own, (mamba.num_heads, 1)))}


class GraniteHybridTranslation(MambaTranslation):
    """Granite 4: gate and up of the MLP that computes each token are two tensors, with "_shexp" beside experts."""

    keys = MambaTranslation.keys | {
        "expert_shared_feed_forward_length",
        "rope.scaling.finetuned",  # whether queries and keys are rotated
    }

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Kinds of layers, positions, and the widths of MLPs."""
        key, fields = Keys(gguf), super().fields(gguf, raw)
        E, H, layers = raw["hidden_size"], raw["num_attention_heads"], read_layers(Fields(raw, str(gguf.path)))
        inner = key.size("ssm.inner_size")
        if inner % E:
            raise CheckpointError(f"{gguf.path}: {key.prefix}.ssm.inner_size {inner} should be a multiple of {E}")
        attends = by_layer(key, "attention.head_count_kv", layers)
        experts = raw.get("num_local_experts", 0)
        F = key.size("expert_shared_feed_forward_length") if experts else raw["intermediate_size"]
        rotated = gguf.get(f"{key.prefix}.rope.scaling.finetuned", bool, True)
        return fields | {
            "mamba_expand": inner // E,
            "layer_types": ["attention" if heads else "mamba" for heads in attends],
            "position_embedding_type": "rope" if rotated else "nope",
            "num_local_experts": experts,
            "shared_intermediate_size": F,
            "attention_multiplier": raw.get("attention_multiplier") or (raw.get("head_dim") or E // H) ** -0.5,
            "shared_mlp_apart": True,
        }

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """Also the MLP that computes each token."""
        rest = (layer_name(name, "blk") or "").removesuffix(".weight")
        own, ending = rest.removesuffix("_shexp"), "_shexp" if raw["num_local_experts"] else ""
        if rest == own + ending and own in (*HALVES, "ffn_down"):
            return {renamed(name, f"shared_mlp.{HALVES.get(own, 'output_linear')}.weight"): tensor}
        return super().read(name, tensor, raw, where)

    def refusals(self, config: GraniteHybridConfig, table: Fields) -> dict[str, bool]:
        """Also Mamba-2 of another width, and steps that have bounds."""
        others = super().refusals(config, table)
        if config.mamba is not None:
            others["with mamba_expand 2 alone"] = config.mamba.inner != 2 * config.hidden_size
            others["with steps of Mamba of any size alone"] = config.mamba.limits != UNLIMITED
        return others

    def entries(self, config: GraniteHybridConfig, table: Fields, where: str) -> dict[str, Any]:
        """Also whether there is rotation, and the width of the MLP beside experts."""
        return super().entries(config, table, where) | {
            "rope.scaling.finetuned": config.rotated[0],
            "expert_shared_feed_forward_length": config.shared_size if config.num_experts else None,
        }

    def written(
        self, name: str, tensors: Mapping[str, Written], config: GraniteHybridConfig
    ) -> dict[str, Written] | None:
        """Also the MLP that computes each token."""
        rest, whole, ending = layer_name(name, "layers") or "", tensors[name], "_shexp" if config.num_experts else ""
        own = rest.removeprefix("shared_mlp.").removesuffix(".weight")
        if own == "input_linear":
            F = config.shared_size
            halves = {"ffn_gate": whole.parts[0].part(0, 0, F), "ffn_up": whole.parts[0].part(0, F, 2 * F)}
        elif own == "output_linear":
            halves = {"ffn_down": whole.parts[0]}
        elif rest.startswith("shared_mlp."):
            halves = {file: whole.parts[0] for file, ours in HALVES.items() if ours == own}
        else:
            return super().written(name, tensors, config)
        return {
            renamed(name, f"{file}{ending}.weight", "blk"): replace(whole, parts=[half])
            for file, half in halves.items()
        }


class NemotronTranslation(MambaTranslation):
    """Nemotron-H: the kind of each layer follows from its key/value heads and the width of its MLP."""

    stem = "mixer"
    names = NEMOTRON_FIELDS
    keys = MambaTranslation.keys | {
        "attention.layer_norm_epsilon",  # of the RMS norms too where the next is missing
        "attention.layer_norm_rms_epsilon",
        "expert_count",
        "expert_feed_forward_length",
        "expert_gating_func",  # llama.cpp has sigmoids in any case
        "expert_group_count",
        "expert_group_used_count",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "expert_used_count",
        "expert_weights_norm",
        "expert_weights_scale",
        "feed_forward_length",
        "moe_latent_size",
        "nextn_predict_layers",  # whose layers are left out, with a warning
    }

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Kinds of layers, and their experts."""
        key, fields = Keys(gguf), super().fields(gguf, raw)
        layers = read_layers(Fields(raw, str(gguf.path)))
        heads = by_layer(key, "attention.head_count_kv", layers)
        widths = by_layer(key, "feed_forward_length", layers)
        experts = key.size("expert_count", 0, least=0)
        fields["layers_block_type"] = [
            ("moe" if experts else "mlp") if width else "attention" if heads_of_layer else "mamba"
            for heads_of_layer, width in zip(heads, widths, strict=True)
        ]
        fields["head_dim"] = head_width(raw)
        epsilon = "attention.layer_norm_rms_epsilon"
        if not key.has(epsilon):
            epsilon = "attention.layer_norm_epsilon"
        if not key.has(epsilon):
            raise CheckpointError(f"{gguf.path} lacks {key.prefix}.{epsilon}")
        fields["layer_norm_epsilon"] = key.number(epsilon, 0.0)
        fields["time_step_min"] = NO_STEP
        fields["mlp_bias"] = any(name.endswith(".ffn_up.bias") for name in gguf.tensors)
        if any(widths) and not experts:
            fields["intermediate_size"] = the_one(key, "feed_forward_length", widths)
        if not experts:
            return fields
        if key.has("moe_latent_size"):
            fields["moe_latent_size"] = key.size("moe_latent_size", least=0) or None
        return fields | {
            "n_routed_experts": experts,
            "num_experts_per_tok": key.size("expert_used_count"),
            "moe_intermediate_size": key.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": key.size("expert_shared_feed_forward_length"),
            "n_shared_experts": key.size("expert_shared_count", 0, least=0),
            "n_group": key.size("expert_group_count", 1, least=0) or 1,
            "topk_group": key.size("expert_group_used_count", 1, least=0) or 1,
            "norm_topk_prob": gguf.get(f"{key.prefix}.expert_weights_norm", bool, False),
            "routed_scaling_factor": key.number("expert_weights_scale", 1.0) or 1.0,
        }

    def refusals(self, config: NemotronHConfig, table: Fields) -> dict[str, bool]:
        """Also layers with experts beside others with an MLP, and groups of experts chosen otherwise."""
        router = config.router
        return super().refusals(config, table) | {
            "with MLPs or with experts, not with both": {"mlp", "moe"} <= {*config.kinds},
            "with experts without biases": bool(config.num_experts) and config.mlp_bias,
            "with a part of its groups of experts alone": router.groups == router.chosen_groups > 1,
        }

    def entries(self, config: NemotronHConfig, table: Fields, where: str) -> dict[str, Any]:
        """Also the kinds of layers, and their experts."""
        width = config.expert_size or config.intermediate_size
        entries = super().entries(config, table, where) | {
            "attention.layer_norm_epsilon": config.epsilon,
            "attention.layer_norm_rms_epsilon": config.epsilon,
            "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in config.kinds],
            "expert_count": config.num_experts or None,
            "expert_used_count": config.experts_per_token or None,
        }
        if not config.num_experts:
            return entries
        router = config.router
        groups = {"expert_group_count": router.groups, "expert_group_used_count": router.chosen_groups}
        return entries | {
            "expert_feed_forward_length": config.expert_size,
            "expert_shared_feed_forward_length": config.shared_size,
            "expert_shared_count": 1,
            "expert_weights_norm": config.normalised,
            "expert_weights_scale": float(router.scale),
            **(groups if router.groups > 1 else {}),
        }


class FalconTranslation(MambaTranslation):
    """Falcon-H1: the factors are multiplied into the weights, as llama.cpp's converter does."""

    names = FALCON_FIELDS
    keys = MambaTranslation.keys - {"attention.head_count_kv"}

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of Mamba-2, and its norm."""
        fields, normed = super().fields(gguf, raw), any(name.endswith(".ssm_norm.weight") for name in gguf.tensors)
        inner = Keys(gguf).size("ssm.inner_size")
        return fields | {"mamba_d_ssm": inner, "mamba_rms_norm": normed, "mamba_norm_before_gate": False}

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """Also the norm before the MLP, whose name ends as no other's."""
        if layer_name(name, "blk") == "ffn_norm":
            return {renamed(name, FALCON_NORM): tensor}
        return super().read(name, tensor, raw, where)

    def entries(self, config: FalconH1Config, table: Fields, where: str) -> dict[str, Any]:
        """Also the norms' epsilon without the factor of the residual sum."""
        return super().entries(config, table, where) | {"attention.layer_norm_rms_epsilon": config.mamba.epsilon}

    def written(self, name: str, tensors: Mapping[str, Written], config: FalconH1Config) -> dict[str, Written] | None:
        """Also the matrices with their factors, and the norm before the MLP."""
        rest, whole = layer_name(name, "layers"), tensors[name]
        stream, head = _stream(config), config.logit_scale
        if name == "embed_tokens.weight":
            embedding = _scaled(whole, config.embedding_scale * stream)
            separate = config.tied_head and not math.isclose(config.embedding_scale * stream, head)
            return {"token_embd.weight": embedding} | ({"output.weight": _scaled(whole, head)} if separate else {})
        if name == "lm_head.weight":
            return {"output.weight": _scaled(whole, head)}
        if rest == FALCON_NORM:
            return {renamed(name, "ffn_norm", "blk"): whole}
        if rest in (factors := _factors(config)):
            file, factor = factors[rest]
            return {renamed(name, f"{file}.weight", "blk"): _scaled(whole, factor)}
        return super().written(name, tensors, config)


def _stream(config: FalconH1Config) -> float:
    """The factor by which the model computes the residual sum divided (`falcon_h1.py`)."""
    return math.sqrt(config.mamba.epsilon / config.epsilon)


def _factors(config: FalconH1Config) -> dict[str, tuple[str, Any]]:
    """Tensors of a layer -> their names in the file, without ".weight", and the factor of all or of each row."""
    mamba, stream, (queries, keys, values) = config.mamba, _stream(config), config.qkv_factors
    wide = mamba.groups * mamba.state_size
    rows = np.repeat(config.mamba_factors, (mamba.inner, mamba.inner, wide, wide, mamba.num_heads))
    return {
        "self_attn.q_proj.weight": ("attn_q", queries),
        "self_attn.k_proj.weight": ("attn_k", keys),
        "self_attn.v_proj.weight": ("attn_v", queries),
        "self_attn.o_proj.weight": ("attn_output", values * stream / queries),
        "mamba.in_proj.weight": ("ssm_in", rows),
        "mamba.out_proj.weight": ("ssm_out", stream),
        "mlp.gate_proj.weight": ("ffn_gate", config.mlp_factors[0]),
        "mlp.down_proj.weight": ("ffn_down", config.mlp_factors[1] * stream),
    }


@dataclass(frozen=True, eq=False)
class Scaled(ComputedTensor):
    """A matrix with a factor of each row, in float32."""

    source: Tensor
    factors: NDArray[np.float32]
    """[out]"""
    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """As the source."""
        return self.source.shape

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values, some rows at a time."""
        first = 0
        for chunk in self.source.chunks():
            yield chunk * self.factors[first : first + len(chunk), None]
            first += len(chunk)

    def rounded(self, chunk: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values as they are."""
        return chunk

    def part(self, axis: int, first: int, stop: int) -> "Scaled":
        """Rows (axis 0) or columns (axis 1) `first` to `stop`."""
        factors = self.factors if axis else self.factors[first:stop]
        return replace(self, source=self.source.part(axis, first, stop), factors=factors)


def _scaled(whole: Written, factor: Any) -> Written:
    """A matrix with a factor of all rows or of each; the matrix itself if all are 1."""
    [matrix] = whole.parts
    factors = np.broadcast_to(np.float32(factor), matrix.shape[:1])
    return whole if (factors == 1).all() else replace(whole, parts=[Scaled(matrix, factors)])


def by_layer(key: Keys, entry: str, layers: int) -> list[int]:
    """A number for each layer, in the file as an array or as one for all.

    Raises:
        CheckpointError: there is none, or not one for each layer, or one is negative.
    """
    if not key.is_array(entry):
        return [key.size(entry, least=0)] * layers
    numbers = key.each(entry)
    if len(numbers) < layers or not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
        raise CheckpointError(
            f"{key.gguf.path}: {key.prefix}.{entry} should be a number for each of {layers} layers, found "
            f"{numbers!s:.60}"
        )
    return numbers[:layers]


def the_one(key: Keys, entry: str, numbers: list[int]) -> int:
    """The number that layers have which have one.

    Raises:
        CheckpointError: no layer has.
        UnsupportedModelError: layers have different ones.
    """
    values = sorted({*numbers} - {0})
    if not values:
        raise CheckpointError(f"{key.gguf.path}: {key.prefix}.{entry} should be more than 0 in one layer at least")
    if len(values) > 1:
        raise UnsupportedModelError(
            f"{key.gguf.path}: {key.prefix}.{entry} differs from layer to layer; minillm runs layers of one shape"
        )
    return values[0]
