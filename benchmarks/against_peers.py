"""How fast is minillm beside transformers and CTranslate2? Decode at batch 1 and 8, and prefill, in float32.

A shared machine's memory bandwidth drifts within minutes, so figures taken apart say nothing. Each engine lives in a
process of its own, where its threads disturb nobody's; short bursts take turns, A B C A B C, and before each burst the
bandwidth is probed. Reported are medians, extremes and the ratios within each round.

minillm appears twice where the processor has AVX-512: with its BLAS as it comes, and with
OPENBLAS_CORETYPE=SKYLAKEX, which its command line sets by itself on processors that OpenBLAS underrates.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from harness import (
    RESULTS,
    BenchmarkError,
    available_cores,
    describe,
    has_avx512,
    make_folder,
    positive,
    say,
    thread_environment,
    write_csv,
)
from peer_process import Task, Worker, write_checkpoint

PEER_PACKAGES = {"transformers": ("torch", "transformers"), "ctranslate2": ("ctranslate2", "torch", "transformers")}
"""Peer -> what must be installed; CTranslate2's converter reads a checkpoint through the other two."""
OURS, TUNED = "minillm", "minillm SKYLAKEX"
HEADER = ("round", "task", "engine", "tokens", "seconds", "tokens_per_second", "bandwidth_gb_per_second")
REST_SECONDS = 0.2
"""Before each probe, for the threads of the burst before to stop spinning"""


class Burst(NamedTuple):
    """One measurement."""

    number: int
    task: Task
    engine: str
    seconds: float
    bandwidth: float
    """GB/s, probed right before"""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.task.tokens / self.seconds


def bandwidth_probe(threads: int) -> Callable[[], float]:
    """A function that measures how fast the memory is read, in GB/s: the best of three dot products over 256 MB for
    each thread.
    """
    import numpy as np

    parts = np.ones((threads, 64 << 20), np.float32)
    pool = ThreadPoolExecutor(threads)

    def read() -> float:
        began = time.perf_counter()
        list(pool.map(lambda part: np.dot(part, part), parts))
        return time.perf_counter() - began

    def probe() -> float:
        return parts.nbytes / min(read() for _ in range(3)) / 1e9

    probe()  # the first one finds threads and pages unready
    return probe


def measure(workers: list[Worker], tasks: Sequence[Task], rounds: int, threads: int, vocab: int) -> Iterator[Burst]:
    """Let the engines take turns at each task. The first turn warms up and is not kept."""
    probe = bandwidth_probe(threads)
    for task in tasks:
        for worker in workers:
            say(f"{task.name}: {worker.name} warms up")
            worker.run(task, vocab)
        for number in range(1, rounds + 1):
            say(f"{task.name}: round {number} of {rounds}")
            for worker in workers:
                time.sleep(REST_SECONDS)
                bandwidth = probe()
                yield Burst(number, task, worker.name, worker.run(task, vocab), bandwidth)


def table(bursts: Sequence[Burst], weight_bytes: int) -> list[str]:
    """Speeds of each task and engine; how many times as fast minillm is; and the share of the bandwidth."""
    names = list(dict.fromkeys(burst.engine for burst in bursts))
    ours = [name for name in (OURS, TUNED) if name in names]
    columns = "".join(f"{name + ' is':>22}" for name in ours)
    lines = [f"{'task':<18}{'engine':<18}{'tokens/s, median (min-max)':>30}{columns}{'of bandwidth':>14}"]
    for task in dict.fromkeys(burst.task for burst in bursts):
        speeds = {name: [b for b in bursts if b.task == task and b.engine == name] for name in names}
        for name, mine in speeds.items():
            values = [burst.speed for burst in mine]
            spread = f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"
            ratios = ""
            for own in ours:
                pairs = zip(speeds[own], mine, strict=True)
                ratio = statistics.median(a.speed / b.speed for a, b in pairs)
                ratios += f"{f'{ratio:.2f} x' if name not in ours else '':>22}"
            share = ""
            if task.batch == 1 and task.new_tokens > 1:
                share = f"{statistics.median(b.speed * weight_bytes / 1e9 / b.bandwidth for b in mine):.2f}"
            lines.append(f"{task.name:<18}{name:<18}{spread:>30}{ratios}{share:>14}")
    probes = [burst.bandwidth for burst in bursts]
    median = statistics.median(probes)
    lines.append(f"bandwidth probe: median {median:.1f} GB/s ({min(probes):.1f}-{max(probes):.1f})")
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure minillm beside other engines, in turns.")
    parser.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    parser.add_argument("--threads", type=positive, default=available_cores(), metavar="N", help="default: all cores")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="turns of each engine (default: 7)")
    parser.add_argument(
        "--peers", type=_peers, default=tuple(PEER_PACKAGES), metavar="A,B", help=f"default: {','.join(PEER_PACKAGES)}"
    )
    parser.add_argument(
        "--prefill", type=positive, default=512, metavar="N", help="tokens of the prompt (default: 512)"
    )
    parser.add_argument(
        "--new-tokens", type=positive, default=64, metavar="N", help="generated in decode (default: 64)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="for the CSV and the table")
    return parser.parse_args(arguments)


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in PEER_PACKAGES:
            raise argparse.ArgumentTypeError(f"{name!r} is not known: expected {' or '.join(PEER_PACKAGES)}")
    return names


def sort_out(peers: Sequence[str]) -> tuple[list[str], str]:
    """The peers that can run here, and a line about those that cannot."""
    missing = {
        peer: absent
        for peer in peers
        if (absent := [name for name in PEER_PACKAGES[peer] if importlib.util.find_spec(name) is None])
    }
    words = [f"{peer} (without {', '.join(absent)})" for peer, absent in missing.items()]
    line = f"{'; '.join(words)}: pip install 'minillm[peers]'" if words else "none"
    return [peer for peer in peers if peer not in missing], line


def start(stack: ExitStack, args: argparse.Namespace, peers: Sequence[str]) -> list[Worker]:
    """All engines, loaded, in the order of their turns."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    plain |= thread_environment(args.threads) | {"HF_HUB_OFFLINE": "1"}
    plans = [(OURS, "minillm", args.shape, plain)]
    if has_avx512():
        plans.append((TUNED, "minillm", args.shape, plain | {"OPENBLAS_CORETYPE": "SKYLAKEX"}))
    if peers:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minillm-peers-"))
        say("writing the peers' checkpoint")
        write_checkpoint(args.shape, folder, plain)
        plans += [(peer, peer, folder, plain) for peer in peers]
    workers = []
    for name, engine, model, environment in plans:
        say(f"loading {name}")
        workers.append(stack.enter_context(Worker(name, engine, model, args.threads, environment)))
    return workers


def run(args: argparse.Namespace) -> None:
    """Measure and write."""
    from minillm.accounting import parameter_count, position_parameters
    from minillm.models.opt import SHAPES, read_config

    if args.shape not in SHAPES:
        raise BenchmarkError(f"shape {args.shape!r} is not known: expected one of {', '.join(SHAPES)}")
    config = read_config(SHAPES[args.shape])
    if args.new_tokens < 2:
        raise BenchmarkError("--new-tokens should be at least 2: decode begins after the first")
    tasks = (
        Task("decode, batch 1", 1, 32, args.new_tokens),
        Task(f"prefill of {args.prefill}", 1, args.prefill, 1),
        Task("decode, batch 8", 8, 32, args.new_tokens),
    )
    longest = max(task.prompt + task.new_tokens for task in tasks)
    if longest > config.max_positions:
        raise BenchmarkError(
            f"{longest} tokens are asked for, and the context of {args.shape} is {config.max_positions}"
        )
    make_folder(args.out)
    peers, missing = sort_out(args.peers)
    with ExitStack() as stack:
        workers = start(stack, args, peers)
        bursts = list(measure(workers, tasks, args.rounds, args.threads, config.vocab_size))
    facts = {"question": f"minillm beside other engines, {args.shape}, float32, random weights, greedy"}
    facts |= {"rounds": str(args.rounds), "left out": missing}
    facts |= describe(args.threads, ("minillm", "numpy", "torch", "transformers", "ctranslate2"))
    weights = 4 * (parameter_count(config) - position_parameters(config))
    lines = [*(f"{key}: {fact}" for key, fact in facts.items()), "", *table(bursts, weights)]
    stem = args.out / f"against_peers_{args.shape}"
    rows = (
        [b.number, b.task.name, b.engine, b.task.tokens, f"{b.seconds:.6f}", f"{b.speed:.2f}", f"{b.bandwidth:.1f}"]
        for b in bursts
    )
    write_csv(stem.with_name(stem.name + ".csv"), facts, HEADER, rows)
    stem.with_name(stem.name + ".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join([*lines, f"written: {stem}.csv, {stem}.txt"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for what cannot be run."""
    args = parse(arguments)
    for name in [name for name in os.environ if name.startswith("OPENBLAS_")]:
        del os.environ[name]  # "as it comes"
    os.environ.update(thread_environment(1))  # of this process alone: the probe has threads of its own
    from minillm.errors import MinillmError

    try:
        run(args)
    except (MinillmError, BenchmarkError) as error:
        print(f"against_peers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
