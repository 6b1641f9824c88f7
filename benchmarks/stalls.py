"""How long do long prompts delay those that decode, by the token budget of a step, and a short prompt behind them?

Some streams decode; then several long prompts come in at once. Their chunks share each step with the streams' tokens,
so the time of a step is the time between two tokens of a stream: many tokens a step compute prompts fast, few keep the
others' tokens coming. Then a short prompt comes in while a step of a long one is computed: the steps and seconds until
its first token, that step included, and until the long one's.

Figures are seconds of CPU time with one thread, which is what the clock would show if nothing else ran on the machine,
and seconds of the clock with more threads.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness import describe, execute, headed, make_folder, new_parser, positive, positives, say, token_ids, write_csv

if TYPE_CHECKING:
    from minillm import Engine

HEADER = (
    *("budget", "calm_ms_p50", "between_tokens_ms_p50", "between_tokens_ms_p99", "between_tokens_ms_max"),
    *("first_token_s_mean", "first_token_s_last", "prompt_tokens_per_s", "tokens_per_s"),
)
BESIDE = ("long_tokens", "first_token_steps", "first_token_s", "long_step_s", "long_first_token_s")
SHORT = 32
"""Prompt tokens of a stream, and of a short prompt"""
CALM = 10
"""Steps before the long prompts come in"""


class Figures(NamedTuple):
    """One round with one budget."""

    calm: list[float]
    """Seconds of each step before"""
    steps: list[float]
    """Seconds of each step until all long prompts are computed"""
    first_tokens: list[float]
    """Seconds from the arrival of the long prompts to the first token of each"""
    prompts: int
    """Tokens of the long prompts"""
    streams: int
    """Number of streams, each of which gets one token in each step"""

    def row(self) -> list[float]:
        """The columns of `HEADER` after the budget."""
        total = sum(self.steps)
        return [
            1e3 * statistics.median(self.calm),
            *(1e3 * percentile(self.steps, share) for share in (0.5, 0.99, 1.0)),
            statistics.mean(self.first_tokens),
            max(self.first_tokens),
            self.prompts / total,
            (self.prompts + self.streams * len(self.steps)) / total,
        ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as this share of all."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure stalls of decoding streams while long prompts come in.", "CSV")
    parser.set_defaults(threads=1)
    parser.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    parser.add_argument("--budgets", type=positives, default=(32, 64, 128, 256, 512), metavar="N,N")
    parser.add_argument("--streams", type=positive, default=8, metavar="N", help="that decode (default: 8)")
    parser.add_argument("--prompts", type=positive, default=4, metavar="N", help="that come in (default: 4)")
    parser.add_argument("--length", type=positive, default=500, metavar="N", help="tokens of each (default: 500)")
    parser.add_argument(
        "--beside",
        type=positives,
        default=(500, 1000, 2000),
        metavar="N,N",
        help="tokens of long prompts beside which a short one comes in (default: 500,1000,2000)",
    )
    parser.add_argument("--repeat", type=positive, default=3, help="rounds (default: 3)")
    return parser.parse_args(arguments)


class Clocked:
    """A step loop over an engine's model whose steps are timed."""

    def __init__(self, engine: "Engine", args: argparse.Namespace, places: int, budget: int | None) -> None:
        from minillm.engine.loop import StepLoop
        from minillm.engine.scheduler import Limits

        memory = engine.runner.backend.memory
        limits = Limits.of(memory, places) if budget is None else Limits(places, budget, max(budget, 512))
        self.loop = StepLoop({"target": engine.runner}, limits)
        self._vocab_size = engine.config.vocab_size
        self._clock = time.process_time if args.threads == 1 else time.perf_counter

    def add(self, number: int, length: int, new: int) -> int:
        """Add a request with a prompt of its own. Returns its id."""
        from minillm import GenerationConfig
        from minillm.decoding.resolving import resolve, strategy_for
        from minillm.decoding.strategy import Request

        config = GenerationConfig(max_new_tokens=new)
        settings = resolve(config, {}, vocab_size=self._vocab_size, eos_token_id=None)
        return self.loop.add(Request(token_ids(number, length, self._vocab_size), settings, strategy_for(settings)))

    def step(self) -> float:
        """Seconds of one step."""
        began = self._clock()
        self.loop.step_or_raise()
        return self._clock() - began

    def until_ended(self, request_id: int) -> list[float]:
        """Seconds of each step until a request has ended."""
        steps = []
        while self.loop.knows(request_id):
            steps.append(self.step())
        return steps


def measure(engine: "Engine", args: argparse.Namespace, budget: int) -> Figures:
    """One round with one budget."""
    clocked = Clocked(engine, args, args.streams + args.prompts, budget)
    loop = clocked.loop
    room = engine.config.max_positions - SHORT
    streams = [clocked.add(i, SHORT, room) for i in range(args.streams)]
    while not all(active.started for active in loop.scheduler.running) or loop.scheduler.waiting:
        loop.step_or_raise()
    calm = [clocked.step() for _ in range(CALM)]
    waiting = {clocked.add(args.streams + i, args.length, 1) for i in range(args.prompts)}
    steps: list[float] = []
    first_tokens: list[float] = []
    while waiting:
        steps.append(clocked.step())
        done = {request_id for request_id in waiting if not loop.knows(request_id)}
        first_tokens += [sum(steps)] * len(done)
        waiting -= done
    for request_id in streams:
        loop.abort(request_id)
    return Figures(calm, steps, first_tokens, args.prompts * args.length, args.streams)


def beside(engine: "Engine", args: argparse.Namespace, length: int) -> list[float]:
    """One round with a short prompt beside a long one: the columns of `BESIDE` after the first."""
    clocked = Clocked(engine, args, 2, None)
    long = clocked.add(0, length, 1)
    running = clocked.step()  # the short one comes in while it runs
    short = clocked.until_ended(clocked.add(1, SHORT, 1))
    rest = clocked.until_ended(long)
    seconds = running + sum(short)
    return [1 + len(short), seconds, running, seconds + sum(rest)]


def table(rows: Sequence[Sequence[float]]) -> list[str]:
    """The medians as text."""
    lines = [
        f"{'budget':>8}{'calm, ms':>10}{'between tokens, ms: p50':>25}{'p99':>8}{'max':>8}{'first token, s: mean':>22}"
        f"{'last':>7}{'prompt tokens/s':>17}{'tokens/s':>10}"
    ]
    for budget, calm, p50, p99, most, mean, last, prompt, both in rows:
        lines.append(
            f"{budget:>8.0f}{calm:>10.0f}{p50:>25.0f}{p99:>8.0f}{most:>8.0f}{mean:>22.2f}{last:>7.2f}{prompt:>17.0f}"
            f"{both:>10.0f}"
        )
    return lines


def beside_table(rows: Sequence[Sequence[float]]) -> list[str]:
    """The medians beside long prompts as text."""
    lines = [f"{'beside tokens':>14}{'steps to first token':>22}{'seconds':>9}{'a step, s':>11}{'long one, s':>13}"]
    for length, steps, seconds, step, long in rows:
        lines.append(f"{length:>14.0f}{steps:>22.0f}{seconds:>9.2f}{step:>11.2f}{long:>13.2f}")
    return lines


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results. Returns the exit code."""
    from minillm import Engine

    make_folder(args.out)
    found: dict[int, list[list[float]]] = {budget: [] for budget in args.budgets}
    by_length: dict[int, list[list[float]]] = {length: [] for length in args.beside}
    with Engine.random(args.shape, max_batch_size=args.streams + args.prompts, threads=args.threads) as engine:
        measure(engine, args, args.budgets[-1])  # warm-up
        for turn in range(args.repeat):
            for budget in args.budgets[:: 1 if turn % 2 else -1]:
                found[budget].append(measure(engine, args, budget).row())
                say(f"round {turn + 1}, budget {budget}: p99 {found[budget][-1][3]:.0f} ms between tokens")
            for length in args.beside:
                by_length[length].append(beside(engine, args, length))
                say(f"round {turn + 1}, beside {length} tokens: first token after {by_length[length][-1][1]:.2f} s")
    rows = [[float(budget), *map(statistics.median, zip(*each, strict=True))] for budget, each in found.items()]
    question = f"{args.streams} streams of {args.shape} decode, {args.prompts} prompts of {args.length} tokens come in"
    clock = "CPU time" if args.threads == 1 else "the clock"
    facts = {"question": question, "rounds": f"{args.repeat}, medians; seconds of {clock}"} | describe(args.threads)
    path = args.out / f"stalls_{args.shape}.csv"
    write_csv(path, facts, HEADER, [[int(budget), *(f"{value:.4f}" for value in row)] for budget, *row in rows])
    print("\n".join([*headed(facts), *table(rows), ""]))
    print(f"written: {path}")
    facts["question"] = f"a prompt of {SHORT} tokens of {args.shape} comes in while a long one is computed"
    path = args.out / f"stalls_beside_{args.shape}.csv"
    rows = [[float(length), *map(statistics.median, zip(*each, strict=True))] for length, each in by_length.items()]
    write_csv(path, facts, BESIDE, [[int(n), int(steps), *(f"{v:.4f}" for v in row)] for n, steps, *row in rows])
    print("\n".join([*headed(facts), *beside_table(rows), ""]))
    print(f"written: {path}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("stalls", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
