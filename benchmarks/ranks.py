"""What do several processes cost, and what do they gain?

- Two processes of one core each, tensor or pipeline parallel, beside one process of as many cores: decode steps and a
  prompt, in turns.
- An all-reduce beside a model of latency and bandwidth, which are probed by messages from one process to another.
- The share of the time for which pipeline stages wait, beside (S - 1) / (M + S - 1).
- Strong scaling (the same work on more ranks) and weak scaling (eight more sequences for each rank). With more ranks
  than cores they share them, and cannot gain: such rows are marked.
- What the model says of more ranks, with the links measured here and published ones, as a plot.

Seconds are of the clock: nothing else should run on the machine. CPU time is that of rank 0, which waits for the others
at full speed.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import (
    available_cores,
    describe,
    execute,
    headed,
    make_folder,
    need_matplotlib,
    new_parser,
    positive,
    positives,
    say,
    spread,
    write_csv,
    write_figure,
)
from rank_process import Side, measured_links

if TYPE_CHECKING:
    from minillm.config import ModelConfig

MICRO_BATCHES = (1, 2, 4, 8)
PARTS = ("steps", "links", "stages", "scaling")
"""Parts of the measurement: tensor parallelism beside one process; all-reduces; pipeline stages; more ranks"""
Figures = dict[tuple[str, str], list[float]]
"""Side and case -> milliseconds"""


class Link(NamedTuple):
    """A model of messages: each takes the latency, and its bytes at the bandwidth."""

    name: str
    latency: float
    """Seconds"""
    bandwidth: float
    """Bytes/s in one direction"""
    source: str

    def seconds(self, size: float) -> float:
        """Of one message."""
        return self.latency + size / self.bandwidth

    def all_reduce_seconds(self, size: float, ranks: int) -> float:
        """Of a sum over ranks: by recursive doubling, or in a ring of shares, whichever takes less (Thakur,
        Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005).
        """
        if ranks == 1:
            return 0.0
        doubling = math.ceil(math.log2(ranks)) * self.seconds(size)
        return min(doubling, 2 * (ranks - 1) * self.seconds(size / ranks))


PUBLISHED = (
    Link("100 Gb/s", 0.6e-6, 12.5e9, "Mellanox ConnectX-5 product brief: 100 Gb/s, 600 ns"),
    Link("NVLink", 2e-6, 450e9, "H100 SXM data sheet: 900 GB/s both ways; 2 us of latency are assumed"),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure ranks beside one process.", "CSV, text and the plot")
    parser.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    parser.add_argument("--name", metavar="NAME", help="of a shape that is given as JSON")
    parser.add_argument("--dtype", default="auto", help="of the weights (default: float32, as they are drawn)")
    parser.add_argument("--ranks", type=positives, default=(2, 4), metavar="N,N", help="of the scaling (default: 2,4)")
    parser.add_argument("--batches", type=positives, default=(1, 8), metavar="N,N", help="of decode (default: 1,8)")
    parser.add_argument("--prompt-length", type=positive, default=512, metavar="N", help="of prefill (default: 512)")
    parser.add_argument("--context", type=positive, default=64, metavar="N", help="before decode steps (default: 64)")
    parser.add_argument("--steps", type=positive, default=16, metavar="N", help="timed steps a round (default: 16)")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument(
        "--parts",
        type=parts_of,
        default=PARTS,
        metavar="PART,PART",
        help=f"of {', '.join(PARTS)} (default: all). The steps keep two models in memory, stages and scaling more",
    )
    parser.add_argument("--beyond", default="opt-30b", metavar="SHAPE", help="of the model on GPUs (default: opt-30b)")
    args = parser.parse_args(arguments)
    args.name = args.name or args.shape
    return args


def parts_of(text: str) -> tuple[str, ...]:
    """The parts that are named, as an argument of argparse; scaling needs the links."""
    named = set(text.split(","))
    if not named <= {*PARTS}:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(PARTS)}, found {text!r}")
    named |= {"links"} if "scaling" in named else set()
    return tuple(part for part in PARTS if part in named)


def config_of(shape: str) -> "ModelConfig":
    """The configuration of a published shape, or of one as JSON."""
    from minillm.models import family_of, published_config

    if not shape.startswith("{"):
        return published_config(shape)
    raw = json.loads(shape)
    config: ModelConfig = family_of(raw).read_config(raw)
    return config


def link_of(one_way: Mapping[int, float]) -> Link:
    """Latency by the smallest message, bandwidth by the largest one."""
    least, most = min(one_way), max(one_way)
    bandwidth = (most - least) / max(1e-12, one_way[most] - one_way[least])
    return Link("shared memory here", one_way[least], bandwidth, "messages between two processes")


def sides_of(args: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """Name, tensor and pipeline degrees, and threads of a process, of each side."""
    sides = []
    if {"steps", "stages"} & {*args.parts}:
        sides.append(("one process", 1, 1, args.threads))
    if "scaling" in args.parts:
        sides.append(("one core", 1, 1, 1))
    counts = args.ranks if "scaling" in args.parts else (2,) if "steps" in args.parts else ()
    sides += [(f"tensor {ranks}", ranks, 1, 1) for ranks in counts]
    return [*sides, ("pipeline 2", 1, 2, 1)] if "stages" in args.parts else sides


def measure(sides: Sequence[Side], args: argparse.Namespace) -> tuple[Figures, Figures, dict[int, list[float]]]:
    """All cases, in turns. Returns milliseconds of the clock, those of rank 0's CPU, and shares of waiting by M."""
    figures: Figures = {}
    cpu: Figures = {}
    waiting: dict[int, list[float]] = {}
    for turn in range(args.repeat + 1):
        say(f"round {turn} of {args.repeat}" if turn else "warm-up")
        for side in sides[:: 1 if turn % 2 else -1]:
            weak = {8 * side.tensor} if "scaling" in args.parts else set()
            cases: dict[str, dict[str, Any]] = {
                f"decode, batch {batch}": {"do": "decode", "batch": batch, "prompt": args.context, "steps": args.steps}
                for batch in sorted({*args.batches, *weak})
            }
            cases["prefill"] = {"do": "prefill", "prompt": args.prompt_length}
            for name, case in cases.items():
                found = side.ask(**case)
                if turn:
                    for kind, into in (("seconds", figures), ("cpu", cpu)):
                        values = found[kind] if isinstance(found[kind], list) else [found[kind]]
                        into.setdefault((side.name, name), []).append(1e3 * statistics.median(values))
            if side.pipeline > 1:
                for M in MICRO_BATCHES:
                    found = side.ask(do="prefill", prompt=args.prompt_length, micro_batches=M)
                    if turn:
                        waiting.setdefault(M, []).append(1 - found["busy"] / found["seconds"])
    return figures, cpu, waiting


def table_of_steps(figures: Figures, cpu: Figures) -> list[str]:
    """Every side beside the process with all cores."""
    lines = [f"{'':24}{'ms, median (least to most)':>34}{'CPU of rank 0':>16}{'speed beside one process':>26}"]
    for side, case in figures:
        middle, least, most = spread(figures[side, case])
        base = figures.get(("one process", case))
        ratio = f"{statistics.median(base) / middle:.2f}" if base else ""
        shown = f"{middle:.2f} ({least:.2f} to {most:.2f})"
        name = f"{side}{'*' if _ranks(side) > available_cores() else ''}, {case}"
        lines.append(f"{name:30}{shown:>28}{statistics.median(cpu[side, case]):>16.2f}{ratio:>26}")
    return lines


def _ranks(side: str) -> int:
    return int(side.split()[-1]) if side.split()[-1].isdecimal() else 1


def table_of_links(found: Mapping[str, Mapping[int, float]], link: Link, ranks: int) -> list[str]:
    """All-reduces as measured and by the model."""
    lines = [
        f"one message between two processes: {1e6 * link.latency:.2f} us, {link.bandwidth / 1e9:.2f} GB/s",
        f"{'bytes':>10}{'all-reduce, us':>18}{'by the model':>15}",
    ]
    for size, seconds in found["all_reduce"].items():
        lines.append(f"{size:>10}{1e6 * seconds:>18.2f}{1e6 * link.all_reduce_seconds(size, ranks):>15.2f}")
    return lines


def table_of_bubbles(waiting: Mapping[int, Sequence[float]], stages: int = 2) -> list[str]:
    """The share of waiting of the first stage, as measured and by the formula."""
    lines = [f"{'parts':>6}{'waiting':>10}{'(S - 1) / (M + S - 1)':>24}"]
    for M, shares in waiting.items():
        lines.append(f"{M:>6}{statistics.median(shares):>10.3f}{(stages - 1) / (M + stages - 1):>24.3f}")
    return lines


def table_of_scaling(figures: Figures, link: Link, args: argparse.Namespace) -> list[str]:
    """The same work, and more of it, on more ranks. The model divides the time of one core, and adds all-reduces."""
    lines = [f"{'ranks':>6}  {'case':24}{'speed-up':>10}{'by the model':>14}{'efficiency':>12}"]
    for ranks in args.ranks:
        mark = "*" if ranks > available_cores() else ""
        for case in [*(f"decode, batch {batch}" for batch in args.batches), "prefill"]:
            one = statistics.median(figures["one core", case])
            ours = statistics.median(figures[f"tensor {ranks}", case])
            tokens = args.prompt_length if case == "prefill" else int(case.split()[-1])
            predicted = one / min(ranks, available_cores()) + 1e3 * reduce_seconds(args.shape, tokens, ranks, link)
            speeds = f"{one / ours:>10.2f}{one / predicted:>14.2f}{one / ours / ranks:>12.2f}"
            lines.append(f"{f'{ranks}{mark}':>6}  {case:24}{speeds}")
        one = statistics.median(figures["one core", "decode, batch 8"])
        weak = statistics.median(figures[f"tensor {ranks}", f"decode, batch {8 * ranks}"])
        lines.append(f"{f'{ranks}{mark}':>6}  {f'weak: batch {8 * ranks}':24}{'':>10}{'':>14}{one / weak:>12.2f}")
    return lines


def reduce_seconds(shape: str, tokens: int, ranks: int, link: Link, number_bytes: int = 4) -> float:
    """All all-reduces of a pass: one of the embedding, two in each layer."""
    config = config_of(shape)
    size = number_bytes * tokens * config.hidden_size
    return (2 * config.num_layers + 1) * link.all_reduce_seconds(size, ranks)


def plot(path: Path, figures: Figures, link: Link, args: argparse.Namespace) -> None:
    """Speed-ups by the model: of this machine's core, and of a GPU at its roofline, by the link between them."""
    from matplotlib.figure import Figure

    from minillm.measure.accounting.hardware import CHIPS
    from minillm.measure.accounting.roofline import Analysis, Workload
    from minillm.measure.accounting.storage import storage_for

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    here, there = figure.subplots(1, 2, sharey=True)
    counts = (1, 2, 4, 8, 16)
    cases = {"decode, batch 8": 8, "prefill": args.prompt_length}
    for style, (case, tokens) in zip(("-", "--"), cases.items(), strict=True):
        one = statistics.median(figures["one core", case]) / 1e3
        for colour, each in enumerate((link, PUBLISHED[0])):
            times = [one / n + reduce_seconds(args.shape, tokens, n, each) for n in counts]
            here.plot(counts, [one / t for t in times], style, color=f"C{colour}", label=f"{case} over {each.name}")
        points = [(n, one / (statistics.median(figures[f"tensor {n}", case]) / 1e3)) for n in args.ranks]
        fits = [(n, speed) for n, speed in points if n <= available_cores()]
        here.plot(*zip(*fits, strict=True), "o" if style == "-" else "s", color="black", label=f"{case}: measured")
    storage, work = storage_for("float16"), Workload(batch=8, prompt_length=args.prompt_length)
    analysis = Analysis(config=config_of(args.beyond), storage=storage, workload=work, hardware=CHIPS["h100"])
    phases = {"decode, batch 8": analysis.decode, f"prefill, 8 x {args.prompt_length}": analysis.prefill}
    for style, (case, phase) in zip(("-", "--"), phases.items(), strict=True):
        for colour, each in enumerate(PUBLISHED):
            times = [phase.seconds / n + reduce_seconds(args.beyond, phase.tokens, n, each, 2) for n in counts]
            there.plot(
                counts,
                [phase.seconds / t for t in times],
                style,
                color=f"C{colour + 1}",
                label=f"{case} over {each.name}",
            )
    for axes, title in ((here, f"{args.name}, cores as this one"), (there, f"{args.beyond}, H100 at its roofline")):
        axes.plot(counts, counts, ":", color="grey", label="ideal")
        speeds = (0.25, 0.5, *counts)
        axes.set(title=title, xlabel="ranks, tensor parallel", xscale="log", yscale="log", xticks=counts, yticks=speeds)
        axes.set_xticklabels(map(str, counts))
        axes.set_yticklabels([f"{speed:g}" for speed in speeds])
        axes.axhline(1, color="lightgrey", linewidth=0.8, zorder=0)
        axes.minorticks_off()
        axes.legend(fontsize=7)
    here.set_ylabel("speed-up over one rank: lines by the model")
    write_figure(path, figure)


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results. Returns the exit code."""
    need_matplotlib()
    make_folder(args.out)
    reduces = {}
    if "links" in args.parts:
        say("messages between processes")
        reduces = {ranks: measured_links(ranks) for ranks in sorted({2, *args.ranks})}
    with ExitStack() as stack:
        sides = []
        for name, *degrees in sides_of(args):
            sides.append(Side(name, args.shape, args.dtype, *degrees))
            stack.callback(sides[-1].close)
        figures, cpu, waiting = measure(sides, args)
    name = args.name
    question = f"{name}: ranks of one core each beside one process of {args.threads}"
    facts = {"question": question, "rounds": f"{args.repeat}, medians of {args.steps} steps; in turns"}
    facts |= describe(args.threads, ("minillm", "numpy", "mpi4py", "mpich"))
    rows = [
        [side, case, *(f"{value:.4f}" for value in spread(values)), f"{statistics.median(cpu[side, case]):.4f}"]
        for (side, case), values in figures.items()
    ]
    header = ("side", "case", "ms_median", "ms_min", "ms_max", "cpu_ms_of_rank_0")
    write_csv(args.out / f"ranks_{name}.csv", facts, header, rows)
    lines = [*table_of_steps(figures, cpu), ""] if figures else []
    if reduces:
        link = link_of(reduces[2]["one_way"])
        for ranks, found in reduces.items():
            lines += [f"{ranks} ranks", *table_of_links(found, link, ranks), ""]
    if waiting:
        lines += [*table_of_bubbles(waiting), ""]
    if "scaling" in args.parts:
        lines += [*table_of_scaling(figures, link, args), ""]
        plot(args.out / f"ranks_{name}.png", figures, link, args)
    lines.append(f"* more ranks than the {available_cores()} cores")
    text = "\n".join([*headed(facts), *lines])
    (args.out / f"ranks_{name}.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("ranks", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
