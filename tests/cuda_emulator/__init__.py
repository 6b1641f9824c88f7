"""Runs the kernels of `kernels/*.cu` on a CPU: g++ compiles the very same files, and NumPy arrays are their memory.

    emulator = Emulator("forward")
    kernels = Kernels(emulator, "float32")          # as with CuPy's launcher
    kernels.get("norm", "layer_norm")((rows,), (256,), (out, x, gain, bias, np.int32(width), np.float32(1e-5)))

Every CUDA thread is a fiber, and blocks run one after another. `include/` is the CUDA language for g++ (forced into the
source), `runtime/` the scheduler, `building.py` compiles, `arguments.py` holds each argument to the kernel's signature.
It cannot show speed, bank conflicts, races between blocks, wrong PTX, streams, graphs, or how a GPU rounds.
"""

from .building import BuildError
from .emulator import SCHEDULES, Emulator, LaunchError
from .toolkit import missing

__all__ = ["SCHEDULES", "BuildError", "Emulator", "LaunchError", "missing"]
