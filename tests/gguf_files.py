"""Tiny GGUF files, written by the package `gguf` from a config.json and random numbers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import quantize

from minillm.backends.cpu.selftest import random_blocks
from minillm.models import config_of, tensor_shapes
from minillm.reference.blocks import BLOCK_FORMATS

from .tiny import std_of

KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "intermediate_size": "feed_forward_length",
    "head_dim": "attention.key_length",
}
"""Of the Llama family"""

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


UNWRITTEN = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K")
"""Block formats that the package `gguf` reads and does not write"""


def to_gguf_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K as llama.cpp's converter orders them: a head's two halves, interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def arrays(raw: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, float32, by the names in minillm."""
    shapes = tensor_shapes(config_of(raw))
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(0, std_of(name, raw), shape).astype(np.float32) for name, shape in shapes.items()}
    return {n: v + np.float32(v.ndim == 1 and n.endswith(".weight")) for n, v in values.items()}


def write_tokenizer(writer: GGUFWriter, tokens: Sequence[str], **entries: Any) -> None:
    """Entries of the tokenizer; without any a byte-level one of these tokens, with one merge (`byte_tokens`)."""
    writer.add_token_list(list(tokens))
    merges = [" ".join(list(tokens)[:2])]
    for name, value in ({"model": "gpt2", "pre": "gpt-2", "merges": merges} | entries).items():
        key = f"tokenizer.ggml.{name}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)


def byte_tokens(size: int) -> list[str]:
    """The symbols of the 256 bytes, the first two together, and further tokens."""
    from minillm.text.tokenizer.layouts import BYTE_SYMBOLS

    symbols = list(BYTE_SYMBOLS)
    return [*symbols, "".join(symbols[:2]), *(f"<extra {i}>" for i in range(1, size - 256))][:size]


def write_llama(
    path: Path,
    raw: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    type_of: Callable[[str], Type] = lambda name: Type.F32,
    values: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
    **entries: Any,
) -> dict[str, np.ndarray]:
    """Write a model of the Llama family; returns the numbers before rounding, by the names in minillm.

    Args:
        path: the file
        raw: config.json
        architecture: llama, qwen2 or qwen3
        type_of: type of a matrix by its name in minillm
        values: the numbers; random if absent
        tokenizer: entries for `write_tokenizer`
        **entries: further metadata, without the architecture's prefix; dots as "__"
    """
    raw = raw or LLAMA
    values = values or arrays(raw)
    writer = GGUFWriter(str(path), architecture)
    for field, key in KEYS.items():
        value = raw.get(field)
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
    for name, value in entries.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    write_tokenizer(writer, **({"tokens": byte_tokens(raw["vocab_size"])} | (tokenizer or {})))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], raw["num_hidden_layers"])
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw.get("num_key_value_heads", raw["num_attention_heads"])}
    for name, value in values.items():
        stem, _, kind = name.rpartition(".")
        part = stem.rpartition(".")[2]
        if architecture == "llama" and part in heads:
            value = to_gguf_order(value, heads[part])
        target = f"{names.get_name(stem if stem == 'lm_head' else f'model.{stem}')}.{kind}"
        add_tensor(writer, target, value, type_of(name) if value.ndim > 1 else Type.F32)
    finish(writer)
    return values


def add_tensor(writer: GGUFWriter, name: str, value: np.ndarray, kind: Type = Type.F32) -> None:
    """Add a tensor, rounded to a type; blocks that the package `gguf` cannot round to have random numbers."""
    if kind == Type.F32:
        writer.add_tensor(name, value)
    elif kind.name in UNWRITTEN:
        rng = np.random.default_rng(len(name))
        writer.add_tensor(name, random_blocks(rng, BLOCK_FORMATS[kind.name], *value.shape).blocks, raw_dtype=kind)
    else:
        writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)


def finish(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
