"""How do prefill and decode grow with the length and the batch? Seconds of both, for every pair of the two.

Prefill multiplies matrices of many rows and is bound by arithmetic; a decode step reads every weight once, whatever the
batch, and the whole cache of each sequence. So prompts should take time by their length, and a little more for the
attention; more sequences should decode in hardly more time than one, until their arithmetic or their caches weigh.

All pairs take turns within each round. A prompt is computed in chunks, and of several prompts the first ones' new
tokens come along with the last ones' chunks: that is how the engine runs, and it counts as prefill here.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness import (
    BenchmarkError,
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
    token_ids,
    write_csv,
    write_figure,
)

if TYPE_CHECKING:
    from minillm import Engine

HEADER = (
    *("batch", "length", "prefill_seconds_median", "prefill_seconds_min", "prefill_seconds_max"),
    *("prefill_tokens_per_second", "step_seconds_median", "step_seconds_min", "step_seconds_max"),
    "decode_tokens_per_second",
)
CHUNK = 64
"""Tokens of prompts that a step computes at least, while others decode"""


class Task(NamedTuple):
    """A length and a batch size."""

    batch: int
    length: int
    """Tokens of each prompt, and before the first decode step"""


class Figures(NamedTuple):
    """Measurements of a pair, by round."""

    prefill: list[float]
    """Seconds of all prompts"""
    step: list[float]
    """Seconds of a decode step"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure prefill and decode against length and batch.", "CSV and the plot")
    parser.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    parser.add_argument("--lengths", type=positives, default=(32, 128, 512, 1024), metavar="N,N,...", help="of prompts")
    parser.add_argument("--batches", type=positives, default=(1, 2, 4, 8), metavar="N,N,...", help="prompts at once")
    parser.add_argument("--steps", type=positive, default=16, metavar="N", help="timed decode steps (default: 16)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="timed rounds (default: 3)")
    parser.add_argument("--backend", default="auto", help="cpu or numpy (default: cpu where there is a C compiler)")
    parser.add_argument("--dtype", default="float32", help="how weights are kept (default: float32)")
    return parser.parse_args(arguments)


def time_task(engine: "Engine", task: Task, steps: int) -> tuple[float, float]:
    """Seconds of a pair's prefill, and of one of its decode steps."""
    chunks = -(-task.batch * task.length // CHUNK)
    prompts = [token_ids(number, task.length, engine.config.vocab_size) for number in range(task.batch)]
    requests = [engine.add(prompt, max_new_tokens=steps + chunks + 1, eos_token_id=()) for prompt in prompts]
    missing = engine.stats.prompt_tokens + task.batch * task.length
    began = time.perf_counter()
    while engine.stats.prompt_tokens < missing:
        engine.step()
    prefilled = time.perf_counter()
    for _ in range(steps):
        engine.step()
    ended = time.perf_counter()
    for request in requests:
        engine.abort(request)
    return prefilled - began, (ended - prefilled) / steps


def measure(engine: "Engine", tasks: Sequence[Task], steps: int, repeat: int) -> dict[Task, Figures]:
    """Measure all pairs in turns. The first round is a warm-up and is not kept."""
    figures = {task: Figures([], []) for task in tasks}
    for number in range(repeat + 1):
        for task, kept in figures.items():
            say(f"round {number} of {repeat}: batch {task.batch}, length {task.length}")
            prefill, step = time_task(engine, task, steps)
            if number:
                kept.prefill.append(prefill)
                kept.step.append(step)
    return figures


def row(task: Task, figures: Figures) -> list[object]:
    """A row of the CSV, in the order of `HEADER`."""
    prefill, step = spread(figures.prefill), spread(figures.step)
    speeds = task.batch * task.length / prefill[0], task.batch / step[0]
    times = [
        [*(f"{one:.6f}" for one in kind), f"{speed:.2f}"] for kind, speed in zip((prefill, step), speeds, strict=True)
    ]
    return [*task, *times[0], *times[1]]


def table(figures: dict[Task, Figures]) -> list[str]:
    """The figures as lines of text."""
    lines = [f"{'batch':>6}{'length':>8}{'prefill, ms (min-max)':>30}{'tokens/s':>11}{'step, ms':>26}{'tokens/s':>11}"]
    for task, one in figures.items():
        prefill, step = spread(one.prefill), spread(one.step)
        times = [f"{1e3 * mid:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})" for mid, low, high in (prefill, step)]
        speeds = [f"{task.batch * task.length / prefill[0]:,.1f}", f"{task.batch / step[0]:,.1f}"]
        lines.append(f"{task.batch:>6}{task.length:>8}{times[0]:>30}{speeds[0]:>11}{times[1]:>26}{speeds[1]:>11}")
    return lines


def conclusion(figures: dict[Task, Figures]) -> str:
    """The result in one sentence, from the corners of the table."""
    few, many = min(task.batch for task in figures), max(task.batch for task in figures)
    short, long = min(task.length for task in figures), max(task.length for task in figures)
    prefill = {task: statistics.median(one.prefill) for task, one in figures.items()}
    step = {task: statistics.median(one.step) for task, one in figures.items()}
    wait = prefill[Task(few, long)] / prefill[Task(few, short)]
    slower = step[Task(few, long)] / step[Task(few, short)]
    gain = many / few * step[Task(few, short)] / step[Task(many, short)]
    return (
        f"At batch {few} a prompt of {long} tokens takes {wait:.1f} times as long as one of {short} and a decode step "
        f"after it {slower:.2f} times; after {short} tokens a batch of {many} decodes {gain:.1f} times the tokens of "
        f"one of {few} in the same time."
    )


def plot(path: Path, figures: dict[Task, Figures], name: str, facts: dict[str, str]) -> None:
    """Draw the speed of prefill and the time of a decode step against length, a line for each batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    batches = sorted({task.batch for task in figures})
    for i, batch in enumerate(batches):
        tasks = [task for task in figures if task.batch == batch]
        lengths = [task.length for task in tasks]
        colour = (0.12, 0.44 - 0.3 * i / len(batches), 0.95 - 0.75 * i / len(batches))
        speeds = [[batch * t.length / seconds for seconds in spread(figures[t].prefill)] for t in tasks]
        steps = [[1e3 * seconds for seconds in spread(figures[t].step)] for t in tasks]
        for axis, values in ((left, speeds), (right, steps)):
            middle = [mid for mid, _, _ in values]
            reach = [[abs(mid - end) for mid, *ends in values for end in (sorted(ends)[side],)] for side in (0, 1)]
            axis.errorbar(
                lengths, middle, reach, fmt="o-", markersize=4, capsize=3, color=colour, label=f"batch {batch}"
            )
    left.set(title="Prefill", xlabel="prompt tokens", ylabel="tokens a second", xscale="log", ylim=(0, None))
    right.set(title="Decode", xlabel="tokens before", ylabel="ms a step", xscale="log", ylim=(0, None))
    lengths = sorted({task.length for task in figures})
    for axis in (left, right):
        axis.set_xticks(lengths, lengths)
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.suptitle(f"Prefill and decode against length and batch: {name}")
    figure.supxlabel(
        f"Medians, whiskers from min to max. {facts['cpu']}; cores: {facts['cores']}", fontsize=8, color="0.35"
    )
    write_figure(path, figure)


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from minillm import Engine

    need_matplotlib()
    make_folder(args.out)
    engine = Engine.random(
        args.shape, max_batch_size=max(args.batches), backend=args.backend, dtype=args.dtype, threads=args.threads
    )
    longest = args.lengths[-1] + args.steps + -(-args.batches[-1] * args.lengths[-1] // CHUNK) + 1
    if longest > engine.config.max_positions:
        raise BenchmarkError(
            f"prompt and generated tokens come to {longest}, and the model's context is {engine.config.max_positions}: "
            "lower --lengths, --steps or --batches"
        )
    tasks = [Task(batch, length) for batch in args.batches for length in args.lengths]
    figures = measure(engine, tasks, args.steps, args.repeat)
    name = f"{args.shape}, {args.dtype} on {engine.runner.backend.name}"
    facts = {"question": f"prefill and decode against length and batch, {name}"}
    facts |= {"rounds": str(args.repeat), "timed steps": str(args.steps)}
    facts |= describe(args.threads)
    stem = args.out / f"lengths_and_batches_{args.shape}"
    write_csv(stem.with_name(stem.name + ".csv"), facts, HEADER, [row(*pair) for pair in figures.items()])
    plot(stem.with_name(stem.name + ".png"), figures, name, facts)
    print("\n".join([*headed(facts), *table(figures), ""]))
    print(conclusion(figures))
    print(f"written: {stem}.csv, {stem}.png")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("lengths_and_batches", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
