"""Two ranks on one GPU, for `gpu.py`: whether NCCL, the ranks' types and their order are right; never how fast.

    python gpu_ranks.py RANK SOCKET NEW_TOKENS

NCCL refuses two ranks on one GPU, which it knows by host and bus. With another NCCL_HOSTID in each process it takes
them for two hosts and sends through sockets. The packaged model's tokens are compared with those of one process.
"""

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NoReturn

sys.path[:0] = [str(Path(__file__).parents[1])]  # minillm need not be installed

from gpu_figures import Figure  # noqa: E402

from minillm.distributed.communicator import Communicator, Traffic  # noqa: E402

NEW_TOKENS, FEW = 24, 4
SECONDS = 100
PROMPTS = "A list of colors: red,", "Count from 3 to 9:"
APART = {
    "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
}  # fmt: skip
"""NCCL's ways that two processes on one GPU can take"""


class PairCommunicator(Communicator):
    """Two processes that a connection joins: for what NCCL does not carry, small objects and messages of rank 0."""

    def __init__(self, rank: int, connection: Connection, size: int = 2, traffic: Traffic | None = None) -> None:
        self.rank, self.size, self.traffic = rank, size, traffic or Traffic()
        self._connection = connection
        self._waiting: dict[str, deque[Any]] = {"message": deque(), "object": deque(), "array": deque()}

    def receive(self, out: Any, source: int) -> None:
        """Fill an array of the host with what the other rank sends."""
        out[...] = self._take("array")

    def listen(self) -> bytes:
        """The next message from rank 0."""
        message: bytes = self._take("message")
        return message

    def all_gather(self, value: Any) -> list[Any]:
        """Both ranks' objects."""
        if self.size == 1:
            return [value]
        self._connection.send(("object", value))
        other = self._take("object")
        return [value, other] if self.rank == 0 else [other, value]

    def group(self, members: Sequence[int]) -> Communicator:
        """Both ranks, or this one."""
        if len(members) == self.size:
            return self
        return PairCommunicator(0, self._connection, 1, self.traffic)

    def free(self) -> None:
        """Nothing is held."""

    @property
    def on_this_machine(self) -> int:
        """Both."""
        return self.size

    def abort(self, cause: str) -> NoReturn:
        """End; the other one finds its connection closed."""
        print(cause, file=sys.stderr, flush=True)
        os._exit(1)

    def _all_reduce(self, x: Any) -> None:
        self._connection.send(("array", x))
        x += self._take("array")

    def _send(self, x: Any, to: int) -> None:
        self._connection.send(("array", x))

    def _tell(self, message: bytes, to: int) -> None:
        self._connection.send(("message", message))

    def _take(self, kind: str) -> Any:
        while not self._waiting[kind]:
            found, value = self._connection.recv()
            self._waiting[found].append(value)
        return self._waiting[kind].popleft()


def ranks(*, emulated: bool) -> Iterator[Figure]:
    """Tokens of two ranks beside those of one process: steps launched call by call, then recorded with NCCL's sums."""
    for recorded in (False, True):
        what = "two ranks on one GPU, over NCCL" + ", recorded" * recorded
        for line in _two_ranks(FEW if emulated else NEW_TOKENS, recorded=recorded):
            yield Figure("ranks", "", what, note=line)


def _two_ranks(count: int, *, recorded: bool) -> Iterator[str]:
    switches = {"MINILLM_CUDA_RANKS": str(int(recorded))}
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "pair")
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), socket, str(count)],
                stdout=subprocess.PIPE,
                stderr=sys.stderr,
                text=True,
                env=os.environ | APART | switches | {"NCCL_HOSTID": f"rank{rank}"},
            )
            for rank in range(2)
        ]
        try:
            said, _ = processes[0].communicate(timeout=SECONDS)
            codes = processes[0].returncode, processes[1].wait(SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    yield from said.strip().splitlines()
    if not said.strip() or any(codes):
        yield f"failed: exit codes {codes}; see the log"


def main() -> None:
    """One rank; rank 0 prints the verdict of each prompt."""
    from minillm import Engine
    from minillm.distributed.nccl import NcclCommunicator, use_own_gpu
    from minillm.parallel import Parallel

    rank, socket, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    pair = PairCommunicator(rank, _connected(rank, socket))
    use_own_gpu(pair)
    where: dict[str, Any] = {"device": "cuda", "dtype": "float16", "max_batch_size": 2, "cache_bytes": 1 << 22}
    texts = []
    with Engine(parallel=Parallel(tensor=2), communicator=NcclCommunicator(pair), **where) as engine:
        if rank:
            engine.follow()
            return
        texts = [engine.generate(prompt, max_new_tokens=count).token_ids for prompt in PROMPTS]
        traffic = pair.traffic.of("all-reduce")
    with Engine(**where) as engine:
        for prompt, text in zip(PROMPTS, texts, strict=True):
            alone = engine.generate(prompt, max_new_tokens=count).token_ids
            same = next((i for i, (a, b) in enumerate(zip(alone, text, strict=False)) if a != b), len(alone))
            verdict = "right: the tokens of one process" if alone == text else "OTHER TOKENS than of one process"
            print(f"{verdict}, {same} of {len(alone)}; {traffic.messages} sums of {traffic.bytes} bytes in all")


def _connected(rank: int, socket: str) -> Connection:
    if rank == 0:
        with Listener(socket, "AF_UNIX") as listener:
            return listener.accept()
    import time

    for _ in range(1000):
        try:
            return Client(socket, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.05)
    raise SystemExit("rank 0 does not listen")


if __name__ == "__main__":
    main()
