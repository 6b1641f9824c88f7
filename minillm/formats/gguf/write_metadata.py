"""A configuration as the metadata of a GGUF file: the inverse of `read_metadata.py`.

What llama.cpp would compute otherwise is refused by name; where it only approximates, a warning says so.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config import Fields, ModelConfig
from ...errors import UnsupportedModelError
from ...models import gpt_oss
from ...models.rotary import RotaryConfig, read_rotary, rope_table, yarn_scale
from ...models.text_parts import text_config
from .architecture import LONGROPE, ROTARY_FACTORS, Architecture
from .architectures import ARCHITECTURES
from .translations import translation_of

logger = logging.getLogger("minillm")

_RAMP = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Ends of YaRN's ramp, which llama.cpp has in one way in almost all architectures"""


def gguf_fields(raw: Mapping[str, Any], config: ModelConfig, where: str) -> tuple[str, dict[str, Any]]:
    """The architecture's name and its metadata entries; `read_gguf_config` reads them back.

    Raises:
        UnsupportedModelError: llama.cpp does not run the family, or not this configuration of it.
    """
    name = _architecture_for(config, where)
    architecture, own = ARCHITECTURES[name], translation_of(name)
    table = _scaling_table(raw)
    _refuse_other(architecture, config, own.refusals(config, table), where)
    rotary, local = _rotaries(config, where)
    fields = Fields(text_config(raw))
    values = {
        "block_count": config.num_layers,
        "context_length": fields.size("max_position_embeddings", config.max_positions)
        if rotary
        else config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": _kv_heads(config),
        "shortconv.l_cache": getattr(config, "taps", None),
        "attention.key_length": config.head_dim,
        "attention.layer_norm_epsilon": getattr(config, "epsilon", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "epsilon", None),
        "attention.sliding_window": None if own.own_rotary else _window(architecture, config, where),
        "attention.sliding_window_pattern": _period(architecture, config, where),
        "attn_logit_softcapping": getattr(config, "score_cap", None),
        "final_logit_softcapping": getattr(config, "logit_cap", None),
        "expert_count": config.num_experts or None,
        "expert_used_count": config.experts_per_token or None,
        "expert_feed_forward_length": getattr(config, "expert_size", None),
        "use_parallel_residual": getattr(config, "parallel", None),
        "logit_scale": getattr(config, "logit_scale", None),
    }
    if "residual_scale" in architecture.keys:  # whose configuration has products of them
        factors = {key: field for key, field in architecture.keys.items() if "scale" in key}
        values |= {key: float(fields.number(field, 1.0)) for key, field in factors.items()}
        values["attention.layer_norm_rms_epsilon"] = fields.number("rms_norm_eps", 1e-6)
    if rotary is not None:
        values |= {"rope.freq_base": float(rotary.base), "rope.scaling.original_context_length": rotary.short}
    if local is not None:
        values["rope.freq_base_swa"] = float(local.base)
    entries = {key: values[key] for key in architecture.keys if values.get(key) is not None}
    if "attention.key_length" in entries:
        entries["attention.value_length"] = config.head_dim
    if rotary is not None and not own.own_rotary:
        entries["rope.dimension_count"] = 2 * len(rotary.frequencies)
        if config.model_type == "gpt_oss" and not table.raw:
            table = Fields(gpt_oss.YARN)  # what the family has without a table
        usual = {field: value for field, value in table.raw.items() if field not in own.scaling_fields}
        entries |= _scaling(architecture, Fields(usual, table.source), rotary, where)
    entries |= own.entries(config, table, where)
    entries = {key: value for key, value in entries.items() if value is not None}
    return name, {f"{name}.{key}": value for key, value in (entries | {"vocab_size": config.vocab_size}).items()}


def _architecture_for(config: ModelConfig, where: str) -> str:
    """llama.cpp's name of a model's architecture.

    Raises:
        UnsupportedModelError: there is none, or none that is written.
    """
    if config.bidirectional and config.output not in ("states", "labels"):
        raise UnsupportedModelError(f"{where}: GGUF files of encoders are written without a head of each token")
    written = {name: table for name, table in ARCHITECTURES.items() if table.bidirectional == config.bidirectional}
    names = dict[str, str]()
    for name, table in written.items():
        for kin in (table.model_type, *table.kin):
            names.setdefault(kin, name)
    if config.model_type not in names:
        raise UnsupportedModelError(
            f"{where}: no GGUF file is written of {config.model_type!r}, but of {', '.join(sorted(names))}"
        )
    name = names[config.model_type]
    return ARCHITECTURES[name].with_experts or name if config.num_experts else name


def _kv_heads(config: ModelConfig) -> int | list[int]:
    """K; where some layers have a convolution, that of each layer."""
    attending = config.layers_with_keys()
    if len(attending) == config.num_layers:
        return config.num_kv_heads
    return [config.num_kv_heads if i in attending else 0 for i in range(config.num_layers)]


def _scaling_table(raw: Mapping[str, Any]) -> Fields:
    """The table of rotary scaling; for Gemma 3, the one of layers without a window."""
    fields = Fields(text_config(raw))
    tables = fields.get("rope_parameters", {})
    if any(isinstance(table, dict) for table in tables.values()):
        fields = Fields({"rope_parameters": tables.get("full_attention", {})})
    return rope_table(fields)


def _rotaries(config: ModelConfig, where: str) -> tuple[RotaryConfig | None, RotaryConfig | None]:
    """Rotary embeddings of layers without a window and of layers with one; None: there is none.

    Raises:
        UnsupportedModelError: the latter is scaled.
    """
    if not hasattr(config, "rotaries"):
        return getattr(config, "rotary", None), None
    windows: tuple[int | None, ...] = getattr(config, "windows", ())
    of_layers = list(zip(config.rotaries, windows, strict=True))
    full = next((rotary for rotary, window in of_layers if window is None), None)
    local = next((rotary for rotary, window in of_layers if window is not None), None)
    if full is None or local is None or full == local:
        return full or local, local
    plain = read_rotary(Fields({"rope_theta": local.base}), 2 * len(local.frequencies), config.max_positions)
    if local.frequencies != plain.frequencies:
        raise UnsupportedModelError(f"{where}: llama.cpp has no rotary scaling in this family's layers with a window")
    return full, local


def _refuse_other(architecture: Architecture, config: ModelConfig, own: Mapping[str, bool], where: str) -> None:
    """Refuse what llama.cpp computes otherwise; `own` is what the architecture's `Translation` says of it."""
    layers, step = config.num_layers, architecture.unrotated
    activation = getattr(config, "activation", architecture.activation)
    rotated = tuple(step is None or (i + 1) % step > 0 for i in range(layers))
    width = config.hidden_size // config.num_heads if layers == architecture.shared_scale else config.head_dim
    scales = [scale**-2 for scale in getattr(config, "scales", ())] + [getattr(config, "query_scalar", width)]
    others = {
        f"with {architecture.activation} alone, not {activation}": activation != architecture.activation,
        "with heads of width E / H alone": architecture.square
        and config.num_heads * config.head_dim != config.hidden_size,
        "with as many key/value heads as heads alone": not architecture.grouped
        and config.num_kv_heads != config.num_heads,
        f"with rotary embedding in all but each layer of {step} alone": not architecture.says_rotation
        and getattr(config, "rotated", rotated) != rotated,
        f"with attention scaled by 1 / sqrt {width} alone": not np.allclose(scales, width, rtol=1e-12),
        "without dynamic rotary scaling": config.keys_follow_length and config.keys_change_beyond is None,
    }
    others |= {f"with {name} {only} alone": getattr(config, name) != only for name, only in architecture.needs.items()}
    others |= {f"with {name} alone": getattr(config, name) is None for name in architecture.capped}
    others |= own
    for other, is_so in others.items():
        if is_so:
            raise UnsupportedModelError(f"{where}: llama.cpp runs this family {other}")


def _window(architecture: Architecture, config: ModelConfig, where: str) -> int | None:
    """The sliding window, which llama.cpp ignores in most families."""
    windows = set(getattr(config, "windows", (getattr(config, "window", None),)))
    window: int | None = min((width for width in windows if width is not None), default=None)
    if architecture.period is not None or architecture.windows_by_layer or window is None:
        return window
    if window >= config.max_positions:
        return None
    if len(windows) > 1 or config.model_type not in ("mistral", "mixtral", "starcoder2", "phi3"):
        raise UnsupportedModelError(f"{where}: llama.cpp runs this family without sliding windows")
    logger.warning(
        "%s: llama.cpp runs this family without its sliding window: texts over %d tokens differ there", where, window
    )
    return window


def _period(architecture: Architecture, config: ModelConfig, where: str) -> int | None:
    """Every which layer has no sliding window; None where it is the family's own.

    Raises:
        UnsupportedModelError: layers in another order.
    """
    if architecture.period is None:
        return None
    slides = [window is not None for window in getattr(config, "windows", ())]
    for period in (architecture.period, *range(2, len(slides) + 2)):
        if slides == [(i + 1) % period > 0 for i in range(len(slides))]:
            return None if period == architecture.period else period
    raise UnsupportedModelError(f"{where}: llama.cpp runs this family with windows in all but each n-th layer alone")


def _scaling(architecture: Architecture, table: Fields, rotary: RotaryConfig, where: str) -> dict[str, Any]:
    """Entries of rotary scaling; Llama 3's and LongRoPE's have tensors as well (`rotary_factors`)."""
    kind = table.raw.get("rope_type") or table.raw.get("type") or "default"
    if rotary.short is not None:
        logger.warning(
            "%s: in a context over %d tokens llama.cpp rotates all texts as long ones, minillm those that are so long",
            where, rotary.short
        )  # fmt: skip
        return {"rope.scaling.attn_factor": float(rotary.scale)}
    if kind == "default" or (kind == "dynamic" and table.raw.get("alpha")):  # of a larger base
        return {}
    if kind not in architecture.scalings:
        raise UnsupportedModelError(f"{where}: llama.cpp runs this family without rotary scaling {kind!r:.40}")
    if kind == "llama3":
        return {}
    written = {"rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
    written |= {"attention_factor", "mscale", "mscale_all_dim"} if kind == "yarn" else set()
    written |= {name for name, usual in _RAMP.items() if table.number(name, usual) == usual}
    if not architecture.whole_ramp:
        written |= _ends_of_ramp(table, where)
    if others := set(table.raw) - written:
        raise UnsupportedModelError(f"{where}: rotary scaling with {', '.join(sorted(others))} is not written here")
    factor = float(table.number("factor"))
    entries = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn" and rotary.scale != yarn_scale(factor):
        entries["rope.scaling.attn_factor"] = rotary.scale / yarn_scale(factor)
    if "original_max_position_embeddings" in table.raw:
        entries["rope.scaling.original_context_length"] = table.size("original_max_position_embeddings")
    return entries


def _ends_of_ramp(table: Fields, where: str) -> set[str]:
    """The fields of YaRN's ramp, which files have none of: they are to be llama.cpp's but for its roundings.

    Raises:
        UnsupportedModelError: they are not; or the ramp is rounded, which files of the family cannot say.
    """
    if table.get("truncate", True):
        raise UnsupportedModelError(
            f"{where}: files of this family are read with truncate False in rotary scaling alone"
        )
    for name, usual in _RAMP.items():
        if table.number(name, usual) != usual:
            raise UnsupportedModelError(f"{where}: rotary scaling with {name} {table.raw[name]} is not written here")
    logger.warning("%s: llama.cpp rounds the ends of YaRN's ramp, which the model does not", where)
    return {"truncate", "beta_fast", "beta_slow"}


def rotary_factors(raw: Mapping[str, Any], config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """The tensors by which rotary frequencies are divided: Llama 3.1's to 3.3's, and LongRoPE's. [D / 2] each"""
    rotary: RotaryConfig | None = getattr(config, "rotary", None)
    if rotary is None:
        return {}
    table = _scaling_table(raw)
    if rotary.short is not None:
        return {name: np.array(table.raw[field], np.float32) for name, field in LONGROPE.items()}
    if table.raw.get("rope_type", table.raw.get("type")) != "llama3":
        return {}
    plain = read_rotary(Fields({"rope_theta": rotary.base}), 2 * len(rotary.frequencies), config.max_positions)
    return {ROTARY_FACTORS: np.divide(plain.frequencies, rotary.frequencies).astype(np.float32)}
