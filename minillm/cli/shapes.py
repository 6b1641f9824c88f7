"""minillm shapes: the operations of one forward pass, with their shapes, FLOPs and bytes."""

import argparse
from dataclasses import asdict

from .options import add_model_options, add_prompt_options, load_engine, read_prompts
from .output import Table, as_json, number_text, print_report, title
from .parser import Parser

DESCRIPTION = """Run one forward pass and list its operations: the shapes that each reads and
writes, its weight, its FLOPs and its bytes.

Prefill computes all tokens of the prompt; decode the one token after it, with
the keys and values of the others in the cache. Rows are [tokens, numbers], or
[tokens, heads, numbers of a head]; a projection's weight is stored as
[out, in]. The same operation of all layers is one line, its FLOPs and bytes
those of all. A multiply-add is two FLOPs. `minillm analyze` says the same of a
model that is not loaded."""

EPILOG = """examples:
  minillm shapes --prompt "A list of colors: red,"
  minillm shapes --prompt "A list of colors: red," --phase decode
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_prompt_options(parser)
    add_model_options(parser)
    parser.add_argument(
        "--phase", choices=("prefill", "decode"), default="prefill", help="the pass that runs (default: prefill)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each prompt")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..measure.shapes import pass_table

    prompts = read_prompts(args)
    engine = load_engine(args)
    for number, prompt in enumerate(prompts):
        table = pass_table(engine, prompt, args.phase)
        if args.json:
            print(as_json({"prompt": prompt, "flops": table.flops, "bytes": table.bytes} | asdict(table)))
            continue
        title(prompt, number, len(prompts))
        note = f"{number_text(table.flops)}FLOP, {table.flops / table.bytes:.2f} FLOPs per byte".replace("  ", " ")
        print_report([Table(table.head, table.rows(), table.title, note)])
