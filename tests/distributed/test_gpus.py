"""Which GPU each rank takes; without one, by what the processes tell each other."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.distributed.nccl import gpus_of, use_own_gpu
from minillm.errors import DeviceError, FollowedError

A, B = "0000:3b:00.0", "0000:af:00.0"


def test_processes_of_a_machine_take_one_gpu_each() -> None:
    assert gpus_of([("one", [A, B]), ("one", [A, B])]) == [0, 1]
    assert gpus_of([("one", [A, B]), ("other", [A, B]), ("one", [A, B]), ("other", [A, B])]) == [0, 0, 1, 1]


def test_a_launcher_may_show_each_process_its_own() -> None:
    """By CUDA_VISIBLE_DEVICES, after which every process counts from 0."""
    assert gpus_of([("one", [A]), ("one", [B])]) == [0, 0]
    assert gpus_of([("one", [B]), ("one", [A, B])]) == [0, 0]


def test_one_gpu_too_few_is_seen_and_may_be_shared_only_where_that_is_asked_for() -> None:
    told = [("one", [A]), ("one", [A]), ("other", [])]
    assert gpus_of(told) == [0, None, None]
    assert gpus_of(told, shared=True) == [0, 0, None]


class Told:
    """The communicator of one of several ranks; `others` have told theirs."""

    def __init__(self, rank: int, others: list[Any]) -> None:
        self.rank, self._others = rank, others

    def all_gather(self, value: Any) -> list[Any]:
        return [*self._others[: self.rank], value, *self._others[self.rank :]]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that became current, on a machine with two of them."""
    used: list[int] = []
    runtime = SimpleNamespace(getDeviceCount=lambda: 2, deviceGetPCIBusId=[A, B].__getitem__)
    cuda = SimpleNamespace(runtime=runtime, Device=lambda i: SimpleNamespace(use=lambda: used.append(i)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr("minillm.distributed.nccl._machine", lambda: "one")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    return used


def test_a_rank_makes_its_gpu_the_current_one(used: list[int]) -> None:
    other: Any = ("one", [A, B], "")
    assert [use_own_gpu(Told(rank, [other])) for rank in (0, 1)] == [0, 1]  # type: ignore[arg-type]
    assert used == [0, 1]


def test_all_ranks_end_with_the_same_line_where_one_has_no_gpu(used: list[int]) -> None:
    """So none of them waits for the one that failed."""
    others: list[Any] = [("one", [A, B], ""), ("one", [A, B], "")]
    broken: list[Any] = [("other", [], "device 'cuda' needs CuPy, an NVIDIA GPU and its driver: no driver")]
    line = "rank 2: no GPU is left for it: it sees 2, and there are 3 processes on its machine: start as many as there"
    for rank, kind in enumerate((DeviceError, FollowedError, FollowedError)):
        with pytest.raises(kind, match=line):
            use_own_gpu(Told(rank, others))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"^rank 1: device 'cuda' needs CuPy, .*: no driver$"):
        use_own_gpu(Told(0, broken))  # type: ignore[arg-type]
    assert not used
