"""What does a token cost late in a long text, by the format of the K/V cache, beside llama.cpp? CPU seconds.

A Llama of random weights with layers like SmolLM2-135M's, one by default, goes on with a text. Each format of the cache
of either engine computes the text once; then all take turns, a few tokens each, on one thread. Measured is CPU time,
which other processes change least. A cache costs the difference to a short text, whose tokens cost the rest alone.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    describe,
    execute,
    headed,
    make_folder,
    new_parser,
    positive,
    positives,
    say,
    token_ids,
    write_csv,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
}
OURS = ("float32", "bfloat16", "int8", "int4")
TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""llama.cpp's formats, and their numbers in its interface"""
THEIRS: dict[str, dict[str, dict[str, object]]] = {
    "llama.cpp": {name: {"type_k": number, "type_v": number, "flash_attn_type": 1} for name, number in TYPES.items()},
    "ik_llama.cpp": {name: {"type_k": number, "type_v": number} for name, number in TYPES.items()},
}
"""Engine -> cache -> its parameters: with flash attention, which narrow caches need and the fork has by default"""
ROTATED = {"k_cache_hadamard": True, "v_cache_hadamard": True}
THEIRS["ik_llama.cpp"]["q4_0 rotated"] = THEIRS["ik_llama.cpp"]["q4_0"] | ROTATED
HEADER = ("engine", "cache", "context", "ms_median", "ms_min", "ms_max")
VERSIONS = ("minillm", "numpy", "llama-cpp-python", "ik-llama-cpp-python")
TEXT = Path(__file__).parents[1] / "tests" / "real" / "alice.txt"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure decoding late in long texts.", "CSV")
    parser.add_argument("--contexts", type=positives, default=(16, 4096, 16384), metavar="N,N,...")
    parser.add_argument("--layers", type=positive, default=1, metavar="N")
    parser.add_argument("--tokens", type=positive, default=8, metavar="N", help="of a turn (default: 8)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="turns (default: 3)")
    parser.add_argument(
        "--perplexity", type=Path, metavar="FILE", help="of a page of English with a GGUF file, in place of times"
    )
    parser.set_defaults(threads=1)
    return parser.parse_args(arguments)


def write_model(folder: Path, layers: int, positions: int) -> Path:
    """A GGUF file of random weights in Q8_0."""
    from safetensors.numpy import save_file

    from minillm.backends.loader import RandomTensor
    from minillm.formats.gguf.write import write_gguf
    from minillm.models import config_of, tensor_shapes

    raw = LLAMA | {"num_hidden_layers": layers, "max_position_embeddings": positions}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    shapes = tensor_shapes(config_of(raw))
    tensors = {name: RandomTensor(name, shape, 0, 0.05).load() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    write_gguf(folder, folder / "model.gguf", "int8", tokenizer=False, progress=False)
    return folder / "model.gguf"


def our_tokens(path: Path, cache: str, prompt: list[int], new_tokens: int) -> Iterator[object]:
    """Tokens of minillm, one by one; the first comes when the prompt is computed."""
    from minillm import Engine

    options: dict[str, Any] = {"threads": 1, "max_batch_size": 1, "cache_bytes": 1 << 29, "backend": "cpu"}
    with Engine(path, cache_dtype=cache, **options) as engine:
        yield from engine.stream(prompt, max_new_tokens=new_tokens, eos_token_id=())


def their_tokens(engine: str, path: Path, cache: str, prompt: list[int], new_tokens: int) -> Iterator[object]:
    """The same of llama.cpp or its fork."""
    from peer_engines import GGUF_ENGINES

    chunks = {"n_batch": 512, "n_ubatch": 512}
    yield from GGUF_ENGINES[engine](str(path), 1, THEIRS[engine][cache] | chunks).tokens(prompt, new_tokens)


def peers() -> list[str]:
    """Names of llama.cpp and its fork, as far as they are installed."""
    from peer_plans import PACKAGES

    present = [engine for engine in THEIRS if all(importlib.util.find_spec(name) for name in PACKAGES[engine])]
    for engine in THEIRS:
        if engine not in present:
            say(f"without {engine}: {' or '.join(PACKAGES[engine])} is not installed")
    return present


def measure(path: Path, length: int, tokens: int, repeat: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of CPU time a token: engine and cache -> those of each turn."""
    ways: dict[tuple[str, str], Callable[..., Iterator[object]]] = {("minillm", cache): our_tokens for cache in OURS}
    for engine in peers():
        ways |= {(engine, cache): partial(their_tokens, engine) for cache in THEIRS[engine]}
    texts = {}
    for (engine, cache), start in ways.items():
        say(f"{engine}, {cache}: a text of {length} tokens")
        texts[engine, cache] = start(path, cache, token_ids(0, length, LLAMA["vocab_size"]), 2 + tokens * repeat)
        for _ in range(2):
            next(texts[engine, cache])
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way, text in texts.items():
            began = time.process_time()
            for _ in range(tokens):
                next(text)
            times[way].append((time.process_time() - began) / tokens * 1e3)
    for text in texts.values():
        text.close()  # type: ignore[attr-defined]
    return times


def surprise(path: Path) -> Iterator[tuple[str, str, int, float]]:
    """Engine, cache, tokens and perplexity of the first 1,024 tokens of a text, which each computes in one pass."""
    from peer_engines import GGUF_ENGINES
    from peer_process import perplexity

    from minillm import Engine
    from minillm.formats import open_model

    opened = open_model(path)
    if opened.tokenizer is None:
        raise BenchmarkError(f"{path} has no tokenizer")
    ids = opened.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:1024]
    for cache in OURS:
        with Engine(path, cache_dtype=cache, threads=1, max_batch_size=1, backend="cpu") as engine:
            yield "minillm", cache, len(ids), perplexity(engine.forward(ids), ids)
    for name in peers():
        for cache, fields in THEIRS[name].items():
            yield name, cache, len(ids), perplexity(GGUF_ENGINES[name](str(path), 1, fields).logits(ids), ids)


def run_perplexity(args: argparse.Namespace) -> int:
    """Compare the perplexities of a text by the format of the cache. Returns the exit code."""
    make_folder(args.out)
    rows: list[list[object]] = []
    widest: dict[str, float] = {}
    for engine, cache, tokens, value in surprise(args.perplexity):
        change = value / widest.setdefault(engine, value) - 1
        print(f"{engine:<14}{cache:<14}{value:>9.4f}{change:>+9.3%}", flush=True)
        rows.append([engine, cache, tokens, f"{value:.5f}", f"{change:.6f}"])
    facts = {"question": f"perplexity of a page of English by the format of the K/V cache, {args.perplexity.name}"}
    facts |= {"change": "against the engine's own widest cache"}
    facts |= describe(1, VERSIONS)
    path = args.out / f"cache_perplexity_{args.perplexity.stem}.csv"
    write_csv(path, facts, ("engine", "cache", "tokens", "perplexity", "change"), rows)
    print(f"written: {path}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Measure and write. Returns the exit code."""
    if args.perplexity is not None:
        return run_perplexity(args)
    make_folder(args.out)
    lines, rows = [f"{'engine':<14}{'cache':<14}{'context':>9}{'ms a token, median (min-max)':>32}"], []
    with tempfile.TemporaryDirectory() as scratch:
        path = write_model(Path(scratch) / "model", args.layers, max(args.contexts) + 4096)
        for length in args.contexts:
            for (engine, cache), times in measure(path, length, args.tokens, args.repeat).items():
                middle = statistics.median(times)
                spread = f"{middle:.3f} ({min(times):.3f}-{max(times):.3f})"
                lines.append(f"{engine:<14}{cache:<14}{length:>9}{spread:>32}")
                print(lines[-1], flush=True)
                rows.append([engine, cache, length, *(f"{value:.4f}" for value in (middle, min(times), max(times)))])
    facts = {"question": f"CPU time of a token late in a text, {args.layers} layers like SmolLM2-135M's, one thread"}
    facts |= {"turns": f"{args.repeat} of {args.tokens} tokens"}
    facts |= describe(1, VERSIONS)
    write_csv(args.out / "long_context.csv", facts, HEADER, rows)
    print("\n".join([*headed(facts), *lines, ""]))
    print(f"written: {args.out / 'long_context.csv'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for invalid arguments."""
    return execute("long_context", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
