"""Ranks that share each layer on emulated GPUs: their decode steps are recorded with the sums between them."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda import rows
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.dependent import begins_early
from minillm.backends.cuda.device import Device
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import ALL_REDUCE, Call, Kernels
from minillm.backends.cuda.kernels import Launch as Collected
from minillm.backends.cuda.linear import LIBRARY_PRODUCT
from minillm.backends.cuda.memory import CudaMemory, RecordedStep
from minillm.backends.loader import RandomTensor
from minillm.distributed.threads import ThreadCommunicator, run_ranks
from minillm.engine import assembly
from minillm.parallel import Parallel
from tests.distributed.ranks import on_ranks

from .launchers import launcher, missing
from .recording import Launch, Recorder, RecordingDevice

PROMPTS = ["A list of colors: red,", "Count from 3 to 9:", "The"]


class OneByOne(Recorder):
    """A launcher of one of several threads: the emulator runs one kernel at a time."""

    lock = threading.Lock()

    def run(self, launch: Launch) -> None:
        if launch.name == ALL_REDUCE:  # which waits for the others
            launch.kernel(launch.grid, launch.block, launch.args)
            return
        with self.lock:
            super().run(launch)


class CapturedGroup:
    """A group of threads whose sums are recorded like launches, as NCCL's are; with a log of what was asked for."""

    captures = True

    def __init__(self, inner: ThreadCommunicator, recorder: Recorder) -> None:
        self.inner, self.recorder, self.rank, self.size = inner, recorder, inner.rank, inner.size
        self.log: list[tuple[str, int]] = []

    def all_reduce(self, x: Any) -> Any:
        self.inner.traffic.add("all-reduce", x.nbytes)
        if self.recorder.recording is None:
            self._sum("called", x)
        else:
            self.log.append(("captured", x.nbytes))
            sum_up: Any = Call(lambda x: self._sum("replayed", x))
            self.recorder.recording.append(Launch(ALL_REDUCE, sum_up, (1,), (1,), (x,), 0))
        return x

    def _sum(self, how: str, x: Any) -> None:
        self.log.append((how, x.nbytes))
        self.inner._all_reduce(x)

    def all_gather(self, value: Any) -> list[Any]:
        return self.inner.all_gather(value)

    def repeated(self, nbytes: int) -> None:
        self.inner.repeated(nbytes)


class RankBackend(CudaBackend):
    def join(self, group: Any) -> None:
        device: Any = self.device
        super().join(CapturedGroup(group, device.recorder) if group.size > 1 else group)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[RankBackend]:
    """The backends that engines of this test have made, on emulated GPUs."""
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setattr(Kernels, "processors", 1)
    made: list[RankBackend] = []

    def choose(placement: Any, max_batch_size: int) -> RankBackend:
        device = RecordingDevice(OneByOne(Emulator()))
        made.append(RankBackend(device, device.recorder, "float32", max_batch_size=max_batch_size, records_ranks=True))
        return made[-1]

    monkeypatch.setattr(assembly, "choose_backend", choose)
    return made


def answers(engine: Engine) -> list[list[int]]:
    """Tokens of prompts together and alone, so that steps of several buckets run."""
    several = [engine.generate(texts, max_new_tokens=6, eos_token_id=()) for texts in (PROMPTS, PROMPTS[:1], PROMPTS)]
    return [answer.token_ids for answers in several for answer in answers]


def logs(backends: list[RankBackend]) -> list[list[tuple[str, int]]]:
    groups: list[Any] = [backend.group for backend in sorted(backends, key=lambda backend: backend.rank)]
    return [group.log for group in groups]


@pytest.mark.slow
def test_decode_steps_of_ranks_are_replayed_with_their_sums(backends: list[RankBackend]) -> None:
    shared = on_ranks(Parallel(tensor=2), answers, max_batch_size=4)
    first, second = logs(backends)
    assert first == second, "the same sums, in the same order, captured in the same steps"
    assert {how for how, _ in first} == {"called", "captured", "replayed"}
    assert shared.result == answers_of_one()
    for backend in backends:
        device: Any = backend.device
        assert device.replays > 6 and not backend.memory.runs_ahead
    sums = [nbytes for how, nbytes in first if how != "captured"]
    for traffic in shared.traffic:
        assert (traffic.of("all-reduce").messages, traffic.of("all-reduce").bytes) == (len(sums), sum(sums))


def answers_of_one() -> list[list[int]]:
    from minillm.backends.numpy import NumpyBackend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "choose_backend", lambda placement, max_batch_size: NumpyBackend())
        return answers(Engine(max_batch_size=4, cache_bytes=1 << 24))


@pytest.mark.slow
@pytest.mark.parametrize("agree", [True, False])
def test_a_rank_whose_memory_moves_has_all_record_anew(
    agree: bool, backends: list[RankBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL captures on all ranks or on none. Where they do not agree, the logs show it."""
    run = RecordedStep.run

    def moving(self: RecordedStep[Any], *arguments: Any) -> Any:
        is_new, result = self.is_new, run(self, *arguments)
        device: Any = self._device
        if is_new and device is backends[1].device:
            self.workspace.scratch.reservations += 1
        return result

    monkeypatch.setattr(RecordedStep, "run", moving)
    if not agree:
        monkeypatch.setattr(CudaMemory, "_agree", lambda *_: None)
    on_ranks(Parallel(tensor=2), answers, max_batch_size=4)
    captured = [[entry for entry in log if entry[0] == "captured"] for log in logs(backends)]
    assert (logs(backends)[0] == logs(backends)[1]) is agree
    assert (len(captured[0]) == len(captured[1])) is agree


def test_ranks_agree_on_what_moved_and_on_what_is_not_recorded() -> None:
    from types import SimpleNamespace

    def work(communicator: Any) -> tuple[int, bool]:
        step: Any = SimpleNamespace(workspace=SimpleNamespace(scratch=SimpleNamespace(reservations=5)), plain=False)
        if communicator.rank == 1:
            step.workspace.scratch.reservations, step.plain = 6, True
        CudaMemory._agree(SimpleNamespace(), communicator, step, 5)  # type: ignore[arg-type]
        return step.workspace.scratch.reservations, step.plain

    assert run_ranks(3, work) == [(6, True)] * 3


def test_without_the_switch_or_a_group_that_can_nothing_is_recorded(device: RecordingDevice) -> None:
    from types import SimpleNamespace

    def joined(*, records: bool, captures: bool, size: int = 2) -> bool:
        backend = CudaBackend(device, device.recorder, "float32", records_ranks=records, prompt_tokens=64)
        backend.join(SimpleNamespace(rank=0, size=size, captures=captures))  # type: ignore[arg-type]
        assert (backend.memory.runs_ahead, backend.memory.prompt_tokens) == ((False, 0) if size > 1 else (True, 64))
        return backend.replays

    assert not joined(records=False, captures=True)
    assert not joined(records=True, captures=False)
    assert joined(records=True, captures=True)
    assert joined(records=False, captures=False, size=1)


def test_nothing_begins_before_the_end_of_another_librarys_launch() -> None:
    def launch(name: str) -> Collected:
        kernel: Any = None
        return Collected(name, {}, kernel, (1,), (32,), (np.zeros(4, np.float32),) * 3, 0)

    launches = [launch(name) for name in ("embed", ALL_REDUCE, "layer_norm", LIBRARY_PRODUCT, "layer_norm", "glu")]
    assert [begins_early(launches, i) for i in range(6)] == [False] * 5 + [True]


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_a_shared_table_has_zeros_for_other_ranks_tokens(storage: str, emulator: Any) -> None:
    whole = np.random.default_rng(0).standard_normal((9, 24)).astype(storage)
    places = np.random.default_rng(1).standard_normal((4, 24)).astype(storage)
    whole[3] = np.inf  # the first of the second rank's, which other tokens must not bring in
    ids, positions = np.array([8, 0, 4, 2, 5], np.int32), np.array([0, 1, 2, 3, 0], np.int32)
    parts = []
    for first, stop in ((0, 3), (3, 9)):
        out = np.full((5, 24), np.nan, storage)
        table = np.ascontiguousarray(whole[first:stop])
        added: dict[str, Any] = {} if first else {"position_table": places, "positions": positions}
        rows.embed(Kernels(emulator, storage), table, ids, out, **added, scale=2.0, first=first)
        parts.append(out.astype("f"))
    expected = (2 * whole[ids].astype("f")).astype(storage).astype("f")
    own = ids >= 3
    np.testing.assert_array_equal(parts[1], np.where(own[:, None], expected, 0))
    both = (2 * whole[ids].astype("f") + places[positions].astype("f")).astype(storage).astype("f")
    np.testing.assert_array_equal(parts[0], np.where(own[:, None], places[positions].astype("f"), both))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_shared_table_of_few_bits_is_the_whole_ones_rows(dtype: str, learned: bool) -> None:
    """Those of other ranks' tokens are zeros, or what is added to them."""
    backend = CudaBackend(Device(), launcher(), dtype)
    table = backend.loader.prepare("w", [RandomTensor("w", (12, 128), 1, 1.0)], role="vocabulary")
    places = backend.loader.prepare("p", [RandomTensor("p", (4, 128), 2, 1.0)], role="positions")
    ids, positions = np.array([8, 0, 11, 2, 5], np.int32), np.array([0, 1, 2, 3, 0], np.int32)
    added: dict[str, Any] = {"positions": positions, "position_table": places} if learned else {}
    backend.memory.arena = backend.memory.workspace.scratch.arena  # as in a pass
    whole = backend.embed(ids, table, **added).copy()
    backend.join(SimpleNamespace(rank=0, size=2, captures=False))
    shared = backend.embed(np.array([108, 100, 3, 102, 205], np.int32), replace(table, first=100), **added)
    own = np.array([True, True, False, True, False])
    np.testing.assert_array_equal(shared[own], whole[own])
    np.testing.assert_array_equal(shared[~own], places.data[positions[~own]] if learned else np.zeros((2, 128)))
