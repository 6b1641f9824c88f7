"""Random weights as a GGUF file, which llama.cpp reads, for `peer_files.py`.

Llama, Qwen2 and GPT-2 have architectures of their own there. OPT has none, and gets GPT-2's with the same matrices.
That is the same work but for the activation: both normalise before attention, before the MLP and at the end, have
biases everywhere and learned positions, and tie the head to the embedding; GPT-2 has GELU where OPT has ReLU.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minillm.backends.weights import Tensor
from minillm.config import ModelConfig
from minillm.models import opt
from minillm.models.gpt2 import GPT2Config
from minillm.models.llama import LlamaConfig
from minillm.models.rotary import BASE

LLAMA_TYPES = {"f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}
"""Formats that llama.cpp makes of its f32 file; for Q4_0 it keeps the head in more bits by itself."""

Names = Mapping[str, tuple[str, ...]]
"""What the file has -> what we have, of which several go one after the other: a weight, and a bias where the model has
one. `{}` is the layer's number."""

_OPT: Names = {
    "token_embd": ("embed_tokens",),
    "position_embd": ("embed_positions",),
    "output_norm": ("final_layer_norm",),
    "blk.{}.attn_norm": ("layers.{}.self_attn_layer_norm",),
    "blk.{}.attn_qkv": tuple(f"layers.{{}}.self_attn.{name}_proj" for name in "qkv"),
    "blk.{}.attn_output": ("layers.{}.self_attn.out_proj",),
    "blk.{}.ffn_norm": ("layers.{}.final_layer_norm",),
    "blk.{}.ffn_up": ("layers.{}.fc1",),
    "blk.{}.ffn_down": ("layers.{}.fc2",),
}
_GPT2: Names = {
    "token_embd": ("wte",),
    "position_embd": ("wpe",),
    "output_norm": ("ln_f",),
    "blk.{}.attn_norm": ("h.{}.ln_1",),
    "blk.{}.attn_qkv": ("h.{}.attn.c_attn",),
    "blk.{}.attn_output": ("h.{}.attn.c_proj",),
    "blk.{}.ffn_norm": ("h.{}.ln_2",),
    "blk.{}.ffn_up": ("h.{}.mlp.c_fc",),
    "blk.{}.ffn_down": ("h.{}.mlp.c_proj",),
}
_LLAMA: Names = {
    "token_embd": ("embed_tokens",),
    "output_norm": ("norm",),
    "output": ("lm_head",),
    "blk.{}.attn_norm": ("layers.{}.input_layernorm",),
    "blk.{}.attn_q": ("layers.{}.self_attn.q_proj",),
    "blk.{}.attn_k": ("layers.{}.self_attn.k_proj",),
    "blk.{}.attn_v": ("layers.{}.self_attn.v_proj",),
    "blk.{}.attn_output": ("layers.{}.self_attn.o_proj",),
    "blk.{}.ffn_norm": ("layers.{}.post_attention_layernorm",),
    "blk.{}.ffn_gate": ("layers.{}.mlp.gate_proj",),
    "blk.{}.ffn_up": ("layers.{}.mlp.up_proj",),
    "blk.{}.ffn_down": ("layers.{}.mlp.down_proj",),
}
LAYOUTS: dict[str, tuple[str, Names]] = {
    "opt": ("gpt2", _OPT),
    "gpt2": ("gpt2", _GPT2),
    "llama": ("llama", _LLAMA),
    "qwen2": ("qwen2", _LLAMA),
}
"""model_type -> architecture in llama.cpp, names."""


def write_gguf(config: ModelConfig, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """A model as a GGUF file in float32, without a vocabulary: token ids come in and logits go out.

    Args:
        config: the model
        raw: its config.json
        tensors: its weights
        path: of the file
    """
    import gguf

    architecture, names = LAYOUTS[config.model_type]
    sources = dict(_sources(names, tensors, config.num_layers))
    extra = _rotary_factors(config, raw) if isinstance(config, LlamaConfig) else {}
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config, raw)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, parts in sources.items():
        rows = sum(tensors[part].shape[0] - _offset(part) for part in parts)
        size = (rows, *tensors[parts[0]].shape[1:])
        writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * int(np.prod(size)))
    for name, array in extra.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parts in sources.items():
        loaded = [tensors[part].load()[_offset(part) :] for part in parts]
        writer.write_tensor_data(_in_pairs(name, np.concatenate(loaded), config))
    for array in extra.values():
        writer.write_tensor_data(array)
    writer.close()


def _sources(names: Names, tensors: Mapping[str, Tensor], layers: int) -> Iterator[tuple[str, list[str]]]:
    """Every tensor's name in the file, and the names of what it is made of."""
    for name, parts in names.items():
        for i in range(layers if "{}" in name else 1):
            for kind in ("weight", "bias"):
                sources = [f"{part.format(i)}.{kind}" for part in parts]
                if all(source in tensors for source in sources):
                    yield f"{name.format(i)}.{kind}", sources


def _offset(name: str) -> int:
    """The first rows of OPT's position table stand for no position, and GPT-2's has none of them."""
    return opt.POSITION_OFFSET if name == "embed_positions.weight" else 0


def _write_sizes(writer: Any, config: ModelConfig, raw: Mapping[str, Any]) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(config, LlamaConfig):
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(raw.get("rope_theta", BASE))
        writer.add_layer_norm_rms_eps(config.epsilon)
    else:
        writer.add_layer_norm_eps(config.epsilon if isinstance(config, GPT2Config) else opt.NORM_EPSILON)


def _in_pairs(name: str, array: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """Of "llama", the rows of Q and K as it wants them.

    Its rotation turns neighbours of a head, 2 j and 2 j + 1, where checkpoints of Hugging Face turn j and j + D / 2.
    "qwen2" does as those.
    """
    kind = name.split(".")[-2]
    if config.model_type != "llama" or kind not in ("attn_q", "attn_k"):
        return array
    heads = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])  # [H D, ...] -> [H, 2, D/2, ...]
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(array.shape)  # -> [H, D/2, 2, ...] -> [H D, ...]


def _rotary_factors(config: LlamaConfig, raw: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """What "llama" divides the plain frequencies by, where they are scaled (Llama 3.1). [D / 2]"""
    D = config.head_dim
    plain = raw.get("rope_theta", BASE) ** (-np.arange(0, D, 2) / D)
    factors = (plain / config.rotary.frequencies).astype(np.float32)
    return {} if np.allclose(factors, 1) else {"rope_freqs.weight": factors}


def quantize_gguf(source: Path, path: Path, form: str) -> None:
    """Have llama.cpp write a file in another format, as its own tool does.

    Raises:
        RuntimeError: it refuses.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{LLAMA_TYPES[form]}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not write {path.name}")


def gguf_bytes(path: Path) -> int:
    """Bytes of the weights that one token needs: without the tables of which it needs a row."""
    import gguf

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    looked_up: Sequence[str] = ("position_embd.weight", "rope_freqs.weight")
    if "output.weight" in sizes:
        looked_up = (*looked_up, "token_embd.weight")
    return sum(size for name, size in sizes.items() if name not in looked_up)
