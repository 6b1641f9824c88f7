"""How fast is a corpus embedded? Texts of mixed length, beside sentence-transformers on torch.

A checkpoint of random numbers in a published shape of BERT, with a vocabulary of made-up words. Both sides get the same
texts, tokenizing included, in one process, on as many threads, in turns; sentence-transformers takes batches of 32 of
like length, as is its default. Time is CPU time, as in `encoders.py`. The vectors of float32 must agree; the least
cosine between int8's and theirs is printed.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from encoders import FORMATS, TOLERANCE, write_bert
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
    write_csv,
)

PEER = "sentence-transformers"
HEADER = ("side", "texts", "tokens", "texts_per_s_median", "texts_per_s_min", "texts_per_s_max", "ratio", "cosine")
MEDIAN, SIGMA = 40, 0.9
"""Parameters of the log-normal distribution of lengths in words"""

Embed = Callable[[list[str]], Any]
"""N texts -> their vectors, [N, E]"""


def main(argv: list[str] | None = None) -> int:
    """Measure and write the CSV. Returns the exit code."""
    parser = new_parser(str(__doc__).split("\n\n", maxsplit=1)[0], "CSV")
    parser.add_argument("--shape", default="all-MiniLM-L6-v2", help="a published shape of BERT (default: %(default)s)")
    parser.add_argument("--texts", type=positive, default=1000, metavar="N", help="(default: 1000)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="of all texts (default: 3)")
    return execute("corpus", run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Load all sides, measure them in turns, print and write the table."""
    import numpy as np

    make_folder(args.out)
    facts = describe(args.threads, ("minillm", "numpy", PEER, "transformers", "torch")) | {
        "shape": args.shape,
        "rounds": str(args.rounds),
    }
    print("\n".join(headed(facts)))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
        sides, words, longest = load(write_bert(args.shape, Path(folder)), args.threads, engines)
        texts = corpus(args.texts, words, longest)
        tokens = sum(len(text.split()) + 2 for text in texts)
        say(f"{len(texts)} texts of {tokens} tokens, {args.rounds} rounds")
        vectors = {name: embed(texts) for name, embed in sides.items()}  # warm, and compared
        difference = float(np.abs(vectors[FORMATS[0]] - vectors[PEER]).max())
        if not difference < TOLERANCE:
            raise BenchmarkError(f"the vectors differ by {difference:.2g}: expected less than {TOLERANCE:g}")
        rates = measure(sides, texts, args.rounds)
    rows = []
    for name, values in rates.items():
        ratio = spread([ours / theirs for ours, theirs in zip(values, rates[PEER], strict=True)])[0]
        norms = np.linalg.norm(vectors[name], axis=-1) * np.linalg.norm(vectors[PEER], axis=-1)
        cosine = float(((vectors[name] * vectors[PEER]).sum(axis=-1) / norms).min())
        middle, least, most = spread(values)
        rows.append([name, len(texts), tokens, middle, least, most, ratio, cosine])
        speed = f"{middle:.1f} texts/s ({least:.1f} to {most:.1f}), {ratio:.2f} x {PEER}'s speed"
        print(f"{name}: {speed}, cosines from {cosine:.5f}")
    rounded = [[round(cell, 4) if isinstance(cell, float) else cell for cell in row] for row in rows]
    write_csv(args.out / f"corpus_{args.shape}.csv", facts, HEADER, rounded)
    return 0


def load(checkpoint: Path, threads: int, engines: ExitStack) -> tuple[dict[str, Embed], list[str], int]:
    """All sides, the words of the vocabulary, and the longest text in tokens.

    Raises:
        BenchmarkError: sentence-transformers is missing.
    """
    try:
        import torch
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise BenchmarkError(f"this needs {PEER}: {error}") from None
    from minillm import Engine

    torch.set_num_threads(threads)
    peer: Any = SentenceTransformer(str(checkpoint), device="cpu")  # no modules.json: the mean of all tokens
    sides: dict[str, Embed] = {}
    for dtype in FORMATS:
        engine = engines.enter_context(Engine(checkpoint, dtype=dtype, threads=threads, progress=False))
        sides[dtype] = lambda texts, engine=engine: engine.embed(texts, progress=False)  # type: ignore[misc]
    sides[PEER] = lambda texts: peer.encode(texts, show_progress_bar=False)
    words = [word for word in peer.tokenizer.get_vocab() if word.startswith("w")]
    return sides, sorted(words), engine.context


def corpus(count: int, words: list[str], longest: int) -> list[str]:
    """Texts of words drawn alike; their lengths are log-normal, and at most what a model reads."""
    draws = random.Random(0)
    lengths = [min(max(3, round(draws.lognormvariate(math.log(MEDIAN), SIGMA))), longest - 2) for _ in range(count)]
    return [" ".join(draws.choices(words, k=length)) for length in lengths]


def measure(sides: dict[str, Embed], texts: list[str], rounds: int) -> dict[str, list[float]]:
    """Texts a second of CPU time of each side in each round; the order turns from round to round."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in [*sides] if number % 2 else reversed([*sides]):
            began = time.process_time()
            sides[name](texts)
            rates[name].append(len(texts) / (time.process_time() - began))
    return rates


if __name__ == "__main__":
    sys.exit(main())
