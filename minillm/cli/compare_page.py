"""The page of `minillm compare`: all results, and the tree of beam search as SVG. Needs nothing from elsewhere."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from .. import __version__

if TYPE_CHECKING:
    from ..comparison import BeamTree, Outcome
    from ..decoding.strategy import Candidate
    from ..tokenizer import Tokenizer

COLUMN, ROW = 142, 27
"""Distances between steps and between candidates, in pixels"""
BOX_WIDTH, BOX_HEIGHT = 112, 21
MARGIN, HEAD = 12, 34
TOKEN_LENGTH = 8
"""Characters of a token that fit into its box"""


def page(model: str, prompt: str, outcomes: Sequence["Outcome"], tree: "BeamTree", tokenizer: "Tokenizer") -> str:
    """The whole page as HTML.

    Args:
        model: how the model is called
        prompt: text
        outcomes: what each strategy gave
        tree: what beam search looked at
        tokenizer: for the tokens of the tree
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
    """The tree as an SVG element: a column for each step, a box for each candidate, and a line to its parent."""
    width = 2 * MARGIN + len(tree.steps) * COLUMN + 28
    height = HEAD + max(map(len, tree.steps)) * ROW + MARGIN
    best = tree.best_ranks()
    lines, boxes = [], []
    sources = {0: (MARGIN + 14.0, HEAD + BOX_HEIGHT / 2)}  # of the prompt; then where each beam's box ends
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
    drawn = "".join(line for *_, line in sorted(lines, key=lambda line: line[:2]))  # the winner's on top
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
