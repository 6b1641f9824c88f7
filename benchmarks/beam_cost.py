"""What does a step of beam search cost beside a greedy step of as many sequences? Seconds per step, by context length.

Both compute one token for each of four sequences. Greedy search runs four prompts of that length; beam search runs four
beams on one prompt, ranks their candidates, and forks the sequences that are named more than once. Steps of the two
alternate, so that other load affects both; the ratio is the median of the ratios within each turn.

The weights are random, so the candidates are nearly equal and the beams fork as often as they can. The copies that
forks make are counted: positions of the K/V cache, in all layers.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness import describe, execute, headed, make_folder, new_parser, positive, positives, say, write_csv

if TYPE_CHECKING:
    from minillm import Engine
    from minillm.engine.loop import StepLoop

HEADER = (
    "context", "greedy_ms_median", "greedy_ms_min", "greedy_ms_max", "beam_ms_median", "beam_ms_min", "beam_ms_max",
    "ratio_median", "ratio_quartile_1", "ratio_quartile_3", "positions_copied_per_step", "page_size",
)  # fmt: skip
LIMIT = 1.25
"""Goal for the ratio."""


class Figures(NamedTuple):
    """Measurements at one context length."""

    context: int
    greedy: list[float]
    """Seconds of each step"""
    beam: list[float]
    copied: float
    """Positions that a beam step copied on average"""

    @property
    def ratios(self) -> list[float]:
        """Beam over greedy, turn by turn, least first."""
        return sorted(b / g for b, g in zip(self.beam, self.greedy, strict=True))

    def row(self, page_size: int) -> list[object]:
        """A row of the CSV, in the order of `HEADER`."""
        times = [f"{1e3 * f(side):.3f}" for side in (self.greedy, self.beam) for f in (statistics.median, min, max)]
        low, middle, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return [self.context, *times, f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}", f"{self.copied:.1f}", page_size]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure steps of beam search against greedy steps.", "CSV")
    parser.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    parser.add_argument(
        "--contexts", type=positives, default=(100, 1000), metavar="N,N,...", help="tokens before the first timed step"
    )
    parser.add_argument("--beams", type=positive, default=4, metavar="N", help="and greedy prompts (default: 4)")
    parser.add_argument("--steps", type=positive, default=60, metavar="N", help="timed turns (default: 60)")
    return parser.parse_args(arguments)


def loop_with(engine: "Engine", prompts: list[list[int]], steps: int, num_beams: int) -> "StepLoop":
    """A step loop on the engine's model, with prompts computed and one warm-up step taken."""
    from minillm import GenerationConfig
    from minillm.decoding.resolving import resolve, strategy_for
    from minillm.decoding.strategy import Request
    from minillm.engine.loop import StepLoop
    from minillm.engine.scheduler import Limits

    chunk = 512
    spare = 3 + -(-sum(map(len, prompts)) // chunk)  # the first prompts go on while the last are computed
    config = GenerationConfig(max_new_tokens=steps + spare, num_beams=num_beams)
    settings = resolve(config, {}, vocab_size=engine.config.vocab_size, eos_token_id=None)
    loop = StepLoop({"target": engine.runner}, Limits(max(num_beams, len(prompts)), chunk, chunk))
    for prompt in prompts:
        loop.add(Request(prompt, settings, strategy_for(settings)))
    while loop.stats.decode_tokens == 0:
        loop.step()
    return loop


def measure(engine: "Engine", context: int, beams: int, steps: int) -> Figures:
    """Time steps at one context length, in turns."""
    V, cache = engine.config.vocab_size, engine.runner.cache
    prompts = [[(7919 * i + 101 * j + 11) % V for i in range(context - 2)] for j in range(beams)]
    say(f"context {context}: computing the prompts")
    greedy = loop_with(engine, prompts, steps, 1)
    beam = loop_with(engine, prompts[:1], steps, beams)
    figures = Figures(context, [], [], 0.0)
    say(f"context {context}: {steps} turns")
    before = cache.copied_positions
    for turn in range(steps):
        for loop, seconds in ((greedy, figures.greedy), (beam, figures.beam))[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            loop.step()
            seconds.append(time.perf_counter() - began)
    copied = (cache.copied_positions - before) / steps
    for loop in (greedy, beam):
        while loop.busy:
            loop.step()
    return figures._replace(copied=copied)


def table(figures: Sequence[Figures]) -> list[str]:
    """The figures as text."""
    lines = [f"{'context':>8}{'greedy step, ms':>28}{'beam step, ms':>28}{'ratio (quartiles)':>24}{'copied':>9}"]
    for one in figures:
        row = [str(cell) for cell in one.row(0)]
        times = "".join(f"{f'{row[i]} ({row[i + 1]}-{row[i + 2]})':>28}" for i in (1, 4))
        lines.append(f"{row[0]:>8}{times}{f'{row[7]} ({row[8]}-{row[9]})':>24}{row[10]:>9}")
    return lines


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from minillm import Engine

    make_folder(args.out)
    engine = Engine.random(args.shape, max_batch_size=2 * args.beams, threads=args.threads)
    figures = [measure(engine, context, args.beams, args.steps) for context in args.contexts]
    facts = {"question": f"a step of {args.beams} beams against a greedy step of batch {args.beams}, {args.shape}"}
    facts |= {"turns": str(args.steps)} | describe(args.threads)
    path = args.out / f"beam_cost_{args.shape}.csv"
    write_csv(path, facts, HEADER, [one.row(engine.runner.cache.page_size) for one in figures])
    print("\n".join([*headed(facts), *table(figures), ""]))
    worst = max(statistics.median(one.ratios) for one in figures)
    print(f"A beam step costs {worst:.2f} times a greedy step at most; {LIMIT} is aimed at.")
    print(f"written: {path}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("beam_cost", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
