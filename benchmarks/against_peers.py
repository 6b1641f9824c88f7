"""How fast is minillm beside llama.cpp, CTranslate2 and transformers, in 32, 16, 8 and 4 bits, and at what loss?

A shared machine's memory bandwidth drifts within minutes, so figures taken apart say nothing. Each engine lives in a
process of its own, where its threads disturb nobody's; short bursts take turns, A B C A B C, and before each burst the
bandwidth is probed. Reported are medians, extremes and the ratios within each round.

All have the same weights, drawn at random in a published shape, with one exception that `peer_gguf.py` explains:
llama.cpp does not run OPT, and computes GPT-2's architecture with its matrices.
"""

import argparse
import importlib.util
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import (
    RESULTS,
    BenchmarkError,
    available_cores,
    describe,
    make_folder,
    positive,
    say,
    thread_environment,
    write_csv,
    write_result,
)
from peer_measure import Session, measure_fresh, measure_loaded
from peer_plans import (
    BITS,
    CASES,
    PACKAGES,
    PLANS,
    STAND_INS,
    position_bytes,
    table_bytes,
    takes_part,
    tasks,
    weight_bytes,
)
from peer_process import write_files
from peer_report import Results, goal_table, other_tables, speed_table

HEADER = ("round", "task", "engine", "tokens", "seconds", "tokens_per_second", "bandwidth_gb_per_second")
VERSIONS = ("minillm", "numpy", "numba", "torch", "transformers", "ctranslate2", "llama_cpp_python")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure minillm beside other engines, in turns.")
    parser.add_argument("--shape", default="opt-125m", help="published shape, random weights (default: opt-125m)")
    parser.add_argument("--threads", type=positive, default=available_cores(), metavar="N", help="default: all cores")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each engine (default: 5)")
    for name, known in (("cases", CASES), ("engines", tuple(PACKAGES)), ("formats", tuple(BITS))):
        parser.add_argument(
            f"--{name}", type=chosen(known), default=known, metavar="A,B", help=f"default: {','.join(known)}"
        )
    parser.add_argument(
        "--prefill", type=positive, default=512, metavar="N", help="tokens of the prompt (default: 512)"
    )
    parser.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="in a burst (default: 32)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="for the CSV and the table")
    return parser.parse_args(arguments)


def chosen(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For argparse: words with commas between them, each of them known."""

    def read(text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not known: expected {', '.join(known)}")
        return words

    return read


def sort_out(engines: Sequence[str]) -> tuple[list[str], str]:
    """The engines that can run here, and a line about those that cannot."""
    missing = {
        engine: absent
        for engine in engines
        if (absent := [name for name in PACKAGES[engine] if importlib.util.find_spec(name) is None])
    }
    words = [f"{engine} (without {', '.join(absent)})" for engine, absent in missing.items()]
    line = f"{'; '.join(words)}: pip install 'minillm[fast,peers]'" if words else "none"
    return [engine for engine in engines if engine not in missing], line


def check(args: argparse.Namespace) -> Any:
    """The configuration of the shape.

    Raises:
        ParameterError: no family publishes the shape.
        BenchmarkError: the arguments ask for what cannot be.
    """
    from peer_files import PUBLISHED

    from minillm.models import published_config

    config = published_config(args.shape)
    if config.model_type not in PUBLISHED:
        raise BenchmarkError(f"{args.shape} is of {config.model_type}: expected a shape of {', '.join(PUBLISHED)}")
    if args.new_tokens < 2:
        raise BenchmarkError("--new-tokens should be at least 2: decode begins after the first")
    timed = [task for case in args.cases for task in tasks(case, args.prefill, args.new_tokens)]
    longest = max((task.prompt + task.new_tokens for task in timed), default=0)
    if longest > config.max_positions:
        raise BenchmarkError(
            f"{longest} tokens are asked for, and the context of {args.shape} is {config.max_positions}"
        )
    return config


def run(args: argparse.Namespace) -> None:
    """Measure and write."""
    config = check(args)
    make_folder(args.out)
    engines, missing = sort_out(args.engines)
    plans = [
        plan
        for plan in PLANS
        if plan.engine in engines and plan.form in args.formats and any(takes_part(case, plan) for case in args.cases)
    ]
    environment = os.environ | thread_environment(args.threads) | {"HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # cold starts would compile what an installed package has compiled
    with tempfile.TemporaryDirectory(prefix="minillm-peers-") as folder:
        say("writing the same weights for every engine")
        wanted = ["ctranslate2"] * any(plan.engine == "ctranslate2" for plan in plans)
        wanted += [plan.label for plan in plans if plan.engine == "llama.cpp"]
        gguf = write_files(args.shape, folder, wanted, environment)
        weights = {plan: weight_bytes(plan, config, gguf) for plan in plans}
        tables = {plan: table_bytes(plan, config) for plan in plans}
        results = Results(weights, tables, position_bytes(config))
        session = Session(args, config, environment, folder)
        measure_loaded(session, plans, results)
        measure_fresh(session, plans, results)
    write(args, config.model_type, missing, results)


def write(args: argparse.Namespace, family: str, missing: str, results: Results) -> None:
    """Print the tables, and keep them with every burst."""
    facts = {"question": f"minillm beside other engines, {args.shape}, random weights, greedy"}
    facts |= {"llama.cpp": f"{STAND_INS.get(family, 'the same model')}; its cache is float16"}
    facts |= {"rounds": str(args.rounds), "left out": missing}
    facts |= describe(args.threads, VERSIONS)
    probes = [burst.bandwidth for burst in results.bursts] or [0.0]
    facts["bandwidth"] = f"median {statistics.median(probes):.1f} GB/s ({min(probes):.1f}-{max(probes):.1f})"
    lines = [*(f"{key}: {fact}" for key, fact in facts.items()), "", *goal_table(results), ""]
    lines += [*speed_table(results), *other_tables(results)]
    stem = args.out / f"against_peers_{args.shape}"
    rows = (
        [b.number, b.task.name, b.plan.name, b.tokens, f"{b.seconds:.6f}", f"{b.speed:.2f}", f"{b.bandwidth:.1f}"]
        for b in results.bursts
    )
    write_csv(stem.with_name(stem.name + ".csv"), facts, HEADER, rows)
    write_result(stem.with_name(stem.name + ".txt"), "\n".join(lines) + "\n")
    print("\n".join([*lines, f"written: {stem}.csv, {stem}.txt"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for what cannot be run."""
    args = parse(arguments)
    for name in [name for name in os.environ if name.startswith("OPENBLAS_")]:
        del os.environ[name]  # minillm's command line sets what it wants
    os.environ.update(thread_environment(1))  # of this process alone: the probe has threads of its own
    from minillm.errors import MinillmError

    try:
        run(args)
    except (MinillmError, BenchmarkError) as error:
        print(f"against_peers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without removing the files, which are large
    sys.exit(main())
