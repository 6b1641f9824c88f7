"""minillm summarize: texts through an encoder-decoder, a line for each; `translate` does likewise."""

import argparse

from ..errors import ParameterError
from ..progress_bar import bars_aside
from .options import (
    COMMON,
    TEXTS_AT_ONCE,
    add_generation_options,
    add_model_options,
    add_text_options,
    each_block,
    generation_fields,
    has_ranks,
    load_engine,
    read_texts,
    resolve_settings,
    sequences_of,
)
from .output import as_json, show
from .parser import Parser

SHORT = (COMMON - {"draft", "prompt", "prompt_file", "system", "stats"}) | {
    *("text", "file", "whole", "truncate", "source", "target", "num_beams"),
}
"""Options in the short help, by their `dest`"""

WORDS = {
    "max_new_tokens": "tokens to write at most (default: the checkpoint's limit, else 256)",
    "num_beams": "width of beam search (default: the checkpoint's, else 4; 1: greedy search)",
    "sampling": "Each of these but the penalties turns sampling on.",
}
"""Help where the defaults are the tasks'"""
DESCRIPTION = "Summarize texts with an encoder-decoder, such as BART or T5: a line for each."
EPILOG = """examples:
  minillm summarize -m facebook/bart-large-cnn --whole --file article.txt
  minillm summarize -m google/flan-t5-small --json < lines.txt
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_text_options(parser)
    add_other_options(parser, task="summarization", key="summary_text", doing="summarizing")


def add_other_options(parser: Parser, **task: str) -> None:
    """Add the options beside the texts; `task` is what `run` does with them."""
    add_model_options(parser, needed="an encoder-decoder", parallel=True, chosen="--lora")
    add_generation_options(parser, words=WORDS)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each text")
    parser.shorten(SHORT)
    parser.set_defaults(**task)


def run(args: argparse.Namespace) -> None:
    """Run either command."""
    from ..pipelines import pipeline
    from ..pipelines.text2text import Text2Text

    texts, fields = read_texts(args), generation_fields(args)
    languages = {"src_lang": getattr(args, "source", None), "tgt_lang": getattr(args, "target", None)}
    given = {name: language for name, language in languages.items() if language is not None}
    sequences = sequences_of(resolve_settings(args, fields, Text2Text.DEFAULTS))
    prompts = TEXTS_AT_ONCE if has_ranks(args) else len(texts)  # all ranks alike; rank 0 alone has the texts
    engine = load_engine(args, prompts=prompts, sequences=sequences, any_task=True)
    with pipeline(args.task, engine, truncation=args.truncate, **given) as write:
        for block in each_block(texts, args.doing):
            try:
                results = write(block, **fields)
            except ParameterError as error:  # in the command's own words
                raise ParameterError(
                    str(error).replace("src_lang", "--source").replace("tgt_lang", "--target")
                ) from None
            with bars_aside():
                for text, outputs in zip(block, results, strict=True):
                    for output in outputs if isinstance(outputs, list) else [outputs]:
                        show(as_json({"text": text} | output) if args.json else " ".join(output[args.key].splitlines()))
