"""How close are measured times to the prediction? Decode steps and prefill against the floors of this machine.

The prediction is the roofline's: for each operation its bytes at the probed bandwidth or its arithmetic, whichever
takes longer, added up. The arithmetic of a product is its time with weights in the processor's cache, which is probed
on a part of each kind of weight and includes their unpacking; of everything else it is the FLOPs at the probed rate.
Bytes and FLOPs are those counted in the run, which a closed form gives exactly (tests hold them to it). Nothing is
fitted. The machine is probed anew before each round, since a shared one drifts; the error is (predicted - measured) /
measured, the median of the rounds, and it is printed whatever it is.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness import (
    BenchmarkError,
    describe,
    execute,
    headed,
    make_folder,
    new_parser,
    positive,
    say,
    spread,
    token_ids,
    write_csv,
    write_result,
)

if TYPE_CHECKING:
    from minillm import Engine
    from minillm.measure.accounting.hardware import Hardware

GOALS = {"prefill": 0.1, "decode": 0.05}
"""Phase -> largest error of the prediction"""
HEADER = (
    *("shape", "phase", "round", "predicted_seconds", "measured_seconds", "error"),
    *("bandwidth_gb_per_second", "gflop_per_second"),
)


class Trial(NamedTuple):
    """One phase of one round: seconds of a step."""

    shape: str
    phase: str
    number: int
    predicted: float
    measured: float
    hardware: "Hardware"

    @property
    def error(self) -> float:
        """Relative error; below 0 the prediction was too fast."""
        return self.predicted / self.measured - 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure how far off the roofline's prediction is.", "CSV and the table")
    parser.add_argument("--shapes", default="opt-125m,opt-1.3b", metavar="A,B", help="default: opt-125m,opt-1.3b")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file as it is, in place of shapes")
    parser.add_argument("--prompt-length", type=positive, default=256, metavar="N", help="prompt tokens (default: 256)")
    parser.add_argument("--new-tokens", type=positive, default=16, metavar="N", help="generated (default: 16)")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--backend", default="auto", help="cpu or numpy (default: cpu where there is a C compiler)")
    parser.add_argument("--dtype", default="float32", help="how weights are kept (default: float32)")
    return parser.parse_args(arguments)


def measure(engine: "Engine", shape: str, args: argparse.Namespace) -> Iterator[Trial]:
    """Measure the machine's peak rates and run, in each round. The timed steps run without an observer."""
    from minillm.measure.profiling import CachedProducts, probe_with, profile

    prompt = token_ids(0, args.prompt_length, engine.config.vocab_size)
    for number in range(1, args.repeat + 1):
        say(f"{shape}: round {number} of {args.repeat}")
        hardware = probe_with(engine.runner.backend, args.threads)
        options = {
            "cached": CachedProducts(engine.runner.backend),
            "max_new_tokens": args.new_tokens,
            "eos_token_id": (),
        }
        found = profile(engine, [prompt], hardware=hardware, **options)
        for name, phase in found.phases.items():
            steps = len(phase.steps)
            measured = sum(step.plain_seconds for step in phase.steps) / steps
            yield Trial(shape, name, number, phase.floor / steps, measured, hardware)


def table(trials: Sequence[Trial]) -> list[str]:
    """One line for each shape and phase."""
    lines = [f"{'shape':<12}{'phase':<10}{'predicted, ms':>14}{'measured, ms (min-max)':>34}{'error':>9}{'goal':>8}"]
    for shape, phase in dict.fromkeys((trial.shape, trial.phase) for trial in trials):
        mine = [trial for trial in trials if (trial.shape, trial.phase) == (shape, phase)]
        middle, low, high = (1e3 * seconds for seconds in spread([trial.measured for trial in mine]))
        predicted = 1e3 * statistics.median(trial.predicted for trial in mine)
        error = statistics.median(trial.error for trial in mine)
        verdict = "met" if abs(error) <= GOALS[phase] else "missed"
        lines.append(
            f"{shape:<12}{phase:<10}{predicted:>14.2f}{f'{middle:.2f} ({low:.2f}-{high:.2f})':>34}{error:>+9.1%}"
            f"{GOALS[phase]:>8.0%} {verdict}"
        )
    rates = [spread([trial.hardware.bandwidth / 1e9 for trial in trials])]
    rates += [spread([trial.hardware.rate("float32") / 1e9 for trial in trials])]
    probed = [
        f"{middle:.1f} {unit} ({low:.1f}-{high:.1f})"
        for (middle, low, high), unit in zip(rates, ("GB/s", "GFLOP/s"), strict=True)
    ]
    return [*lines, f"probed: {', '.join(probed)}"]


def conclusion(trials: Sequence[Trial]) -> str:
    """The result in one sentence."""
    parts = []
    for phase in dict.fromkeys(trial.phase for trial in trials):
        errors = {}
        for shape in dict.fromkeys(trial.shape for trial in trials):
            errors[shape] = statistics.median(t.error for t in trials if (t.shape, t.phase) == (shape, phase))
        words = " and ".join(f"{error:+.0%} for {shape}" for shape, error in errors.items())
        parts.append(f"of {'a decode step' if phase == 'decode' else phase} by {words}")
    return f"The roofline's time is off the clock's: {'; '.join(parts)}."


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from minillm import Engine
    from minillm.models import published, published_config

    shapes = [] if args.model else list(dict.fromkeys(part.strip() for part in args.shapes.split(",")))
    for shape in shapes:
        if shape not in published():
            raise BenchmarkError(f"shape {shape!r} is not known: expected one of {', '.join(published())}")
        if args.prompt_length + args.new_tokens > published_config(shape).max_positions:
            raise BenchmarkError(f"prompt and new tokens are beyond the context of {shape}: lower --prompt-length")
    make_folder(args.out)
    trials: list[Trial] = []
    for shape in shapes:
        say(f"{shape}: making random weights")
        options = {"backend": args.backend, "dtype": args.dtype, "threads": args.threads}
        with Engine.random(shape, max_batch_size=1, **options) as engine:
            trials += measure(engine, shape, args)
            name = engine.runner.backend.name
    if args.model:
        with Engine(args.model, max_batch_size=1, backend=args.backend, threads=args.threads) as engine:
            trials += measure(engine, args.model.stem, args)
            name = engine.runner.backend.name
    dtype = "as the file has them" if args.model else args.dtype
    facts = {"question": f"the roofline's prediction beside the clock, batch 1, weights {dtype}, on {name}"}
    facts |= {"work": f"prompt of {args.prompt_length} tokens, {args.new_tokens} new", "rounds": str(args.repeat)}
    facts |= describe(args.threads)
    lines = [*headed(facts), *table(trials), "", conclusion(trials)]
    rows = [
        [
            *(t.shape, t.phase, t.number, f"{t.predicted:.6f}", f"{t.measured:.6f}", f"{t.error:.4f}"),
            *(f"{t.hardware.bandwidth / 1e9:.2f}", f"{t.hardware.rate('float32') / 1e9:.2f}"),
        ]
        for t in trials
    ]
    stem = args.out / (f"prediction_{args.model.stem}" if args.model else "prediction")
    write_csv(Path(f"{stem}.csv"), facts, HEADER, rows)
    write_result(Path(f"{stem}.txt"), "\n".join(lines) + "\n")
    print("\n".join([*lines, f"written: {stem}.csv, {stem}.txt"]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("prediction", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
