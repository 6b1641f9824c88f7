"""minillm quantize: write a checkpoint with quantised weights."""

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .options import next_command
from .output import Table, bytes_text, print_report
from .parser import Parser

if TYPE_CHECKING:
    from ..formats.write_checkpoint import Rounding

EPILOG = """examples:
  minillm quantize facebook/opt-1.3b opt-1.3b-int4 --dtype int4
  minillm quantize Qwen/Qwen2.5-0.5B-Instruct qwen.gguf --dtype Q4_K_M
  minillm generate --model opt-1.3b-int4 --prompt "Once upon a time"
"""


DESCRIPTION = """Write a checkpoint with smaller weights.
It loads fast: nothing is rounded again.

A target that ends in .gguf is one file for llama.cpp and minillm, with the
tokenizer and chat template: float32, float16, bfloat16, int8 (Q8_0), int4
(Q4_0), or one of llama.cpp's mixtures: Q6_K, Q5_K_M, Q5_K_S, Q4_K_M, Q4_K_S,
Q5_1, Q5_0, IQ4_XS, IQ4_NL, MXFP4.

At the end it shows what was saved, and how far the weights moved: the norm of
the difference over the norm of the matrix, of all matrices of a kind and of the
worst one. What that costs, perplexity shows."""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("source", metavar="SRC", help="checkpoint folder, GGUF file or Hugging Face hub id")
    parser.add_argument("target", metavar="DST", type=Path, help="a folder to be made, or a file that ends in .gguf")
    parser.add_argument(
        "--dtype",
        required=True,
        help="of the weights: int8, int4, bfloat16, float16 (GGUF: also float32, Q4_K_M and others of llama.cpp)",
    )
    parser.add_argument("--group-size", type=int, metavar="N", help="weights that share a scale: 32 (default) or 64")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..formats import find_model, open_model
    from ..formats.gguf.write import check_gguf_request, write_gguf
    from ..formats.write_checkpoint import check_request, write_checkpoint

    as_gguf = args.target.suffix.lower() == ".gguf"
    check, write = (check_gguf_request, write_gguf) if as_gguf else (check_request, write_checkpoint)
    check(args.target, args.dtype, args.group_size)  # before anything is downloaded
    source = find_model(args.source, revision=args.revision)
    roundings = write(source, args.target, args.dtype, args.group_size)
    written = open_model(args.target)
    before, after = open_model(source).weight_bytes, written.weight_bytes
    print_report(error_table(roundings))
    print(f"{'weights':<11} {bytes_text(before)} -> {bytes_text(after)}, {after / before:.0%} of it")
    chat = written.chat_template is not None
    print(f"{'next':<11} {next_command(args.target, chat=chat, output=written.config.output)}")


def error_table(roundings: "list[Rounding]") -> list[str | Table]:
    """A line for each kind of matrix and format: the relative error of all of them together, and of the worst one."""
    kinds: dict[tuple[str, str], list[Rounding]] = {}
    for rounding in roundings:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", rounding.name.removesuffix(".weight"))
        kinds.setdefault((name, rounding.format.name), []).append(rounding)
    rows = []
    for (name, form), rounded in kinds.items():
        error, norm = (
            math.fsum(getattr(rounding, field) for rounding in rounded) for field in ("squared_error", "squared_norm")
        )
        worst = max(rounded, key=lambda rounding: rounding.error)
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", worst.name)
        which = ", ".join(f"{place} {number}" for place, number in zip(("layer", "expert"), numbers, strict=False))
        rows.append([name, str(len(rounded)), form, f"{math.sqrt(error / norm) if norm else 0:.2%}"])
        rows[-1] += [f"{worst.error:.2%}" + f" in {which}" * bool(which)] * (len(rounded) > 1)
    if not rows:
        return ["every weight is written as it was, or exactly"]
    worst = max(roundings, key=lambda rounding: rounding.error)
    table = Table(("matrices", "number", "format", "error", "worst"), rows)
    return [table, "", f"{'error':<11} at most {worst.error:.2%}, in {worst.name}"]
