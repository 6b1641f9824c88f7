"""GGUF files as sources of models: their metadata as a config.json, their tensors by the names that `build` asks for.

A family is described once, in its own file. `ARCHITECTURES` says only what llama.cpp calls things: each metadata key
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and each tensor by its name in the family's published
checkpoints. The family's `read_config` then reads the result as it would read config.json.

llama.cpp rotates neighbouring pairs of a head in the architecture "llama", and its converter reorders the rows of Q and
K for that; `permuted` names them, and here the order is undone. Fused Q, K, V are stored as minillm uses them.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.weights import Rearranged, Tensor
from ..checkpoint.gguf import GGUF, Array, read_shards
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from .gguf_tensors import FLOATS, GGUFTensors, kept_dtype, open_tensors
from .rotary import BASE, read_rotary, rope_table

logger = logging.getLogger("minillm")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ROTARY_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of all published Llama 3.1 to 3.3 but for its factor, which a GGUF file has only as its result"""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """llama.cpp's words for a family."""

    model_type: str
    keys: Mapping[str, str]
    """Metadata key, without the architecture's prefix -> field of config.json"""
    optional: frozenset[str] = frozenset()
    """Keys that may be absent"""
    tensors: Mapping[str, str]
    """Tensor in the file -> in a checkpoint, without ".weight" and ".bias"; N is the number of the layer"""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Field of config.json that says whether a tensor is there -> the tensor in the file"""
    permuted: Mapping[str, str] = field(default_factory=dict)
    """Tensors whose rows are in llama.cpp's rotary order -> the field with their number of heads"""
    activation: str = "silu"
    """The family's own, which files do not name; llama.cpp takes the approximation by tanh for every GELU"""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Attribute of the configuration -> the one value that llama.cpp runs"""
    square: bool = False
    """All heads together are as wide as the model"""
    needs_output: bool = False
    """The LM head is stored also where it is the embedding"""
    written: bool = True
    """Whether minillm writes files of it, too"""


_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_GROUPED = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
}
_RMS = _GROUPED | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_OPTIONAL = frozenset({"attention.head_count_kv", "attention.key_length", "attention.sliding_window", "expert_count"})
_OPTIONAL |= {"rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"}

_SPLIT_ATTENTION = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.N.attn_norm": "layers.N.input_layernorm",
    "blk.N.attn_q": "layers.N.self_attn.q_proj",
    "blk.N.attn_k": "layers.N.self_attn.k_proj",
    "blk.N.attn_v": "layers.N.self_attn.v_proj",
    "blk.N.attn_output": "layers.N.self_attn.o_proj",
    "blk.N.ffn_norm": "layers.N.post_attention_layernorm",
}
_LLAMA = _SPLIT_ATTENTION | {
    "blk.N.ffn_gate": "layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "layers.N.mlp.up_proj",
    "blk.N.ffn_down": "layers.N.mlp.down_proj",
}
_GEMMA = _LLAMA | {  # gains of norms are as the model uses them, not less 1 as in checkpoints
    "blk.N.post_attention_norm": "layers.N.post_attention_layernorm",
    "blk.N.ffn_norm": "layers.N.pre_feedforward_layernorm",
    "blk.N.post_ffw_norm": "layers.N.post_feedforward_layernorm",
}
_GEMMA_27B = 62
"""Layers of the Gemma 3 whose scores are divided by the root of E / H, not of D; files do not say so"""
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",  # or mistral, which has the same name there
        keys=_RMS,
        optional=_OPTIONAL,
        tensors=_LLAMA,
        flags=_BIASES,
        permuted={"blk.N.attn_q": "num_attention_heads", "blk.N.attn_k": "num_key_value_heads"},
    ),
    "qwen2": Architecture(model_type="qwen2", keys=_RMS, optional=_OPTIONAL, tensors=_LLAMA, square=True),
    "qwen3": Architecture(
        model_type="qwen3",
        keys=_RMS,
        optional=_OPTIONAL,
        tensors=_LLAMA
        | {
            "blk.N.attn_q_norm": "layers.N.self_attn.q_norm",
            "blk.N.attn_k_norm": "layers.N.self_attn.k_norm",
        },
        flags={"attention_bias": "blk.0.attn_q.bias"},
        needs={"qkv_bias": False},
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        keys=_GROUPED | {"attention.layer_norm_epsilon": "norm_epsilon"},
        optional=_OPTIONAL,
        tensors=_SPLIT_ATTENTION | {"blk.N.ffn_up": "layers.N.mlp.c_fc", "blk.N.ffn_down": "layers.N.mlp.c_proj"},
        flags={"use_bias": "blk.0.ffn_up.bias"},
        activation="gelu_new",
        needs={"biases": True},
        square=True,
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        keys=_SIZES | {"feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        optional=_OPTIONAL,
        tensors={
            "token_embd": "wte",
            "position_embd": "wpe",
            "output_norm": "ln_f",
            "output": "lm_head",
            "blk.N.attn_norm": "h.N.ln_1",
            "blk.N.attn_qkv": "h.N.attn.c_attn",
            "blk.N.attn_output": "h.N.attn.c_proj",
            "blk.N.ffn_norm": "h.N.ln_2",
            "blk.N.ffn_up": "h.N.mlp.c_fc",
            "blk.N.ffn_down": "h.N.mlp.c_proj",
        },
        activation="gelu_new",
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        keys=_SIZES
        | {
            "rope.freq_base": "rotary_emb_base",
            "use_parallel_residual": "use_parallel_residual",
            "attention.layer_norm_epsilon": "layer_norm_eps",
        },
        optional=_OPTIONAL | {"use_parallel_residual"},
        tensors={
            "token_embd": "embed_in",
            "output_norm": "final_layer_norm",
            "output": "embed_out",
            "blk.N.attn_norm": "layers.N.input_layernorm",
            "blk.N.attn_qkv": "layers.N.attention.query_key_value",
            "blk.N.attn_output": "layers.N.attention.dense",
            "blk.N.ffn_norm": "layers.N.post_attention_layernorm",
            "blk.N.ffn_up": "layers.N.mlp.dense_h_to_4h",
            "blk.N.ffn_down": "layers.N.mlp.dense_4h_to_h",
        },
        flags={"attention_bias": "blk.0.attn_qkv.bias"},
        activation="gelu",
        needs={"attention_bias": True},
        needs_output=True,
    ),
    "bloom": Architecture(
        model_type="bloom",
        keys=_SIZES | {"context_length": "seq_length", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        optional=_OPTIONAL,
        tensors={
            "token_embd": "word_embeddings",
            "token_embd_norm": "word_embeddings_layernorm",
            "output_norm": "ln_f",
            "output": "lm_head",
            "blk.N.attn_norm": "h.N.input_layernorm",
            "blk.N.attn_qkv": "h.N.self_attention.query_key_value",
            "blk.N.attn_output": "h.N.self_attention.dense",
            "blk.N.ffn_norm": "h.N.post_attention_layernorm",
            "blk.N.ffn_up": "h.N.mlp.dense_h_to_4h",
            "blk.N.ffn_down": "h.N.mlp.dense_4h_to_h",
        },
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        keys=_RMS | {"final_logit_softcapping": "final_logit_softcapping"},
        optional=_OPTIONAL | {"final_logit_softcapping"},
        tensors=_GEMMA
        | {
            "blk.N.attn_q_norm": "layers.N.self_attn.q_norm",
            "blk.N.attn_k_norm": "layers.N.self_attn.k_norm",
        },
        activation="gelu_new",
        written=False,
    ),
}
"""By `general.architecture`. To add a family, add its entry."""


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
    raw: dict[str, Any] = {"model_type": architecture.model_type}
    for key, name in architecture.keys.items():
        value = _value(gguf, f"{prefix}.{key}")
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
    raw |= token_ids(gguf)
    if architecture.model_type == "llama" and raw.get("sliding_window") is not None:
        raw["model_type"] = "mistral"
    rotary = _rotary(gguf, raw, prefix)
    if architecture.model_type == "gemma3_text":
        shared = raw["hidden_size"] // raw["num_attention_heads"]
        raw["query_pre_attn_scalar"] = shared if raw["num_hidden_layers"] == _GEMMA_27B else raw.get("head_dim", 256)
    return raw | rotary


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


def token_ids(gguf: GGUF) -> dict[str, Any]:
    """`bos_token_id`, and `eos_token_id`: the ids that end a text, a turn or a message."""
    ids = {name: gguf.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "eom")}
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    return {"bos_token_id": ids["bos"], "eos_token_id": list(dict.fromkeys(ends)) or None}


def _value(gguf: GGUF, key: str) -> Any:
    """A metadata entry; of an array with one number for each layer that number, if it is the same for all."""
    value = gguf.metadata.get(key)
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
    factor = gguf.get(f"{prefix}.rope.scaling.factor", float) or gguf.get(f"{prefix}.rope.scale_linear", float) or 1.0
    kind = gguf.get(f"{prefix}.rope.scaling.type", str) or ("linear" if factor != 1 else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{gguf.path}: {prefix}.rope.scaling.type is {kind!r:.60}; minillm runs linear, yarn"
        )
    if kind != "none":
        fields["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if (original := gguf.get(f"{prefix}.rope.scaling.original_context_length", int)) is not None:
            fields["rope_scaling"]["original_max_position_embeddings"] = original
    return fields


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
        tensors[f"{renamed.replace('.N.', f'.{number[0]}.') if number else renamed}.{kind}"] = ordered
    return tensors


def gguf_name(architecture: Architecture, name: str) -> str:
    """The name in a GGUF file of a tensor that `build` asks for."""
    stem, _, kind = name.rpartition(".")
    number = _NUMBER.search(stem)
    pattern = _NUMBER.sub("N", stem, count=1)
    stored = next(theirs for theirs, ours in architecture.tensors.items() if ours == pattern)
    return f"{stored.replace('.N.', f'.{number[0]}.') if number else stored}.{kind}"


def gguf_fields(raw: Mapping[str, Any], config: ModelConfig, where: str) -> tuple[str, dict[str, Any]]:
    """The architecture's name and its metadata entries; `read_gguf_config` reads them back.

    Raises:
        UnsupportedModelError: llama.cpp does not run the family, or not this configuration of it.
    """
    model_type = "llama" if config.model_type == "mistral" else config.model_type
    names = (name for name, each in ARCHITECTURES.items() if each.model_type == model_type and each.written)
    name = next(names, None)
    if name is None:
        raise UnsupportedModelError(
            f"{where}: llama.cpp does not run {config.model_type!r}; GGUF files are written of "
            f"{', '.join(sorted({each.model_type for each in ARCHITECTURES.values() if each.written} | {'mistral'}))}"
        )
    architecture = ARCHITECTURES[name]
    _refuse_other(architecture, config, where)
    rotary = getattr(config, "rotary", None)
    fields = Fields(raw)
    found = {
        "block_count": config.num_layers,
        "context_length": fields.size("max_position_embeddings") if rotary else config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_epsilon": getattr(config, "epsilon", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "epsilon", None),
        "attention.sliding_window": _window(config, where),
        "use_parallel_residual": getattr(config, "parallel", None),
    }
    if rotary is not None:
        found["rope.freq_base"] = float(rope_table(fields).number("rope_theta", _base(fields)))
    entries = {key: found[key] for key in architecture.keys if found.get(key) is not None}
    if "attention.key_length" in entries:
        entries["attention.value_length"] = config.head_dim
    if rotary is not None:
        entries["rope.dimension_count"] = 2 * len(rotary.frequencies)
        entries |= _scaling(rope_table(fields), where)
    return name, {f"{name}.{key}": value for key, value in (entries | {"vocab_size": config.vocab_size}).items()}


def _base(fields: Fields) -> float:
    return fields.number("rope_theta", fields.number("rotary_emb_base", BASE))


def _refuse_other(architecture: Architecture, config: ModelConfig, where: str) -> None:
    """Refuse what llama.cpp computes otherwise."""
    activation = getattr(config, "activation", architecture.activation)
    if activation != architecture.activation:
        raise UnsupportedModelError(
            f"{where}: llama.cpp runs this family with {architecture.activation} alone, not {activation}"
        )
    if architecture.square and config.num_heads * config.head_dim != config.hidden_size:
        raise UnsupportedModelError(f"{where}: llama.cpp runs this family with heads of width E / H alone")
    for name, value in architecture.needs.items():
        if getattr(config, name) != value:
            raise UnsupportedModelError(f"{where}: llama.cpp runs this family with {name} {value} alone")
    scales = getattr(config, "scales", ())
    if any(scale != config.head_dim**-0.5 for scale in scales):
        raise UnsupportedModelError(f"{where}: llama.cpp scales attention by 1 / sqrt {config.head_dim} alone")
    if getattr(config, "keys_follow_length", False):
        raise UnsupportedModelError(f"{where}: llama.cpp has no dynamic rotary scaling")


def _window(config: ModelConfig, where: str) -> int | None:
    """The sliding window of all layers, which llama.cpp ignores in these families."""
    windows = set(getattr(config, "windows", (getattr(config, "window", None),)))
    window: int | None = min((each for each in windows if each is not None), default=None)
    if window is None or window >= config.max_positions:
        return None
    if len(windows) > 1 or config.model_type not in ("mistral", "starcoder2"):
        raise UnsupportedModelError(f"{where}: llama.cpp runs this family without sliding windows")
    logger.warning(
        "%s: llama.cpp runs this family without its sliding window: texts over %d tokens differ there", where, window
    )
    return window


def _scaling(table: Fields, where: str) -> dict[str, Any]:
    """Entries of rotary scaling; that of Llama 3 is a tensor (`rotary_factors`)."""
    kind = table.raw.get("rope_type") or table.raw.get("type") or "default"
    if kind in ("default", "llama3"):
        return {}
    own = set(table.raw) - {"rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings"}
    if own - {"partial_rotary_factor"}:
        raise UnsupportedModelError(f"{where}: rotary scaling with {', '.join(sorted(own))} is not written here")
    entries = {"rope.scaling.type": kind, "rope.scaling.factor": float(table.number("factor", 1.0))}
    if "original_max_position_embeddings" in table.raw:
        entries["rope.scaling.original_context_length"] = table.size("original_max_position_embeddings")
    return entries


def rotary_factors(raw: Mapping[str, Any], config: ModelConfig) -> NDArray[np.float32] | None:
    """The factors by which Llama 3.1 to 3.3 divide rotary frequencies, [D / 2]; None without such scaling."""
    rotary = getattr(config, "rotary", None)
    fields = Fields(raw)
    if rotary is None or rope_table(fields).raw.get("rope_type", rope_table(fields).raw.get("type")) != "llama3":
        return None
    bare = {"rope_theta": rope_table(fields).number("rope_theta", _base(fields))}
    plain = read_rotary(Fields(bare), 2 * len(rotary.frequencies), config.max_positions)
    factors: NDArray[np.float32] = np.divide(plain.frequencies, rotary.frequencies).astype(np.float32)
    return factors


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
