"""Damaged files of checkpoints: each folder is loaded and used, or refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from minillm import Engine
from minillm.formats import open_checkpoint

from .mutate import TEXTS, mutate_bytes, mutate_json, to_json
from .outcome import attempt, expect
from .seeds import TEMPLATES, copy_seed, write_seeds
from .values import odd

NAMES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "model.safetensors"),
    *("model.safetensors.index.json", "pytorch_model.bin", "added_tokens.json"),
)
ODD_TEXTS = ("", " ", "A list of colors: red,", "</s><s><unk>", "naïve 日本 😀\u200d", "\0\n\t", "<0x41>", "a" * 300)


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    (folder / "seeds").mkdir()
    seeds = write_seeds(folder / "seeds")

    def run(number: int, rng: Random) -> None:
        seed = seeds[0] if rng.random() < 0.04 else rng.choice(seeds[1:])
        target = folder / f"input-{number}"
        copy_seed(seed, target)
        try:
            damaged = _damage(rng, target)
            _use(rng, target, damaged)
        finally:
            shutil.rmtree(target)

    return run


def _damage(rng: Random, folder: Path) -> set[str]:
    """Change one file or two. Returns their names."""
    present = sorted(path.name for path in folder.iterdir() if path.name in NAMES or path.suffix == ".safetensors")
    chosen = rng.sample(present, rng.choice([1, 1, 1, 1, 2]))
    if rng.random() < 0.05:
        chosen = [rng.choice(NAMES)]  # one that this layout does not have, more often than not
    for name in chosen:
        path = folder / name
        content = path.read_bytes() if path.exists() else b"{}"
        path.unlink(missing_ok=True)
        if rng.random() < 0.03:
            _special_file(rng, path)
        else:
            path.write_bytes(_changed(rng, name, content))
    return set(chosen)


def _changed(rng: Random, name: str, content: bytes) -> bytes:
    if name.endswith(".json") and rng.random() < 0.75:
        return to_json(mutate_json(rng, json.loads(content))).encode("utf-8", "surrogatepass")
    if name.endswith(".safetensors") and len(content) > 8 and rng.random() < 0.4:
        return _changed_header(rng, content)
    if name == "chat_template.jinja" and rng.random() < 0.3:
        content = rng.choice(TEMPLATES).read_bytes()
    head = 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else 0
    if name.endswith(".bin"):
        head = content.find(b"archive/byteorder") + 100
    return mutate_bytes(rng, content, head)


def _changed_header(rng: Random, content: bytes) -> bytes:
    """A safetensors file whose header has changed in structure, and mostly has the right length."""
    length = int.from_bytes(content[:8], "little")
    header = to_json(mutate_json(rng, json.loads(content[8 : 8 + length]))).encode("utf-8", "surrogatepass")
    said = len(header) if rng.random() < 0.95 else rng.randrange(2**63)
    return said.to_bytes(8, "little") + header + content[8 + length :]


def _special_file(rng: Random, path: Path) -> None:
    match rng.randrange(5):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            path.mkdir()
        case 3:
            path.symlink_to("nowhere")
        case _:
            path.symlink_to(path.name)


def _use(rng: Random, folder: Path, damaged: set[str]) -> None:
    options: dict[str, Any] = {"backend": "numpy", "threads": 1, "max_batch_size": 2}
    if rng.random() < 0.5:
        options["cache_bytes"] = 1 << 20
    engine = attempt(lambda: Engine(folder, **options))
    if engine is None:
        return
    with engine:
        if all(name.endswith((".safetensors", ".bin")) for name in damaged):
            _compare_weights(folder)
        for text in rng.sample(ODD_TEXTS, 2) if engine.tokenizer is not None else ():
            ids = attempt(lambda text=text: engine.tokenizer.encode(text))
            if ids is not None:
                attempt(lambda ids=ids: engine.tokenizer.decode(ids))
        attempt(lambda: engine.generate(rng.choice(ODD_TEXTS), max_new_tokens=2))
        attempt(lambda: engine.generate([3, 4], min_new_tokens=2, max_new_tokens=2, logprobs=True))
        compiles = "chat_template.jinja" in damaged or rng.random() < 0.1  # which takes longer than all else
        if engine.chat_template is not None and compiles:
            message = {"role": "user", "content": rng.choice(TEXTS)}
            attempt(lambda: engine.chat([message], max_new_tokens=1))
        expect(not engine.busy, "the engine is busy after its last request")
    if rng.random() < 0.02:
        attempt(lambda: Engine(folder, **options, **{rng.choice(["dtype", "revision", "draft"]): odd(rng)}))


def _compare_weights(folder: Path) -> None:
    """The same numbers as the safetensors library reads from the files."""
    from safetensors import SafetensorError, safe_open

    ours = open_checkpoint(folder)
    for path in ours.files:
        if path.suffix != ".safetensors":
            continue
        try:
            reader = safe_open(path, "np")
        except SafetensorError:  # of what there is in no tensor: its metadata
            continue
        with reader as theirs:
            for name in theirs.keys():  # noqa: SIM118 - it is no mapping
                if name in ours and ours[name].file.path == path and ours[name].dtype != "bfloat16":
                    expected, found = theirs.get_tensor(name), ours[name].load()
                    same = found.shape == expected.shape and np.array_equal(
                        found, expected, equal_nan=found.dtype.kind == "f"
                    )
                    expect(same, f"{name} differs from what the safetensors library reads")
