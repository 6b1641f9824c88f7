"""minillm perplexity: the accuracy of each dtype."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..progress import loading_bar
from .options import add_model_options, decode, load_engine, placement_fields
from .output import as_json

if TYPE_CHECKING:
    from ..engine import Engine

DTYPES = "float32,bfloat16,float16,int8,int4"

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


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("perplexity", help="what each dtype costs in accuracy", description=DESCRIPTION)
    add_model_options(parser, dtypes=DTYPES)
    parser.add_argument("--shape", metavar="NAME", help="random weights in a published shape, such as opt-125m")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text to predict")
    parser.add_argument("--json", action="store_true", help="one JSON object for each dtype")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..loading import check_dtype

    if args.shape is not None:
        names = ("model", "revision", "adapter", "adapters", "tokenizer", "text")
        given = [name for name in names if getattr(args, name) is not None]
        if given:
            raise ParameterError(f"--shape stands for random weights: leave out --{given[0]}")
    dtypes = [word.strip() for word in args.dtype.split(",")]
    for dtype in dtypes:
        check_dtype(dtype)  # all of them, before the first model is loaded
    rows = _measure(args, list(dict.fromkeys(["float32", *dtypes])), _text(args))
    if not args.json:
        print(f"{'dtype':<10}{'weights':>12}{'perplexity':>12}{'change':>10}{'logit error':>14}")
    for row in rows:
        if row.dtype in dtypes:
            print(as_json(vars(row)) if args.json else _line(row), flush=True)


def _text(args: argparse.Namespace) -> str | None:
    """The text to predict."""
    from ..precision import HELD_OUT

    if args.shape is not None:
        return None
    path = args.text or HELD_OUT
    return decode(path.read_bytes, str(path))


def _measure(args: argparse.Namespace, dtypes: list[str], text: str | None) -> Iterator[Accuracy]:
    """One row per dtype; the first is the baseline."""
    from ..precision import perplexity, relative_error, sample_logits, weight_bytes

    exact, plain = None, None
    for dtype in dtypes:
        with _load(args, dtype) as engine:
            value = None if text is None else perplexity(engine, text)
            logits = sample_logits(engine)
            exact, plain = (logits, value) if exact is None else (exact, plain)
            change = None if value is None or plain is None else value / plain - 1
            yield Accuracy(dtype, weight_bytes(engine), value, change, relative_error(logits, exact))


def _load(args: argparse.Namespace, dtype: str) -> "Engine":
    from ..engine import Engine

    args = argparse.Namespace(**vars(args) | {"dtype": dtype})
    if args.shape is None:
        return load_engine(args)
    with loading_bar("drawing"):
        return Engine.random(args.shape, max_batch_size=1, **placement_fields(args))


def _line(row: Accuracy) -> str:
    """A row of the table."""
    shown = [f"{'-':>12}" if row.perplexity is None else f"{row.perplexity:>12.4f}"]
    shown += [f"{'-':>10}" if row.change is None else f"{row.change:>+10.2%}"]
    return f"{row.dtype:<10}{row.weight_bytes / 1e6:>9.1f} MB{''.join(shown)}{row.logit_error:>14.2e}"
