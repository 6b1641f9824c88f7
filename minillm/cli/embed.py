"""minillm embed: texts as vectors, JSON lines or a file of NumPy's."""

import argparse
from pathlib import Path
from typing import Any

from ..errors import ParameterError
from ..progress_bar import bars_aside
from .options import add_model_options, add_text_options, each_block, load_engine, read_texts
from .output import as_json, note, show
from .parser import Parser

DESCRIPTION = """\
Embed texts: a JSON object with the vector of each, a line for each, or an array
[texts, dimensions] in a file. Similar texts have vectors with a
large dot product. How a vector is formed, the checkpoint's folder says."""
EPILOG = """examples:
  minillm embed -m sentence-transformers/all-MiniLM-L6-v2 "How are you?"
  minillm embed -m BAAI/bge-small-en-v1.5 --file texts.txt --output vectors.npy
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_text_options(parser)
    add_model_options(parser, needed="an encoder, or a decoder made for embeddings", parallel=True, chosen="--lora")
    group = parser.add_argument_group("vectors", "Left out, the checkpoint's folder decides each of these.")
    group.add_argument("--dimensions", type=int, metavar="N", help="only the first N numbers (Matryoshka)")
    modes = ("mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean")
    group.add_argument("--pooling", choices=modes, help="of tokens' states; cls is the first's")
    group.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="divide each vector by its length, or do not"
    )
    group.add_argument(
        "--precision",
        choices=("float32", "int8", "uint8", "binary", "ubinary"),
        default="float32",
        help="256 steps between the ends of each dimension in these texts, or a bit of each number, in bytes",
    )
    group.add_argument("--prompt", metavar="TEXT", help="goes before each text")
    group.add_argument("--prompt-name", metavar="NAME", help="likewise, one of the checkpoint's, such as query")
    group.add_argument("--lora", metavar="NAME", help="adapter of --adapters to use")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.npy", help="write an array, and print nothing")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    import numpy as np

    from ..output_files import check_writable, write_file
    from ..tasks.quantized_vectors import quantize_vectors

    if args.output is not None and args.output.suffix != ".npy":
        raise ParameterError(f"--output should end in .npy, found {str(args.output)!r:.60}")
    check_writable(args.output)
    texts = read_texts(args)
    names = ("dimensions", "pooling", "normalize", "prompt", "prompt_name", "truncate", "lora")
    options = {name: getattr(args, name) for name in names}
    ranged = args.precision in ("int8", "uint8")  # by the ranges of all vectors
    vectors = []
    with load_engine(args, any_task=True, prefix_cache=False) as engine:
        for block in each_block(texts, "embedding", counted=False):
            embeddings: Any = engine.embed(block, **options)
            if args.output is not None or ranged:
                vectors.append(embeddings)
                continue
            with bars_aside():
                _show(block, quantize_vectors(embeddings, args.precision))
    if not vectors:
        return
    array = quantize_vectors(np.concatenate(vectors), args.precision)  # blocks of [N, E] -> [N, E]
    if args.output is None:
        _show(texts, array)
        return
    write_file(args.output, _npy(array))
    note(f"{args.output}: {array.shape[0]} vectors of {vectors[0].shape[1]} dimensions")


def _show(texts: list[str], vectors: Any) -> None:
    """A JSON object for each text; float32 in as few digits as it needs."""
    for text, vector in zip(texts, vectors, strict=True):
        whole = vector.dtype.kind != "f"
        numbers = vector.tolist() if whole else [float(str(value)) for value in vector]
        show(as_json({"text": text, "embedding": numbers}))


def _npy(array: Any) -> bytes:
    """An array as a file of NumPy's."""
    import io

    import numpy as np

    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()
