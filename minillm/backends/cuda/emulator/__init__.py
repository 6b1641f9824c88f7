"""Runs the kernels of `kernels/cuda/*.cu` on a CPU: g++ compiles the same files, and NumPy arrays are their memory.

    emulator = Emulator("forward")
    kernels = Kernels(emulator, "float32")          # as with CuPy's launcher
    kernels.get("norm", "layer_norm")((rows,), (256,), (out, x, gain, bias, np.int32(width), np.float32(1e-5)))

Every CUDA thread is a fiber, and blocks run one after another. A thread runs until it has to wait for others; who goes
on then is the schedule, and a kernel that lacks a barrier gives wrong numbers under some of them.
`Emulator(checks=True)` finds races, accesses outside an argument, loads that are not aligned and indices outside an
array directly, and names the lines.

    include/      the CUDA language for g++, forced into the source
    runtime/      fibers, schedules, barriers, tensor cores, and the checks
    building.py   compiling, once for each source and set of options
    emulator.py   the launcher;  arguments.py  holds each argument to the kernel's signature
    guarding.py   arguments between guard pages;  lines.py  from an instruction to its line
    traffic.py    what warps ask of memory: requests, sectors of 32 bytes, lines of 128
    tensor_map.py where a copy of a box of a matrix finds it

It cannot show speed, bank conflicts, wrong PTX, streams, graphs, or how a GPU rounds. Blocks that wait for each other
never end here, but for those of a cooperative launch and of a cluster.
"""

from .building import BuildError
from .emulator import SCHEDULES, Emulator, LaunchError
from .toolkit import missing
from .traffic import Traffic, count_traffic

__all__ = ["SCHEDULES", "BuildError", "Emulator", "LaunchError", "Traffic", "count_traffic", "missing"]
