"""minillm compare: one prompt under every decoding strategy."""

import argparse
import math
import shutil
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import PromptError
from ..output_files import write_file
from .options import add_model_options, add_prompt_options, load_engine, read_prompts
from .terminal import as_json

if TYPE_CHECKING:
    from ..comparison import BeamTree, Outcome
    from ..decoding.strategy import Candidate
    from ..tokenizer import Tokenizer


COLUMN, ROW = 142, 27
"""Distances between steps and between candidates, in pixels"""
BOX_WIDTH, BOX_HEIGHT = 112, 21
MARGIN, HEAD = 12, 34
TOKEN_LENGTH = 8
"""Characters of a token shown in its box"""


def page(model: str, prompt: str, outcomes: Sequence["Outcome"], tree: "BeamTree", tokenizer: "Tokenizer") -> str:
    """The whole page as HTML.

    Args:
        model: the model's name
        prompt: text
        outcomes: results of each strategy
        tree: candidates of beam search
        tokenizer: decodes the tokens of the tree
    """
    template = Template(Path(__file__).with_name("compare.html").read_text(encoding="utf-8"))
    return template.substitute(
        count=len(outcomes),
        model=escape(model),
        prompt=escape(prompt),
        articles="\n".join(map(_article, outcomes)),
        beams=max(map(len, tree.steps)),
        width=max(sum(candidate.beam is not None for candidate in step) for step in tree.steps),
        tree=draw_tree(tree, tokenizer),
        version=__version__,
    )


def _article(outcome: "Outcome") -> str:
    """One strategy's result."""
    mean = math.exp(outcome.log_prob_per_token)
    numbers = {
        "log p": f"{outcome.log_prob:.2f}",
        "per token": f"{outcome.log_prob_per_token:.3f}",
        "tokens": len(outcome.token_ids),
        "steps": outcome.steps,
        "seconds": f"{outcome.seconds:.3f}",
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{number}</dd></div>" for name, number in numbers.items())
    end = " …" if outcome.finish_reason == "length" else " ∎"
    return (
        f"<article><h3>{escape(outcome.variant.name)}</h3><code>{escape(outcome.variant.settings)}</code>"
        f'<p class="text">{escape(outcome.text.removeprefix(" "))}<span class="end">{end}</span></p>'
        f'<div class="bar" title="{mean:.1%}"><i style="width: {100 * mean:.1f}%"></i></div><dl>{cells}</dl></article>'
    )


def draw_tree(tree: "BeamTree", tokenizer: "Tokenizer") -> str:
    """The tree as an SVG element: a column per step, a box per candidate, and a line to its parent."""
    width = 2 * MARGIN + len(tree.steps) * COLUMN + 28
    height = HEAD + max(map(len, tree.steps)) * ROW + MARGIN
    best = tree.best_ranks()
    lines, boxes = [], []
    sources = {0: (MARGIN + 14.0, HEAD + BOX_HEIGHT / 2)}  # end of the prompt, later of each beam
    boxes.append(
        f'<circle cx="{MARGIN + 8}" cy="{sources[0][1]}" r="6" fill="var(--accent)"><title>prompt</title></circle>'
    )
    for number, step in enumerate(tree.steps):
        left = MARGIN + 28 + number * COLUMN + (COLUMN - BOX_WIDTH) / 2
        boxes.append(f'<text class="head" x="{left}" y="20">step {number + 1}</text>')
        following = {}
        for rank, candidate in enumerate(step):
            top = HEAD + rank * ROW
            middle = top + BOX_HEIGHT / 2
            kind = _kind(candidate, best=number < len(best) and best[number] == rank)
            x, y = sources[candidate.parent]
            bend = (left - x) / 2
            curve = f"M{x} {y}C{x + bend} {y} {left - bend} {middle} {left} {middle}"
            line = f'<path class="{kind}" d="{curve}"/>'
            lines.append((kind.count("best"), kind != "pruned", line))
            boxes.append(_box(candidate, kind, left, top, tokenizer))
            if candidate.beam is not None:
                following[candidate.beam] = (left + BOX_WIDTH, middle)
        sources = following
    drawn = "".join(line for *_, line in sorted(lines, key=lambda line: line[:2]))  # the best beam's on top
    return f'<svg width="{width}" height="{height}" role="img" aria-label="beam tree">{drawn}{"".join(boxes)}</svg>'


def _kind(candidate: "Candidate", *, best: bool) -> str:
    """CSS classes of a candidate."""
    fate = "finished" if candidate.finished else "kept" if candidate.beam is not None else "pruned"
    return f"{fate} best" if best else fate


def _box(candidate: "Candidate", kind: str, left: float, top: float, tokenizer: "Tokenizer") -> str:
    token = tokenizer.token(candidate.token).replace(" ", "␣").replace("\n", "\\n")
    short = token if len(token) <= TOKEN_LENGTH else token[: TOKEN_LENGTH - 1] + "…"
    return (
        f'<g class="{kind}"><title>{escape(token)}: {candidate.log_prob:.4f}</title>'
        f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"/>'
        f'<text x="{left + 6}" y="{top + 15}">{escape(short)}</text>'
        f'<text class="sum" x="{left + BOX_WIDTH - 5}" y="{top + 14.5}">{candidate.log_prob:.2f}</text></g>'
    )


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
    """Two or more lines per strategy: its numbers, then its text."""
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
