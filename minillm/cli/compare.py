"""minillm compare: one prompt under 13 decoding strategies."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decoding.fields import FIELDS
from ..errors import ParameterError
from ..output_files import check_writable
from .options import (
    add_generation_options,
    add_model_options,
    add_prompt_options,
    generation_fields,
    load_engine,
    read_prompts,
)
from .output import Table, as_json, terminal_width, title, tokens_of, wrapped, write_page
from .parser import Parser

if TYPE_CHECKING:
    from ..measure.comparison import Outcome, Variant
    from ..text.tokenizer import Tokenizer

DESCRIPTION = """Continue one prompt under 13 decoding strategies.

log p is the natural logarithm of the continuation's probability under the
model: the closer to zero, the likelier. Greedy search takes the likeliest token
each time, beam search looks for the likeliest text, sampling for neither."""

EPILOG = """examples:
  minillm compare --prompt "Once upon a time"
  minillm compare --prompt "Once upon" --strategies "beam search,sampling"
  minillm compare --prompt "Once upon a time" --vary temperature=0,0.7,1.5
  minillm compare --prompt "Once upon a time" --seed 3 --html page.html
"""

SHARED = [
    name
    for name, setting in FIELDS.items()
    if setting.group in ("text", "sampling") and setting.needs in (None, "encoder", "stop_strings")
    if name not in ("num_return_sequences", "use_cache", "do_sample")
] + ["seed"]
"""Generation fields that are set for all strategies alike"""
DEFAULTS = {"max_new_tokens": 20, "seed": 0}
WIDTH = 120
"""Columns of the texts in a file or a pipe"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_prompt_options(parser)
    add_model_options(parser, parallel=True, chosen="--lora")
    words = {
        "max_new_tokens": "tokens to generate (default: 20)",
        "seed": "seed of the sampling strategies (default: 0)",
        "sampling": "For the strategies that sample, and penalties for all.",
    }
    parser.add_argument("--strategies", metavar="NAME,...", help="compare these alone, by their names in the table")
    parser.add_argument(
        "--vary",
        action="append",
        metavar="FIELD=VALUE,...",
        help="compare values of a generation field in place of strategies: temperature=0,0.7,1.5, num_beams=1,2,4",
    )
    add_generation_options(parser, words=words, only=SHARED)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that also draws the tree of the beams")
    parser.add_argument("--json", action="store_true", help="one JSON object for each prompt, with all results")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..decoding.prompts import need_tokenizer
    from ..measure.comparison import BEAM_SEARCH, beam_tree, compare
    from ..measure.pictures import draw_tree

    prompts = read_prompts(args)
    if args.html is not None and len(prompts) > 1:
        raise ParameterError("--html shows one prompt: give one")
    check_writable(args.html)
    fields = DEFAULTS | {name: value for name in SHARED if (value := getattr(args, name, None)) is not None}
    seed, variants = fields.pop("seed"), _variants(args)
    beams = [variant.fields.get("num_beams", 1) for variant in variants]
    widest = max(*beams, BEAM_SEARCH.fields["num_beams"] if args.html is not None else 1)
    engine = load_engine(args, sequences=widest, prefix_cache=False)
    tokenizer = need_tokenizer(engine.tokenizer)
    for number, prompt in enumerate(prompts):
        outcomes = compare(engine, prompt, variants, seed=seed, **fields)
        if args.html is not None:
            tree = beam_tree(engine, prompt, **fields | dict(BEAM_SEARCH.fields))
            write_page(
                args.html,
                "compare.html",
                model=args.model or "the model inside minillm",
                prompt=prompt,
                results=[(outcome, numbers(outcome)) for outcome in outcomes],
                candidates=max(map(len, tree.steps)),
                beams=max(sum(candidate.beam is not None for candidate in step) for step in tree.steps),
                drawing=draw_tree(tree, tokenizer),
            )
        if args.json:
            print(as_json({"prompt": prompt, "results": [_as_dict(outcome, tokenizer) for outcome in outcomes]}))
        else:
            title(prompt, number, len(prompts))
            print("\n".join(_table(outcomes, terminal_width() or WIDTH)))


def _variants(args: argparse.Namespace) -> "Sequence[Variant]":
    """The strategies that are named, or those of a field's values, or all.

    Raises:
        ParameterError: a name is not known, or a value is not one of the field's.
    """
    from ..measure.comparison import STRATEGIES

    if args.vary is not None:
        if args.strategies is not None:
            raise ParameterError("--strategies and --vary are given: leave one out")
        return _varied(args)
    if args.strategies is None:
        return STRATEGIES
    known = {variant.name: variant for variant in STRATEGIES}
    names = [name.strip() for name in args.strategies.split(",")]
    for name in names:
        if name not in known:
            raise ParameterError(f"--strategies: {name!r:.60} is not known: expected some of {', '.join(known)}")
    return [known[name] for name in names]


def _varied(args: argparse.Namespace) -> "list[Variant]":
    """A variant for each value of the field that --vary names.

    Raises:
        ParameterError: it names none, or several; or a value is not one of the field's.
    """
    from ..measure.comparison import Variant

    if len(args.vary) > 1:
        raise ParameterError(f"--vary is given {len(args.vary)} times: vary one field at a time")
    [given] = args.vary
    name, _, values = given.partition("=")
    name = name.strip().replace("-", "_")
    if name in FIELDS and FIELDS[name].read.many:
        raise ParameterError(f"--vary {name}: the field takes several values at once, vary one that takes a single one")
    if name not in FIELDS or not values:
        raise ParameterError(f"--vary takes a generation field and its values, FIELD=VALUE,...; found {given!r:.80}")
    if getattr(args, name, None) is not None:
        raise ParameterError(f"--vary {name} and the flag of {name} are given: leave one out")
    varied, words = [], [word.strip() for word in values.split(",")]
    for word in words:
        if words.count(word) > 1:
            raise ParameterError(f"--vary {name}: {word!r:.60} stands there twice")
        try:
            value = FIELDS[name].read.word(word)
        except (ValueError, argparse.ArgumentTypeError):
            expected = FIELDS[name].read.expected
            raise ParameterError(f"--vary {name}: expected {expected}, found {word!r:.60}") from None
        varied.append(Variant(f"{name} {word}", generation_fields(argparse.Namespace(**{name: value}))))
    return varied


def _as_dict(outcome: "Outcome", tokenizer: "Tokenizer") -> dict[str, Any]:
    return {
        "name": outcome.variant.name,
        "settings": dict(outcome.variant.fields),
        "text": outcome.text,
        "token_ids": outcome.token_ids,
        "tokens": tokens_of(tokenizer, outcome.token_ids),
        "finish_reason": outcome.finish_reason,
        "logprob": outcome.log_prob,
        "logprob_per_token": outcome.log_prob_per_token,
        "steps": outcome.steps,
        "seconds": outcome.seconds,
    }


def numbers(outcome: "Outcome") -> dict[str, str]:
    """The numbers that the table and the page show."""
    return {
        "log p": f"{outcome.log_prob:.2f}",
        "per token": f"{outcome.log_prob_per_token:.3f}",
        "tokens": str(len(outcome.token_ids)),
        "steps": str(outcome.steps),
        "seconds": f"{outcome.seconds:.3f}",
    }


def _table(outcomes: list["Outcome"], width: int) -> list[str]:
    """The lines of each strategy: its numbers, its settings, beside them or below, then its text."""
    rows = [[outcome.variant.name, *numbers(outcome).values()] for outcome in outcomes]
    settings = ["settings", *(outcome.variant.settings for outcome in outcomes)]
    folded = Table(["strategy", *numbers(outcomes[0])], rows).folded(width)
    beside = max(len(lines[-1]) for lines in folded) + 2 + max(map(len, settings)) <= width
    texts = ["", *(as_json(outcome.text) for outcome in outcomes)]
    shown = []
    for lines, text, below in zip(folded, settings, texts, strict=True):
        if beside:
            lines[-1] = f"{lines[-1]}  {text}".rstrip()
        elif text:
            lines += wrapped(f"  {text}", width)
        indent = " " * 4
        shown += lines + textwrap.wrap(
            below, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    return shown
