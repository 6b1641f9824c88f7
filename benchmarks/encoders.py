"""How fast are texts embedded? A BERT shape with random weights beside CTranslate2, in float32 and in int8.

Both embed the same token ids in one process, on as many threads, in turns: the last hidden states of a batch of texts
of one length, of which the first token's is taken. Time is CPU time, which other work on the machine lengthens less
than the clock; the ratio of a round is CTranslate2's time over minillm's. In float32 the results must agree.

CTranslate2 reads a checkpoint that transformers writes, so this needs both, and PyTorch.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
    spread,
    token_ids,
    write_csv,
)

FORMATS = ("float32", "int8")
HEADER = (
    *("dtype", "texts", "tokens_each", "minillm_ms_median", "minillm_ms_min", "minillm_ms_max"),
    *("ctranslate2_ms_median", "ctranslate2_ms_min", "ctranslate2_ms_max", "ratio_median", "ratio_min", "ratio_max"),
)
TOLERANCE = 1e-3
"""Between both sides' hidden states in float32"""
AIM = 1.2


class Case(NamedTuple):
    """The work of both sides in a round."""

    dtype: str
    texts: int
    tokens: int


def main(argv: list[str] | None = None) -> int:
    """Measure and write the CSV. Returns the exit code."""
    parser = new_parser(str(__doc__).split("\n\n", maxsplit=1)[0], "CSV")
    parser.add_argument("--shape", default="bert-base-uncased", help="a published shape of BERT (default: %(default)s)")
    parser.add_argument("--texts", type=positives, default=(1, 16), metavar="N,...", help="batches (default: 1,16)")
    parser.add_argument(
        "--tokens", type=positives, default=(32, 128), metavar="T,...", help="lengths (default: 32,128)"
    )
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="of each case (default: 7)")
    return execute("encoders", run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Convert the checkpoint, measure each case in turns, print and write the table."""
    make_folder(args.out)
    facts = describe(args.threads, ("minillm", "numpy", "ctranslate2", "transformers", "torch")) | {
        "shape": args.shape,
        "rounds": str(args.rounds),
    }
    print("\n".join(headed(facts)))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_bert(args.shape, Path(folder))
        convert(checkpoint)
        for dtype in FORMATS:
            with loaded(checkpoint, dtype, args.threads) as sides:
                for case in (Case(dtype, texts, tokens) for texts in args.texts for tokens in args.tokens):
                    say(f"{case.dtype}: {case.texts} x {case.tokens} tokens")
                    rows.append([*case, *measure(sides, case, args.rounds)])
    for row in rows:
        ratio = f"{row[9]:.2f} x CTranslate2's speed ({row[10]:.2f} to {row[11]:.2f})"
        print(f"{row[0]}, {row[1]} x {row[2]} tokens: {row[3]:.1f} ms, CTranslate2 {row[6]:.1f} ms: {ratio}")
    print(f"{AIM} x is aimed at")
    rounded = [[round(cell, 4) if isinstance(cell, float) else cell for cell in row] for row in rows]
    write_csv(args.out / f"encoders_{args.shape}.csv", facts, HEADER, rounded)
    return 0


def write_bert(shape: str, folder: Path) -> Path:
    """A checkpoint of random numbers as transformers writes it, whose vocabulary is "w0", "w1" and so on.

    Raises:
        BenchmarkError: a package is missing, or the shape is not BERT's.
    """
    from minillm.models import published, published_config

    if published_config(shape).model_type != "bert":
        raise BenchmarkError(f"--shape {shape}: BERT's shapes alone are measured")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise BenchmarkError(f"this needs transformers and torch: {error}") from None
    raw = published()[shape]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config: Any = transformers.AutoConfig.for_model(**raw)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{i}" for i in range(raw["vocab_size"] - len(special)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def convert(checkpoint: Path) -> None:
    """Write CTranslate2's form of a checkpoint into a folder inside it.

    Raises:
        BenchmarkError: CTranslate2 is missing.
    """
    try:
        import ctranslate2
        import transformers
    except ImportError as error:
        raise BenchmarkError(f"this needs CTranslate2: {error}") from None
    kept = getattr(transformers.BertConfig, "position_embedding_type", None)
    transformers.BertConfig.position_embedding_type = "absolute"  # the converter asks for it
    try:
        ctranslate2.converters.TransformersConverter(str(checkpoint)).convert(str(checkpoint / "ctranslate2"))
    finally:
        if kept is None:
            del transformers.BertConfig.position_embedding_type


Embed = Callable[[list[list[int]]], Any]
"""Token ids of N texts -> the first token's hidden state of each, [N, E]"""


@contextmanager
def loaded(checkpoint: Path, dtype: str, threads: int) -> Iterator[tuple[Embed, Embed]]:
    """minillm and CTranslate2, loaded in a format."""
    import ctranslate2
    import numpy as np

    from minillm import Engine

    peer = ctranslate2.Encoder(
        str(checkpoint / "ctranslate2"), compute_type=dtype, intra_threads=threads, inter_threads=1
    )

    def theirs(ids: list[list[int]]) -> Any:
        return np.array(peer.forward_batch(ids).last_hidden_state)[:, 0]  # [N, T, E] -> [N, E]

    with Engine(checkpoint, dtype=dtype, threads=threads, progress=False) as engine:

        def ours(ids: list[list[int]]) -> Any:
            return engine.embed(ids, pooling="cls", progress=False)  # [N, E]

        yield ours, theirs


def measure(sides: tuple[Embed, Embed], case: Case, rounds: int) -> list[float]:
    """Milliseconds of each side, median, least and greatest; and of the rounds' ratios."""
    import numpy as np

    ids = [token_ids(i, case.tokens, 90) for i in range(case.texts)]
    ours, theirs = (side(ids) for side in sides)  # warm, and compared
    difference = float(np.abs(ours - theirs).max())
    if case.dtype == "float32" and not difference < TOLERANCE:
        raise BenchmarkError(f"the hidden states differ by {difference:.2g}: expected less than {TOLERANCE:g}")
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            began = time.process_time()
            sides[side](ids)
            times[side].append(1e3 * (time.process_time() - began))
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    return [*spread(times[0]), *spread(times[1]), *spread(ratios)]


if __name__ == "__main__":
    sys.exit(main())
