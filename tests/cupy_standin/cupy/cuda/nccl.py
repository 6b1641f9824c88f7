"""NCCL between two processes of this machine, through a socket."""

import ctypes
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

NCCL_SUM = 0
NCCL_FLOAT32, NCCL_FLOAT16, NCCL_BFLOAT16 = 7, 6, 9
TYPES = {NCCL_FLOAT32: "float32", NCCL_FLOAT16: "float16"}


def get_unique_id() -> str:
    """The place where ranks meet."""
    return str(Path(tempfile.mkdtemp()) / "nccl")


class NcclCommunicator:
    """One of two ranks."""

    def __init__(self, size: int, unique: str, rank: int) -> None:
        assert size <= 2
        self._connection = _meet(unique, rank) if size == 2 else None

    def allReduce(self, source: int, target: int, count: int, kind: int, operation: int, stream: int) -> None:  # noqa: N802
        """The sum over both, in the numbers' own type; now, or when the graph that is captured is launched."""
        from . import launch

        assert operation == NCCL_SUM
        if self._connection is not None:
            launch(lambda: self._sum(source, target, count, kind))

    def _sum(self, source: int, target: int, count: int, kind: int) -> None:
        assert self._connection is not None
        own = _numbers(source, count, kind)
        self._connection.send_bytes(own.tobytes())
        other = np.frombuffer(self._connection.recv_bytes(), own.dtype)
        _numbers(target, count, kind)[...] = own + other

    def destroy(self) -> None:
        """Nothing is left."""


def _numbers(address: int, count: int, kind: int) -> Any:
    dtype = np.dtype(TYPES[kind])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


def _meet(unique: str, rank: int) -> Connection:
    if rank == 0:
        with Listener(unique, "AF_UNIX") as listener:
            return listener.accept()
    for _ in range(1000):
        try:
            return Client(unique, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.05)
    raise RuntimeError("the other rank does not come")
