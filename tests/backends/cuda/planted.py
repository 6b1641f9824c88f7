"""The kernels of planted.cu, which have a fault when asked for it, and those of the engine with one in their source."""

import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import STORAGE, kernel_folder

SOURCE = Path(__file__).with_name("planted.cu")
PLANTS = re.findall(r"^    ([A-Z_]+),", SOURCE.read_text(), re.MULTILINE)
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def kernel(emulator: Emulator, name: str, storage: str = "float32", *more: str) -> Any:
    """A kernel of planted.cu."""
    return emulator.module(SOURCE, (f"-DMINILLM_STORAGE={STORAGE[storage]}", *more)).get_function(name)


def plant(fault: str) -> np.int32:
    """The last argument of most kernels: which fault they are to have."""
    return np.int32(PLANTS.index(fault))


NONE = plant("NONE")


def line_of(text: str) -> int:
    """The number of the one line of planted.cu that holds `text`."""
    found = [i for i, line in enumerate(SOURCE.read_text().splitlines(), 1) if text in line]
    assert len(found) == 1, text
    return found[0]


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def with_fault(file: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a kernel's file compiled from a copy of the sources in which `new` stands in place of `old`.

    That is a line of the file or of one of the headers that its name begins.
    """
    folder = tmp_path / "cuda"
    shutil.copytree(kernel_folder(), folder)
    main = folder / file
    (faulty,) = (path for path in folder.glob(f"{main.stem}*") if old in path.read_text())
    source = faulty.read_text()
    assert source.count(old) == 1, old
    faulty.write_text(source.replace(old, new))
    module = Emulator.module

    def module_with_fault(self: Emulator, path: Path, options: tuple[str, ...] = ()) -> Any:
        return module(self, main if path.name == file else path, options)

    monkeypatch.setattr(Emulator, "module", module_with_fault)
