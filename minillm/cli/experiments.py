"""The experiments of minillm inspect: --lens, --ablate and --patch, each a figure."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..output_files import check_writable
from ..text.display import token_text
from .plots import COLOUR_MAP, need_matplotlib, with_glyphs, write_figure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.engine import Engine

EXPERIMENTS = {
    "lens": "the next token, were each layer the last (logit lens)",
    "ablate": "what each head adds to the next token's log-probability",
    "patch": "how far the rows of --source, at one layer and token each, bring its next token back",
}
"""Name of an option -> what its figure shows"""
LABEL = 12
"""Characters of a token in a figure"""


def add_experiments(parser: Any) -> None:
    """Add the options."""
    for name, words in EXPERIMENTS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"draw {words}: .png, .svg ...")
    parser.add_argument("--source", metavar="TEXT", help="a text of as many tokens as the prompt; needs --patch")


def check_experiments(args: argparse.Namespace, num_prompts: int) -> None:
    """Check what can be checked before the model is loaded.

    Raises:
        ParameterError: --source without --patch or the other way round, or several prompts.
        UsageError: matplotlib is not installed, or a file cannot be written.
    """
    if (args.patch is None) != (args.source is None):
        raise ParameterError("--patch FILE and --source TEXT belong together: give both, or neither")
    files = [getattr(args, name) for name in ("attention", *EXPERIMENTS) if getattr(args, name) is not None]
    if len({*files}) < len(files):
        raise ParameterError(f"{files[0]} is named for several figures: give each a file of its own")
    for name in ("attention", *EXPERIMENTS):
        path = getattr(args, name)
        if path is not None and num_prompts > 1:
            raise ParameterError(f"--{name} draws one prompt: give one")
        if path is not None and name in EXPERIMENTS:
            check_writable(path)
            need_matplotlib(path)


def run_experiments(args: argparse.Namespace, engine: "Engine", ids: list[int]) -> dict[str, Any]:
    """Draw the experiments that are asked for. Returns their results by name, for --json."""
    results: dict[str, Any] = {}
    for name, draw in (("lens", _lens), ("ablate", _ablate), ("patch", _patch)):
        path = getattr(args, name)
        if path is not None:
            results[name], figure = draw(args, engine, ids)
            write_figure(path, draw_grid, **figure)
    return results


def _lens(args: argparse.Namespace, engine: "Engine", ids: list[int]) -> tuple[Any, dict[str, Any]]:
    import numpy as np

    from ..measure.inside import logit_lens

    lens = logit_lens(engine, ids, lora=args.lora)
    words = [_labels(args.lens, engine, row) for row in lens.next_ids[..., 0].tolist()]
    figure = {
        "values": np.exp(lens.log_probs[..., 0]),
        "rows": ["embedding", *(f"layer {i}" for i in range(engine.config.num_layers))],
        "columns": _labels(args.lens, engine, ids),
        "texts": words,
        "title": "The token that would follow each one (column), were each layer (row) the last",
        "label": "its probability",
        "most": 1.0,
    }
    return {"token_ids": lens.next_ids[..., 0].tolist(), "logprobs": lens.log_probs[..., 0].tolist()}, figure


def _ablate(args: argparse.Namespace, engine: "Engine", ids: list[int]) -> tuple[Any, dict[str, Any]]:
    from ..measure.inside import ablate_heads

    token, effects = ablate_heads(engine, ids, lora=args.lora)
    [word] = _labels(args.ablate, engine, [token])
    figure = {
        "values": effects,
        "rows": [f"layer {i}" for i in range(len(effects))],
        "columns": [f"head {i}" for i in range(effects.shape[1])],
        "title": f"What each head adds to the log-probability of “{word}”",
        "label": "log-probability with the head minus without",
    }
    return {"token_id": token, "effects": effects.tolist()}, figure


def _patch(args: argparse.Namespace, engine: "Engine", ids: list[int]) -> tuple[Any, dict[str, Any]]:
    from ..measure.inside import patch

    token, restored = patch(engine, ids, args.source, lora=args.lora)
    [word] = _labels(args.patch, engine, [token])
    figure = {
        "values": restored,
        "rows": [f"layer {i}" for i in range(len(restored))],
        "columns": _labels(args.patch, engine, ids),
        "title": f"How far the other text's residual stream, at one layer and token, brings back “{word}”",
        "label": "0: as after the prompt; 1: as after the source",
    }
    return {"token_id": token, "restored": restored.tolist()}, figure


def _labels(path: Path, engine: "Engine", ids: Sequence[int]) -> list[str]:
    """Tokens as a figure shows them."""
    from ..decoding.prompts import need_tokenizer

    tokenizer = need_tokenizer(engine.tokenizer)
    labels = [token_text(tokenizer.token(token), LABEL) for token in ids]
    return labels if path.suffix == ".svg" else list(map(with_glyphs, labels))  # who shows an SVG has fonts


def draw_grid(
    figure: Any,
    values: "NDArray[np.float32]",
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    label: str,
    texts: Sequence[Sequence[str]] | None = None,
    most: float | None = None,
) -> None:
    """Draw numbers as coloured cells.

    Args:
        figure: an empty figure
        values: [rows, columns]
        rows: their labels, the first at the bottom
        columns: their labels
        title: above
        label: meaning of the colours
        texts: of the cells
        most: the number of the last colour, the first being 0; None: colours on both sides of 0
    """
    R, C = values.shape
    figure.set_size_inches(max(6, min(40, 2 + C * (0.75 if texts else 0.45))), max(3, min(40, 1.5 + 0.3 * R)))
    axis = figure.subplots()
    bound = max(float(abs(values).max()), 1e-6)
    colours = {"cmap": "PuOr", "vmin": -bound, "vmax": bound}
    if most is not None:
        colours = {"cmap": COLOUR_MAP, "vmin": 0, "vmax": most}
    image = axis.imshow(values, origin="lower", aspect="auto", interpolation="nearest", **colours)
    axis.set_xticks(range(C), columns, rotation=90 if max(map(len, columns)) > 6 else 0, fontsize=8)
    axis.set_yticks(range(R), rows, fontsize=8)
    for i, words in enumerate(texts or ()):
        for j, word in enumerate(words):
            dark = values[i, j] < 0.6 * (most or 1)
            axis.text(j, i, word, ha="center", va="center", fontsize=6.5, color="white" if dark else "black")
    figure.colorbar(image, ax=axis, shrink=0.8).set_label(label, fontsize=8)
    figure.suptitle(title, fontsize=10)
