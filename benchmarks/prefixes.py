"""What does a long prompt cost that was computed before? Seconds to its first token, restored against computed.

A small Llama of random weights gets one prompt again and again, each time with an empty cache: it computes the prompt,
reads its keys and values from a file of `save_prefix`, or from the folder of a prefix store. The ways take turns, round
by round, and the ratio is that of the medians. Files are in the system's memory, as after they were just written. The
tokens of all ways must agree exactly, or the script exits with 1.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import describe, execute, headed, make_folder, new_parser, positive, say, token_ids, write_csv

if TYPE_CHECKING:
    from minillm import Engine

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
HEADER = ("way", "tokens", "seconds_median", "seconds_min", "seconds_max", "ratio")
CHECKED = 8
"""New tokens that are compared after the prompt"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure restored against computed prompts.", "CSV")
    parser.add_argument("--model", metavar="FOLDER", help="a checkpoint instead of the small Llama")
    parser.add_argument("--length", type=positive, default=8192, metavar="N", help="prompt tokens (default: 8192)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="rounds (default: 3)")
    return parser.parse_args(arguments)


def write_llama(folder: Path, positions: int) -> Path:
    """A checkpoint of random weights."""
    from safetensors.numpy import save_file

    from minillm.backends.loader import RandomTensor
    from minillm.models import config_of, tensor_shapes

    raw = LLAMA | {"max_position_embeddings": positions}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    shapes = tensor_shapes(config_of(raw))
    tensors = {name: RandomTensor(name, shape, 0, 0.05).load() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def ways(engine: "Engine", prompt: list[int], file: Path) -> dict[str, Callable[[], None]]:
    """Name of a way -> what it does before the prompt comes."""
    cache: Any = engine.runner.cache
    store = cache.store

    def empty(stored: Any) -> None:
        cache.clear()
        cache.store = stored

    def load() -> None:
        empty(None)
        engine.load_prefix(file)

    return {"computed": lambda: empty(None), "from a file": load, "from a store": lambda: empty(store)}


def measure(engine: "Engine", prompt: list[int], file: Path, repeat: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds to the first token in each way, and whether the tokens agree."""
    seconds: dict[str, list[float]] = {}
    tokens = set()
    for number in range(repeat):
        for way, prepare in ways(engine, prompt, file).items():
            say(f"{way}: round {number + 1} of {repeat}")
            began = time.perf_counter()
            prepare()
            engine.generate(prompt, max_new_tokens=1, eos_token_id=(), progress=False)
            seconds.setdefault(way, []).append(time.perf_counter() - began)
            tokens.add(tuple(engine.generate(prompt, max_new_tokens=CHECKED, eos_token_id=()).token_ids))
    return seconds, len(tokens) == 1


def run(args: argparse.Namespace) -> int:
    """Measure, check and write. Returns the exit code."""
    from minillm import Engine

    make_folder(args.out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model) if args.model else write_llama(Path(scratch) / "model", args.length + 64)
        options: dict[str, Any] = {"max_batch_size": 1, "threads": args.threads, "cache_bytes": 2**31}
        file = Path(scratch) / "prompt.safetensors"
        with Engine(folder, prefix_store=Path(scratch) / "store", **options) as engine:
            prompt = token_ids(0, args.length, engine.config.vocab_size)
            engine.save_prefix(file, prompt)
            size = file.stat().st_size
        with Engine(folder, prefix_store=Path(scratch) / "store", **options) as engine:
            engine.load_prefix(file)  # which reads all weights, the first time
            seconds, agree = measure(engine, prompt, file, args.repeat)
    name = Path(args.model).resolve().name if args.model else "a small Llama"
    facts = {"question": f"a prompt of {args.length} tokens, restored against computed, {name}"}
    facts |= {"file": f"{size / 2**20:.0f} MiB", "rounds": str(args.repeat)} | describe(args.threads)
    computed = statistics.median(seconds["computed"])
    lines, rows = [f"{'way':<14}{'seconds, median (min-max)':>30}{'of computing':>14}"], []
    for way, taken in seconds.items():
        middle = statistics.median(taken)
        spread = f"{middle:.3f} ({min(taken):.3f}-{max(taken):.3f})"
        lines.append(f"{way:<14}{spread:>30}{middle / computed:>14.1%}")
        times = (f"{value:.6f}" for value in (middle, min(taken), max(taken)))
        rows.append([way, args.length, *times, f"{middle / computed:.4f}"])
    write_csv(args.out / "prefixes.csv", facts, HEADER, rows)
    print("\n".join([*headed(facts), *lines, ""]))
    print("tokens: the same in every way" if agree else "tokens DISAGREE")
    print(f"written: {args.out / 'prefixes.csv'}")
    return 0 if agree else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if tokens differ, 2 for invalid arguments."""
    return execute("prefixes", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
