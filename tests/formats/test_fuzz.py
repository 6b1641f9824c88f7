"""Random damage: whatever the bytes are, a file is read or refused in our words."""

import random

import numpy as np
import pytest
from safetensors.numpy import save

from minillm.errors import MinillmError
from minillm.formats.pytorch import read_torch_zip
from minillm.formats.safetensors import read_safetensors

from . import torch_archive as archive


def safetensors_file(path):
    values = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float16)}
    (path / "whole").write_bytes(save(values, metadata={"format": "pt"}))


def torch_file(path):
    views = {
        "a.weight": archive.tensor(archive.tuple_of(3, 4), archive.tuple_of(1, 3), store=archive.storage(12)),
        "b": archive.tensor(archive.tuple_of(5), archive.tuple_of(1), store=archive.storage(5, "1", "HalfStorage")),
    }
    archive.write(path / "whole", archive.dictionary(views), {"0": bytes(range(48)), "1": bytes(10)})


def damage(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: a bit, a byte, an extreme 32-bit number, a piece cut out or copied elsewhere."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(changed)), rng.randint(1, 16)
        match rng.randrange(5):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.choice(b"\0\xff()RbQtu.}]0129[\x7f\x80" + bytes([rng.randrange(256)]))
            case 2:
                changed[at : at + 4] = rng.choice([2**31 - 1, 2**32 - 1, 2**31, 0]).to_bytes(4, "little")
            case 3:
                del changed[at : at + length]
            case _:
                changed[at:at] = changed[rng.randrange(len(changed)) :][:length]
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize(("write", "read"), [(safetensors_file, read_safetensors), (torch_file, read_torch_zip)])
def test_damaged_files_are_read_or_refused(tmp_path, write, read):
    write(tmp_path)
    whole = (tmp_path / "whole").read_bytes()
    outcomes = {"read": 0, "refused": 0}
    for seed in range(1500):
        path = tmp_path / f"damaged-{seed % 2}"  # a mapped file must not be cut short under its reader
        path.unlink(missing_ok=True)
        path.write_bytes(damage(whole, random.Random(seed)))
        try:
            for tensor in read(path).values():
                assert 4 * tensor.load().size <= 4 * len(whole)
                assert tensor.load().shape == tensor.shape
            outcomes["read"] += 1
        except MinillmError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 50, outcomes
