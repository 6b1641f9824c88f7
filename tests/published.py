"""Checkpoints quantised as each published scheme defines it, written in plain NumPy; needs no other package.

Every writer rounds a matrix [out, in] and returns its stored parts by the ends of their names, and the matrix that they
mean. A second folder holds what they mean as an ordinary checkpoint, which transformers would read alike.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from minillm.models import building, family_named, family_of

from .tiny import RandomTensor, std_of

Parts = dict[str, np.ndarray]
Writer = Callable[[np.ndarray], tuple[Parts, np.ndarray]]
"""A matrix -> its parts, and the matrix that they mean"""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"model_type": "qwen2"},  # with biases
    "opt": {
        "model_type": "opt",
        "vocab_size": 96,
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 64,
    },
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 8},
    "gpt_neox": {  # whose Q, K and V are one matrix, head by head
        "model_type": "gpt_neox",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
}
CONFIGS["mixtral"] = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS["gemma2"] = LLAMA | {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16}
PREFIX = {"opt": "model.decoder.", "gpt_neox": "gpt_neox."}
"""The beginning of tensors' names, if not "model.\""""
ZEROS = "int4 with zero points"
UNQUANTISED = ("embed", "lm_head", "norm", "block_sparse_moe.gate")


@dataclass(frozen=True)
class Published:
    """A way to quantise."""

    config: dict[str, Any]
    """quantization_config"""
    write: Writer
    dtype: str
    """The dtype that minillm reads it as"""
    stored: str = "float16"
    """config.json's dtype"""


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to a dtype and back."""
    return values.astype(getattr(ml_dtypes, dtype, dtype)).astype(np.float32)


def write_pair(
    folder: Path,
    family: str,
    published: Published,
    *,
    seed: int = 0,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
    **fields: Any,
) -> tuple[Path, Path]:
    """Two checkpoint folders: quantised, and what it means as an ordinary one. `fields` are of config.json."""
    raw = CONFIGS[family] | {"dtype": published.stored} | fields
    config = family_of(raw).read_config(raw)
    shapes = building.tensor_shapes(family_named(family).build, config, as_built=False)
    quantised, plain = {}, {}
    for short, shape in shapes.items():
        name = PREFIX.get(family, "model.") + short if "lm_head" not in short and short != "embed_out.weight" else short
        values = rounded(RandomTensor(short, shape, seed, std_of(short, raw)).load(), published.stored)
        plain[name] = values
        if len(shape) < 2 or any(part in name for part in UNQUANTISED):
            quantised[name] = values.astype(getattr(ml_dtypes, published.stored, published.stored))
            continue
        parts, meant = published.write(values)
        exact = published.dtype not in ("float32", "float16", "bfloat16")
        plain[name] = meant.astype(np.float32) if exact else rounded(meant.astype(np.float32), published.stored)
        quantised |= {name.removesuffix("weight") + part: array for part, array in parts.items()}
    if change is not None:
        change(quantised)
    for where, tensors, added in (
        (folder / "quantised", quantised, {"quantization_config": published.config}),
        (folder / "plain", plain, {}),
    ):
        where.mkdir(parents=True)
        (where / "config.json").write_text(json.dumps(raw | added), encoding="utf-8")
        save_file({name: np.asarray(array, order="C") for name, array in tensors.items()}, where / "model.safetensors")
    return folder / "quantised", folder / "plain"


# --- integers --------------------------------------------------------------------------------------------------------


def integers_of(
    matrix: np.ndarray, bits: int, group_of: np.ndarray, *, symmetric: bool, scale_dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Round a matrix: integers from 0 on [out, in], scales and zero points [out, G], and what they mean [out, in]."""
    highest, groups = 2**bits - 1, int(group_of.max()) + 1
    scales, zeros = np.empty((len(matrix), groups), scale_dtype), np.empty((len(matrix), groups), np.int64)
    for g in range(groups):
        part = matrix[:, group_of == g]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scales[:, g] = ((high - low) / highest).astype(scale_dtype)
        zeros[:, g] = (highest + 1) // 2 if symmetric else np.rint(-low / scales[:, g].astype(np.float64))
    zeros = np.clip(zeros, 1, highest)  # version 1 of GPTQ stores them less 1
    wide = scales.astype(np.float64)
    q = np.clip(np.rint(matrix / wide[:, group_of]) + zeros[:, group_of], 0, highest).astype(np.int64)
    return q, scales, zeros, (q - zeros[:, group_of]) * wide[:, group_of]


def packed(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Integers from 0 on, of a row in words of 32 bits, lowest bits first, in this order. [n, m] -> [n, m bits / 32]"""
    per = 32 // bits
    padded = np.zeros((len(values), -(-values.shape[1] // per) * per), np.uint64)
    padded[:, : values.shape[1]] = values
    words = np.zeros((len(values), padded.shape[1] // per), np.uint64)
    for i, column in enumerate(order or range(per)):
        words |= padded[:, column::per] << np.uint64(bits * i)
    return words.astype(np.uint32).view(np.int32)


def gptq(
    bits: int = 4, size: int = 32, *, symmetric: bool = True, ordered: bool = False, version: int = 1, dtype: str = ""
) -> Published:
    """GPTQ as AutoGPTQ packs it (`qlinear_cuda.py`, `pack`): words down the columns of [in, out]."""

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        inputs = matrix.shape[1]
        group_of = np.arange(inputs) // (inputs if size < 0 else size)
        if ordered:
            group_of = np.random.default_rng(inputs).permutation(group_of)
        q, scales, zeros, meant = integers_of(matrix, bits, group_of, symmetric=symmetric)
        return {
            "qweight": packed(q, bits).T,  # along the input
            "qzeros": packed(zeros.T - (version == 1), bits),  # [G, out], along the output
            "scales": scales.T,
            "g_idx": group_of.astype(np.int32),
        }, meant

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": ordered}
    layout = {} if version == 1 else {"checkpoint_format": "gptq_v2"}
    return Published(config | layout, write, dtype or f"int{bits}")


def awq(size: int = 32, *, symmetric: bool = False, dtype: str = "") -> Published:
    """AWQ's GEMM layout (AutoAWQ, `WQLinear_GEMM.from_linear`): words along the rows of [in, out], interleaved."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        group_of = np.arange(matrix.shape[1]) // size
        q, scales, zeros, meant = integers_of(matrix, 4, group_of, symmetric=symmetric)
        return {"qweight": packed(q.T, 4, order), "qzeros": packed(zeros.T, 4, order), "scales": scales.T}, meant

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": not symmetric, "version": "gemm"}
    return Published(config, write, dtype or ("int4" if symmetric else ZEROS))


def mlx(bits: int = 4, size: int = 64, *, dtype: str = "int4 with offsets", stored: str = "bfloat16") -> Published:
    """MLX's affine quantisation (`mlx.core.quantize`): a stream of bits a row, scales and biases of groups."""

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        grouped = matrix.reshape(len(matrix), -1, size)
        low, high = grouped.min(axis=2), grouped.max(axis=2)
        scales = ((high - low) / (2**bits - 1)).astype(getattr(ml_dtypes, stored, stored))
        biases = low.astype(scales.dtype)
        wide, floor = scales.astype(np.float64)[..., None], biases.astype(np.float64)[..., None]
        q = np.clip(np.rint((grouped - floor) / wide), 0, 2**bits - 1).astype(np.uint8)
        stream = np.unpackbits(q.reshape(len(matrix), -1, 1), axis=2, bitorder="little")[..., :bits]
        words = np.packbits(stream.reshape(len(matrix), -1), axis=1, bitorder="little").view("<u4")
        return {"weight": words, "scales": scales, "biases": biases}, (q * wide + floor).reshape(matrix.shape)

    config = {"quant_method": "mlx", "group_size": size, "bits": bits}
    return Published(config, write, dtype, stored)


def compressed(
    layout: str,
    *,
    bits: int = 8,
    strategy: str = "channel",
    size: int | None = None,
    symmetric: bool = True,
    ordered: bool = False,
    dtype: str = "int8",
    stored: str = "bfloat16",
    **fields: Any,
) -> Published:
    """compressed-tensors: integers of rows or groups, dense or packed."""

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        inputs = matrix.shape[1]
        group_of = np.arange(inputs) // (size or inputs)
        if ordered:
            group_of = np.random.default_rng(inputs).permutation(group_of)
        if strategy == "tensor":
            flat = integers_of(matrix.reshape(1, -1), bits, np.zeros(matrix.size, int), symmetric=symmetric)
            q, meant = (flat[i].reshape(matrix.shape) for i in (0, 3))
            scales, zeros = flat[1].reshape(1), flat[2].reshape(1)
        else:
            scale_dtype = getattr(ml_dtypes, stored, stored)
            q, scales, zeros, meant = integers_of(matrix, bits, group_of, symmetric=symmetric, scale_dtype=scale_dtype)
        half = 2 ** (bits - 1)
        parts: Parts = {"weight_scale": scales}
        if layout == "pack-quantized":
            parts |= {"weight_packed": packed(q, bits), "weight_shape": np.array(matrix.shape, np.int64)}
            parts |= {} if symmetric else {"weight_zero_point": packed(zeros.T, bits).T}
        else:
            parts |= {"weight": (q - half).astype(np.int8)}
            parts |= {} if symmetric else {"weight_zero_point": (zeros - half).astype(np.int8)}
        return parts | ({"weight_g_idx": group_of.astype(np.int32)} if ordered else {}), meant

    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "group_size": size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return Published(_compressed_config(layout, group) | fields, write, dtype, stored)


def _compressed_config(layout: str, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


# --- floats ----------------------------------------------------------------------------------------------------------


def float8(
    kind: str, *, block: tuple[int, int] | None = None, scale_shape: str = "number", stored: str = "bfloat16"
) -> Published:
    """float8 E4M3 with scales: of blocks ("fp8"), of rows or of the matrix ("modelopt", "compressed-tensors")."""

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        height, width = block or ((1, matrix.shape[1]) if scale_shape == "rows" else matrix.shape)
        rows, columns = np.arange(len(matrix)) // height, np.arange(matrix.shape[1]) // width
        scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
        np.maximum.at(scales, (rows[:, None], columns[None]), np.abs(matrix) / 448)
        spread = scales[rows][:, columns]
        q = (matrix / spread).astype(ml_dtypes.float8_e4m3fn)
        scale = scales.reshape(() if scale_shape == "number" and not block else scales.shape)
        name = "weight_scale_inv" if kind == "fp8" else "weight_scale"
        return {"weight": q, name: scale}, q.astype(np.float32) * spread

    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if kind == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    elif kind == "compressed-tensors":
        strategy = "block" if block else {"rows": "channel", "number": "tensor"}[scale_shape]
        weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "group_size": None}
        weights |= {"block_structure": list(block)} if block else {}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        config = _compressed_config(
            "float-quantized", {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        )
    else:
        config["weight_block_size"] = list(block) if block else None
    return Published(config, write, stored, stored)


NF4 = np.float32(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)
"""The 16 values of NF4 (QLoRA, appendix E)"""


def nf4(*, nested: bool = False, block: int = 64, dtype: str = "NF4", stored: str = "float16") -> Published:
    """bitsandbytes' NF4: one line of numbers in blocks, two indices a byte, the first in the high bits."""

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        flat = matrix.reshape(-1)
        padded = np.zeros(-(-flat.size // block) * block, np.float32)
        padded[: flat.size] = flat
        absmax = np.abs(padded.reshape(-1, block)).max(axis=1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": stored, "shape": matrix.shape}
        parts: Parts = {}
        if nested:  # double quantisation in a table of our own; a block is 256 scales
            offset, table = float(absmax.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
            centred = absmax - np.float32(offset)
            outer = np.array([np.abs(centred[i : i + 256]).max() for i in range(0, len(centred), 256)], np.float32)
            spread = np.repeat(outer, 256)[: len(centred)]
            index = np.abs(centred[:, None] / spread[:, None] - table).argmin(axis=1).astype(np.uint8)
            absmax = table[index] * spread + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table, "weight.absmax": index}
        else:
            parts["weight.absmax"] = absmax
        scale = np.repeat(absmax, block)[: flat.size]
        indices = np.abs((flat / scale)[:, None] - NF4).argmin(axis=1).astype(np.uint8)
        pairs = np.append(indices, np.zeros(indices.size % 2, np.uint8))
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        parts |= {"weight": (pairs[::2] << 4 | pairs[1::2])[:, None], "weight.quant_map": NF4}
        parts["weight.quant_state.bitsandbytes__nf4"] = text
        return parts, (NF4[indices] * scale).reshape(matrix.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    return Published(config | {"bnb_4bit_use_double_quant": nested}, write, dtype, stored)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitudes of 4-bit floats: a sign, two bits of exponent, one of fraction"""


def float4(method: str, size: int) -> Published:
    """E2M1 with scales in float8 of 16 and one of the matrix (NVFP4), or exponents of 32 (MXFP4)."""

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        grouped = matrix.reshape(len(matrix), -1, size)
        largest = np.abs(grouped).max(axis=2)
        whole = np.float32(1)
        if size == 32:
            stored = (np.floor(np.log2(largest)) - 2 + 127).astype(np.uint8)
            scales = np.ldexp(np.float32(1), stored.astype(int) - 127)
        else:
            whole = np.float32(1 if method == "mlx" else largest.max() / (6 * 448))
            eights = (largest / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
            stored = eights.view(np.uint8) if method == "mlx" else eights
            divisor = np.float32(1) / whole
            scales = (
                eights.astype(np.float32) / divisor if method.startswith("c") else eights.astype(np.float32) * whole
            )
        codes = np.abs(np.abs(grouped / scales[..., None])[..., None] - E2M1).argmin(axis=3).astype(np.uint8)
        meant = E2M1.astype(np.float32)[codes] * np.sign(grouped) * scales[..., None]
        codes = (codes | (grouped < 0).astype(np.uint8) << 3).reshape(len(matrix), -1)
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        if method == "mlx":
            parts = {"weight": pairs.view("<u4"), "scales": stored}
        elif method == "modelopt":
            parts = {"weight": pairs, "weight_scale": stored, "weight_scale_2": whole, "input_scale": np.float32(1)}
        else:
            parts = {"weight_packed": pairs, "weight_scale": stored}
            parts |= {} if size == 32 else {"weight_global_scale": divisor.reshape(1)}
        return parts, meant.reshape(matrix.shape)

    kind = "nvfp4" if size == 16 else "mxfp4"
    config: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": size, "mode": kind}
    if method == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    elif method != "mlx":
        strategy = "tensor_group" if size == 16 else "group"
        weights = {"num_bits": 4, "type": "float", "strategy": strategy, "symmetric": True, "group_size": size}
        config = _compressed_config(f"{kind}-pack-quantized", {"targets": ["Linear"], "weights": weights})
    return Published(config, write, kind.upper(), "bfloat16")


def llm_int8(stored: str = "float16") -> Published:
    """bitsandbytes' LLM.int8(): rows of int8, and the largest magnitude of each."""

    def write(matrix: np.ndarray) -> tuple[Parts, np.ndarray]:
        largest = np.abs(matrix).max(axis=1)
        q = np.rint(matrix / largest[:, None] * 127).astype(np.int8)
        parts = {"weight": q, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
        return parts, q * (largest * np.float32(1 / 127))[:, None]

    return Published({"quant_method": "bitsandbytes", "load_in_8bit": True}, write, stored, stored)


ALL: dict[str, Published] = {
    "gptq-int4": gptq(),
    "gptq-int4-of-128": gptq(size=128),
    "gptq-int4-v2": gptq(size=64, version=2),
    "gptq-int8-rows": gptq(8, -1),
    "gptq-int4-asymmetric": gptq(symmetric=False, dtype=ZEROS),
    "gptq-int4-asymmetric-of-128-v2": gptq(size=128, symmetric=False, version=2, dtype=ZEROS),
    "gptq-int4-asymmetric-rows": gptq(size=-1, symmetric=False, dtype=ZEROS),
    "gptq-int8-asymmetric-v2": gptq(8, symmetric=False, version=2, dtype="float16"),
    "gptq-int4-desc-act": gptq(ordered=True, dtype="float16"),
    "gptq-int4-of-16": gptq(size=16, dtype="float16"),
    "awq": awq(),
    "awq-symmetric": awq(symmetric=True),
    "awq-of-128": awq(128),
    "awq-of-16": awq(16, dtype="float16"),
    "mlx-int4": mlx(),
    "mlx-int4-of-32": mlx(size=32, stored="float16"),
    "mlx-3-bits": mlx(3),
    "mlx-6-bits": mlx(6, dtype="bfloat16"),
    "mlx-8-bits": mlx(8, dtype="bfloat16"),
    "compressed-int8": compressed("int-quantized"),
    "compressed-int8-tensor": compressed("naive-quantized", strategy="tensor"),
    "compressed-int8-asymmetric": compressed("int-quantized", symmetric=False, dtype="bfloat16"),
    "compressed-packed-int4": compressed("pack-quantized", bits=4, strategy="group", size=32, dtype="int4"),
    "compressed-packed-int4-of-128": compressed("pack-quantized", bits=4, strategy="group", size=128, dtype="int4"),
    "compressed-packed-int4-rows": compressed("pack-quantized", bits=4, dtype="int4"),
    "compressed-packed-int8-float16": compressed("pack-quantized", strategy="group", size=64, stored="float16"),
    "compressed-packed-int4-asymmetric": compressed(
        "pack-quantized", bits=4, strategy="group", size=32, symmetric=False, dtype=ZEROS
    ),
    "compressed-packed-int4-asymmetric-rows": compressed("pack-quantized", bits=4, symmetric=False, dtype=ZEROS),
    "compressed-packed-int4-actorder": compressed(
        "pack-quantized", bits=4, strategy="group", size=32, ordered=True, dtype="bfloat16"
    ),
    "compressed-float8-rows": float8("compressed-tensors", scale_shape="rows"),
    "compressed-float8-tensor": float8("compressed-tensors", stored="float32"),
    "compressed-float8-blocks": float8("compressed-tensors", block=(48, 32)),
    "fp8-blocks": float8("fp8", block=(128, 128)),
    "fp8-small-blocks": float8("fp8", block=(48, 32)),
    "fp8-number": float8("fp8"),
    "modelopt": float8("modelopt", stored="float16"),
    "compressed-nvfp4": float4("compressed-tensors", 16),
    "compressed-mxfp4": float4("compressed-tensors", 32),
    "modelopt-nvfp4": float4("modelopt", 16),
    "mlx-nvfp4": float4("mlx", 16),
    "mlx-mxfp4": float4("mlx", 32),
    "bitsandbytes-nf4": nf4(),
    "bitsandbytes-nf4-nested": nf4(nested=True, stored="bfloat16"),
    "bitsandbytes-nf4-of-4096": nf4(block=4096, stored="float32"),
    "bitsandbytes-nf4-of-32": nf4(block=32, dtype="float16"),
    "bitsandbytes-int8": llm_int8(),
}
"""Every layout that is read, by a name"""
