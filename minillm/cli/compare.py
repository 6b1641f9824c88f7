"""minillm compare: one prompt under every decoding strategy, side by side."""

import argparse
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError
from ..output_files import write_file
from .options import add_model_options, add_prompt_options, load_engine, read_prompts
from .terminal import as_json

if TYPE_CHECKING:
    from ..comparison import Outcome

DESCRIPTION = """Continue one prompt under every decoding strategy.

log p is the natural logarithm of the continuation's probability under the
model: the closer to zero, the likelier. Greedy search takes the likeliest token
each time, beam search looks for the likeliest text, sampling for neither."""

EPILOG = """examples:
  minillm compare --prompt "A list of colors: red,"
  minillm compare --prompt "Once upon a time" --seed 3 --html page.html
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "compare",
        help="one prompt under every decoding strategy",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_prompt_options(parser)
    add_model_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=20, metavar="N", help="tokens to generate (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that also draws the tree of the beams")
    parser.add_argument("--json", action="store_true", help="one JSON object with all results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..comparison import BEAM_SEARCH, STRATEGIES, beam_tree, compare
    from ..prompts import need_tokenizer
    from .compare_page import page

    prompts = read_prompts(args)
    if len(prompts) != 1:
        raise PromptError(f"compare takes one prompt, found {len(prompts)}")
    [prompt] = prompts
    widest = max(variant.fields.get("num_beams", 1) for variant in STRATEGIES)
    engine = load_engine(args, sequences=widest)
    tokenizer = need_tokenizer(engine.tokenizer)
    outcomes = compare(engine, prompt, seed=args.seed, max_new_tokens=args.max_new_tokens)
    if args.html is not None:
        tree = beam_tree(engine, prompt, max_new_tokens=args.max_new_tokens, **BEAM_SEARCH.fields)
        write_file(args.html, page(args.model or "the model inside minillm", prompt, outcomes, tree, tokenizer))
    if args.json:
        print(as_json({"prompt": prompt, "results": [_as_dict(one) for one in outcomes]}))
    else:
        print("\n".join(_table(outcomes, max(60, shutil.get_terminal_size().columns))))


def _as_dict(outcome: "Outcome") -> dict[str, Any]:
    return {
        "name": outcome.variant.name,
        "settings": dict(outcome.variant.fields),
        "text": outcome.text,
        "token_ids": outcome.token_ids,
        "finish_reason": outcome.finish_reason,
        "logprob": outcome.log_prob,
        "logprob_per_token": outcome.log_prob_per_token,
        "steps": outcome.steps,
        "seconds": outcome.seconds,
    }


def _table(outcomes: list["Outcome"], width: int) -> list[str]:
    """Two or more lines for each strategy: its numbers, and its text below them."""
    columns = f"{'log p':>8}{'per token':>11}{'tokens':>8}{'steps':>7}{'seconds':>9}"
    left = max(len(outcome.variant.name) for outcome in outcomes) + 2
    lines = [f"{'strategy':<{left}}{columns}  settings"]
    for one in outcomes:
        numbers = (
            f"{one.log_prob:8.2f}{one.log_prob_per_token:11.3f}{len(one.token_ids):8}{one.steps:7}{one.seconds:9.3f}"
        )
        lines.append(f"{one.variant.name:<{left}}{numbers}  {one.variant.settings}".rstrip())
        shown = as_json(one.text)
        lines += textwrap.wrap(shown, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return lines
