"""When each token and word was said: cross-attention of the heads that follow the speech, aligned with the tokens.

    w = softmax(q k)              of the alignment heads, each token's over the positions of the sound   [heads, T, S]
    w = median over time of (w - mean over tokens) / (standard deviation over tokens)
    path = dynamic time warping of -(mean over heads of w): the cheapest way through [T, S] that goes back in neither

A token ends where the path enters its row (openai/whisper's timing.py; transformers' `_extract_token_timestamps`).
Tokens are joined to words where a space or punctuation begins, in languages without spaces at each character.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..text.languages import LANGUAGES
from ..text.tokenizer import Tokenizer
from .speech_tokens import SECONDS_PER_POSITION

WITHOUT_SPACES = ("chinese", "japanese", "thai", "lao", "myanmar", "cantonese")
OPENING = "\"'“¡¿([{-"
"""Punctuation that belongs to the word after it"""
CLOSING = "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word before it"""
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""In the text of tokens that end within a character"""


@dataclass(frozen=True)
class Word:
    """A word of a transcript."""

    text: str
    """With the space before it"""
    start: float
    """Seconds from the beginning of the sound"""
    end: float


def token_times(weights: NDArray[np.float32], width: int) -> list[float]:
    """The seconds at which tokens are said.

    Args:
        weights: of the alignment heads, [heads, T, S]
        width: positions under the median filter, an odd number

    Returns:
        [T]
    """
    if not weights.shape[1]:
        return []
    with np.errstate(invalid="ignore", divide="ignore"):  # a single token deviates from no mean
        normal = (weights - weights.mean(axis=1, keepdims=True)) / weights.std(axis=1, keepdims=True)
    matrix = median_filter(normal, width).mean(axis=0)  # [heads, T, S] -> [T, S]
    rows, columns = dynamic_time_warping(-matrix.astype(np.float64))
    entered = np.diff(rows, prepend=-1) > 0
    return [float(position) * SECONDS_PER_POSITION for position in columns[entered]]


def median_filter(x: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The median of each number and its neighbours along the last axis, which is reflected at its ends."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)  # [..., S] -> [..., S, width]
    return np.sort(windows, axis=-1)[..., half]


def dynamic_time_warping(matrix: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest path from the first to the last corner, a step down, right or both at a time.

    Of equal costs a step to the right wins, then one down. All cells of a diagonal are computed at once.

    Args:
        matrix: the cost of each cell, [T, S]

    Returns:
        The rows and the columns of the path's cells.
    """
    T, S = matrix.shape
    cost = np.full((T + 1, S + 1), np.inf, np.float32)
    steps = np.full((T + 1, S + 1), 2, np.int8)
    """0: down and right, 1: down, 2: right; how the path comes to a cell"""
    cost[0, 0] = 0
    for diagonal in range(2, T + S + 1):
        i = np.arange(max(1, diagonal - S), min(T, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        before = np.choose(step, (both, down, right))
        cost[i, j] = matrix[i - 1, j - 1] + before
        steps[i, j] = step
    steps[0, :], steps[:, 0] = 2, 1
    row, column = T, S
    path = []
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        back = int(steps[row, column])
        row, column = row - (back != 2), column - (back != 1)
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def words_of(
    token_ids: Sequence[int], spans: Sequence[tuple[float, float]], tokenizer: Tokenizer, language: str | None
) -> list[Word]:
    """The words of a segment.

    Args:
        token_ids: without those of times
        spans: when each token is said, from and to
        tokenizer: the model's
        language: its code, or None
    """
    groups = characters(token_ids, tokenizer)
    if LANGUAGES.get(language or "en") not in WITHOUT_SPACES:
        groups = spaced(groups)
    return [Word(text, spans[places[0]][0], spans[places[-1]][1]) for text, places in punctuated(groups)]


Group = tuple[str, list[int]]
"""A text, and the places of its tokens"""


def characters(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[Group]:
    """The shortest groups of tokens that are whole characters."""
    whole = tokenizer.decode(list(token_ids))
    groups: list[Group] = []
    first, offset = 0, 0
    for place in range(len(token_ids)):
        text = tokenizer.decode(list(token_ids[first : place + 1]))
        cut = text.find(REPLACEMENT)
        if cut < 0 or offset + cut >= len(whole) or whole[offset + cut] == REPLACEMENT:
            groups.append((text, list(range(first, place + 1))))
            first, offset = place + 1, offset + len(text)
    return groups


def spaced(groups: Sequence[Group]) -> list[Group]:
    """Groups joined up to the next space or punctuation."""
    words: list[Group] = []
    for text, places in groups:
        if text.startswith(" ") or text.strip() in PUNCTUATION or not words:
            words.append((text, places))
        else:
            words[-1] = words[-1][0] + text, [*words[-1][1], *places]
    return words


def punctuated(groups: Sequence[Group]) -> list[Group]:
    """Groups with the punctuation that belongs to them."""
    words: list[Group] = []
    for text, places in reversed(groups):
        if words and text.startswith(" ") and text.strip() in OPENING:
            text, places = text + words[-1][0], [*places, *words.pop()[1]]
        words.append((text, places))
    joined: list[Group] = []
    for text, places in reversed(words):
        if joined and not joined[-1][0].endswith(" ") and text in CLOSING:
            text, places = joined[-1][0] + text, [*joined.pop()[1], *places]
        joined.append((text, places))
    return [word for word in joined if word[0]]
