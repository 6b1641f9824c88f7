"""How long does a GPU wait for Python? Microseconds of a decode step, found without a GPU.

The engine runs as on a GPU, but kernels, graphs and copies do nothing, and time is simulated: the host's clock is this
thread's CPU time, and each launched step occupies the device for `--device-us`, after the step before it. To wait moves
the host's clock on. So two figures come out of each step: what the host computes, and how long the device stands idle,
because the next step was not launched when one had ended. What CuPy's own calls take (a copy, a launch of a graph and
an event: about 15 to 20 us) is in neither.

Sequences of 128 tokens decode side by side, greedy and sampling, no text; the median of many steps counts. Then
prompts, whose passes are not recorded: what the host computes for one, and that for each launch of a kernel or of a
product of the library.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import describe, execute, headed, make_folder, new_parser, positive, positives, say, token_ids, write_csv

DEVICE_US = {1: 277, 8: 323, 32: 482, 128: 1057}
"""Sequences -> microseconds that a step of opt-125m takes on an H100; between them, in line"""
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": {"do_sample": True, "top_p": 0.9}}
WARM_UP = 20


class Simulation:
    """The clocks of a host and of a device that does nothing."""

    def __init__(self) -> None:
        self.step_ns = 0
        """Nanoseconds that a launched step takes"""
        self.idle_ns = 0
        """Nanoseconds for which the device has stood idle"""
        self.launches = 0
        """Launches that were not replayed"""
        self._skipped = self._busy_until = 0

    def now(self) -> int:
        """The host's clock: nanoseconds of this thread's CPU time, and of its waiting."""
        return time.thread_time_ns() + self._skipped

    def launch(self) -> None:
        """Occupy the device for one step."""
        now = self.now()
        self.idle_ns += max(0, now - self._busy_until)
        self._busy_until = max(now, self._busy_until) + self.step_ns

    def waiter(self) -> Callable[[], None]:
        """Returns a function that waits for all that is launched so far."""
        until = self._busy_until

        def wait() -> None:
            self._skipped += max(0, until - self.now())

        return wait


class NullKernel:
    """Is only counted."""

    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        self._simulation.launches += 1


class NullLauncher:
    """Compiles nothing; it serves as a module too."""

    architecture, processors = "90", 132

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def module(self, path: Path, options: tuple[str, ...]) -> "NullLauncher":
        """Any module."""
        return self

    def get_function(self, name: str) -> NullKernel:
        """Any kernel."""
        return NullKernel(self._simulation)


def null_backend(simulation: Simulation, dtype: str, max_batch_size: int) -> Any:
    """The CUDA backend on a device without work."""
    import numpy as np

    from minillm.backends.cuda.backend import CudaBackend
    from minillm.backends.cuda.device import Device

    class NullDevice(Device):
        def __init__(self) -> None:
            super().__init__()
            self.has_library = True

        def multiply(self, x: Any, weight: Any, out: Any) -> None:
            simulation.launches += 1

        def empty(self, shape: Any, dtype: Any, purpose: Any) -> Any:
            return np.zeros(shape, dtype)  # memory that the system commits when it is written: never

        def address(self, array: Any) -> int:
            return id(array)

        def send(self, source: Any, target: Any, offset: int = 0) -> None:
            _ = source.ctypes.data, source.nbytes  # what CuPy's call is given

        def record(self, launch: Callable[[], object]) -> Callable[[], object]:
            launch()
            return simulation.launch

        def wait(self) -> None:
            super().wait()
            simulation.waiter()()

        def mark(self) -> Callable[[], None]:
            return simulation.waiter()

    return CudaBackend(NullDevice(), NullLauncher(simulation), dtype, max_batch_size=max_batch_size)


def null_engine(simulation: Simulation, shape: str, max_batch_size: int, tokens: int) -> Any:
    """An engine on a device without work, with room for so many tokens."""
    import minillm.backends.placement
    from minillm import Engine
    from minillm.measure.accounting import Storage, cache_bytes_per_token
    from minillm.models import published_config

    room = tokens * cache_bytes_per_token(published_config(shape), Storage.all_in("float16"))
    choose = minillm.backends.placement._cuda
    setattr(minillm.backends.placement, "_cuda", lambda where, n: null_backend(simulation, where.dtype, n))  # noqa: B010
    try:
        return Engine.random(shape, device="cuda", dtype="float16", max_batch_size=max_batch_size, cache_bytes=room)
    finally:
        setattr(minillm.backends.placement, "_cuda", choose)  # noqa: B010


def measure(shape: str, batch: int, fields: dict[str, Any], steps: int, device_us: float) -> tuple[float, float]:
    """Median microseconds of a decode step: on the host, and for which the device is idle."""
    simulation = Simulation()
    simulation.step_ns = round(1e3 * device_us)
    host, idle = [], []
    with null_engine(simulation, shape, batch, batch * (128 + steps + WARM_UP + 64)) as engine:
        for i in range(batch):
            prompt = token_ids(i, 128, engine.config.vocab_size)
            engine.add(prompt, max_new_tokens=steps + WARM_UP + 40, eos_token_id=(), **fields)
        before = engine.stats.decode_tokens
        while engine.stats.decode_tokens < before + WARM_UP * batch:
            engine.step()
        for _ in range(steps):
            began, idled = time.thread_time_ns(), simulation.idle_ns
            assert len(engine.step()) == batch
            host.append(time.thread_time_ns() - began)
            idle.append(simulation.idle_ns - idled)
    return 1e-3 * statistics.median(host), 1e-3 * statistics.median(idle)


def measure_prompt(shape: str, length: int, repeats: int) -> tuple[float, int]:
    """Median microseconds of the host for a request of one new token, and launches of each."""
    simulation, host = Simulation(), []
    with null_engine(simulation, shape, 1, length + 64) as engine:
        prompt = token_ids(1, length, engine.config.vocab_size)
        for _ in range(2 + repeats):  # two to warm up
            began, before = time.thread_time_ns(), simulation.launches
            engine.generate(prompt, max_new_tokens=1, eos_token_id=())
            host.append(time.thread_time_ns() - began)
    return 1e-3 * statistics.median(host[2:]), simulation.launches - before


def device_us(batch: int) -> float:
    """Microseconds that a step takes on the device."""
    import numpy as np

    return float(np.interp(batch, [*DEVICE_US], [*DEVICE_US.values()]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Find how long a GPU would wait for the host in each decode step.", "CSV")
    parser.set_defaults(threads=1)
    parser.add_argument("--shape", default="opt-125m", help="published shape (default: opt-125m)")
    parser.add_argument(
        "--sequences",
        type=positives,
        default=(1, 8, 32, 128),
        metavar="N,N,...",
        help="side by side (default: 1,8,32,128)",
    )
    parser.add_argument(
        "--prompts", type=positives, default=(512, 2000), metavar="N,N,...", help="tokens (default: 512,2000)"
    )
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="timed steps (default: 300)")
    parser.add_argument(
        "--device-us", type=positive, metavar="N", help="of a step on the device (default: as predicted for opt-125m)"
    )
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    make_folder(args.out)
    rows = []
    for kind, fields in KINDS.items():
        for batch in args.sequences:
            say(f"{kind}, {batch} sequences")
            device = args.device_us or device_us(batch)
            host, idle = measure(args.shape, batch, fields, args.steps, device)
            rows.append((kind, batch, f"{device:.0f}", f"{host:.0f}", f"{idle:.0f}", ""))
    for length in args.prompts:
        say(f"prompt of {length} tokens")
        host, launches = measure_prompt(args.shape, length, max(1, args.steps // 10))
        rows.append((f"prompt of {length}", 1, "", f"{host:.0f}", "", f"{host / launches:.1f}"))
    facts = {"question": f"microseconds of a decode step that a GPU waits for the host, {args.shape}, simulated"}
    facts |= {"steps": f"median of {args.steps}"} | describe(args.threads)
    header = ("kind", "sequences", "device_us", "host_us", "idle_us", "us_per_launch")
    path = args.out / "gpu_host.csv"
    write_csv(path, facts, header, rows)
    lines = [f"{kind:14}" + "".join(f"{cell:>14}" for cell in cells) for kind, *cells in [header, *rows]]
    print("\n".join([*headed(facts), *lines, "", f"written: {path}"]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("gpu_host", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
