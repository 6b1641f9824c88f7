"""What does the K/V cache save? FLOPs and seconds of greedy generation with it and without, against length.

The naive way computes the whole sequence again for each token, so its cost grows with the square of the length; with
the cache each token costs one row, and the cost grows with the length itself. FLOPs are counted from the calls really
made, and predicted from the lengths by `minillm.measure.accounting`; the two must agree exactly, or the script exits
with 1.

One run to the greatest length passes through all others, so each length's figures are those of the same run at the
moment when its last token came out. The first round is counted and not timed; then naive and cached runs take turns.
By default all of it takes half a minute on two cores.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    write_csv,
    write_figure,
)

if TYPE_CHECKING:
    from minillm import Engine

MODES = {"naive": False, "cached": True}
"""Mode -> use_cache"""
COLOURS = {"naive": "#c0392b", "cached": "#1f6fb2"}
HEADER = ("mode", "tokens", "flops_counted", "flops_formula", "seconds_median", "seconds_min", "seconds_max")
DEFAULT_LENGTHS = (8, 16, 32, 48)


class Curve(NamedTuple):
    """Cumulative cost of one mode, by generated token."""

    counted: list[int]
    """FLOPs of the calls made"""
    formula: list[int]
    """FLOPs predicted from the lengths"""
    seconds: list[list[float]]
    """[rounds][tokens]"""
    token_ids: list[int]

    def spread(self, length: int) -> tuple[float, float, float]:
        """Median, least and greatest seconds to `length` tokens."""
        taken = [seconds[length - 1] for seconds in self.seconds]
        return statistics.median(taken), min(taken), max(taken)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure naive against cached generation.", "CSV and the plot")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    model.add_argument("--model", metavar="FOLDER", help="a checkpoint instead")
    parser.add_argument(
        "--lengths", type=positives, default=DEFAULT_LENGTHS, metavar="N,N,...", help="generated tokens to report at"
    )
    parser.add_argument("--prompt-length", type=positive, default=16, metavar="N", help="prompt tokens (default: 16)")
    parser.add_argument("--repeat", type=positive, default=2, metavar="N", help="timed rounds (default: 2)")
    return parser.parse_args(arguments)


def load(args: argparse.Namespace) -> "Engine":
    """The engine, with room for the longest run."""
    from minillm import Engine
    from minillm.models.opt import OPTConfig

    if args.model:
        engine = Engine(args.model, max_batch_size=1, prefix_cache=False, threads=args.threads)
    else:
        engine = Engine.random(args.shape, max_batch_size=1, threads=args.threads)
    if not isinstance(engine.config, OPTConfig):
        raise BenchmarkError(f"the formula is OPT's; {args.model} is a {engine.config.model_type}")
    longest = args.prompt_length + args.lengths[-1]
    if longest > engine.config.max_positions:
        raise BenchmarkError(
            f"prompt and generated tokens come to {longest}, and the model's context is {engine.config.max_positions}: "
            "lower --lengths or --prompt-length"
        )
    return engine


def measure(engine: "Engine", prompt: list[int], new_tokens: int, repeat: int) -> dict[str, Curve]:
    """Run everything. Returns the curve of each mode."""
    curves = {}
    for mode, use_cache in MODES.items():
        say(f"{mode}: counting")
        counted, token_ids = count(engine, prompt, new_tokens, use_cache)
        curves[mode] = Curve(counted, formula(engine, len(prompt), new_tokens, use_cache), [], token_ids)
    for number in range(repeat):
        for mode, use_cache in MODES.items():
            say(f"{mode}: round {number + 1} of {repeat}")
            curves[mode].seconds.append(clock(engine, prompt, new_tokens, use_cache))
    return curves


def count(engine: "Engine", prompt: list[int], new_tokens: int, use_cache: bool) -> tuple[list[int], list[int]]:
    """FLOPs of the calls made up to each token, and the tokens."""
    from minillm.backends.observe import counting

    flops: list[int] = []
    token_ids: list[int] = []
    with counting(engine.runner) as counted:
        for event in engine.stream(prompt, max_new_tokens=new_tokens, use_cache=use_cache, eos_token_id=()):
            flops.append(counted.total.flops)
            token_ids += event.token_ids
    return flops, token_ids


def formula(engine: "Engine", prompt_length: int, new_tokens: int, use_cache: bool) -> list[int]:
    """FLOPs up to each token, predicted from the lengths."""
    from minillm.measure.accounting import generation, step_flops

    flops, total = [], 0
    for step in generation([prompt_length], new_tokens, use_cache=use_cache):
        total += step_flops(engine.config, step)
        flops.append(total)
    return flops


def clock(engine: "Engine", prompt: list[int], new_tokens: int, use_cache: bool) -> list[float]:
    """Seconds from the request to each token."""
    began = time.perf_counter()
    events = engine.stream(prompt, max_new_tokens=new_tokens, use_cache=use_cache, eos_token_id=())
    return [time.perf_counter() - began for _ in events]


def table(curves: dict[str, Curve], lengths: Sequence[int]) -> list[str]:
    """The figures as lines of text."""
    lines = [
        f"{'':>6}  {'GFLOP':^33}  {'seconds, median (min-max)':^57}",
        f"{'tokens':>6}  {'naive':>12}{'cached':>12}{'ratio':>9}  {'naive':>24}{'cached':>24}{'ratio':>9}",
    ]
    for length in lengths:
        naive, cached = (curves[mode].counted[length - 1] / 1e9 for mode in MODES)
        slow, fast = (curves[mode].spread(length) for mode in MODES)
        times = "".join(f"{f'{mid:.3f} ({low:.3f}-{high:.3f})':>24}" for mid, low, high in (slow, fast))
        lines.append(
            f"{length:>6}  {naive:>12.1f}{cached:>12.1f}{naive / cached:>9.1f}  {times}{slow[0] / fast[0]:>9.1f}"
        )
    return lines


def conclusion(curves: dict[str, Curve], length: int) -> str:
    """The result in one sentence, from the figures at the greatest length and at half of it."""
    naive, cached = curves["naive"], curves["cached"]
    work = naive.counted[length - 1] / cached.counted[length - 1]
    wait = naive.spread(length)[0] / cached.spread(length)[0]
    text = f"For {length} tokens the naive way takes {work:.1f} times the FLOPs and {wait:.1f} times the seconds"
    half = length // 2
    if half == 0:
        return text + "."
    growth = [
        (curve.counted[length - 1] / curve.counted[half - 1], curve.spread(length)[0] / curve.spread(half)[0])
        for curve in (naive, cached)
    ]
    return (
        f"{text} of the cached way; from {half} tokens to {length} its FLOPs grow {growth[0][0]:.1f}-fold and its "
        f"seconds {growth[0][1]:.1f}-fold, with the cache {growth[1][0]:.1f}-fold and {growth[1][1]:.1f}-fold."
    )


def rows(curves: dict[str, Curve], lengths: Sequence[int]) -> Iterator[list[object]]:
    """Rows of the CSV, in the order of `HEADER`."""
    for mode, curve in curves.items():
        for length in lengths:
            times = (f"{seconds:.6f}" for seconds in curve.spread(length))
            yield [mode, length, curve.counted[length - 1], curve.formula[length - 1], *times]


def plot(path: Path, curves: dict[str, Curve], lengths: Sequence[int], name: str, facts: dict[str, str]) -> None:
    """Draw FLOPs and seconds against length, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    work, wait = figure.subplots(1, 2)
    tokens = range(1, lengths[-1] + 1)
    for mode, curve in curves.items():
        colour = COLOURS[mode]
        work.plot(tokens, [flops / 1e9 for flops in curve.formula], color=colour, linewidth=1.4)
        work.plot(lengths, [curve.counted[n - 1] / 1e9 for n in lengths], "o", markersize=5, color=colour)
        wait.plot(tokens, [curve.spread(n)[0] for n in tokens], color=colour, linewidth=1.4)
        spreads = [curve.spread(n) for n in lengths]
        whiskers = [[mid - low for mid, low, _ in spreads], [high - mid for mid, _, high in spreads]]
        middle = [mid for mid, _, _ in spreads]
        wait.errorbar(lengths, middle, whiskers, fmt="o", markersize=5, capsize=3, color=colour)
    last = lengths[-1]
    _finish(work, "Work", "GFLOP", last, {mode: curve.counted[-1] / 1e9 for mode, curve in curves.items()})
    _finish(wait, "Time", "seconds", last, {mode: curve.spread(last)[0] for mode, curve in curves.items()})
    figure.suptitle(f"Greedy generation with and without the K/V cache: {name}, float32")
    figure.supxlabel(
        "Work: points are counted from the calls made, lines are the formula. Time: median, whiskers from min to max.\n"
        f"{facts['cpu']}; cores: {facts['cores']}",
        fontsize=8,
        color="0.35",
    )
    write_figure(path, figure)


def _finish(axis: Any, title: str, unit: str, length: int, ends: dict[str, float]) -> None:
    """Name a panel, and each curve at its last point."""
    axis.set_title(title)
    axis.set_xlabel("generated tokens")
    axis.set_ylabel(unit)
    axis.set_xlim(0, 1.04 * length)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    ratio = ends["naive"] / ends["cached"]
    for mode, text, offset in (
        ("naive", f"naive: {ends['naive']:.4g} {unit}", (-10, -2)),
        ("cached", f"cached: {ends['cached']:.3g} {unit},\n{ratio:.3g} times less", (0, 14)),
    ):
        axis.annotate(
            text,
            (length, ends[mode]),
            offset,
            textcoords="offset points",
            ha="right",
            color=COLOURS[mode],
            weight="bold",
        )


def run(args: argparse.Namespace) -> int:
    """Measure, check and write. Returns the exit code."""
    need_matplotlib()
    make_folder(args.out)
    engine = load(args)
    name = Path(args.model).resolve().name if args.model else args.shape
    prompt = [(7919 * i + 11) % engine.config.vocab_size for i in range(args.prompt_length)]
    curves = measure(engine, prompt, args.lengths[-1], args.repeat)
    facts = {"question": f"naive against cached greedy generation, {name}, prompt of {len(prompt)} tokens"}
    facts |= {"rounds": str(args.repeat)} | describe(args.threads)

    stem = args.out / f"naive_vs_cached_{name}"
    write_csv(stem.with_name(stem.name + ".csv"), facts, HEADER, rows(curves, args.lengths))
    plot(stem.with_name(stem.name + ".png"), curves, args.lengths, f"{name}, prompt of {len(prompt)} tokens", facts)
    print("\n".join([*headed(facts), *table(curves, args.lengths), ""]))
    print(_compare_tokens(curves["naive"].token_ids, curves["cached"].token_ids))
    agree = all(curve.counted == curve.formula for curve in curves.values())
    print(_agreement(curves) if not agree else "FLOPs: counted and formula agree exactly, at every token of both ways.")
    print(conclusion(curves, args.lengths[-1]))
    print(f"written: {stem}.csv, {stem}.png")
    return 0 if agree else 1


def _compare_tokens(naive: list[int], cached: list[int]) -> str:
    """Whether both modes give the same tokens. Rounding may separate them where two logits are almost equal."""
    for i, (a, b) in enumerate(zip(naive, cached, strict=True)):
        if a != b:
            return f"tokens: the same up to number {i}, where two logits are equal but for rounding"
    return f"tokens: all {len(naive)} the same both ways."


def _agreement(curves: dict[str, Curve]) -> str:
    """The first token at which count and formula differ."""
    for mode, curve in curves.items():
        for i, (counted, formula) in enumerate(zip(curve.counted, curve.formula, strict=True)):
            if counted != formula:
                return f"FLOPs DISAGREE: {mode}, {i + 1} tokens: counted {counted}, formula {formula}"
    return "FLOPs agree"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if count and formula differ, 2 for invalid arguments."""
    return execute("naive_vs_cached", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
