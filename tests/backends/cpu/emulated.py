"""Kernels compiled for another processor and run by an emulator, in place of those of this one.

With MINILLM_TEST_TARGET in the environment, such as `aarch64:generic+dotprod`, `kernels.py` launches here. So the tests
of single kernels are those of that processor.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from minillm.backends.cpu import compiling

HEAD = struct.Struct("32s5q")
POINTER = ctypes.c_void_p


def missing() -> str | None:
    """The missing requirement for compiling for aarch64 and running the result; None if all is installed."""
    if shutil.which("qemu-aarch64-static") is None or not Path("/usr/aarch64-linux-gnu/lib").is_dir():
        return "needs apt install qemu-user-static libc6-arm64-cross"
    if compiling.importlib.util.find_spec("ziglang") is None:
        return "needs pip install ziglang"
    return None


def build(target: str, folder: Path, library: Path | None = None) -> Path:
    """Compile emulated.c for "aarch64:" and a CPU in zig's words, with kernels or their library. -> the program"""
    _, cpu = target.split(":")
    kernels = compiling.SOURCES.glob("*.c") if library is None else [library, f"-Wl,-rpath,{library.parent}"]
    sources = [str(path) for path in (*kernels, Path(__file__).with_suffix(".c"))]
    command = [sys.executable, "-m", "ziglang", "cc", *compiling.FLAGS, "-Werror", "-target", "aarch64-linux-gnu",
               f"-mcpu={cpu}", f"-I{compiling.SOURCES}", *sources, "-o", str(folder / "kernels"), "-lm"]  # fmt: skip
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder / "cache"))
    subprocess.run(command, env=os.environ | caches, check=True)
    return folder / "kernels"


class Emulator:
    """A process of the other processor that runs kernels on copies of this process's memory."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __getattr__(self, name: str) -> Any:
        """A plain function of the kernels, of no argument, a number or `byref` of a structure."""

        def function(argument: Any = None) -> int:
            structure = getattr(argument, "_obj", None)
            return self._ask(name, structure) if structure is not None else self._ask(name, None, argument)

        return function

    def run(self, name: str, arguments: Any, shares: int, workers: int) -> None:
        """Launch a kernel."""
        self._ask(name, arguments, None, shares, workers)

    def _ask(self, name: str, structure: Any, number: Any = None, shares: int = 0, workers: int = 0) -> int:
        image = Image([] if structure is None else [structure, *structure.kept])
        places = [] if structure is None else image.point(structure, image.offset(ctypes.addressof(structure)))
        value = image.offset(ctypes.addressof(structure)) if structure is not None else getattr(number, "value", 0)
        head = HEAD.pack(name.encode(), value, shares, workers, len(image.content), len(places))
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        stdin.write(head + bytes(image.content) + np.array(places, np.int64).tobytes())
        stdin.flush()
        answer = stdout.read(8 + len(image.content))
        assert len(answer) == 8 + len(image.content), f"the emulated process ended: {self._process.wait()}"
        image.write_back(answer[8:])
        return int.from_bytes(answer[:8], "little", signed=True)


class Image:
    """The memory that some arrays and structures lie in, each at the same address modulo 64."""

    def __init__(self, held: list[Any]) -> None:
        def bounds(each: Any) -> tuple[int, int]:
            if isinstance(each, np.ndarray):
                return byte_bounds(each)
            return ctypes.addressof(each), ctypes.addressof(each) + ctypes.sizeof(each)

        self._pieces: list[list[int]] = []  # [first address, address after, offset]
        for low, high in sorted(map(bounds, held)):
            if self._pieces and low < self._pieces[-1][1]:
                self._pieces[-1][1] = max(high, self._pieces[-1][1])
            else:
                self._pieces.append([low, high, 0])
        self.content = bytearray()
        for piece in self._pieces:
            self.content += bytes((piece[0] - len(self.content)) % 64)
            piece[2] = len(self.content)
            self.content += ctypes.string_at(piece[0], piece[1] - piece[0])
        self._before = bytes(self.content)

    def offset(self, address: int) -> int:
        """The place of an address of this process in the image."""
        for low, high, offset in self._pieces:
            if low <= address <= high:
                return offset + address - low
        raise AssertionError(f"nothing that the arguments keep lies at {address:#x}")

    def point(self, structure: Any, at: int) -> list[int]:
        """Replace the pointers of a structure, which begins at this offset, by offsets. -> their own offsets"""
        places = []
        for name, kind in structure._fields_:
            place, value = at + getattr(type(structure), name).offset, getattr(structure, name)
            if isinstance(value, ctypes.Structure):
                places += self.point(value, place)
            elif kind is POINTER and value is not None:
                places.append(place)
                self.content[place : place + 8] = self.offset(value).to_bytes(8, "little")
                if name == "changes":  # an array of pointers
                    for i in range(structure.T):
                        inner = self.offset(value) + 8 * i
                        if address := int.from_bytes(self.content[inner : inner + 8], "little"):
                            places.append(inner)
                            self.content[inner : inner + 8] = self.offset(address).to_bytes(8, "little")
        self._before = bytes(self.content)
        return places

    def write_back(self, content: bytes) -> None:
        """Take over what has changed."""
        for low, high, offset in self._pieces:
            size = high - low
            if content[offset : offset + size] != self._before[offset : offset + size]:
                ctypes.memmove(low, content[offset : offset + size], size)


_emulator: list[Emulator] = []


def emulator(target: str) -> Emulator:
    """The emulator of this process, built when first needed."""
    if not _emulator:
        built = os.environ.get("MINILLM_TEST_PROGRAM")
        program = Path(built) if built else build(target, Path(tempfile.mkdtemp(prefix="minillm-emulated-")))
        _emulator.append(Emulator(program))
    return _emulator[0]
