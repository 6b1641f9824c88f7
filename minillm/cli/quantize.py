"""minillm quantize: write a checkpoint with quantised weights."""

import argparse
from pathlib import Path
from typing import Any

from ..progress import loading_bar

EPILOG = """examples:
  minillm quantize facebook/opt-1.3b opt-1.3b-int4 --dtype int4
  minillm quantize Qwen/Qwen2.5-0.5B-Instruct qwen.gguf --dtype int8
  minillm generate --model opt-1.3b-int4 --prompt "Once upon a time"
"""


DESCRIPTION = """Write a checkpoint with smaller weights.
It loads at once: its files are mapped, not read.

A target that ends in .gguf is one file for llama.cpp and minillm, with the
tokenizer and chat template: float32, float16, bfloat16, int8 (Q8_0) or int4
(Q4_0)."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "quantize",
        help="write a checkpoint with smaller weights",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint folder, GGUF file or Hugging Face hub id")
    parser.add_argument("target", metavar="DST", type=Path, help="a folder to be made, or a file that ends in .gguf")
    parser.add_argument(
        "--dtype", required=True, help="of the weights: int8, int4, bfloat16, float16 (GGUF: also float32)"
    )
    parser.add_argument("--group-size", type=int, metavar="N", help="weights that share a scale: 32 (default) or 64")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..checkpoint import find_model
    from ..gguf_writing import check_gguf_request, write_gguf
    from ..quantizing import check_request, write_checkpoint

    as_gguf = args.target.suffix.lower() == ".gguf"
    check, write = (check_gguf_request, write_gguf) if as_gguf else (check_request, write_checkpoint)
    check(args.target, args.dtype, args.group_size)  # before anything is downloaded
    source = find_model(args.source, revision=args.revision)
    with loading_bar("writing"):
        write(source, args.target, args.dtype, args.group_size)
