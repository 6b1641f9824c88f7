"""Ranks as processes of MPI, on one machine or several, started by `mpiexec` or Slurm's `srun`.

Source: MPI 4.1 (mpi-forum.org), through mpi4py. Arrays go through the buffer interface, without pickling.
"""

import ctypes
import signal
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np

from ..errors import DeviceError, FollowedError, install, printable
from .communicator import Communicator, Traffic

STEP = 1
"""Tag of messages from rank 0; arrays have tag 0"""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent ends"""
EAGER_SECONDS = 0.005
"""Time for which a rank waits at full speed for rank 0: longer than the choice of tokens between two passes"""
IDLE_SECONDS = 0.001
"""Interval at which it looks afterwards"""
FORWARD_SECONDS = 0.2
"""Time for mpiexec to forward a rank's last line, which it may drop once the rank has called MPI_Abort"""


class MpiCommunicator(Communicator):
    """The processes of an MPI communicator."""

    def __init__(self, comm: Any, traffic: Traffic) -> None:
        self._comm = comm
        self._sent: list[tuple[Any, Any]] = []
        """Arrays on their way"""
        self.rank, self.size, self.traffic = comm.Get_rank(), comm.Get_size(), traffic

    def receive(self, out: Any, source: int) -> None:
        """Fill an array with what another rank sends."""
        self._comm.Recv(out, source=source, tag=0)

    def listen(self) -> bytes:
        """The next message from rank 0."""
        from mpi4py import MPI

        status, began = MPI.Status(), time.monotonic()
        while (message := self._comm.Improbe(source=0, tag=STEP, status=status)) is None:
            time.sleep(0 if time.monotonic() - began < EAGER_SECONDS else IDLE_SECONDS)
        out = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([out, MPI.BYTE])
        self._forget_sent()
        return bytes(out)

    def all_gather(self, value: Any) -> list[Any]:
        """A small object of each rank, in their order."""
        values: list[Any] = self._comm.allgather(value)
        return values

    def group(self, members: Sequence[int]) -> "MpiCommunicator":
        """Some of the ranks."""
        return MpiCommunicator(self._comm.Split(members[0], self.rank), self.traffic)

    def copy(self) -> "MpiCommunicator":
        """The same processes with messages apart from this communicator's, as for another model."""
        return MpiCommunicator(self._comm.Dup(), Traffic())

    def free(self) -> None:
        """Free the communicator: an MPI library has a limited number of them (MPICH about 2,000)."""
        for request, _ in self._sent:
            request.Wait()
        self._sent = []
        if self._comm:  # not freed before
            self._comm.Free()

    @property
    def on_this_machine(self) -> int:
        """Number of ranks with which this one could share memory."""
        from mpi4py import MPI

        neighbours = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        count = int(neighbours.Get_size())
        neighbours.Free()
        return count

    def abort(self, cause: str) -> NoReturn:
        """Print the cause, and end all processes with exit code 1."""
        print(f"minillm: {printable(f'rank {self.rank}: {cause}')}", file=sys.stderr, flush=True)
        self.end(1)

    def end(self, code: int) -> NoReturn:
        """End all processes with an exit code."""
        time.sleep(FORWARD_SECONDS)
        self._comm.Abort(code)
        raise SystemExit(code)

    def _all_reduce(self, x: Any) -> None:
        from mpi4py import MPI

        self._comm.Allreduce(MPI.IN_PLACE, x)

    def _send(self, x: Any, to: int) -> None:
        self._forget_sent()
        copied = np.array(x)  # the stage goes on to the next micro-batch, in the same memory
        self._sent.append((self._comm.Isend(copied, dest=to, tag=0), copied))

    def _tell(self, message: bytes, to: int) -> None:
        from mpi4py import MPI

        self._forget_sent()
        self._comm.Send([message, MPI.BYTE], dest=to, tag=STEP)

    def _forget_sent(self) -> None:
        self._sent = [(request, copied) for request, copied in self._sent if not request.Test()]


@cache
def _end_with_launcher() -> None:
    """Let the system end this process when its launcher is gone, even if it hangs (Linux: prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def world() -> MpiCommunicator:
    """All processes that `mpiexec` has started; they end when it does.

    Raises:
        DeviceError: mpi4py, or the MPI that it needs, is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"several processes need MPI, which cannot be loaded ({error}): {install('mpi')}") from None
    _end_with_launcher()
    return MpiCommunicator(MPI.COMM_WORLD, Traffic())


def check_threads(models: int) -> None:
    """Check that MPI can be called from the threads in which so many models are served, one for each.

    Raises:
        DeviceError: it gives a lower level of thread support (MPI 4.1, section 11.6); on other ranks than 0
            FollowedError.
    """
    processes = world()
    from mpi4py import MPI

    levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    needed = MPI.THREAD_MULTIPLE if models > 1 else MPI.THREAD_SERIALIZED
    if (given := MPI.Query_thread()) < needed:
        kind = FollowedError if processes.rank else DeviceError
        raise kind(
            f"to serve {models} model{'s' * (models > 1)} on ranks, MPI should give MPI_THREAD_{levels[needed]}, and "
            f"gives MPI_THREAD_{levels[given]}: use an MPI library that is built for it"
            + (", or serve each model by a job of its own" if models > 1 else "")
        )
