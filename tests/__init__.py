"""The tests mirror the package. Workers of pytest-xdist share the cores, so each has one BLAS thread."""

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before anything imports NumPy; a tiny model gains nothing from more
