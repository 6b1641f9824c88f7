"""Ranks with a GPU each: arrays on the devices go over NCCL, messages of rank 0 and small objects over MPI.

Source: NVIDIA's NCCL user guide (communicators, collectives, point-to-point), through `cupy.cuda.nccl`. The choice of
GPUs is tested; the rest needs a machine with two.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import DeviceError, FollowedError
from .communicator import Communicator


class NcclCommunicator(Communicator):
    """Processes that MPI connects; each has a GPU."""

    captures = True

    def __init__(self, processes: Communicator) -> None:
        """Connect the devices; each process has made its own the current one (`use_own_gpu`).

        Raises:
            DeviceError: CuPy has no NCCL.
        """
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise DeviceError(f"several GPUs need NCCL, which CuPy cannot load ({error})") from None
        self._processes, self._nccl = processes, nccl
        self.rank, self.size, self.traffic = processes.rank, processes.size, processes.traffic
        [unique, *_] = processes.all_gather(nccl.get_unique_id() if self.rank == 0 else None)
        self._devices = nccl.NcclCommunicator(self.size, unique, self.rank)

    def receive(self, out: Any, source: int) -> None:
        """Fill an array with what another rank sends: on the device, or on the host."""
        if self._on_host(out):
            self._processes.receive(out, source)
        else:
            self._devices.recv(out.data.ptr, out.size, self._type(out), source, self._stream())

    def listen(self) -> bytes:
        """The next message from rank 0."""
        return self._processes.listen()

    def all_gather(self, value: Any) -> list[Any]:
        """A small object of each rank, in their order."""
        return self._processes.all_gather(value)

    def group(self, members: Sequence[int]) -> "NcclCommunicator":
        """Some of the ranks."""
        return NcclCommunicator(self._processes.group(members))

    def free(self) -> None:
        """Destroy NCCL's communicator, and free the processes'."""
        if self._devices is not None:
            self._devices.destroy()
        self._devices = None
        self._processes.free()

    @property
    def on_this_machine(self) -> int:
        """Number of these processes on this machine."""
        return self._processes.on_this_machine

    def abort(self, cause: str) -> NoReturn:
        """End all ranks."""
        self._processes.abort(cause)

    def _all_reduce(self, x: Any) -> None:
        self._devices.allReduce(x.data.ptr, x.data.ptr, x.size, self._type(x), self._nccl.NCCL_SUM, self._stream())

    def _send(self, x: Any, to: int) -> None:
        if self._on_host(x):
            self._processes._send(x, to)
        else:  # in the order of the stream: what computes the next micro-batch there waits
            self._devices.send(x.data.ptr, x.size, self._type(x), to, self._stream())

    def _tell(self, message: bytes, to: int) -> None:
        self._processes._tell(message, to)

    def _on_host(self, array: Any) -> bool:
        return not hasattr(array.data, "ptr")

    def _type(self, array: Any) -> int:
        number: int = getattr(self._nccl, f"NCCL_{array.dtype.name.upper()}")
        return number

    def _stream(self) -> int:
        from cupy.cuda import get_current_stream

        pointer: int = get_current_stream().ptr
        return pointer


def use_own_gpu(processes: Communicator) -> int:
    """Make a GPU of this machine, which no other process there takes, the thread's current one. Returns its number.

    `CupyDevice` makes it that of each thread that computes.

    Raises:
        DeviceError: on every rank, for the same cause: one sees no GPU, or more processes than GPUs are on a machine.
    """
    cause, seen = "", []
    try:
        from cupy.cuda import Device, runtime

        seen = [runtime.deviceGetPCIBusId(number) for number in range(runtime.getDeviceCount())]
    except (ImportError, RuntimeError) as error:  # CUDARuntimeError is one
        cause = f"device 'cuda' needs CuPy, an NVIDIA GPU and its driver: {' '.join(str(error).split())}"
    told = processes.all_gather((_machine(), seen, cause))
    numbers = gpus_of([(machine, gpus) for machine, gpus, _ in told], shared="NCCL_HOSTID" in os.environ)
    for rank, (number, (machine, gpus, failed)) in enumerate(zip(numbers, told, strict=True)):
        if number is None:
            beside = sum(other == machine for other, *_ in told)
            failed = failed or (
                f"no GPU is left for it: it sees {len(gpus)}, and there are {beside} processes on its machine: "
                "start as many as there are GPUs"
            )
            raise (FollowedError if processes.rank else DeviceError)(f"rank {rank}: {failed}")
    own = numbers[processes.rank]
    assert own is not None
    Device(own).use()
    return own


def gpus_of(seen: Sequence[tuple[str, Sequence[str]]], *, shared: bool = False) -> list[int | None]:
    """Each rank's GPU, by its place among those that it sees.

    In the order of the ranks, each gets the first one it sees that no rank before it has; so it does not matter whether
    a launcher has shown each process one GPU or all of them.

    Args:
        seen: of each rank its machine, and the bus ids of the GPUs it sees
        shared: whether a rank without one of its own gets the first one it sees

    Returns:
        Numbers, from 0; None: no GPU is left.
    """
    numbers: list[int | None] = []
    taken: set[tuple[str, str]] = set()
    for machine, gpus in seen:
        free = [i for i, gpu in enumerate(gpus) if (machine, gpu) not in taken]
        number = free[0] if free else 0 if shared and gpus else None
        if number is not None:
            taken.add((machine, gpus[number]))
        numbers.append(number)
    return numbers


def _machine() -> str:
    """A name that no other running machine has: containers may have the same host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
