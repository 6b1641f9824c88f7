"""The time of a step in parts, for `gpu.py`: the host's share, and each kernel.

    python gpu_profile.py SHAPE SEQUENCES CONTEXT      one decode step, launched call by call
    python gpu_profile.py SHAPE prompt LENGTH          one prompt

It marks the pass for `ncu`, NVIDIA's profiler, which `launches` starts it under. Where there is no ncu, `launches`
times each launch between two events: host work that the GPU has to wait for is then in the times of small kernels.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]  # minillm need not be installed

from gpu_figures import Figure, Sizes  # noqa: E402
from harness import token_ids  # noqa: E402

METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes.sum": "bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "of the DRAM's peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "blocks",
}
UNITS = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0}
UNITS |= {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
CASE_SECONDS = 75
"""Most that one case takes under ncu, which repeats every launch"""


class Case(NamedTuple):
    """A pass to be profiled: a decode step of some sequences, or one prompt."""

    sequences: int
    """0: a prompt"""
    length: int
    """Of the context, or of the prompt"""

    def __str__(self) -> str:
        return f"batch {self.sequences}, context {self.length}" if self.sequences else f"prompt {self.length}"


def cases(sizes: Sizes, shapes: list[str]) -> list[tuple[str, Case]]:
    """Every batch and a prompt of the middle-sized shape, then the smallest step of the others, then a long context."""
    context, main = sizes.prompt + 32, shapes[min(2, len(shapes) - 1)]
    first = [(main, Case(batch, context)) for batch in sizes.batches] + [(main, Case(0, sizes.short_prefill))]
    others = [(shape, Case(sizes.batches[0], context)) for shape in shapes if shape != main]
    return [*first, *others, (main, Case(1, sizes.prefill))]


def host(*, emulated: bool) -> Iterator[Figure]:
    """The host's work in a decode step of opt-125m, and how long the GPU would wait for it, and in a prompt; no GPU."""
    from gpu_host import KINDS, device_us, measure, measure_prompt

    for kind, fields in KINDS.items():
        for batch in (1, 2) if emulated else (1, 8, 32, 128):
            device = device_us(batch)
            host_us, idle = measure("opt-125m", batch, fields, 5 if emulated else 200, device)
            note = f"a GPU that takes {device:.0f} us waits for {idle:.0f}; simulated"
            yield Figure("host", "opt-125m", f"{kind}, batch {batch}", 1e-6 * host_us, 1e-6 * host_us, note=note)
    for length in (20,) if emulated else (512, 2000):
        host_us, number = measure_prompt("opt-125m", length, 1 if emulated else 20)
        note = f"{host_us / number:.1f} us for each of {number} launches; CuPy's calls are not counted"
        yield Figure("host", "opt-125m", f"prompt of {length}", 1e-6 * host_us, 1e-6 * host_us, note=note)


def launches(sizes: Sizes, shapes: list[str]) -> Iterator[Figure]:
    """The time of each kernel in a pass, summed over its launches."""
    program = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if not program:
        yield Figure("launches", "", "", note="by events: without ncu")
    for shape, case in cases(sizes, shapes):
        try:
            found = _by_ncu(program, shape, case) if program else _by_events(shape, case)
            for kernel in sorted(found.values(), key=lambda one: -one.seconds):
                yield kernel._replace(part="launches", shape=shape, what=f"{case}: {kernel.what}")
        except Exception as error:  # a case that fails must not end the others
            words = (str(error).splitlines() or [""])[0][:200]
            yield Figure("launches", shape, str(case), note=f"failed: {type(error).__name__}: {words}")


def _by_events(shape: str, case: Case) -> dict[str, Figure]:
    """Time every launch of a pass between two events."""
    from minillm.backends.cuda.kernels import Launch

    times: list[tuple[str, Any, Any]] = []

    def watched(engine: Any, run: Callable[[], object]) -> None:
        device, kernels = engine.runner.backend.device, engine.runner.backend.kernels
        get, cuda = kernels.get, device.xp.cuda

        call = Launch.__call__

        def timed(name: str, launch: Callable[..., None]) -> Callable[..., None]:
            def between_events(*arguments: Any, **options: Any) -> None:
                events = cuda.Event(), cuda.Event()
                events[0].record(device.stream)
                launch(*arguments, **options)
                events[1].record(device.stream)
                times.append((name, *events))

            return between_events

        kernels.get = lambda module, name, **constants: timed(name, get(module, name, **constants))
        setattr(Launch, "__call__", lambda launch: timed(launch.name, call)(launch))  # noqa: B010
        try:
            run()
        finally:
            kernels.get = get
            setattr(Launch, "__call__", call)  # noqa: B010
        device.wait()
        for name, began, ended in times:
            _add(found, name, 1e-3 * cuda.get_elapsed_time(began, ended), 0)

    found: dict[str, Figure] = {}
    one_pass(shape, case, watched)
    return found


def _by_ncu(program: str, shape: str, case: Case) -> dict[str, Figure]:
    """Run a pass under ncu, and read its table."""
    what = [str(case.sequences or "prompt"), str(case.length)]
    command = [program, "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    command += ["--csv", "--page", "raw", sys.executable, str(Path(__file__)), shape, *what]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(CASE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ncu and what it profiles
            process.wait()
            raise TimeoutError(f"stopped after {CASE_SECONDS} s") from None
        output.seek(0)
        lines = output.read().splitlines()
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    found = read_table(lines)
    if not found:
        raise RuntimeError(f"ncu ended with {code}: {(lines or ['it said nothing'])[-1]}")
    return found


def read_table(lines: list[str]) -> dict[str, Figure]:
    """Kernels in ncu's CSV, one line for each launch; a line of units follows the header."""
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    found: dict[str, Figure] = {}
    shares: dict[str, list[dict[str, str]]] = {}
    for row in rows[1:]:

        def number(name: str, row: dict[str, str] = row) -> float:
            value, unit = row.get(name, "").replace(",", ""), rows[0].get(name, "")
            return float(value) * UNITS.get(unit, 1.0) if value else 0.0

        name = row["Kernel Name"].split("(")[0]
        _add(found, name, number("gpu__time_duration.sum"), int(number("dram__bytes.sum")))
        shares.setdefault(name, []).append(row)
    for name, launched in shares.items():
        last = launched[-1]
        noted = [f"{word} {last[metric]}" for metric, word in [*METRICS.items()][2:] if last.get(metric)]
        found[name] = found[name]._replace(note="last launch: " + ", ".join(noted))
    return found


def _add(found: dict[str, Figure], name: str, seconds: float, size: int) -> None:
    before = found.get(name) or Figure("", "", name)
    total = before.seconds + seconds
    found[name] = before._replace(seconds=total, best=total, bytes=before.bytes + size, launches=before.launches + 1)


def one_pass(shape: str, case: Case, watched: Callable[[Any, Callable[[], object]], None]) -> None:
    """Prepare a pass that is launched call by call, and hand it to `watched` with its engine."""
    from minillm import Engine
    from minillm.measure.accounting import Storage, cache_bytes_per_token
    from minillm.models import published_config

    config, batch = published_config(shape), max(1, case.sequences)
    room = batch * (case.length + 64) * cache_bytes_per_token(config, Storage.all_in("float16"))
    placement: dict[str, Any] = {"device": "cuda", "dtype": "float16", "cache_bytes": room, "max_batch_size": batch}
    with Engine.random(shape, **placement) as engine:
        backend: Any = engine.runner.backend
        backend.device.record = lambda launch: launch  # what would be a graph is launched kernel by kernel

        def prompts() -> list[int]:
            return [
                engine.add(token_ids(i, case.length, config.vocab_size), max_new_tokens=16, eos_token_id=())
                for i in range(batch)
            ]

        for turn in range(2):  # the first compiles, and times the library's products
            requests = prompts()
            if not case.sequences:
                if turn:
                    watched(engine, engine.step)
                engine.step()
            else:
                before = engine.stats.decode_tokens
                while engine.stats.decode_tokens < before + 3 * batch:  # the first is not as recorded
                    engine.step()
                if turn:
                    watched(engine, engine.step)
            for request in requests:
                engine.abort(request)
            engine.step()


def main() -> None:
    """One pass, between the marks that ncu looks for."""
    import cupy
    from gpu_stage import EMULATED_SHAPES

    from minillm.models import published

    def marked(engine: Any, run: Callable[[], object]) -> None:
        engine.runner.backend.device.wait()
        cupy.cuda.runtime.profilerStart()
        run()
        engine.runner.backend.device.wait()
        cupy.cuda.runtime.profilerStop()

    shape, sequences, length = sys.argv[1:4]
    if shape in EMULATED_SHAPES:
        published()[shape] = EMULATED_SHAPES[shape]
    one_pass(shape, Case(0 if sequences == "prompt" else int(sequences), int(length)), marked)


if __name__ == "__main__":
    main()
