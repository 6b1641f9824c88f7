"""Ranks with a GPU each: arrays on the devices go over NCCL, messages of rank 0 and small objects over MPI.

Source: NVIDIA's NCCL user guide (communicators, collectives, point-to-point), through `cupy.cuda.nccl`. Not tested: it
needs a machine with two GPUs.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import DeviceError
from .communicator import Communicator


class NcclCommunicator(Communicator):
    """Processes that MPI connects; each has a GPU."""

    def __init__(self, processes: Communicator) -> None:
        """Connect the devices; each process has made its own the current one.

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
