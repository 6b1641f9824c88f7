"""What does a decode step cost outside the forward pass? CPU milliseconds by what the requests ask for.

1, 8 and 32 sequences decode side by side, all with the same kind of settings, each with values of its own; `mixture`
draws the fields of each request at random. Of the CPU time of each step, that of the forward pass is subtracted: what
is left schedules the step, processes logits, chooses tokens, decodes text and reports it. The kinds take turns, round
by round, and the least time counts: other load only adds.

A model without a tokenizer leaves the guides out. With random weights logits are nearly equal, the hardest case for
sampling; with --model they are a real model's.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import describe, execute, headed, make_folder, new_parser, positive, positives, say, token_ids, write_csv

if TYPE_CHECKING:
    from minillm import Engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
SAMPLED = {"do_sample": True, "top_k": 0}
MIXTURE: dict[str, Callable[[random.Random, int], Any]] = {
    "repetition_penalty": lambda choose, _: choose.uniform(1.01, 1.3),
    "presence_penalty": lambda choose, _: choose.uniform(0, 1),
    "frequency_penalty": lambda choose, _: choose.uniform(0, 1),
    "min_new_tokens": lambda choose, _: choose.randint(1, 30),
    "sequence_bias": lambda choose, V: [[[choose.randrange(V)], choose.uniform(-5, 5)] for _ in range(20)],
    "suppress_tokens": lambda choose, V: [choose.randrange(V) for _ in range(5)],
    "top_logprobs": lambda choose, _: choose.choice([1, 5, 20]),
}
"""Fields of which each request has some, with their values"""

Fields = Callable[[int, int], dict[str, Any]]
"""The fields of request i, with a vocabulary of V tokens"""


def mixture(i: int, V: int) -> dict[str, Any]:
    """Some fields of sampling and of processors."""
    choose = random.Random(i)
    fields = {name: value(choose, V) for name, value in MIXTURE.items() if choose.random() < 0.3}
    fields["eos_token_id"] = V - 1  # there must be one for min_new_tokens
    if choose.random() < 0.7:
        filters = {"top_k": choose.choice([0, 0, 20, 50]), "top_p": choose.choice([1.0, choose.uniform(0.7, 0.99)])}
        fields |= {"do_sample": True, "seed": i, "temperature": choose.uniform(0.5, 1.5), **filters}
    return fields


KINDS: dict[str, Fields] = {
    "greedy": lambda i, V: {},
    "sampling": lambda i, V: SAMPLED | {"seed": i},
    "sampling, top_k 50": lambda i, V: {"do_sample": True, "seed": i, "top_k": 50},
    "sampling, each its temperature": lambda i, V: SAMPLED | {"seed": i, "temperature": 0.5 + i / 32},
    "mixture": mixture,
    "logprobs": lambda i, V: {"logprobs": True},
    "top_logprobs 5": lambda i, V: {"top_logprobs": 5},
    "top_logprobs 20": lambda i, V: {"top_logprobs": 20},
    "each its logit biases": lambda i, V: {"sequence_bias": [[[(7 * i + j) % V], -1.0 - j] for j in range(20)]},
    "each its penalties": lambda i, V: {"repetition_penalty": 1.1 + i / 100, "frequency_penalty": 0.2 + i / 100},
    "guided JSON": lambda i, V: {"guided_json": SCHEMA},
    "guided regex, words": lambda i, V: {"guided_regex": "([a-z]+ )*[a-z]+"},
    "guided regex, counted": lambda i, V: {"guided_regex": "[a-zA-Z ,.]{1,400}"},
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure the CPU time of decode steps outside the forward pass.", "CSV")
    parser.set_defaults(threads=1)
    parser.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    parser.add_argument("--model", help="a checkpoint instead: folder, GGUF file or hub id")
    parser.add_argument(
        "--sequences", type=positives, default=(1, 8, 32), metavar="N,N,...", help="side by side (default: 1,8,32)"
    )
    parser.add_argument("--prompt-length", type=positive, default=64, metavar="N", help="of each (default: 64)")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="timed steps a round (default: 5)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="default: 3")
    return parser.parse_args(arguments)


class Stopwatch:
    """The CPU time that this thread has spent in forward passes."""

    def __init__(self, engine: "Engine") -> None:
        self.spent = 0.0
        memory: Any = engine.runner.backend.memory
        run = memory.run

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return run(*arguments, **options)
            finally:
                self.spent += time.thread_time() - began

        memory.run = timed


def step_times(engine: "Engine", watch: Stopwatch, count: int, fields: Fields, length: int, steps: int) -> list[float]:
    """CPU seconds outside the forward pass of decode steps of `count` sequences, after two that are not timed.

    Steps in which one has ended already do not count.
    """
    V, times = engine.config.vocab_size, []
    before = engine.stats.decode_tokens
    endless: dict[str, Any] = {} if any(name.startswith("guided") for name in fields(0, V)) else {"eos_token_id": []}
    ids = [
        engine.add(token_ids(i, length, V), max_new_tokens=steps + 2 * count + 30, **(endless | fields(i, V)))
        for i in range(count)
    ]
    while engine.busy and engine.stats.decode_tokens < before + 2 * count:
        engine.step()
    for _ in range(steps):
        spent, began = watch.spent, time.thread_time()
        events = engine.step()
        seconds = time.thread_time() - began - (watch.spent - spent)
        if len(events) == count:
            times.append(seconds)
    for request_id in ids:
        engine.abort(request_id)
    while engine.busy:
        engine.step()
    return times


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from minillm import Engine

    make_folder(args.out)
    limits: dict[str, Any] = {"max_batch_size": max(args.sequences), "threads": args.threads}
    engine = Engine(args.model, **limits) if args.model else Engine.random(args.shape, **limits)
    watch = Stopwatch(engine)
    kinds = {name: fields for name, fields in KINDS.items() if engine.tokenizer or not name.startswith("guided")}
    least: dict[tuple[str, int], float] = {}
    for turn in range(args.rounds):
        say(f"round {turn + 1} of {args.rounds}")
        for count in args.sequences:
            for name, fields in kinds.items():
                times = step_times(engine, watch, count, fields, args.prompt_length, args.steps)
                least[name, count] = min([*times, least.get((name, count), float("inf"))])
    name = args.shape if args.model is None else Path(args.model).stem
    facts = {"question": f"CPU ms of a decode step outside the forward pass, {name}"}
    facts |= {"vocabulary": str(engine.config.vocab_size), "steps": f"least of {args.rounds} x {args.steps}"}
    facts |= describe(args.threads)
    rows = [[kind, *(f"{1e3 * least[kind, count]:.2f}" for count in args.sequences)] for kind in kinds]
    header = ("kind", *(f"ms_of_{count}" for count in args.sequences))
    path = args.out / f"host_work_{name}.csv"
    write_csv(path, facts, header, rows)
    lines = [f"{name:32}" + "".join(f"{cell:>10}" for cell in cells) for name, *cells in [header, *rows]]
    print("\n".join([*headed(facts), *lines, "", f"written: {path}"]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("host_work", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
