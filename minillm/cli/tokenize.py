"""minillm tokenize: show the tokens of a text."""

import argparse

from ..errors import ParameterError
from .options import add_model_options, add_prompt_options, read_prompts
from .output import as_json, quoted, title, tokens_of
from .parser import Parser

DESCRIPTION = "Show the tokens of a text, one per line."


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_prompt_options(parser)
    add_model_options(parser, execution=False)
    parser.add_argument("--ids", action="store_true", help="print only the ids of each text, in one line")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each text")
    parser.add_argument("--no-special", action="store_true", help="without the special token at the beginning")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..engine.loading import DEMO_MODEL, named_tokenizer
    from ..formats import find_model, open_model

    if args.ids and args.json:
        raise ParameterError("--ids and --json are two forms of the output: leave one of them out")
    prompts = read_prompts(args)
    if args.tokenizer is not None:
        tokenizer, _ = named_tokenizer(args.tokenizer)
    else:
        path = DEMO_MODEL if args.model is None else find_model(args.model, revision=args.revision)
        tokenizer = open_model(path).need_tokenizer()
    for number, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt, add_special_tokens=not args.no_special)
        if args.ids:
            print(*ids)
        elif args.json:
            print(as_json({"prompt": prompt, "token_ids": ids, "tokens": tokens_of(tokenizer, ids)}))
        else:
            title(prompt, number, len(prompts))
            for i in ids:
                print(f"{i:>7}  {quoted(tokenizer, i)}")
