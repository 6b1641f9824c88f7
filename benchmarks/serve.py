"""How many tokens a second does the server give its users beside llama-server and transformers serve, and how soon?

Each server loads the same real weights and stays in a process of its own, stopped (SIGSTOP) while another is measured,
so that no thread that waits in a loop takes the other's cores. For each load the servers take turns: so many streams,
each of which sends its next request when its last one is answered, and requests at the times of a Poisson process, at
rising rates until the server falls behind. Prompts are pieces of a page of English, each from another place, of 64 to
512 tokens (their logarithms evenly spread); answers have half to one and a half times --new-tokens, so that streams do
not go in step; decoding is greedy, and no answer ends early. Tokens are those of the server's own `usage`, CPU times
those of its process; the client's CPU time stands beside.
"""

import argparse
import asyncio
import math
import random
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
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
    write_result,
)
from serve_client import Answer, closed_loop, complete, open_loop
from serve_engines import CONTEXT, KINDS, Server
from serve_report import HEADER, Load, Run, draw, failures, goal_table, saturated, speed_table

if TYPE_CHECKING:
    from minillm.measure.accounting.roofline import Analysis


TEXT = Path(__file__).parents[1] / "tests" / "real" / "alice.txt"
SHORTEST, LONGEST = 64, 512
"""Tokens of a prompt"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure minillm's server beside others, in turns.", "CSV, the table and the figure")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a checkpoint folder")
    parser.add_argument("--engines", default=",".join(KINDS), metavar="A,B", help=f"default: {','.join(KINDS)}")
    parser.add_argument("--streams", type=positives, default=(1, 8, 32, 64), metavar="N,N", help="default: 1,8,32,64")
    parser.add_argument(
        "--rates",
        type=rates,
        default=(0.5, 1.0, 2.0, 4.0),
        metavar="R,R",
        help="requests a second, rising (default: 0.5,1,2,4; none: leave them out)",
    )
    parser.add_argument("--seconds", type=positive, default=20, metavar="N", help="arrivals at each rate (default: 20)")
    parser.add_argument("--rounds", type=positive, default=1, metavar="N", help="turns of each server (default: 1)")
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="of each number of streams (default: one and a half a stream, at least 4)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=120,
        metavar="N",
        help="seconds of a load, after which what is unanswered has failed; heavier loads are left out (default: 120)",
    )
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="of a mean answer (default: 64)")
    parser.add_argument(
        "--slots", type=positive, default=64, metavar="N", help="requests that a server runs at once (default: 64)"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="of the prompts (default: a page of English)")
    parser.add_argument("--minillm-options", type=str.split, default=[], metavar="'...'", help="for minillm serve")
    parser.add_argument(
        "--llama-server", default="llama-server", metavar="FILE", help="the program (default: that on PATH)"
    )
    parser.add_argument(
        "--transformers-python",
        default=sys.executable,
        metavar="FILE",
        help="a Python with transformers[serving] (default: this one)",
    )
    parser.add_argument(
        "--transformers-model", type=Path, metavar="FOLDER", help="the same weights as a folder of safetensors"
    )
    return parser.parse_args(arguments)


def rates(text: str) -> tuple[float, ...]:
    """Comma-separated numbers above 0, or "none", for argparse."""
    if text == "none":
        return ()
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = (0.0,)
    if not all(0 < rate < math.inf for rate in found):
        raise argparse.ArgumentTypeError(f"expected numbers above 0 or none, found {text!r}")
    return found


def sort_out(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The servers that can run here, and of the others the name with the reason.

    Raises:
        BenchmarkError: a name is unknown.
    """
    names = list(dict.fromkeys(part.strip() for part in args.engines.split(",")))
    for name in names:
        if name not in KINDS:
            raise BenchmarkError(f"server {name!r} is not known: expected {', '.join(KINDS)}")
    reasons = {name: KINDS[name].missing(args) for name in names}
    absent = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    return [name for name in names if not reasons[name]], absent


class Asked(NamedTuple):
    """A request."""

    prompt: str
    tokens: int
    """Of the prompt"""
    new_tokens: int


class Prompts:
    """Pieces of a text: the number of a prompt says where it begins, how long it is, and how long its answer."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Encode the text.

        Raises:
            BenchmarkError: it cannot be read or is too short, or the model has no tokenizer.
        """
        from minillm.formats import open_model

        try:
            text = args.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"--text {args.text} cannot be read: {error}") from None
        tokenizer = open_model(args.model).tokenizer
        if tokenizer is None:
            raise BenchmarkError(f"{args.model} has no tokenizer")
        self._new_tokens = args.new_tokens
        self._tokenizer, self._ids = tokenizer, tokenizer.encode(text, add_special_tokens=False)
        if len(self._ids) < 2 * LONGEST:
            raise BenchmarkError(f"--text {args.text} has {len(self._ids)} tokens: expected at least {2 * LONGEST}")
        self._places = list(range(len(self._ids) - LONGEST))
        random.Random(0).shuffle(self._places)
        self._next = 0

    def take(self, count: int) -> list[Asked]:
        """The next requests."""
        numbers = range(self._next, self._next + count)
        self._next += count
        return [self._prompt(number) for number in numbers]

    def _prompt(self, number: int) -> Asked:
        start, drawn = self._places[number % len(self._places)], random.Random(number)
        length = round(math.exp(drawn.uniform(math.log(SHORTEST), math.log(LONGEST))))
        text = self._tokenizer.decode(self._ids[start : start + length])
        new_tokens = drawn.randint(-(-self._new_tokens // 2), self._new_tokens * 3 // 2)
        return Asked(text, len(self._tokenizer.encode(text)), new_tokens)


def measure(
    args: argparse.Namespace, analysis: "Analysis", servers: Sequence[Server], prompts: Prompts
) -> Iterator[Run]:
    """Give each load to each server, in turns."""
    from serve_prediction import closed_loop_seconds, limits_of

    limits = limits_of(args.model, args.threads, args.slots, args.minillm_options)
    for number in range(1, args.rounds + 1):
        behind: set[tuple[str, bool]] = set()  # the server, and whether its streams or its arrivals were too many
        for load in [*(Load(streams) for streams in args.streams), *(Load(rate=rate) for rate in args.rates)]:
            if load.streams is None:
                delays = arrivals(load.rate, args.seconds)
                asked, predicted = prompts.take(len(delays)), None
            else:
                asked = prompts.take(args.requests or max(4, load.streams * 3 // 2))
                lengths = [(one.tokens, one.new_tokens) for one in asked]
                seconds = closed_loop_seconds(analysis, lengths, load.streams, limits)
                predicted = sum(one.new_tokens for one in asked) / seconds
            for server in servers:
                kind = server.kind.name, load.streams is None
                if kind in behind:
                    continue
                say(f"round {number} of {args.rounds}, {load.name}: {server.kind.name}")
                requests = [server.fields | {"prompt": one.prompt, "max_tokens": one.new_tokens} for one in asked]
                if load.streams is None:
                    work = open_loop(server.port, requests, delays, args.limit)
                else:
                    work = closed_loop(server.port, requests, load.streams, args.limit)
                answers, costs = observe(server, work)
                for answer in answers:
                    if not answer.error and answer.tokens != answer.asked:
                        answer.error = f"{answer.tokens} tokens came, {answer.asked} were asked for"
                run = Run(number, load, server.kind.name, answers, predicted, *costs)
                if saturated(run):
                    behind.add(kind)
                yield run


def observe(server: Server, work: Coroutine[Any, Any, list[Answer]]) -> tuple[list[Answer], tuple[float, float, float]]:
    """The answers of a load, and the CPU seconds of the server, of its main thread and of the client meanwhile."""
    with server.running():
        before, began = server.cpu_seconds(), time.process_time()
        answers = asyncio.run(work)
        client, after = time.process_time() - began, server.cpu_seconds()
    return answers, (after[0] - before[0], after[1] - before[1], client)


def arrivals(rate: float, seconds: int) -> list[float]:
    """Seconds between the arrivals of a Poisson process, the first from the beginning; the same in every call."""
    draw_next = random.Random(round(1e6 * rate))
    delays = [draw_next.expovariate(rate)]
    while sum(delays) < seconds or len(delays) < 2:
        delays.append(draw_next.expovariate(rate))
    return delays


def no_server(absent: Sequence[str]) -> BenchmarkError:
    """The error if all are absent."""
    return BenchmarkError(f"no server can run here: {'; '.join(absent)}")


def start(name: str, args: argparse.Namespace, prompts: Prompts, stack: ExitStack) -> Server:
    """A server that has answered two prompts, and is stopped until its turn.

    Raises:
        BenchmarkError: it does not start, or does not answer.
    """
    say(f"starting {name}")
    server = stack.enter_context(Server(KINDS[name], args))
    for asked in prompts.take(2):
        fields = server.fields | {"prompt": asked.prompt, "max_tokens": asked.new_tokens}
        answer = asyncio.run(complete(server.port, fields))
        if answer.error:
            raise BenchmarkError(f"{answer.error}; its last line: {server.last_words()}")
    server.stop()
    return server


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from serve_prediction import analysis_of

    names, absent = sort_out(args)
    if not names:
        raise no_server(absent)
    prompts = Prompts(args)
    analysis = analysis_of(args.model, args.threads)  # while nothing else runs
    context = min(analysis.config.max_positions, CONTEXT)
    longest_answer = args.new_tokens * 3 // 2
    if LONGEST + longest_answer > context:
        raise BenchmarkError(
            f"prompts of {LONGEST} tokens and {longest_answer} new ones are beyond the context of {context}: "
            "lower --new-tokens, or take another model"
        )
    need_matplotlib()
    make_folder(args.out)
    with ExitStack() as stack:
        servers = []
        for name in names:
            try:
                servers.append(start(name, args, prompts, stack))
            except BenchmarkError as error:
                absent.append(f"{name} ({error})")
        if not servers:
            raise no_server(absent)
        runs = list(measure(args, analysis, servers, prompts))
    facts = {"question": f"servers beside one another, {args.model.stem}, real weights, greedy"}
    facts |= {
        "work": f"prompts of {SHORTEST} to {LONGEST} tokens, {args.new_tokens} new on average, rounds: {args.rounds}"
    }
    facts |= {server.kind.name: server.kind.version(args) for server in servers}
    facts |= {"left out": "; ".join(absent) or "none"} | describe(args.threads)
    stem = args.out / f"serve_{args.model.stem}"
    lines = [*headed(facts), *goal_table(runs), "", *speed_table(runs), *failures(runs)]
    write_csv(stem.with_name(stem.name + ".csv"), facts, HEADER, (run.row() for run in runs))
    write_result(stem.with_name(stem.name + ".txt"), "\n".join(lines) + "\n")
    rows = [dict(zip(HEADER, run.row(), strict=True)) for run in runs]
    write_figure(stem.with_name(stem.name + ".png"), draw(rows, f"{args.model.stem}, {args.threads} threads"))
    print("\n".join([*lines, f"written: {stem}.csv, {stem}.txt, {stem}.png"]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("serve", run, parse(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended
    sys.exit(main())
