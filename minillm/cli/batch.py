"""minillm batch: run a file of requests in OpenAI's batch format."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinillmError, ParameterError, UsageError, install
from ..progress import showing
from .options import MAX_BATCH_SIZE, add_model_options, engine_options, load_engine
from .output import note
from .parser import Parser

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..server.batches import Done

DESCRIPTION = """\
Run a file of requests in OpenAI's batch format, and write their results in the
same order. The same command goes on after an interruption: results that are
written are not computed again, but requests that failed, or have changed, are.
The exit code is 1 if a request has failed.

With --replicas each of several engines takes some of the requests: on this
machine, or in the Ray cluster of RAY_ADDRESS. One that dies loses nothing."""
EPILOG = """a line of the input:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Count to 9"}]}}
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="requests, one a line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="results, one a line")
    add_model_options(parser, parallel=True, chosen="a request's model")
    parser.add_argument(
        "--max-batch-size", type=int, default=MAX_BATCH_SIZE, metavar="N", help="texts that run at once (default: 16)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="engines, each in a process of its own, that share the requests (needs the extra ray)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    try:
        from ..server.batches import read_batch, run_batch
    except ImportError as error:
        raise MinillmError(f"batches need {error.name}: {install('serve')}") from None
    requests = read_batch(args.input)  # before the model is loaded
    if args.output.exists() and args.output.samefile(args.input):
        raise UsageError(f"{args.output} is the input: name another output")
    if args.replicas is not None:
        done = _run_replicas(args)
    else:
        engine = load_engine(args, any_task=True)
        with showing(True):
            done = run_batch(engine, args.input, args.output)
    for name, status, message in done.failed:
        note(f"{name}: {status}: {message}")
    again = [
        f", {count} {word} run again" for count, word in ((done.again, "failed"), (done.changed, "changed")) if count
    ]
    note(f"{len(requests)} requests, {done.resumed} of them done before{''.join(again)}, {len(done.failed)} failed")
    if done.failed:
        raise MinillmError(f"{len(done.failed)} of {len(requests)} requests failed: the same command runs them again")


def _run_replicas(args: argparse.Namespace) -> "Done":
    from ..server.replicas import run_replicas

    if args.replicas < 1:
        raise ParameterError(f"--replicas should be a number above 0, found {args.replicas}")
    for name in ("tensor_parallel", "pipeline_parallel"):
        if getattr(args, name) is not None:
            raise ParameterError(f"--replicas and --{name.replace('_', '-')} do not go together: leave one of them out")
    options = {"model": args.model} | engine_options(args)
    options |= {name: _everywhere(options[name]) for name in ("model", "adapter", "tokenizer") if options.get(name)}
    if "adapters" in options:
        options["adapters"] = {name: _everywhere(path) for name, path in options["adapters"].items()}
    make = partial(_engine, options)
    with showing(True):
        return run_replicas(
            make, args.replicas, args.input, args.output, threads=args.threads, gpu=args.device == "cuda"
        )


def _everywhere(word: str) -> str:
    """A path as other processes find it, which have other working directories; a hub id as it is."""
    return str(Path(word).resolve()) if Path(word).exists() else word


def _engine(options: dict[str, Any], threads: int | None) -> "Engine":
    """The engine of a replica."""
    from ..engine.engine import Engine

    return Engine(**options | {"threads": threads})
