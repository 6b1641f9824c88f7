"""minillm compare: one prompt under every decoding strategy."""

import argparse
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError
from .options import add_model_options, add_prompt_options, load_engine, read_prompts
from .output import Table, as_json, token_text, write_page

if TYPE_CHECKING:
    from ..comparison import BeamTree, Outcome
    from ..tokenizer import Tokenizer

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
        "compare", help="one prompt under every decoding strategy", description=DESCRIPTION, epilog=EPILOG
    )
    add_prompt_options(parser)
    add_model_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=20, metavar="N", help="tokens to generate (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling strategies (default: 0)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that also draws the tree of the beams")
    parser.add_argument("--json", action="store_true", help="one JSON object with all results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..comparison import BEAM_SEARCH, STRATEGIES, beam_tree, compare
    from ..request import need_tokenizer

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
        write_page(
            args.html,
            "compare.html",
            model=args.model or "the model inside minillm",
            prompt=prompt,
            results=[(one, numbers(one)) for one in outcomes],
            candidates=max(map(len, tree.steps)),
            beams=max(sum(candidate.beam is not None for candidate in step) for step in tree.steps),
            drawing=draw_tree(tree, tokenizer),
        )
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
    """Two or more lines per strategy: its numbers, then its text."""
    rows = [[one.variant.name, *numbers(one).values()] for one in outcomes]
    head, *lines = Table(["strategy", *numbers(outcomes[0])], rows).lines()
    shown = [f"{head}  settings"]
    for one, line in zip(outcomes, lines, strict=True):
        shown.append(f"{line}  {one.variant.settings}".rstrip())
        indent = " " * 4
        shown += textwrap.wrap(
            as_json(one.text), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    return shown


# --- the tree of the beams, for the page ------------------------------------------------------------------------------

COLUMN, ROW = 142, 27
"""Distances between steps and between candidates, in pixels"""
BOX_WIDTH, BOX_HEIGHT = 112, 21
LEFT, TOP = 40, 34
"""Space for the prompt and for the numbers of the steps"""


def draw_tree(tree: "BeamTree", tokenizer: "Tokenizer") -> dict[str, Any]:
    """Positions of the tree's parts: a column per step, a box per candidate, and a curve to its parent."""
    prompt = TOP + BOX_HEIGHT / 2
    sources = {0: (LEFT - 14.0, prompt)}  # where the curves begin: at the prompt, later at each beam
    lefts = [LEFT + number * COLUMN + (COLUMN - BOX_WIDTH) / 2 for number in range(len(tree.steps))]
    best = dict(enumerate(tree.best_ranks()))
    boxes = []
    for number, (left, step) in enumerate(zip(lefts, tree.steps, strict=True)):
        following = {}
        for rank, candidate in enumerate(step):
            x, y = sources[candidate.parent]
            middle, bend = prompt + rank * ROW, (left - x) / 2
            fate = "finished" if candidate.finished else "kept" if candidate.beam is not None else "pruned"
            wins = best.get(number) == rank
            boxes.append(
                {
                    "kind": f"{fate} best" if wins else fate,
                    "prominence": 2 if wins else fate != "pruned",  # curves of a higher one are on top
                    "left": left,
                    "top": middle - BOX_HEIGHT / 2,
                    "curve": f"M{x} {y}C{x + bend} {y} {left - bend} {middle} {left} {middle}",
                    "token": token_text(tokenizer.token(candidate.token)),
                    "log_prob": candidate.log_prob,
                }
            )
            if candidate.beam is not None:
                following[candidate.beam] = (left + BOX_WIDTH, middle)
        sources = following
    return {
        "width": LEFT + len(lefts) * COLUMN + 12,
        "height": TOP + max(map(len, tree.steps)) * ROW + 12,
        "prompt": prompt,
        "columns": lefts,
        "boxes": boxes,
        "box": (BOX_WIDTH, BOX_HEIGHT),
    }
