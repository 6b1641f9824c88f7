"""The thread pool in C: every share is done once, idle helpers sleep, forked children and several threads work."""

import ctypes
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from minillm.backends.cpu import launching
from minillm.backends.cpu.launching import Glu, Program, TakeRows, aligned, filled, num_threads, recording, set_threads

from ...children import in_child

two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")


def gated(rows: int, launches: int) -> tuple[Program, np.ndarray, np.ndarray]:
    """A program of launches that write the same results, what it writes to, and what should be there."""
    x = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    out = aligned(rows * 32 * 4).view(np.float32).reshape(rows, 32)
    program = Program()
    for _ in range(launches):
        arguments = filled(Glu, x=x, out=out, T=rows, F=32, activation=1)
        program.add(launching._address_of("glu"), arguments, 8)
    return program, out, np.maximum(x[:, :32], 0) * x[:, 32:]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_share_is_done_once_by_somebody(threads: int) -> None:
    program, out, expected = gated(1000, 20)
    program.threads = threads
    for _ in range(50):
        out[...] = np.nan
        program.run()
        np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_launch_begins_when_all_shares_of_the_one_before_are_done(threads: int) -> None:
    """Each share reads what other shares of the launch before wrote."""
    R, E = 64, 700
    arrays = [aligned(4 * R * E).view(np.float32).reshape(R, E) for _ in range(2)]
    moved, program = (np.arange(R) + 13) % R, Program()
    program.threads = threads
    for i in range(100):
        x, out = arrays[i % 2], arrays[1 - i % 2]
        program.add(launching._address_of("take_rows"), filled(TakeRows, x=x, rows=moved, out=out, R=R, E=E), 8)
    for seed in range(30):
        given = np.random.default_rng(seed).standard_normal((R, E)).astype(np.float32)
        arrays[0][...], arrays[1][...] = given, np.nan
        program.run()
        np.testing.assert_array_equal(arrays[0], np.roll(given, -100 * 13, axis=0))


def test_launches_end_one_after_the_other() -> None:
    program, _, _ = gated(500, 6)
    before = time.perf_counter_ns()
    program.run(watched=True)
    ended = program.ended()
    if os.uname().sysname == "Linux":  # where both clocks are one
        assert before < ended[0] and ended[-1] < time.perf_counter_ns()
    assert (np.diff(ended) >= 0).all()


@two
def test_idle_helpers_take_no_time_of_the_processor() -> None:
    program, _, _ = gated(1000, 20)
    program.threads = 2
    program.run()
    time.sleep(0.1)  # in which they fall asleep
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    program.run()  # and are woken


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Sleepers:
    """A program of two workers that sleep, the helper longer by `late` seconds; and who took part in the last run."""

    def __init__(self, seconds: float, late: float, launches: int = 1) -> None:
        self.workers: set[int] = set()

        def sleep(arguments: int, share: int, shares: int, worker: int) -> None:
            self.workers.add(worker)
            time.sleep(seconds + late * (worker > 0))

        self.kernel = _KERNEL(sleep)
        self.program = Program()
        self.program.threads = 2
        address = ctypes.cast(self.kernel, ctypes.c_void_p).value or 0
        for _ in range(launches):
            self.program.add(address, filled(TakeRows), 2)

    def run(self) -> set[int]:
        self.workers.clear()
        self.program.run()
        return set(self.workers)

    def becomes(self, workers: set[int]) -> bool:
        """Whether these run it within two seconds."""
        end = time.monotonic() + 2
        while self.run() != workers and time.monotonic() < end:
            time.sleep(0.01)
        return self.workers == workers


@two
def test_programs_run_alone_after_waiting_for_a_large_part_of_one() -> None:
    late, even = Sleepers(0.005, 0.02), Sleepers(0.005, 0.0)
    for _ in range(20):  # each time they run alone for longer, at first for 20 ms
        late.run()
        if even.run() == {0}:
            break
    else:
        pytest.fail("helpers took part in all programs")
    assert even.becomes({0, 1})  # when that time is over


@two
def test_waiting_for_a_small_part_of_a_long_program_leaves_its_threads() -> None:
    """Shares are never equally long: here the caller waits for 10 ms in 410. On a busy machine it may wait longer."""
    late, even = Sleepers(0.4, 0.01), Sleepers(0.005, 0.0)
    assert any(even.becomes({0, 1}) and late.run() == even.run() == {0, 1} for _ in range(10))


@two
def test_many_short_waits_leave_a_program_its_threads() -> None:
    """As in attention to a few blocks: here the caller waits 40 times for half a millisecond, half of the time."""
    late, even = Sleepers(0.0005, 0.0005, launches=40), Sleepers(0.005, 0.0)
    assert any(even.becomes({0, 1}) and late.run() == even.run() == {0, 1} for _ in range(10))


def test_programs_of_several_threads_run_at_the_same_time() -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            program, out, expected = gated(300, 20)
            program.threads = 2
            for _ in range(50):
                out[...] = np.nan
                program.run()
                np.testing.assert_allclose(out, expected, rtol=1e-6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    program, out, expected = gated(1000, 20)
    program.threads = 2
    program.run()

    def child() -> bool:
        out[...] = np.nan
        program.run()
        return np.allclose(out, expected, rtol=1e-6)

    assert in_child(child)
    program.run()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_program_ends_with_fewer_threads_than_asked_for() -> None:
    """In a child, which has no helpers yet, and address space for the stacks of few."""
    import resource

    program, out, expected = gated(1000, 20)
    program.threads = 60

    def child() -> bool:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
        out[...] = np.nan
        program.run()
        fewer = len(list(Path("/proc/self/task").iterdir())) < 60
        return fewer and np.allclose(out, expected, rtol=1e-6)

    assert in_child(child)


def test_what_is_recorded_is_repeated() -> None:
    x, out = np.ones((3, 8), np.float32), np.empty((3, 4), np.float32)
    program = Program()
    with recording(program):
        launching.launch("glu", filled(Glu, x=x, out=out, T=3, F=4, activation=0))
    assert program.complete and len(program) == 1
    x[...] = 3
    program.run()
    assert (out == 9).all()


STRUCTURES = {
    "norm_arguments": launching.Norm,
    "selective_scan_arguments": launching.SelectiveScan,
    "glu_arguments": launching.Glu,
    "table": launching.Table,
    "embed_arguments": launching.Embed,
    "rotary_angles_arguments": launching.Angles,
    "heads_to_rotate": launching.Heads,
    "rotary_arguments": launching.Rotary,
    "move_heads_arguments": launching.MoveHeads,
    "route_arguments": launching.Route,
    "take_rows_arguments": launching.TakeRows,
    "store_kv_arguments": launching.StoreKV,
    "attention_arguments": launching.Attention,
    "linear": launching.Linear,
    "argmax_arguments": launching.Argmax,
    "sample_arguments": launching.Sample,
}


def test_the_arrays_of_inner_structures_are_kept_too() -> None:
    """The copy of a structure inside another holds an address alone."""
    values = np.zeros((3, 4), np.float32)
    outer = filled(launching.Embed, words=filled(launching.Table, values=values), T=0, E=4)
    assert any(array is values for array in outer.kept)


KERNELS = Path(__file__).parents[3] / "kernels" / "cpu"


def fields_in_c(name: str) -> list[tuple[str, str]]:
    """Kind and name of each field of a structure, as the source declares it."""
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.[ch]")))
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL).replace("*const ", "*")
    (body,) = re.findall(r"typedef struct {([^}]*)} " + name + ";", source)
    found = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, names = re.fullmatch(r"((?:const )?\w+)\s*(.*)", declaration, re.DOTALL).groups()
        for field in re.split(r",\s*", names):
            base = "pointer" if field.startswith("*") else kind
            found.append((base, field.lstrip("*")))
    return found


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_those_of_the_sources(name: str) -> None:
    kinds = {ctypes.c_void_p: "pointer", ctypes.c_int64: "int64_t", ctypes.c_double: "double"}
    kinds |= {structure: c_name for c_name, structure in STRUCTURES.items()}
    assert [(kinds[kind], field) for field, kind in STRUCTURES[name]._fields_] == fields_in_c(name)


def test_no_more_threads_run_a_launch_than_its_scratch_memory_is_for(monkeypatch) -> None:
    """Though another thread sets their number meanwhile."""
    ran: list[int] = []
    monkeypatch.setattr(launching, "_run_at", lambda where, length, threads, *, watched: ran.append(threads))
    before, sample = num_threads(), filled(launching.Sample)
    try:
        set_threads(2)
        launching.Scratch().serve(sample, "sample", 8)
        set_threads(8)
        program = Program()
        assert program.threads == 8
        with recording(program):
            launching.launch("sample", sample, 4)
            launching.launch("take_rows", filled(TakeRows), 4)
    finally:
        set_threads(before)
    assert ran == [2, 8] and program.threads == 2


def test_the_number_of_threads_is_that_of_the_cores_unless_set() -> None:
    before = num_threads()
    try:
        set_threads(3)
        assert num_threads() == 3 and launching.shares_of(100) == 6
        set_threads(0)
        assert num_threads() == len(os.sched_getaffinity(0))
    finally:
        set_threads(before)
