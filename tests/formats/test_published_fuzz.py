"""Damage to published quantised checkpoints: each is read and run, or refused in one line; memory stays bounded."""

import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import MinillmError

from ..fuzz.mutate import mutate_bytes, mutate_json, to_json
from ..fuzz.outcome import check_message
from ..published import ALL, write_pair

KINDS = (
    *("gptq-int4", "gptq-int4-desc-act", "awq", "compressed-int8", "compressed-packed-int4-asymmetric"),
    *("compressed-float8-blocks", "fp8-small-blocks", "modelopt", "bitsandbytes-nf4-nested", "bitsandbytes-int8"),
    *("mlx-int4", "mlx-nvfp4", "compressed-mxfp4", "modelopt-nvfp4"),
)


def mutated(rng: Random, value: Any, around: Callable[[Any], Any] = lambda changed: changed) -> bytes:
    """JSON of a value whose structure has changed, within another."""
    while True:
        try:
            return to_json(around(mutate_json(rng, value))).encode("utf-8", "surrogatepass")
        except TypeError:  # two changes that together cannot be written as JSON
            continue


def damage_config(rng: Random, folder: Path) -> None:
    """A change of structure in quantization_config, or anywhere in config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    if rng.random() < 0.9:
        text = mutated(rng, raw["quantization_config"], lambda changed: raw | {"quantization_config": changed})
    else:
        text = mutated(rng, raw)
    path.write_bytes(text)


def damage_header(rng: Random, folder: Path) -> None:
    """A valid header that says other things: types, shapes and names exchanged between tensors, tensors left out."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    shape = header[one]["shape"]
    match rng.randrange(6):
        case 0:
            header[one], header[other] = header[other], header[one]
        case 1:
            header[one]["shape"] = shape[::-1] if len(shape) > 1 else [1, *shape]
        case 2:
            same = {
                "F8_E4M3": "I8",
                "I8": "U8",
                "U8": "F8_E5M2",
                "F16": "BF16",
                "BF16": "F16",
                "I32": "F32",
                "F32": "I32",
            }
            header[one]["dtype"] = same.get(header[one]["dtype"], "U8")
        case 3:
            header[f"{one}{rng.choice(['_', '.x', 's'])}"] = header.pop(one)
        case 4:
            if shape and shape[0] % 2 == 0:
                header[one]["shape"] = (
                    [shape[0] // 2, *shape[1:-1], shape[-1] * 2] if len(shape) > 1 else [2, shape[0] // 2]
                )
        case _:
            header[one]["shape"] = [2 * n for n in shape]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def damage_numbers(rng: Random, folder: Path) -> None:
    """Other bytes in the tensors: integers, scales, zero points, tables and the JSON of bitsandbytes."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    begin, end = header[rng.choice([name for name in header if name != "__metadata__"])]["data_offsets"]
    part = mutate_bytes(rng, bytes(content[start + begin : start + end]))[: end - begin]
    content[start + begin : start + begin + len(part)] = part
    path.write_bytes(content)


def damage_bytes(rng: Random, folder: Path) -> None:
    """Any bytes of the file, most of them in its header."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(mutate_bytes(rng, content, 8 + int.from_bytes(content[:8], "little")))


WAYS: tuple[Callable[[Random, Path], None], ...] = (damage_config, damage_header, damage_numbers, damage_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [range(30), pytest.param(range(30, 300), marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_folders_are_read_or_refused(kind: str, inputs: range, tmp_path: Path) -> None:
    seed, _ = write_pair(tmp_path / "seed", "llama", ALL[kind], num_hidden_layers=1)
    outcomes = {"run": 0, "refused": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in inputs:
        rng, folder = Random(f"{kind} {number}"), tmp_path / f"input-{number}"  # a mapped file is never cut short
        shutil.copytree(seed, folder)
        rng.choice(WAYS)(rng, folder)
        try:
            with Engine(folder, backend="numpy", cache_bytes=1 << 20, threads=1) as engine, np.errstate(all="ignore"):
                engine.forward([3, 4, 5])
            outcomes["run"] += 1
        except MinillmError as error:
            check_message(error)
            outcomes["refused"] += 1
        shutil.rmtree(folder)
    assert outcomes["run"] > len(inputs) // 20 and outcomes["refused"] > len(inputs) // 5, outcomes
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < (300 << 10 if sys.platform != "darwin" else 300 << 20), f"{grown} more at the peak"
