"""What has to happen before NumPy is imported."""

import os
from pathlib import Path


def tune_blas() -> None:
    """Tell OpenBLAS to use AVX-512 where an AMD processor has it.

    Some builds of OpenBLAS take such a processor for an older one. What it brings depends on the build and the machine:
    between nothing and 1.05 times for a prefill of 512 in `benchmarks/results`. A setting of the user's own stays.
    """
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    if "AuthenticAMD" in cpu and all(f"avx512{part}" in cpu for part in ("f", "dq", "bw", "vl", "cd")):
        os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")
