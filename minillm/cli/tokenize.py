"""minillm tokenize: show the tokens of a text."""

import argparse
from typing import Any

from .options import add_prompt_options, read_prompts
from .output import quoted


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "tokenize",
        help="show the tokens of a text",
        description="Show the tokens of a text, one per line.",
    )
    add_prompt_options(parser)
    parser.add_argument(
        "--model", metavar="MODEL", help="checkpoint folder, GGUF file or hub id (default: the packaged demo model)"
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--ids", action="store_true", help="print only the ids, in one line")
    parser.add_argument("--no-special", action="store_true", help="without the special token at the beginning")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..checkpoint import find_model
    from ..loading import DEMO_MODEL, read_tokenizer
    from ..tokenizer import Tokenizer

    prompts = read_prompts(args)
    folder = DEMO_MODEL if args.model is None else find_model(args.model, revision=args.revision)
    tokenizer = read_tokenizer(folder) or Tokenizer.from_folder(folder)  # which says what is missing
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=not args.no_special)
        if args.ids:
            print(*ids)
        else:
            for i in ids:
                print(f"{i:>7}  {quoted(tokenizer, i)}")
