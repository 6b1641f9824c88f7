"""minillm perplexity: the accuracy of each dtype."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..errors import ParameterError
from .options import add_model_options, decode, leads, make_engine
from .output import Table, as_json, terminal_width
from .parser import Parser

DTYPES = "float32,bfloat16,float16,int8,int4"
HEAD = (f"{'dtype':<10}", f"{'weights':>10}", f"{'perplexity':>10}", f"{'change':>8}", f"{'logit error':>12}")
"""As wide as the cells, since rows are shown one by one"""

DESCRIPTION = """Show what keeping weights in fewer bits costs: the perplexity of a text, and how
far the logits after random tokens move, relative to float32 (the norm of the
difference over the norm). The text is cut into pieces as long as the context.

Without --text the text is one that the small model inside was not trained on.
With --shape the weights are random, and only the logits are compared."""


@dataclass(frozen=True)
class Accuracy:
    """Size and accuracy of one dtype."""

    dtype: str
    weight_bytes: int
    perplexity: float | None
    change: float | None
    """Change of the perplexity relative to float32"""
    logit_error: float


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_model_options(parser, dtypes=DTYPES, parallel=True)
    parser.add_argument("--shape", metavar="NAME", help="random weights in a published shape, such as opt-125m")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text to predict")
    parser.add_argument("--json", action="store_true", help="one JSON object for each dtype")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..backends.placement import check_dtype

    if args.shape is not None and args.text is not None:
        raise ParameterError("--shape stands for random weights, which predict no text: leave out --text")
    dtypes = [word.strip() for word in args.dtype.split(",")]
    for dtype in dtypes:
        check_dtype(dtype)  # all of them, before the first model is loaded
    compared = list(dict.fromkeys(["float32", *dtypes]))
    if not leads(args):
        for dtype in compared:
            with make_engine(args, dtype=dtype, prefix_cache=False):
                pass  # computes its share here
        return
    measured = _measure(args, compared, _text(args))
    rows = chain([next(measured)], measured)  # a model that has no perplexity is refused before the table's head
    width = terminal_width()
    if not args.json:
        print("\n".join(Table(HEAD, []).lines(width)))
    for row in rows:
        if row.dtype in dtypes:
            lines = [as_json(vars(row))] if args.json else Table(HEAD, [_cells(row)]).folded(width)[-1]
            print("\n".join(lines), flush=True)


def _text(args: argparse.Namespace) -> str | None:
    """The text to predict."""
    from ..measure.precision import HELD_OUT

    if args.shape is not None:
        return None
    path = args.text or HELD_OUT
    return decode(path.read_bytes, str(path))


def _measure(args: argparse.Namespace, dtypes: list[str], text: str | None) -> Iterator[Accuracy]:
    """One row per dtype; the first is the baseline."""
    from ..engine.arguments import refuse_task
    from ..measure.precision import perplexity, relative_error, sample_logits, weight_bytes

    exact, plain = None, None
    for dtype in dtypes:
        with make_engine(args, dtype=dtype, prefix_cache=False) as engine:
            refuse_task(engine.config, "tokens", "perplexity")
            if engine.config.encoder_layers:
                raise ParameterError("perplexity is of a text alone: an encoder-decoder's text depends on its source")
            value = None if text is None else perplexity(engine, text)
            logits = sample_logits(engine)
            exact, plain = (logits, value) if exact is None else (exact, plain)
            change = None if value is None or plain is None else value / plain - 1
            yield Accuracy(dtype, weight_bytes(engine), value, change, relative_error(logits, exact))


def _cells(row: Accuracy) -> list[str]:
    """A row of the table."""
    measured = "-" if row.perplexity is None else f"{row.perplexity:.4f}"
    change = "-" if row.change is None else f"{row.change:+.2%}"
    return [row.dtype, f"{row.weight_bytes / 1e6:.1f} MB", measured, change, f"{row.logit_error:.2e}"]
