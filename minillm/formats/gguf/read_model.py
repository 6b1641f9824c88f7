"""GGUF files as sources of models: their metadata as a config.json, their tensors by the names that `build` asks for.

`gguf_architectures.py` says what llama.cpp calls things. The family's `read_config` then reads the result as it would
read config.json.

llama.cpp rotates neighbouring pairs of a head in some architectures, and its converter reorders the rows of Q and K for
that; `permuted` names them, and here the order is undone. Fused Q, K, V are stored as minillm uses them, gains of norms
as well: not less 1 as in Gemma's checkpoints. A matrix of all experts of a layer is one tensor in the file, and one for
each expert here: a view of the same bytes.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Rearranged, Tensor
from ...config import Fields, ModelConfig
from ...errors import CheckpointError, UnsupportedModelError
from ...models.rotary import RotaryConfig, read_rotary, rope_table, yarn_scale
from .architectures import ARCHITECTURES, Architecture
from .file import GGUF, Array, read_shards
from .keys import check_keys
from .tensors import FLOATS, GGUFTensors, kept_dtype, open_tensors

logger = logging.getLogger("minillm")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ROTARY_FACTORS = "rope_freqs.weight"
_LONGROPE = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
"""Tensors in the file -> fields of rotary scaling"""
_LARGEST = float(np.finfo(np.float32).max)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of all published Llama 3.1 to 3.3 but for its factor, which a GGUF file has only as its result"""


def architecture_of(gguf: GGUF) -> Architecture:
    """The entry of a file's architecture.

    Raises:
        UnsupportedModelError: there is none; the message lists those that there are.
        CheckpointError: the file does not name it.
    """
    name = gguf.get("general.architecture", str)
    if name is None:
        raise CheckpointError(f"{gguf.path} does not say which model it is: general.architecture is missing")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.path}: general.architecture is {name!r:.60}; of GGUF files minillm runs "
            f"{', '.join(map(repr, ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def read_gguf_config(gguf: GGUF) -> dict[str, Any]:
    """The fields of config.json that the metadata and the list of tensors say.

    Raises:
        CheckpointError: one is missing or of the wrong type.
        UnsupportedModelError: the architecture, its rotary scaling, or sizes that differ from layer to layer.
    """
    architecture, prefix = architecture_of(gguf), gguf.metadata["general.architecture"]
    raw: dict[str, Any] = {"model_type": architecture.model_type} | dict(architecture.fields)
    for key, name in architecture.keys.items():
        value = _value(gguf, f"{prefix}.{key}")
        if key == "attention.sliding_window" and value == 0:
            continue  # there is none
        if value is not None:
            raw[name] = value
        elif key not in architecture.optional:
            raise CheckpointError(f"{gguf.path} lacks {prefix}.{key}")
    for name, tensor in architecture.flags.items():
        raw[name] = tensor in gguf.tensors
    if "token_embd.weight" not in gguf.tensors:
        raise CheckpointError(f"{gguf.path} lacks the tensor token_embd.weight")
    raw["vocab_size"] = gguf.tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    raw |= token_ids(gguf, raw["vocab_size"])
    rotary = _rotary(gguf, raw, prefix)
    check_keys(gguf, architecture, raw)
    return raw | rotary | _unsaid(gguf, architecture, raw)


def _unsaid(gguf: GGUF, architecture: Architecture, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that follow from others, by llama.cpp's own rules.

    Raises:
        UnsupportedModelError: a later family under the same name.
    """
    fields: dict[str, Any] = {}
    found = Fields(raw, str(gguf.path))
    shared = raw["hidden_size"] // raw["num_attention_heads"]
    if architecture.model_type == "granite" and gguf.metadata.get("granite.rope.scaling.finetuned") is False:
        raise UnsupportedModelError(
            f"{gguf.path}: granite.rope.scaling.finetuned is false, which is Granite 4 without positions; minillm runs "
            "Granite 3"
        )
    if architecture.model_type == "llama" and raw.get("num_local_experts"):
        fields["model_type"] = "mixtral"
    elif architecture.model_type == "llama" and raw.get("sliding_window") is not None:
        fields["model_type"] = "mistral"
    elif architecture.model_type == "granite" and "attention_multiplier" not in raw:
        fields["attention_multiplier"] = found.size("head_dim", shared) ** -0.5
    elif architecture.period is not None:
        period = found.size("sliding_window_pattern", architecture.period)
        slides = [(i + 1) % period > 0 for i in range(found.size("num_hidden_layers"))]
        fields["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
        of_model = raw["num_hidden_layers"] == architecture.shared_scale
        fields["query_pre_attn_scalar"] = shared if of_model else raw.get("head_dim", 256)
    return fields


def read_gguf_model(gguf: GGUF) -> tuple[dict[str, Any], dict[str, Tensor], GGUFTensors]:
    """A file's configuration, its tensors by the names that `build` asks for, and the same as stored.

    Raises:
        CheckpointError, UnsupportedModelError: as `read_gguf_config`, `open_tensors` and `rename_tensors`.
    """
    raw, stored = read_gguf_config(gguf), open_tensors(gguf)
    return raw, rename_tensors(gguf, stored, raw), stored


def main_dtype(gguf: GGUF) -> str:
    """The format that most numbers of matrices are kept in, by its name in `formats.STORED_FORMATS`."""
    counts: Counter[str] = Counter()
    for tensor in (tensor for shard in read_shards(gguf) for tensor in shard.tensors.values()):
        if len(tensor.shape) > 1:
            counts[kept_dtype(tensor.type)] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else FLOATS["F32"]


def token_ids(gguf: GGUF, vocab_size: int) -> dict[str, Any]:
    """`bos_token_id`, and `eos_token_id`: the ids that end a text, a turn or a message, of those in the vocabulary."""
    stored = {name: gguf.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "eom")}
    ids = {name: i for name, i in stored.items() if i is not None and 0 <= i < vocab_size}
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    return {"bos_token_id": ids.get("bos"), "eos_token_id": list(dict.fromkeys(ends)) or None}


def _value(gguf: GGUF, key: str) -> Any:
    """A metadata entry; of an array with one number for each layer that number, if it is the same for all.

    A fraction is that which was written, 0.22, and not the nearest float32 to it, 0.2199999988.
    """
    value = gguf.metadata.get(key)
    if isinstance(value, float) and abs(value) < _LARGEST and value == np.float32(value):
        return float(str(np.float32(value)))
    if not isinstance(value, Array):
        return value
    numbers = gguf.numbers(key)
    if numbers is None or not len(numbers) or (numbers != numbers[0]).any():
        raise UnsupportedModelError(f"{gguf.path}: {key} differs from layer to layer; minillm runs layers of one shape")
    return numbers[0].item()


def _rotary(gguf: GGUF, raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Fields of rotary position embedding: its share of a head, and its scaling."""
    fields: dict[str, Any] = {}
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    if type(width) is not int or type(heads) is not int or not 0 < heads <= width:
        raise CheckpointError(f"{gguf.path}: {heads!r:.40} heads cannot share a width of {width!r:.40}")
    head_dim = raw.get("head_dim") or width // heads
    if type(head_dim) is not int:
        raise CheckpointError(f"{gguf.path}: {prefix}.attention.key_length should be a width, found {head_dim!r:.40}")
    rotated = gguf.get(f"{prefix}.rope.dimension_count", int)
    if rotated is not None and rotated != head_dim:
        # the next number up: its product with the width is not rounded to below the whole number it stands for
        fields["partial_rotary_factor"] = fields["rotary_pct"] = math.nextafter(rotated / head_dim, 2)
    elif rotated is not None:
        fields["rotary_pct"] = 1.0
    value_dim = gguf.get(f"{prefix}.attention.value_length", int)
    if value_dim is not None and value_dim != head_dim:
        raise UnsupportedModelError(
            f"{gguf.path}: keys have width {head_dim} and values {value_dim}; minillm runs one width for both"
        )
    return fields | _rotary_scaling(gguf, prefix)


def _rotary_scaling(gguf: GGUF, prefix: str) -> dict[str, Any]:
    """The table of rotary scaling; empty without scaling."""
    factor = gguf.get(f"{prefix}.rope.scaling.factor", float) or gguf.get(f"{prefix}.rope.scale_linear", float) or 1.0
    kind = gguf.get(f"{prefix}.rope.scaling.type", str) or ("linear" if factor != 1 else "none")
    if kind not in ("none", "linear", "yarn") and kind not in architecture_of(gguf).scalings:
        raise UnsupportedModelError(
            f"{gguf.path}: {prefix}.rope.scaling.type is {kind!r:.60}; minillm runs linear, yarn"
        )
    table: dict[str, Any] = {}
    if kind != "none":
        table = {"rope_type": kind, "factor": factor}
        if (original := gguf.get(f"{prefix}.rope.scaling.original_context_length", int)) is not None:
            table["original_max_position_embeddings"] = original
    scale = gguf.get(_attention_factor_key(gguf), float, 1.0)
    if kind == "yarn" and scale != 1:  # a factor beside YaRN's own, where config.json has their product
        table["attention_factor"] = _value(gguf, _attention_factor_key(gguf)) * yarn_scale(factor)
    elif scale != 1 and not gguf.tensors.keys() & _LONGROPE.keys():
        raise UnsupportedModelError(
            f"{gguf.path}: {_attention_factor_key(gguf)} is {scale:.6g} with rotary scaling {kind!r:.40}; minillm runs "
            "it with yarn and longrope"
        )
    return {"rope_scaling": table} if table else {}


def _attention_factor_key(gguf: GGUF) -> str:
    """The key of the factor of cosines and sines."""
    return f"{gguf.metadata['general.architecture']}.rope.scaling.attn_factor"


def rename_tensors(gguf: GGUF, stored: GGUFTensors, raw: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors by the names that `build` asks for, in the order in which it uses them.

    Rotary factors, which llama.cpp stores as a tensor, become a field of `raw`.

    Raises:
        UnsupportedModelError: factors other than those of Llama 3.1 to 3.3.
    """
    architecture = architecture_of(gguf)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name == _ROTARY_FACTORS:
            raw["rope_scaling"] = llama3_scaling(tensor.load(), raw, str(gguf.path))
            continue
        if name in _LONGROPE and "longrope" in architecture.scalings:
            raw["rope_scaling"] = raw.get("rope_scaling", {"rope_type": "longrope"}) | {
                _LONGROPE[name]: tensor.load().tolist()
            }
            factor = _value(gguf, _attention_factor_key(gguf))
            raw["rope_scaling"] |= {} if factor is None else {"attention_factor": factor}
            continue
        stem, _, kind = name.rpartition(".")
        number = _NUMBER.search(stem)
        pattern = _NUMBER.sub("N", stem, count=1)
        if kind not in ("weight", "bias") or pattern not in architecture.tensors:
            tensors[name] = tensor  # refused by its name, as a tensor that the configuration leaves no place for
            continue
        ordered: Tensor = tensor
        if pattern in architecture.permuted:
            heads = raw.get(architecture.permuted[pattern]) or raw["num_attention_heads"]
            ordered = in_halves(tensor, heads, f"{gguf.path}: tensor {name}")
        renamed = architecture.tensors[pattern]
        renamed = f"{renamed.replace('.N.', f'.{number[0]}.') if number else renamed}.{kind}"
        if "*" not in renamed:
            tensors[renamed] = ordered
        elif len(tensor.shape) != 3 or tensor.shape[0] != raw.get("num_local_experts"):
            raise CheckpointError(
                f"{gguf.path}: tensor {name} should have shape [experts, outputs, inputs] for "
                f"{raw.get('num_local_experts')!r:.40} experts, found {list(tensor.shape)}"
            )
        else:
            tensors |= {renamed.replace("*", str(expert)): tensor.item(expert) for expert in range(tensor.shape[0])}
    return tensors


def gguf_name(architecture: Architecture, name: str) -> str:
    """The name in a GGUF file of a tensor that `build` asks for; those of a layer's experts have one name."""
    stem, _, kind = name.rpartition(".")
    number = _NUMBER.search(stem)
    pattern = _NUMBER.sub("*", _NUMBER.sub("N", stem, count=1))
    stored = next(theirs for theirs, ours in architecture.tensors.items() if ours == pattern)
    return f"{stored.replace('.N.', f'.{number[0]}.') if number else stored}.{kind}"


def gguf_fields(raw: Mapping[str, Any], config: ModelConfig, where: str) -> tuple[str, dict[str, Any]]:
    """The architecture's name and its metadata entries; `read_gguf_config` reads them back.

    Raises:
        UnsupportedModelError: llama.cpp does not run the family, or not this configuration of it.
    """
    known = {kin: name for name, each in ARCHITECTURES.items() for kin in (each.model_type, *each.kin)}
    if config.model_type not in known:
        raise UnsupportedModelError(
            f"{where}: llama.cpp does not run {config.model_type!r}; GGUF files are written of "
            f"{', '.join(sorted(known))}"
        )
    name = known[config.model_type]
    architecture = ARCHITECTURES[name]
    _refuse_other(architecture, config, where)
    rotary, local = _rotaries(config, where)
    fields = Fields(_text_part(raw))
    found = {
        "block_count": config.num_layers,
        "context_length": fields.size("max_position_embeddings", config.max_positions)
        if rotary
        else config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_epsilon": getattr(config, "epsilon", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "epsilon", None),
        "attention.sliding_window": _window(architecture, config, where),
        "attention.sliding_window_pattern": _period(architecture, config, where),
        "attn_logit_softcapping": getattr(config, "score_cap", None),
        "final_logit_softcapping": getattr(config, "logit_cap", None),
        "expert_count": config.num_experts or None,
        "expert_used_count": config.experts_per_token or None,
        "expert_feed_forward_length": getattr(config, "expert_size", None),
        "use_parallel_residual": getattr(config, "parallel", None),
    }
    if config.model_type == "granite":  # whose configuration has products of them
        names = {key: field for key, field in architecture.keys.items() if "scale" in key}
        found |= {key: float(fields.number(field, 1.0)) for key, field in names.items()}
        found["attention.layer_norm_rms_epsilon"] = fields.number("rms_norm_eps", 1e-6)
    if rotary is not None:
        found |= {"rope.freq_base": float(rotary.base), "rope.scaling.original_context_length": rotary.short}
    if local is not None:
        found["rope.freq_base_swa"] = float(local.base)
    entries = {key: found[key] for key in architecture.keys if found.get(key) is not None}
    if "attention.key_length" in entries:
        entries["attention.value_length"] = config.head_dim
    if rotary is not None:
        entries["rope.dimension_count"] = 2 * len(rotary.frequencies)
        entries |= _scaling(architecture, _scaling_table(raw), rotary, where)
    return name, {f"{name}.{key}": value for key, value in (entries | {"vocab_size": config.vocab_size}).items()}


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text model, which those with a vision tower have in a table."""
    part: Mapping[str, Any] = raw.get("text_config", raw)
    return part


def _scaling_table(raw: Mapping[str, Any]) -> Fields:
    """The table of rotary scaling; of Gemma 3 that of layers without a window."""
    fields = Fields(_text_part(raw))
    tables = fields.get("rope_parameters", {})
    if any(isinstance(table, dict) for table in tables.values()):
        fields = Fields({"rope_parameters": tables.get("full_attention", {})})
    return rope_table(fields)


def _rotaries(config: ModelConfig, where: str) -> tuple[RotaryConfig | None, RotaryConfig | None]:
    """Rotary embedding of layers without a window, and that of those with one; None: there is none.

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


def _refuse_other(architecture: Architecture, config: ModelConfig, where: str) -> None:
    """Refuse what llama.cpp computes otherwise."""
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
        f"with rotary embedding in all but each layer of {step} alone": getattr(config, "rotated", rotated) != rotated,
        f"with attention scaled by 1 / sqrt {width} alone": not np.allclose(scales, width, rtol=1e-12),
        "without dynamic rotary scaling": config.keys_follow_length and config.keys_change_beyond is None,
    }
    others |= {f"with {name} {only} alone": getattr(config, name) != only for name, only in architecture.needs.items()}
    others |= {f"with {name} alone": getattr(config, name) is None for name in architecture.capped}
    for other, is_so in others.items():
        if is_so:
            raise UnsupportedModelError(f"{where}: llama.cpp runs this family {other}")


def _window(architecture: Architecture, config: ModelConfig, where: str) -> int | None:
    """The sliding window, which llama.cpp ignores in most families."""
    windows = set(getattr(config, "windows", (getattr(config, "window", None),)))
    window: int | None = min((each for each in windows if each is not None), default=None)
    if architecture.period is not None or window is None:
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
    """Entries of rotary scaling; those of Llama 3 and LongRoPE have tensors as well (`rotary_factors`)."""
    kind = table.raw.get("rope_type") or table.raw.get("type") or "default"
    if rotary.short is not None:
        logger.warning(
            "%s: in a context over %d tokens llama.cpp rotates all texts as long ones, minillm those that are so long",
            where, rotary.short
        )  # fmt: skip
        return {"rope.scaling.attn_factor": float(rotary.scale)}
    if kind == "default":
        return {}
    if kind not in architecture.scalings:
        raise UnsupportedModelError(f"{where}: llama.cpp runs this family without rotary scaling {kind!r:.40}")
    if kind == "llama3":
        return {}
    written = {"rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
    written |= {"attention_factor", "mscale", "mscale_all_dim"} if kind == "yarn" else set()
    if others := set(table.raw) - written:
        raise UnsupportedModelError(f"{where}: rotary scaling with {', '.join(sorted(others))} is not written here")
    factor = float(table.number("factor"))
    entries = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn" and rotary.scale != yarn_scale(factor):
        entries["rope.scaling.attn_factor"] = rotary.scale / yarn_scale(factor)
    if "original_max_position_embeddings" in table.raw:
        entries["rope.scaling.original_context_length"] = table.size("original_max_position_embeddings")
    return entries


def rotary_factors(raw: Mapping[str, Any], config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """The tensors by which rotary frequencies are divided: those of Llama 3.1 to 3.3, and of LongRoPE. [D / 2] each"""
    rotary: RotaryConfig | None = getattr(config, "rotary", None)
    if rotary is None:
        return {}
    table = _scaling_table(raw)
    if rotary.short is not None:
        return {name: np.array(table.raw[field], np.float32) for name, field in _LONGROPE.items()}
    if table.raw.get("rope_type", table.raw.get("type")) != "llama3":
        return {}
    plain = read_rotary(Fields({"rope_theta": rotary.base}), 2 * len(rotary.frequencies), config.max_positions)
    return {_ROTARY_FACTORS: np.divide(plain.frequencies, rotary.frequencies).astype(np.float32)}


def in_file_order(tensor: Tensor, name: str, architecture: Architecture, config: ModelConfig) -> Tensor:
    """A tensor, by the name that `build` asks for, with its rows as in a file: `in_halves` undone, or itself."""
    counts = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    pattern = _NUMBER.sub("N", gguf_name(architecture, name).rpartition(".")[0], count=1)
    if pattern not in architecture.permuted:
        return tensor
    heads = counts[architecture.permuted[pattern]]

    def side_by_side(stored: NDArray[Any]) -> NDArray[Any]:
        halves = stored.reshape(heads, 2, -1, *stored.shape[1:])  # [H D, ...] -> [H, 2, D / 2, ...]
        return halves.swapaxes(1, 2).reshape(stored.shape)  # [H, 2, D / 2, ...] -> [H, D / 2, 2, ...] -> [H D, ...]

    return Rearranged(tensor, side_by_side)


def in_halves(tensor: Tensor, heads: int, where: str) -> Rearranged:
    """Rows of each head from llama.cpp's order, pairs side by side, to that of checkpoints, a half after the other.

    Raises:
        CheckpointError: the rows are not an even number for each head.
    """
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(f"{where} has {tensor.shape[0]} rows, which {heads!r:.40} heads cannot share in pairs")

    def apart(stored: NDArray[Any]) -> NDArray[Any]:
        pairs = stored.reshape(heads, -1, 2, *stored.shape[1:])  # [H D, ...] -> [H, D / 2, 2, ...]
        return pairs.swapaxes(1, 2).reshape(stored.shape)  # [H, D / 2, 2, ...] -> [H, 2, D / 2, ...] -> [H D, ...]

    return Rearranged(tensor, apart)


def llama3_scaling(factors: NDArray[np.float32], raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rotary scaling of Llama 3.1 to 3.3 that divides frequencies by these factors. [D / 2]

    Raises:
        UnsupportedModelError: it does not.
    """
    bare = {name: value for name, value in raw.items() if name != "rope_scaling"}
    scaling = {"rope_type": "llama3", "factor": float(np.round(factors.max(initial=1), 3)), **_LLAMA3}
    longest = Fields(raw).size("max_position_embeddings")
    plain, scaled = (
        np.array(read_rotary(Fields(fields), 2 * len(factors), longest).frequencies)
        for fields in (bare, bare | {"rope_scaling": scaling})
    )
    if not np.allclose(plain / scaled, factors, rtol=1e-3):
        raise UnsupportedModelError(
            f"{where}: the rotary factors of {_ROTARY_FACTORS} are not those of Llama 3.1 to 3.3, which minillm runs"
        )
    return scaling
