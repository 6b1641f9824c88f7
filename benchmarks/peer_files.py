"""The same weights in the file format of every engine, for `against_peers.py`: random ones, or those of a checkpoint.

    python peer_files.py SHAPE[:LAYERS]|CHECKPOINT|FILE.gguf FOLDER [ctranslate2] [onnx-float32] [onnx-int4]
                         [f32] [f16] [bf16] [Q8_0] [Q4_0] [Q4_K_M] [Q6_K] [IQ4_XS] [MXFP4]

FOLDER becomes a Hugging Face checkpoint in float32, or one of links to the files of the folder CHECKPOINT, which
minillm and transformers load; "ctranslate2" and ONNX Runtime's model builder convert it, and the other words are
llama.cpp's formats: GGUF files, of which the first is written here
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and llama.cpp makes the others. Of a GGUF file it makes all.

In llama.cpp, Llama, Qwen2 and GPT-2 have architectures of their own. OPT has none, and gets GPT-2's with the same
matrices. That is the same work but for the activation: both normalise before attention, before the MLP and at the end,
have biases everywhere and learned positions, and tie the head to the embedding; GPT-2 has GELU where OPT has ReLU.
Families that are not in `LAYOUTS` have the file that minillm itself writes, of the same checkpoint; in MXFP4 all have.
"""

import ctypes
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minillm.backends.loader import Tensor
from minillm.backends.numpy import NumpyBackend
from minillm.config import ModelConfig, read_config
from minillm.errors import ParameterError
from minillm.formats import open_checkpoint
from minillm.formats.canonical import canonical_names
from minillm.formats.gguf.write import write_gguf as own_write_gguf
from minillm.models import build_of, building, family_of, opt, published, published_config, tensor_shapes
from minillm.models.bart import LOGITS_BIAS
from minillm.models.building import random_tensors
from minillm.models.gpt2 import GPT2Config
from minillm.models.llama import LlamaConfig
from minillm.models.parameters import transpose
from minillm.models.rotary import BASE

Table = Mapping[str, Tensor]


class Published(NamedTuple):
    """How a family's checkpoints are published."""

    architecture: str
    prefix: str
    """Prefix of every tensor's name but the LM head's"""


PUBLISHED = {
    "opt": Published("OPTForCausalLM", "model.decoder."),
    "gpt2": Published("GPT2LMHeadModel", "transformer."),
    "llama": Published("LlamaForCausalLM", "model."),
    "qwen2": Published("Qwen2ForCausalLM", "model."),
    "t5": Published("T5ForConditionalGeneration", ""),
    "bart": Published("BartForConditionalGeneration", "model."),
    "lfm2": Published("Lfm2ForCausalLM", "model."),
    "qwen3_5_text": Published("Qwen3_5ForCausalLM", "model."),
    "gpt_oss": Published("GptOssForCausalLM", "model."),
}

NORMS = {"bart": {"normalize_before": False, "normalize_embedding": True}}
"""Fields of config.json that CTranslate2 reads, and transformers no longer writes."""


def write_checkpoint(shape: str, folder: Path) -> None:
    """The weights of `Engine.random(shape)` as a Hugging Face folder, with a tokenizer of words t0, t1 ..."""
    raw = raw_config(shape)
    special = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    architecture = PUBLISHED[raw["model_type"]].architecture
    start = config_of(raw).decoder_start_token_id
    config = raw | special | NORMS.get(raw["model_type"], {})
    config |= {"architectures": [architecture], "torch_dtype": "float32"}
    config |= {} if start is None else {"decoder_start_token_id": start}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", _as_published(tensors_of(shape), raw["model_type"]))
    _write_tokenizer(folder, raw["vocab_size"])


def link_checkpoint(source: Path, folder: Path) -> None:
    """A folder of links to a checkpoint's files, into which other files can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())


def raw_config(source: str) -> dict[str, Any]:
    """The config.json of a shape or of a checkpoint folder."""
    if Path(source).is_dir():
        return read_config(Path(source))
    shape, _, layers = source.partition(":")
    published_config(shape)  # refuses an unknown one
    raw = published()[shape]
    if not layers:
        return raw
    if not layers.isdecimal() or not 0 < int(layers) <= raw["num_hidden_layers"]:
        raise ParameterError(f"{source}: expected 1 to {raw['num_hidden_layers']} layers of {shape}")
    shortened = raw | {"num_hidden_layers": int(layers)}
    kinds = raw.get("layer_types")
    return shortened | ({} if kinds is None else {"layer_types": kinds[: int(layers)]})


def tensors_of(source: str) -> dict[str, Tensor]:
    """The weights of `Engine.random(shape)` or of a checkpoint folder, by name."""
    config = config_of(raw_config(source))
    if Path(source).is_dir():
        return canonical_names(open_checkpoint(Path(source)), config)
    if config.model_type in LAYOUTS or config.encoder_layers:
        return random_tensors(tensor_shapes(config), 0, 0.02, NumpyBackend())
    shapes = building.tensor_shapes(build_of(config), config, as_built=False)
    return random_tensors(shapes, 0, 0.02, NumpyBackend())


def config_of(raw: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes."""
    config: ModelConfig = family_of(raw).read_config(raw)
    return config


def _as_published(tensors: Table, family: str) -> dict[str, Tensor]:
    """The tensors under the names of published checkpoints; GPT-2's projections as [in, out]."""
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    turned = tuple(f".{name}.weight" for name in names) if family == "gpt2" else ()
    published: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == LOGITS_BIAS:
            continue  # zeros where it is absent, as in facebook/bart-base
        prefix = "" if name == "lm_head.weight" else PUBLISHED[family].prefix
        published[prefix + name] = transpose(tensor) if name.endswith(turned) else tensor
    return published


def _write_safetensors(path: Path, tensors: Table) -> None:
    """Write chunk by chunk, so that a model need not fit in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * _count(tensor)
        entry = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # with the 8 bytes of its length, the header ends at a multiple of 64
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for chunk in tensor.chunks():
                file.write(chunk.data)


def _count(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"t{i}": i for i in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="t3")).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "t2", "eos_token": "t2", "pad_token": "t1", "unk_token": "t3"}
    config = special | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_ctranslate2(folder: Path) -> None:
    """Convert the checkpoint, in float32; CTranslate2 converts to other types at load."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(folder / "ctranslate2"))


def write_onnx(folder: Path, form: str) -> None:
    """Convert the checkpoint by ONNX Runtime GenAI's model builder; int4 has groups of 32, as ours.

    Raises:
        RuntimeError: it failed.
    """
    precision = {"float32": "fp32"}.get(form, form)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o"]
    command += [str(folder / f"onnx-{form}"), "-p", precision, "-e", "cpu", "-c", str(folder / "onnx-cache")]
    command += ["--extra_options", "hf_token=false", "int4_block_size=32"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"ONNX Runtime's model builder failed: {lines[-1]:.300}")


def write_llama_cpp(source: str, folder: Path, formats: Sequence[str]) -> dict[str, int]:
    """Write llama.cpp's file of each format. Returns the bytes of each that a token needs."""
    exact, raw = folder / "f32.gguf", raw_config(source)
    config = config_of(raw)
    if "MXFP4" in formats:
        own_write_gguf(folder, folder / "MXFP4.gguf", "MXFP4", tokenizer=False, progress=False)
    others = [form for form in formats if form != "MXFP4"]
    if not others:
        pass
    elif config.model_type in LAYOUTS:
        write_gguf(config, raw, tensors_of(source), exact)
    else:
        own_write_gguf(folder, exact, "float32", tokenizer=False, progress=False)
    for form in others:
        if form != "f32":
            quantize_gguf(exact, folder / f"{form}.gguf", form)
    return {form: gguf_bytes(folder / f"{form}.gguf") for form in formats}


# --- GGUF -------------------------------------------------------------------------------------------------------------

LLAMA_TYPES = {"f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}
LLAMA_TYPES |= {"Q4_K_M": "MOSTLY_Q4_K_M", "Q6_K": "MOSTLY_Q6_K", "IQ4_XS": "MOSTLY_IQ4_XS"}
"""Formats to which llama.cpp converts its f32 file; with Q4_0 it keeps the head in more bits."""

Names = Mapping[str, tuple[str, ...]]
"""Name in the file -> our names, concatenated if several; each has a weight, and a bias if the model has one. `{}` is
the layer's number."""

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
"""model_type -> architecture in llama.cpp, and the names"""


def write_gguf(config: ModelConfig, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a model as a GGUF file in float32, without a vocabulary: it maps token ids to logits.

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
    """Every tensor's name in the file, and the names of its parts."""
    for name, parts in names.items():
        for i in range(layers if "{}" in name else 1):
            for kind in ("weight", "bias"):
                sources = [f"{part.format(i)}.{kind}" for part in parts]
                if all(source in tensors for source in sources):
                    yield f"{name.format(i)}.{kind}", sources


def _offset(name: str) -> int:
    """Number of rows to skip: the first rows of OPT's position table are unused, and GPT-2's table has no such rows."""
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
        writer.add_rope_freq_base(_theta(raw))
        writer.add_layer_norm_rms_eps(config.epsilon)
    else:
        writer.add_layer_norm_eps(config.epsilon if isinstance(config, GPT2Config) else opt.NORM_EPSILON)


def _theta(raw: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies, in the older layout of config.json or the newer one."""
    theta: float = raw.get("rope_theta", (raw.get("rope_parameters") or {}).get("rope_theta", BASE))
    return theta


def _in_pairs(name: str, array: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """Reorder the rows of Q and K for the architecture "llama".

    Its rotary embedding pairs the numbers 2 j and 2 j + 1 of a head, where Hugging Face checkpoints, and the
    architecture "qwen2", pair j and j + D / 2.
    """
    kind = name.split(".")[-2]
    if config.model_type != "llama" or kind not in ("attn_q", "attn_k"):
        return array
    heads = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])  # [H D, ...] -> [H, 2, D/2, ...]
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(array.shape)  # -> [H, D/2, 2, ...] -> [H D, ...]


def _rotary_factors(config: LlamaConfig, raw: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """The divisors of scaled rotary frequencies (Llama 3.1) for the architecture "llama". [D / 2]"""
    D = config.head_dim
    plain = _theta(raw) ** (-np.arange(0, D, 2) / D)
    factors = (plain / config.rotary.frequencies).astype(np.float32)
    return {} if np.allclose(factors, 1) else {"rope_freqs.weight": factors}


def quantize_gguf(source: Path, path: Path, form: str) -> None:
    """Have llama.cpp convert a file, in whatever format it is, to another, as its own tool does.

    Where it is not installed, the program of its fork ik_llama.cpp does.

    Raises:
        RuntimeError: it failed.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        from ik_llama_cpp.quantize import find_quantize_bin

        command = [find_quantize_bin(), "--allow-requantize", source, path, form.upper(), "1"]
        failed = subprocess.run([str(word) for word in command], capture_output=True, check=False).returncode
    else:
        import llama_cpp

        params = llama_cpp.llama_model_quantize_default_params()
        params.allow_requantize = True
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{LLAMA_TYPES[form]}")
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params))
    if failed:
        raise RuntimeError(f"llama.cpp could not write {path.name}")


def gguf_bytes(path: Path) -> int:
    """Bytes of the weights that one token needs: all but the tables of which it reads one row, and other experts."""
    import gguf

    reader = gguf.GGUFReader(path)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    counts = (f"{reader.fields['general.architecture'].contents()}.expert_{name}" for name in ("used_count", "count"))
    used, count = (reader.fields[name].contents() if name in reader.fields else 1 for name in counts)
    sizes = {name: size * used // count if "_exps." in name else size for name, size in sizes.items()}
    looked_up: Sequence[str] = ("position_embd.weight", "rope_freqs.weight")
    if "output.weight" in sizes:
        looked_up = (*looked_up, "token_embd.weight")
    return sum(size for name, size in sizes.items() if name not in looked_up)


def main() -> None:
    """See the module's docstring. Prints, as JSON, the bytes that a token needs of each of llama.cpp's files."""
    source, where, *wanted = sys.argv[1:]
    folder = Path(where)
    if Path(source).is_file():
        for form in wanted:
            quantize_gguf(Path(source), folder / f"{form}.gguf", form)
        print(json.dumps({form: gguf_bytes(folder / f"{form}.gguf") for form in wanted}))
        return
    if Path(source).is_dir():
        link_checkpoint(Path(source), folder)
    else:
        write_checkpoint(source, folder)
    if "ctranslate2" in wanted:
        write_ctranslate2(folder)
    for word in wanted:
        if word.startswith("onnx-"):
            write_onnx(folder, word.removeprefix("onnx-"))
    formats = [form for form in wanted if form != "ctranslate2" and not form.startswith("onnx-")]
    print(json.dumps(write_llama_cpp(source, folder, formats) if formats else {}))


if __name__ == "__main__":
    main()
