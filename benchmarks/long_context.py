"""What does a token cost late in a long text, by the format of the K/V cache, beside llama.cpp? CPU seconds.

A Llama of random weights with layers like SmolLM2-135M's, one by default, goes on with a text. Each format of the cache
of either engine computes the text once; then all take turns, a few tokens each, on one thread. Measured is CPU time,
which other processes change least. A cache costs the difference to a short text, whose tokens cost the rest alone.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import describe, execute, headed, make_folder, new_parser, positive, positives, say, token_ids, write_csv

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
THEIRS = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""llama.cpp's formats, and their numbers in its interface"""
HEADER = ("engine", "cache", "context", "ms_median", "ms_min", "ms_max")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure decoding late in long texts.", "CSV")
    parser.add_argument("--contexts", type=positives, default=(16, 4096, 16384), metavar="N,N,...")
    parser.add_argument("--layers", type=positive, default=1, metavar="N")
    parser.add_argument("--tokens", type=positive, default=8, metavar="N", help="of a turn (default: 8)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="turns (default: 3)")
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


def their_tokens(path: Path, cache: str, prompt: list[int], new_tokens: int) -> Iterator[object]:
    """The same of llama.cpp, with flash attention, which its narrow caches need."""
    import llama_cpp as library
    import numpy as np

    library.llama_backend_init()
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    params = library.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = len(prompt) + new_tokens + 1, 512, 512
    params.n_threads = params.n_threads_batch = params.flash_attn_type = 1
    params.type_k = params.type_v = THEIRS[cache]
    context = library.llama_init_from_model(model, params)
    tokens, position, new = prompt, 0, 0
    while new < new_tokens:
        batch = library.llama_batch_init(512, 0, 1)
        batch.n_tokens = count = min(512, len(tokens) - position if not new else 1)
        for row in range(count):
            batch.token[row], batch.pos[row] = tokens[position + row], position + row
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, row == count - 1
        if library.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        library.llama_batch_free(batch)
        position += count
        if position == len(tokens):
            logits = np.ctypeslib.as_array(library.llama_get_logits(context), (LLAMA["vocab_size"],))
            tokens, new = [*tokens, int(logits.argmax())], new + 1
            yield tokens[-1]
    library.llama_free(context)
    library.llama_model_free(model)


def measure(path: Path, length: int, tokens: int, repeat: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of CPU time a token: engine and cache -> those of each turn."""
    ways: dict[tuple[str, str], Callable[..., Iterator[object]]] = {("minillm", cache): our_tokens for cache in OURS}
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        say("llama-cpp-python is not installed: minillm alone")
    else:
        ways |= {("llama.cpp", cache): their_tokens for cache in THEIRS}
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


def run(args: argparse.Namespace) -> int:
    """Measure and write. Returns the exit code."""
    make_folder(args.out)
    lines, rows = [f"{'engine':<12}{'cache':<10}{'context':>9}{'ms a token, median (min-max)':>32}"], []
    with tempfile.TemporaryDirectory() as scratch:
        path = write_model(Path(scratch) / "model", args.layers, max(args.contexts) + 4096)
        for length in args.contexts:
            for (engine, cache), times in measure(path, length, args.tokens, args.repeat).items():
                middle = statistics.median(times)
                spread = f"{middle:.3f} ({min(times):.3f}-{max(times):.3f})"
                lines.append(f"{engine:<12}{cache:<10}{length:>9}{spread:>32}")
                print(lines[-1], flush=True)
                rows.append([engine, cache, length, *(f"{value:.4f}" for value in (middle, min(times), max(times)))])
    facts = {"question": f"CPU time of a token late in a text, {args.layers} layers like SmolLM2-135M's, one thread"}
    facts |= {"turns": f"{args.repeat} of {args.tokens} tokens"}
    facts |= describe(1, ("minillm", "numpy", "llama-cpp-python"))
    write_csv(args.out / "long_context.csv", facts, HEADER, rows)
    print("\n".join([*headed(facts), *lines, ""]))
    print(f"written: {args.out / 'long_context.csv'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for invalid arguments."""
    return execute("long_context", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
