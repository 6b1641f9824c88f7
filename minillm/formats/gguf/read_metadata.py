"""The metadata of a GGUF file as the fields of a config.json, and its tensors by the names that `build` asks for.

`architectures.py` says what llama.cpp calls things. The family's `read_config` then reads the result as it would
read config.json. Fused Q, K, V are stored as minillm uses them, gains of norms as well: not less 1 as in Gemma's
checkpoints. A matrix of all experts of a layer is one tensor in the file, and one for each expert here: a view of the
same bytes.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Tensor
from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ...models.rotary import read_rotary, yarn_scale
from ..tensors import StoredTensor
from .architecture import LONGROPE, OPTIONAL, ROTARY_FACTORS, Architecture
from .architectures import ARCHITECTURES
from .file import GGUF, Array
from .keys import check_keys
from .names import heads_field, in_halves, is_convolution, published_name, taps_first
from .tensors import BlockTensor, open_tensors
from .translations import translation_of

logger = logging.getLogger("minillm")

Stored = dict[str, StoredTensor | BlockTensor]
"""Tensors by their names in the file"""

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
"""Fields with the number of experts"""
_FUSED, _GATE, _UP = (f".ffn_{name}_exps." for name in ("gate_up", "gate", "up"))
"""Tensors of all experts: the first holds the others, one below the other, in some files"""
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
    own = translation_of(prefix)
    raw: dict[str, Any] = {"model_type": architecture.model_type} | dict(architecture.fields)
    by_layer = _convolutions(gguf, f"{prefix}.attention.head_count_kv") if architecture.convolves else {}
    raw |= by_layer
    for key, name in architecture.keys.items():
        if name in by_layer or key in own.keys:
            continue
        value = _value(gguf, f"{prefix}.{key}")
        if key == "attention.sliding_window" and value == 0:
            continue  # there is none
        if value is not None:
            raw[name] = value
        elif key not in OPTIONAL | architecture.optional:
            raise CheckpointError(f"{gguf.path} lacks {prefix}.{key}")
    for name, tensor in architecture.flags.items():
        raw[name] = tensor in gguf.tensors
    raw["num_hidden_layers"] = _own_layers(gguf, raw["num_hidden_layers"])
    if "token_embd.weight" not in gguf.tensors:
        raise CheckpointError(f"{gguf.path} lacks the tensor token_embd.weight")
    raw["vocab_size"] = gguf.tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    ids = gguf.token_ids(raw["vocab_size"])
    raw |= {"bos_token_id": ids.get("bos"), "eos_token_id": gguf.end_ids(raw["vocab_size"]) or None}
    rotary = _rotary(gguf, raw, prefix, own_heads=own.own_heads)
    check_keys(gguf, architecture, raw)
    raw |= rotary | _unsaid(gguf, architecture, raw)
    return raw | own.fields(gguf, raw)


def _own_layers(gguf: GGUF, layers: Any) -> Any:
    """The number of layers without those that predict further tokens, which come last and are not run."""
    further = gguf.get(f"{gguf.metadata['general.architecture']}.nextn_predict_layers", int, 0)
    if not further:
        return layers
    if type(layers) is not int or not 0 < further < layers:
        raise CheckpointError(f"{gguf.path}: {further} of {layers!r:.40} layers cannot predict further tokens")
    return layers - further


def _convolutions(gguf: GGUF, key: str) -> dict[str, Any]:
    """K, and which layers have attention: those with key/value heads, where the file has a number for each layer."""
    numbers = gguf.numbers(key) if isinstance(gguf.metadata.get(key), Array) else None
    if numbers is None or not (numbers > 0).any():
        return {}
    kinds = ["full_attention" if heads else "conv" for heads in numbers]
    heads = sorted(set(numbers[numbers > 0].tolist()))
    if len(heads) > 1:
        raise UnsupportedModelError(f"{gguf.path}: {key} differs from layer to layer; minillm runs layers of one shape")
    return {"num_key_value_heads": heads[0], "layer_types": kinds}


def _unsaid(gguf: GGUF, architecture: Architecture, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that follow from others, by llama.cpp's own rules.

    Raises:
        UnsupportedModelError: a later family under the same name.
    """
    fields: dict[str, Any] = {}
    config = Fields(raw, str(gguf.path))
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
        fields["attention_multiplier"] = config.size("head_dim", shared) ** -0.5
    elif architecture.period is not None:
        period = config.size("sliding_window_pattern", architecture.period)
        slides = [(i + 1) % period > 0 for i in range(config.size("num_hidden_layers"))]
        fields["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
        of_model = raw["num_hidden_layers"] == architecture.shared_scale
        fields["query_pre_attn_scalar"] = shared if of_model else raw.get("head_dim", 256)
    return fields


def read_gguf_model(gguf: GGUF) -> tuple[dict[str, Any], dict[str, Tensor], Stored]:
    """A file's configuration, its tensors by the names that `build` asks for, and the same as stored.

    Raises:
        CheckpointError, UnsupportedModelError: as `read_gguf_config` and `open_tensors`; or a tensor cannot be what its
            name says.
    """
    raw, stored, architecture = read_gguf_config(gguf), open_tensors(gguf), architecture_of(gguf)
    factors = {name: stored[name].load() for name in (ROTARY_FACTORS, *LONGROPE) if name in stored}
    if ROTARY_FACTORS in factors:
        values, where = factors.pop(ROTARY_FACTORS), str(gguf.path)
        own = translation_of(gguf.metadata["general.architecture"]).rotary(values, raw, where)
        raw |= {"rope_scaling": llama3_scaling(values, raw, where)} if own is None else own
    if "longrope" not in architecture.scalings:
        factors = {}
    elif factors:
        factor = _value(gguf, _attention_factor_key(gguf))
        raw["rope_scaling"] = raw.get("rope_scaling", {"rope_type": "longrope"})
        raw["rope_scaling"] |= {LONGROPE[name]: values.tolist() for name, values in factors.items()}
        raw["rope_scaling"] |= {} if factor is None else {"attention_factor": factor}
    tensors: dict[str, Tensor] = {}
    further = _further(gguf, raw["num_hidden_layers"])
    for name, tensor in stored.items():
        if name != ROTARY_FACTORS and name not in factors and not name.startswith(further):
            tensors |= _renamed(gguf, architecture, name, tensor, raw)
    return raw, tensors, stored


def _further(gguf: GGUF, layers: int) -> tuple[str, ...]:
    """Prefixes of tensors that predict further tokens; a warning names them where there are such tensors."""
    count = gguf.get(f"{gguf.metadata['general.architecture']}.nextn_predict_layers", int, 0)
    prefixes = tuple(f"blk.{layers + i}." for i in range(count))
    if any(name.startswith(prefixes) for name in gguf.tensors if prefixes):
        logger.warning(
            "%s: left out: %s, which predicts further tokens", gguf.path, " and ".join(p.rstrip(".") for p in prefixes)
        )
    return prefixes


def _renamed(
    gguf: GGUF, architecture: Architecture, name: str, tensor: StoredTensor | BlockTensor, raw: Mapping[str, Any]
) -> dict[str, Tensor]:
    """A tensor by the name that `build` asks for, or the matrices in it by the names of each expert's."""
    where = f"{gguf.path}: tensor {name}"
    own = translation_of(gguf.metadata["general.architecture"]).read(name, tensor, raw, where)
    if own is not None:
        return own
    published, heads = published_name(architecture, name), heads_field(architecture, name)
    if published is None and _FUSED in name:
        gate, up = (published_name(architecture, name.replace(_FUSED, own)) for own in (_GATE, _UP))
        if gate is not None and up is not None:
            return _gate_and_up(tensor, gate, up, raw, where)
    if published is None:
        return {name: tensor}  # refused by its name, as a tensor that the configuration leaves no place for
    if heads is not None:
        count = raw.get(heads) or raw["num_attention_heads"]
        return {published: in_halves(tensor, count, where)}
    if is_convolution(name):
        return {published: taps_first(tensor)}
    if "*" not in published:
        return {published: tensor}
    _check_experts(tensor, raw, where, bias=name.endswith(".bias"))
    return {published.replace("*", str(expert)): tensor.item(expert) for expert in range(tensor.shape[0])}


def _gate_and_up(
    tensor: StoredTensor | BlockTensor, gate: str, up: str, raw: Mapping[str, Any], where: str
) -> dict[str, Tensor]:
    """The matrices of each expert in a tensor of all experts' gates and ups. [X, 2 F, E] -> 2 X [F, E]"""
    _check_experts(tensor, raw, where)
    F, tensors = tensor.shape[1] // 2, dict[str, Tensor]()
    for expert in range(tensor.shape[0]):
        matrix = tensor.item(expert)
        tensors[gate.replace("*", str(expert))] = matrix.part(0, 0, F)
        tensors[up.replace("*", str(expert))] = matrix.part(0, F, tensor.shape[1])
    return tensors


def _check_experts(
    tensor: StoredTensor | BlockTensor, raw: Mapping[str, Any], where: str, *, bias: bool = False
) -> None:
    """Refuse a tensor that is not of as many experts as the metadata say."""
    experts = next((raw[name] for name in _EXPERTS if name in raw), None)
    axes = "[experts, outputs]" if bias else "[experts, outputs, inputs]"
    if len(tensor.shape) != axes.count(",") + 1 or tensor.shape[0] != experts:
        raise CheckpointError(
            f"{where} should have shape {axes} for {experts!r:.40} experts, found {list(tensor.shape)}"
        )


def _value(gguf: GGUF, key: str) -> Any:
    """A metadata entry; for an array with a number for each layer, the number if all are equal.

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


def _rotary(gguf: GGUF, raw: Mapping[str, Any], prefix: str, *, own_heads: bool) -> dict[str, Any]:
    """Fields of rotary position embedding: its share of a head unless it is read elsewhere, and its scaling."""
    fields: dict[str, Any] = {}
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    if type(width) is not int or type(heads) is not int or not 0 < heads <= width:
        raise CheckpointError(f"{gguf.path}: {heads!r:.40} heads cannot share a width of {width!r:.40}")
    if own_heads:
        return _rotary_scaling(gguf, prefix)
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
    elif scale != 1 and not gguf.tensors.keys() & LONGROPE.keys():
        raise UnsupportedModelError(
            f"{gguf.path}: {_attention_factor_key(gguf)} is {scale:.6g} with rotary scaling {kind!r:.40}; minillm runs "
            "it with yarn and longrope"
        )
    if not architecture_of(gguf).whole_ramp:  # a family with scaling where config.json does not say otherwise
        table = table | {"truncate": False} if table else {"rope_type": "default"}
    return {"rope_scaling": table} if table else {}


def _attention_factor_key(gguf: GGUF) -> str:
    """The key of the factor of cosines and sines."""
    return f"{gguf.metadata['general.architecture']}.rope.scaling.attn_factor"


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
            f"{where}: the rotary factors of {ROTARY_FACTORS} are not those of Llama 3.1 to 3.3, which minillm runs"
        )
    return scaling
