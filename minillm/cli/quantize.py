"""minillm quantize: write a checkpoint with quantised weights."""

import argparse
from pathlib import Path
from typing import Any

from ..progress import loading_bar

EPILOG = """examples:
  minillm quantize facebook/opt-1.3b opt-1.3b-int4 --dtype int4
  minillm generate --model opt-1.3b-int4 --prompt "Once upon a time"
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "quantize",
        help="write a checkpoint with smaller weights",
        description="Write a checkpoint with smaller weights.\nIt loads at once: its files are mapped, not read.",
        epilog=EPILOG,
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint folder or Hugging Face hub id")
    parser.add_argument("target", metavar="DST", type=Path, help="a folder to be made")
    parser.add_argument("--dtype", required=True, help="of the weights: int8, int4, bfloat16 or float16")
    parser.add_argument("--group-size", type=int, metavar="N", help="weights that share a scale: 32 (default) or 64")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..checkpoint import find_model
    from ..quantizing import check_request, write_checkpoint

    check_request(args.target, args.dtype, args.group_size)  # before anything is downloaded
    source = find_model(args.source, revision=args.revision)
    with loading_bar("writing"):
        write_checkpoint(source, args.target, args.dtype, args.group_size)
