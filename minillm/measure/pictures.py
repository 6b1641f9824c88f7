"""Drawings for pages and notebooks: the tree of a beam search, attention maps, and the block tables of a K/V cache.

SVG without a script. Lines and text have the colour of the text around them, so light and dark pages both do.
"""

import base64
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..batch import TokenSequence
from ..cache import PagedCache
from ..text.display import brief, picture_html, token_text
from ..text.tokenizer import Tokenizer

__all__ = ["AttentionMaps", "BlockTables"]

if TYPE_CHECKING:
    from .comparison import BeamTree

ACCENT, SHARED = "#3b82c4", "#dd8a24"
"""Colours that are told apart on white and on black"""

# --- the tree of the beams --------------------------------------------------------------------------------------------

COLUMN, ROW = 142, 27
"""Width of a step and height of a candidate, in pixels"""
BOX_WIDTH, BOX_HEIGHT = 112, 21
TOP = 30
"""Space for the number of the step"""


def draw_tree(tree: "BeamTree", tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The parts of the drawing: for each step a box per candidate, and a curve to it from its parent; and the winner.

    Each step is drawn apart, from the right edges of the boxes before it to those of its own, so that the page can
    begin a new line at any of them.
    """
    left = COLUMN - BOX_WIDTH
    named = tokenizer.token if tokenizer is not None else "#{}".format
    sources = {0: TOP + BOX_HEIGHT / 2}  # heights at which the curves begin: of the prompt, later of each beam
    best = dict(enumerate(tree.best_ranks()))
    steps, winner, rows, before = [], [], 0, 0.0
    for number, step in enumerate(tree.steps):
        following, boxes = {}, []
        for rank, candidate in enumerate(step):
            y, middle, wins = sources[candidate.parent], TOP + BOX_HEIGHT / 2 + rank * ROW, best.get(number) == rank
            fate = "finished" if candidate.finished else "kept" if candidate.beam is not None else "pruned"
            token = token_text(named(candidate.token))
            boxes.append(
                {
                    "kind": f"{fate} best" if wins else fate,
                    "prominence": 2 if wins else fate != "pruned",  # curves of a higher one are on top
                    "top": middle - BOX_HEIGHT / 2,
                    "curve": f"M0 {y}C{left / 2} {y} {left / 2} {middle} {left} {middle}",
                    "token": token,
                    "log_prob": candidate.log_prob,
                }
            )
            if wins:
                winner.append({"token": token, "probability": math.exp(candidate.log_prob - before)})
                before = candidate.log_prob
            if wins or fate != "pruned":
                rows = max(rows, rank + 1)
            if candidate.beam is not None:
                following[candidate.beam] = middle
        steps.append(boxes)
        sources = following
    return {
        "steps": steps,
        "winner": winner,
        "log_prob": before,
        "column": COLUMN,
        "height": TOP + max(map(len, tree.steps)) * ROW,
        "kept_height": TOP + rows * ROW,
        "left": left,
        "prompt": TOP + BOX_HEIGHT / 2,
        "box": (BOX_WIDTH, BOX_HEIGHT),
    }


LOOKS = {"pruned": (0.35, 0.6), "kept": (0.9, 1.2), "finished": (0.9, 1.2), "best": (1.0, 2.6)}
"""Opacity and width of lines"""


def tree_svg(tree: "BeamTree", tokenizer: Tokenizer | None) -> str:
    """The tree in one line: for each step a column of candidates, best first; the result's way is blue."""
    drawing = draw_tree(tree, tokenizer)
    width, height = COLUMN * len(drawing["steps"]), drawing["height"]
    shapes = [f'<circle cx="6" cy="{drawing["prompt"]}" r="5" fill="{ACCENT}"/>']
    for number, boxes in enumerate(drawing["steps"]):
        shapes.append(f'<g transform="translate({COLUMN * number} 0)">')
        for box in sorted(boxes, key=lambda box: int(box["prominence"])):
            fate = box["kind"].split()[-1]
            opacity, line = LOOKS[fate]
            colour = ACCENT if fate == "best" else "currentColor"
            dashes = ' stroke-dasharray="4 2"' if "finished" in box["kind"] else ""
            middle = box["top"] + 0.7 * BOX_HEIGHT
            shapes += [
                f'<g opacity="{opacity}" stroke="{colour}" stroke-width="{line}" fill="none">',
                f'<path d="{box["curve"]}"/>',
                f'<rect x="{drawing["left"]}" y="{box["top"]}" width="{BOX_WIDTH - 1}" height="{BOX_HEIGHT}" rx="4"'
                f"{dashes}/></g>",
                f'<g opacity="{opacity}">',
                f'<text x="{drawing["left"] + 6}" y="{middle}">{escape(token_text(box["token"], 8))}</text>',
                f'<text x="{COLUMN - 6}" y="{middle}" text-anchor="end">{box["log_prob"]:.2f}</text></g>',
            ]
        shapes.append(f'<text x="{drawing["left"]}" y="16" opacity=".7">step {number + 1}</text></g>')
    return f'<svg width="{width}" height="{height}" role="img" aria-label="tree of the beams">{"".join(shapes)}</svg>'


# --- attention maps ---------------------------------------------------------------------------------------------------

SIDE, CELL, LABELS = 240, 20, 12
"""Pixels of a map's side and of a token's at most, and between two labels at least"""
FADE = 0.5
"""A colour is as opaque as this power of a weight: most weights are small"""


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """How much each token takes from each token before it, in heads of one layer. A notebook shows a map of each head.

    `minillm.measure.inside.attention_maps` makes it.
    """

    layer: int
    heads: tuple[int, ...]
    token_ids: list[int]
    """[T]"""
    probabilities: NDArray[np.float32]
    """The weight of each key for each query; those of a query sum to 1. [len(heads), T, T]"""
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return brief("AttentionMaps", layer=self.layer, heads=self.heads, tokens=len(self.token_ids))

    @property
    def tokens(self) -> list[str]:
        """The text of each token; its number without a tokenizer. [T]"""
        return list(map("#{}".format if self.tokenizer is None else self.tokenizer.token, self.token_ids))

    @property
    def head(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["token", *(f"head {head}" for head in self.heads)]

    def rows(self) -> list[list[str]]:
        """The same as text, a row for each token: the token that each head takes most from, and how much."""
        tokens = [f'"{token_text(token, 12)}"' for token in self.tokens]
        return [
            [token, *(f"{tokens[int(row.argmax())]} {row.max():.2f}" for row in self.probabilities[:, i])]
            for i, token in enumerate(tokens)
        ]

    note = "the token that each head takes most from, and how much"

    def _repr_html_(self) -> str:
        pixels, size = downsampled(self.probabilities, SIDE)  # [N, T, T] -> [N, t, t]
        cell = min(CELL, SIDE / pixels.shape[1])
        step = math.ceil(LABELS / cell)  # of the pixels that have a label
        labels = [token_text(token, 9) for token in self.tokens[::size]][::step]
        maps = [
            _map_svg(f"head {head}", map_, cell, labels, step) for head, map_ in zip(self.heads, pixels, strict=True)
        ]
        pooling = f"; a pixel shows the largest of {size} x {size}" if size > 1 else ""
        note = f"the fuller the colour, the more a token (row) takes from another (column); each row sums to 1{pooling}"
        return picture_html(f"attention of layer {self.layer}", "".join(maps), note)


def downsampled(maps: NDArray[np.float32], pixels: int) -> tuple[NDArray[np.float32], int]:
    """Maps of at most `pixels` rows and columns, and how many tokens a pixel stands for: it shows their largest value.

    [N, T, T] -> [N, t, t]
    """
    N, T, _ = maps.shape
    size = -(-T // pixels)
    short = -(-T // size)
    padded = np.full((N, size * short, size * short), -np.inf, np.float32)
    padded[:, :T, :T] = maps
    return padded.reshape(N, short, size, short, size).max(axis=(2, 4)), size  # [N, t, size, t, size] -> [N, t, t]


def _map_svg(title: str, weights: NDArray[np.float32], cell: float, labels: list[str], step: int) -> str:
    """A map with a title and labels, one for every `step` rows and columns. [t, t]"""
    side, left, top = round(cell * len(weights)), 72, 20
    image = base64.b64encode(opacity_png(weights**FADE, ACCENT)).decode()
    shapes = [
        f'<text x="{left}" y="13">{escape(title)}</text>',
        f'<image x="{left}" y="{top}" width="{side}" height="{side}" preserveAspectRatio="none"'
        f' style="image-rendering:pixelated" href="data:image/png;base64,{image}"/>',
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="currentColor" opacity=".4"/>',
    ]
    small = 'style="font-size:10px" text-anchor="end"'
    for i, label in enumerate(map(escape, labels)):
        middle = cell * (i * step + 0.5) + 3
        shapes += [
            f'<text x="{left - 5}" y="{top + middle:.1f}" {small}>{label}</text>',
            f'<text transform="translate({left + middle:.1f} {top + side + 5}) rotate(-90)" {small}>{label}</text>',
        ]
    size = f'width="{left + side + 12}" height="{top + side + 68}"'
    return f'<svg {size} role="img" aria-label="attention map of {escape(title)}">{"".join(shapes)}</svg>'


def opacity_png(opacities: NDArray[np.float32], colour: str) -> bytes:
    """A PNG of one colour, "#3b82c4", with each pixel's opacity from 0 to 1 (https://www.w3.org/TR/png-3/). [h, w]"""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = opacities.shape
    levels = np.rint(255 * np.clip(opacities, 0, 1)).astype(np.uint8)
    lines = np.pad(levels, ((0, 0), (1, 0)))  # each begins with the number of its filter, 0: none
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)),  # 8 bits, by a palette
            chunk(b"PLTE", 256 * bytes.fromhex(colour.removeprefix("#"))),
            chunk(b"tRNS", bytes(range(256))),  # opacity of each entry
            chunk(b"IDAT", zlib.compress(lines.tobytes())),
            chunk(b"IEND", b""),
        ]
    )


# --- block tables -----------------------------------------------------------------------------------------------------

SLOT, GAP, LABEL = 14, 16, 90
"""Pixels of a position, between pages, and of a sequence's name"""


@dataclass(frozen=True)
class PageUse:
    """A page in a sequence's block table."""

    page: int
    """Its number"""
    filled: int
    """Positions that hold keys and values of this sequence"""
    owners: int
    """Sequences that use it"""


@dataclass(frozen=True)
class BlockTables:
    """The block tables of some sequences, as they are now. A notebook shows a picture."""

    page_size: int
    """P"""
    tables: dict[str, tuple[PageUse, ...]]
    """Name of a sequence -> its pages in order"""
    free_pages: int
    copied_positions: int
    """Positions that forks have copied since the cache was made"""

    @classmethod
    def of(cls, cache: PagedCache, sequences: Mapping[str, TokenSequence]) -> "BlockTables":
        """The tables of sequences of a cache, by names."""
        P = cache.page_size
        tables = {
            name: tuple(
                PageUse(page, max(0, min(P, sequence.cached - i * P)), cache.owners(page))
                for i, page in enumerate(sequence.pages)
            )
            for name, sequence in sequences.items()
        }
        return cls(P, tables, cache.free_pages, cache.copied_positions)

    head = ("sequence", "pages in order: number (positions filled) x owners")

    def rows(self) -> list[list[str]]:
        """The same as text, a row for each sequence."""
        return [
            [name, ", ".join(f"{use.page} ({use.filled}) x {use.owners}" for use in uses) or "none"]
            for name, uses in self.tables.items()
        ]

    @property
    def note(self) -> str:
        """The numbers below the picture."""
        shared = any(use.owners > 1 for uses in self.tables.values() for use in uses)
        sharing = "; x2: two sequences have it" if shared else ""
        free, copied = self.free_pages, self.copied_positions
        return f"pages of {self.page_size} positions{sharing}; {free} free; {copied} positions copied"

    def _repr_html_(self) -> str:
        width = LABEL + max([1, *map(len, self.tables.values())]) * (SLOT * self.page_size + GAP)
        shapes = []
        for row, (name, uses) in enumerate(self.tables.items()):
            top = 52 * row + 20
            shapes.append(f'<text x="0" y="{top + 15}">{escape(token_text(name, 11))}</text>')
            for column, use in enumerate(uses):
                whole, colour = SLOT * self.page_size, SHARED if use.owners > 1 else ACCENT
                left, filled = LABEL + column * (whole + GAP), SLOT * use.filled
                shared = f" x{use.owners}" if use.owners > 1 else ""
                shapes += [
                    f'<text x="{left}" y="{top - 4}" style="font-size:10px">page {use.page}{shared}</text>',
                    f'<rect x="{left}" y="{top}" width="{filled}" height="22" fill="{colour}" opacity=".75"/>',
                    f'<rect x="{left}" y="{top}" width="{whole}" height="22" fill="none" stroke="{colour}"/>',
                ]
        svg = f'<svg width="{width}" height="{52 * len(self.tables) + 4}" role="img" aria-label="block tables">'
        return picture_html("block tables", f"{svg}{''.join(shapes)}</svg>", self.note)
