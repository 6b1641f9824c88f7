"""Results and engines as HTML for notebooks: tokens shaded by probability, with their alternatives; tables.

A notebook calls `_repr_html_` of what a cell returns
(https://ipython.readthedocs.io/en/stable/config/integrating.html#rich-display). The HTML needs no script and no other
file, and every text in it is escaped. Text has the notebook's own colours, shades are half transparent, so light and
dark ones both do. Where styles are removed (untrusted notebooks, some viewers) the plain text stays: alternatives are
in attributes, which only the style sheet draws.

`tokens.css` has the rule of the shade, which the server's page has too.
"""

import codecs
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from ..errors import printable
from .tokenizer import Tokenizer

TOKENS_CSS = Path(__file__).with_name("tokens.css")

STYLE = """
--shade: #dd8a24; --deepest: 52%; --frame: color-mix(in srgb, currentColor 22%, transparent);
.tokens { position: relative; max-width: 46rem; margin: .3em 0; line-height: 1.75; white-space: pre-wrap;
  overflow-wrap: anywhere; padding-bottom: calc(var(--rows, 0) * 1.35em); }
.tok { padding: .12em 0; cursor: default; }
.tok:hover, .tok:focus { outline: 1.5px solid currentColor; }
.tok[data-mark]::before { content: attr(data-mark); font-size: .8em; opacity: .75; }
.special, .note { opacity: .75; }
.given { opacity: .85; }
.special, .note { font-size: .85em; }
.tok:hover::after, .tok:focus::after { content: attr(data-card); position: absolute; z-index: 9;
  margin: 1.9em 0 0 -2ch; padding: .4em .7em; border: 1px solid var(--frame); border-radius: 6px; pointer-events: none;
  font: 12px/1.35 ui-monospace, Menlo, Consolas, monospace; white-space: pre;
  background: var(--jp-layout-color1, var(--vscode-editorWidget-background, Canvas));
  color: var(--jp-ui-font-color1, var(--vscode-editorWidget-foreground, CanvasText)); }
.tokens:hover .tok:focus:not(:hover)::after { content: none; }
@media (max-width: 64rem) { .tok::after { left: 0; } }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .15em 1em .15em 0; border-top: 1px solid var(--frame); }
th { font-weight: 500; }
td.number { text-align: right; }
td.line { white-space: nowrap; }
table { color: inherit; }
.picture { overflow-x: auto; padding: .4em 0; }
.picture text { fill: currentColor; font: 12px ui-monospace, Menlo, Consolas, monospace; }
"""
"""Further rules, all within the element; a card is beside its token where there is room, else at the left."""

BAR = 16
"""Characters of the bar of a certain token."""


class TokenView(NamedTuple):
    """A token as it is shown."""

    text: str
    """New whole characters; empty in the middle of a character"""
    logprob: float | None = None
    top: Sequence[tuple[str, float]] = ()
    """The most likely tokens in its place with their log-probabilities, best first"""
    name: str = ""
    """The token by itself, as the alternatives are named"""
    special: bool = False
    """True if it is no text"""


def view_tokens(
    token_ids: Sequence[int],
    token_bytes: Sequence[bytes],
    logprobs: Sequence[float | None],
    top: Sequence[Sequence[tuple[int, float]] | None] | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[TokenView]:
    """The tokens of a text as they are shown.

    Args:
        token_ids: the tokens
        token_bytes: each token's bytes (may split a character); empty without a tokenizer
        logprobs: each token's log-probability
        top: the most likely tokens in each token's place
        tokenizer: names the tokens; without it they have numbers
    """
    name = "#{}".format if tokenizer is None else tokenizer.token
    special = frozenset() if tokenizer is None else tokenizer.special_ids
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    views = []
    for i, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        own = token in special
        text = f"{token} " if not token_bytes else name(token) if own else decoder.decode(token_bytes[i])
        best = (top[i] if top else None) or ()
        views.append(TokenView(text, logprob, [(name(other), value) for other, value in best], name(token), own))
    return views


def results_html(results: Iterable[tuple[Sequence[TokenView], Sequence[TokenView], str]]) -> str:
    """Texts: each one's given tokens, its generated tokens, and a line that says more."""
    parts = []
    for given, generated, note in results:
        rows = max((len(_card(token).splitlines()) for token in (*given, *generated)), default=0)
        prompt = f'<span class="given">{"".join(map(_span, given))}</span>' if given else ""
        spans = prompt + "".join(map(_span, generated))
        parts.append(f'<div class="tokens shaded" style="--rows:{rows}">{spans}</div>')
        parts.append(f'<div class="note">{escape(note)}</div>')
    return _wrapped("".join(parts))


def table_html(title: str, values: Mapping[str, object]) -> str:
    """A title, and a table of the names and values that are not None."""
    texts = {
        name.replace("_", " "): f"{value:,}" if type(value) is int else str(value)
        for name, value in values.items()
        if value is not None
    }
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in texts.items())
    return _wrapped(f"<strong>{escape(title)}</strong><table>{rows}</table>")


def grid_html(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A title, a table with a row of names above it, and a line below; numbers ("-1.5", "< 0.1 %") to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [
            f'{tag} class="line"' if "[" in cell else f'{tag} class="number"' if _NUMBER.match(cell) else tag
            for cell in cells
        ]
        parts = [f"<{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)]
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    below = f'<div class="note">{escape(note)}</div>' if note else ""
    return _wrapped(f"<strong>{escape(title)}</strong><table>{line(head, 'th')}{body}</table>{below}")


_NUMBER = re.compile(r"(< |-)?\d|-$")


def picture_html(title: str, svg: str, note: str = "") -> str:
    """A title, a drawing of `<svg>` that has the notebook's colours, and a line below."""
    below = f'<div class="note">{escape(note)}</div>' if note else ""
    return _wrapped(f'<strong>{escape(title)}</strong><div class="picture">{svg}</div>{below}')


def percent(probability: float) -> str:
    """A probability as the server's page writes it: two digits, "< 0.1 %"."""
    value = 100 * probability
    return "< 0.1 %" if 0 < value < 0.1 else f"{value:.1f} %" if value < 9.95 else f"{value:.0f} %"


def token_text(token: str, length: int = 1000) -> str:
    """A token as a label in a drawing: spaces are visible, control characters escaped, the end cut off."""
    text = printable(token).replace(" ", "␣")
    return text if len(text) <= length else f"{text[: length - 1]}…"


def brief(kind: str, /, **values: object) -> str:
    """A `repr` of the values that are not None, long ones shortened."""
    return f"{kind}({', '.join(f'{name}={_SHORT.repr(value)}' for name, value in values.items() if value is not None)})"


_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist = 120, 400, 8


@cache
def _style() -> str:
    shared = TOKENS_CSS.read_text(encoding="utf-8").partition("*/")[2]
    return f"<style>.minillm {{{STYLE}{shared}}}</style>"


def _wrapped(content: str) -> str:
    return f'<div class="minillm">{_style()}{content}</div>'


def _span(token: TokenView) -> str:
    text = printable(token.text) if token.special else token.text
    if token.logprob is None:
        return f'<span class="special">{escape(text)}</span>' if token.special else escape(text)
    kind = "tok special" if token.special else "tok"
    card = escape(_card(token)).replace("\n", "&#10;")
    shade = f"--logprob:{max(token.logprob, -99):.3f}"
    word = text.lstrip(" ") or text  # spaces before a word have no shade
    spaces = text[: len(text) - len(word)]
    mark = "" if word else f' data-mark="{escape(printable(token.name))}"'  # drawn by the style sheet, so never copied
    return f'{spaces}<span class="{kind}" tabindex="0" style="{shade}" data-card="{card}"{mark}>{escape(word)}</span>'


def _card(token: TokenView) -> str:
    """The lines that are shown beside a token under the pointer: itself, and what else was likely, with bars."""
    if token.logprob is None:
        return ""
    rows = [*token.top]
    if token.name not in (name for name, _ in rows):
        rows.append((token.name, token.logprob))
    names = [printable(name).replace(" ", "␣")[:24] for name, _ in rows]
    width = max(map(len, names))
    return "\n".join(
        f"{'▸' if name == token.name else ' '} {shown:<{width}}  {percent(math.exp(value)):>7}  {_bar(math.exp(value))}"
        for shown, (name, value) in zip(names, rows, strict=True)
    )


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * BAR * 8), 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths]
