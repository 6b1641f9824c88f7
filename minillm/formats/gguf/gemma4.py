"""Gemma 4 in GGUF files (`gemma4`): layers of two shapes, per-layer embeddings, experts beside each MLP.

    attention.key_length, key_length_swa             D of layers without a window, and with one
    attention.head_count_kv, feed_forward_length     a number, or one for each layer
    attention.sliding_window_pattern                 whether each layer has a window
    attention.shared_kv_layers                       how many of the last layers read the keys and values of others
    rope_freqs [D / 2]                               1 for each pair that turns without a window, 1e30 for the others
    ffn_gate_inp.scale [E], ffn_down_exps.scale [X]  the gain of the router's norm; a factor of each expert

Layers without a window have no `attn_v` where their values are their keys.

Source: https://github.com/ggml-org/llama.cpp (`src/models/gemma4.cpp`; `conversion/gemma.py`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Shifted, Tensor
from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ...models.gemma4_text import FULL, SLIDING, Gemma4Config
from ...models.reading import read_layers
from ...models.rotary import RotaryConfig
from .file import GGUF
from .translation import Keys, Translation, Written, check_shape, layer_name, renamed, unrounded

LOGIT_CAP = 30.0
"""Soft cap of logits in llama.cpp where a file says none; 0 is none"""
STILL = 1e30
"""The factor of a pair that does not turn"""
SCALES = {
    "ffn_gate_inp.scale": "router.norm.weight",
    "ffn_down_exps.scale": "router.per_expert_scale.weight",
}
_KEYS_AND_VALUES = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


class Gemma4Translation(Translation):
    """Fields that layers have of their own, the turning pairs, and the router's scales."""

    own_heads = own_rotary = True
    keys = frozenset({
        "attention.head_count_kv",
        "attention.key_length",
        "attention.key_length_swa",
        "attention.shared_kv_layers",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.value_length_swa",
        "embedding_length_per_layer_input",
        "expert_count",
        "expert_feed_forward_length",
        "expert_used_count",
        "feed_forward_length",
        "final_logit_softcapping",
        "rope.dimension_count_swa",
        "rope.freq_base_swa",
    })  # fmt: skip

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers' shapes and windows, rotary embedding, per-layer embeddings and experts."""
        key, layers = Keys(gguf), read_layers(Fields(raw, str(gguf.path)))
        full, local = (self._width(key, ending) for ending in ("", "_swa"))
        slides = [bool(slide) for slide in key.each("attention.sliding_window_pattern")]
        if len(slides) != layers or slides[-1]:
            raise CheckpointError(
                f"{gguf.path}: {key.prefix}.attention.sliding_window_pattern should be one value for each of {layers} "
                "layers, and false for the last"
            )
        heads = self._of_layers(key, "attention.head_count_kv", layers)
        sizes = self._of_layers(key, "feed_forward_length", layers)
        shared = key.size("attention.shared_kv_layers", 0, least=0)
        own = max(layers - shared, 0)
        doubled = [sizes[0]] * own + [2 * sizes[0]] * (layers - own)
        if sizes != [sizes[0]] * layers and sizes != doubled:
            raise UnsupportedModelError(
                f"{gguf.path}: {key.prefix}.feed_forward_length differs from layer to layer; minillm runs MLPs of one "
                "width, doubled in layers that share keys and values"
            )
        merged = {f"blk.{i}.attn_v.weight" not in gguf.tensors for i in range(own) if not slides[i]}
        table = raw.get("rope_scaling") or {"rope_type": "linear", "factor": 1.0}
        if table["rope_type"] != "linear":
            raise UnsupportedModelError(f"{gguf.path}: in this architecture minillm runs no rotary scaling but linear")
        theta = {FULL: raw.get("rope_theta", 10_000.0), SLIDING: key.number("rope.freq_base_swa", 10_000.0)}
        rope = {
            FULL: {"rope_type": "proportional", "rope_theta": theta[FULL], "factor": table["factor"]},
            SLIDING: {"rope_type": "default", "rope_theta": theta[SLIDING]},
        }
        fields = {
            "head_dim": local,
            "num_key_value_heads": heads[0],
            "per_layer_config": {
                str(i): {"head_dim": local if slides[i] else full, "num_key_value_heads": heads[i]}
                for i in range(layers)
            },
            "layer_types": [SLIDING if slide else FULL for slide in slides],
            "sliding_window": key.size("attention.sliding_window"),
            "num_kv_shared_layers": shared,
            "attention_k_eq_v": merged == {True},
            "intermediate_size": sizes[0],
            "use_double_wide_mlp": sizes == doubled and own < layers,
            "hidden_size_per_layer_input": key.size("embedding_length_per_layer_input", 0, least=0),
            "vocab_size_per_layer_input": raw["vocab_size"],
            "final_logit_softcapping": key.number("final_logit_softcapping", LOGIT_CAP) or None,
            "rope_parameters": rope,
            "rope_scaling": None,
        }
        experts = key.size("expert_count", 0, least=0)
        if experts:
            fields |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": key.size("expert_used_count")}
            fields["moe_intermediate_size"] = key.size("expert_feed_forward_length")
        return fields

    def _width(self, key: Keys, ending: str) -> int:
        """D of layers of one kind, whose values are as wide and which are rotated whole."""
        width = key.size(f"attention.key_length{ending}")
        others = {
            name: key.size(f"{name}{ending}", width) for name in ("attention.value_length", "rope.dimension_count")
        }
        for name, other in others.items():
            if other != width:
                raise UnsupportedModelError(
                    f"{key.gguf.path}: {key.prefix}.{name}{ending} is {other}; in this architecture minillm runs "
                    f"attention.key_length{ending} {width}"
                )
        return width

    def _of_layers(self, key: Keys, name: str, layers: int) -> list[int]:
        """A number for each layer."""
        numbers = [number for number in key.each(name) if type(number) is int] if key.is_array(name) else []
        numbers = numbers or [key.size(name)] * layers
        if len(numbers) != layers or not all(0 < number < 2**31 for number in numbers):
            raise CheckpointError(
                f"{key.gguf.path}: {key.prefix}.{name} should be a number above 0, or one for each of {layers} layers"
            )
        return numbers

    def rotary(self, factors: NDArray[np.float32], raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The share of the pairs that turns in layers without a window. [D / 2]"""
        turning = int((factors == 1).sum())
        rest = factors[turning:]
        if not turning or not (factors[:turning] == 1).all() or not (rest >= STILL / 10).all():
            raise UnsupportedModelError(
                f"{where}: rope_freqs.weight should be 1 for the pairs that turn and {STILL:g} for the others"
            )
        tables = raw["rope_parameters"]
        table = tables[FULL] | {"partial_rotary_factor": turning / len(factors)}
        return {"rope_parameters": tables | {FULL: table}}

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The router's scales; nothing of keys and values that no layer reads."""
        rest = layer_name(name, "blk") or ""
        if rest in SCALES:
            experts = rest == "ffn_down_exps.scale"
            check_shape(tensor, (raw.get("num_experts", 0) if experts else raw["hidden_size"],), where)
            factor = 1.0 if experts else raw["hidden_size"] ** -0.5
            return {renamed(name, SCALES[rest]): Shifted(tensor, 0.0, factor)}
        first = raw["num_hidden_layers"] - raw["num_kv_shared_layers"]
        return {} if rest in _KEYS_AND_VALUES and int(name.split(".")[1]) >= first else None

    def refusals(self, config: Gemma4Config, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        windows, sources = config.windows, config.kv_sources
        own = next((i for i, source in enumerate(sources) if source != i), len(sources))
        shares = own < len(sources)
        read = [own - 1 if window is None else own - 2 for window in windows[own:]]
        return {
            "with keys and values of the last layer of each kind, the one without a window last, alone": shares
            and list(sources[own:]) != read,
            "with windows in some layers alone": not any(windows),
            "with pairs that turn before those that do not alone": _turning(config) is None,
        }

    def entries(self, config: Gemma4Config, table: Fields, where: str) -> dict[str, Any]:
        """The layers' shapes and windows, per-layer embeddings and experts."""
        windows, shapes = config.windows, config.kv_shapes
        full = next(D for (_, D), window in zip(shapes, windows, strict=True) if window is None)
        local = next((D for (_, D), window in zip(shapes, windows, strict=True) if window is not None), full)
        heads, sizes = [K for K, _ in shapes], list(config.mlp_sizes)
        shared = sum(source != i for i, source in enumerate(config.kv_sources))
        _, factor = _turning(config) or (0, 1.0)
        scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": factor} if factor != 1 else {}
        experts = {
            "expert_count": config.num_experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.expert_size,
        }
        return (
            scaled
            | (experts if config.num_experts else {})
            | {
                "attention.head_count_kv": heads[0] if len({*heads}) == 1 else heads,
                "attention.key_length": full,
                "attention.value_length": full,
                "attention.key_length_swa": local,
                "attention.value_length_swa": local,
                "attention.shared_kv_layers": shared,
                "attention.sliding_window": next(window for window in windows if window is not None),
                "attention.sliding_window_pattern": [window is not None for window in windows],
                "embedding_length_per_layer_input": config.per_layer_size,
                "final_logit_softcapping": config.logit_cap or 0.0,
                "feed_forward_length": sizes[0] if len({*sizes}) == 1 else sizes,
                "rope.dimension_count": full,
                "rope.dimension_count_swa": local,
            }
        )

    def factors(self, config: Gemma4Config) -> dict[str, NDArray[np.float32]]:
        """The factors of the pairs in layers without a window. [D / 2]"""
        turning, _ = _turning(config) or (0, 1.0)
        pairs = len(_full(config).frequencies)
        return {"rope_freqs.weight": np.where(np.arange(pairs) < turning, 1, STILL).astype(np.float32)}

    def written(self, name: str, tensors: Mapping[str, Written], config: Gemma4Config) -> dict[str, Written] | None:
        """The router's scales."""
        rest = layer_name(name, "layers") or ""
        file = next((file for file, ours in SCALES.items() if ours == rest), None)
        if file is None:
            return None
        experts = file == "ffn_down_exps.scale"
        scale = Shifted(tensors[name].parts[0], 0.0, 1.0 if experts else config.hidden_size**0.5)
        return {renamed(name, file, "blk"): unrounded(scale, scale.shape)}


def _full(config: Gemma4Config) -> RotaryConfig:
    """Rotary embedding of layers without a window."""
    return next(rotary for rotary, window in zip(config.rotaries, config.windows, strict=True) if window is None)


def _turning(config: Gemma4Config) -> tuple[int, float] | None:
    """How many pairs turn without a window, and by what their frequencies are divided; None: not by one number."""
    rotary = _full(config)
    frequencies = np.array(rotary.frequencies)
    turning, pairs = int((frequencies > 0).sum()), np.arange(len(frequencies)) / len(frequencies)
    if not turning or (frequencies[turning:] > 0).any():
        return None
    factors = rotary.base ** -pairs[:turning] / frequencies[:turning]
    factor = float(f"{factors[0]:.7g}")
    return (turning, factor) if np.allclose(factors, factor, rtol=1e-5) else None
