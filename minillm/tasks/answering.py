"""Answers to questions: the span of a text that is likeliest to begin and to end there.

The probability of a span is that of its first token as a start times that of its last as an end, each among the tokens
of the text and [CLS], which stands for "no answer" (Devlin et al., arXiv 1810.04805, section 4.3).

Source: transformers 4.57, `pipelines/question_answering.py`; transformers 5 has no such pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..reference.softmax import softmax
from ..text.tokenizer.aligned import AlignedText

LONGEST_WINDOW, LARGEST_STRIDE = 384, 128
"""Tokens of a window, and those that neighbours share, unless a call says otherwise"""


@dataclass(frozen=True)
class Answer:
    """A span of the text that was asked about."""

    answer: str
    """Its text; "" if there is no answer"""
    score: float
    """Its probability; equal texts of several places or windows share theirs"""
    start: int
    """Its first character in the text"""
    end: int
    """The character after its last"""


def answers_of(
    context: str,
    windows: Sequence[AlignedText],
    logits: Sequence[NDArray[np.float32]],
    *,
    top_k: int,
    max_answer_tokens: int,
    allow_none: bool,
    whole_words: bool,
    first_stands_for_none: bool,
) -> list[Answer]:
    """The best answers, the likeliest first.

    Args:
        context: the text
        windows: pairs of the question and a part of the text
        logits: of each window's tokens as start and as end [T, 2]
        top_k: answers at most
        max_answer_tokens: tokens of an answer at most
        allow_none: whether "no answer" is among them
        whole_words: answers begin and end with words
        first_stands_for_none: whether the first token is [CLS]
    """
    answers: list[Answer] = []
    least_none = float("inf")
    for window, rows in zip(windows, logits, strict=True):
        own = np.array([owner == 1 for owner in window.owners])  # [T]
        own[0] = own[0] or first_stands_for_none
        start, end = (softmax(np.where(own, column, np.float32(-10_000)), np) for column in rows.T)  # [T] each
        least_none = min(least_none, float(start[0] * end[0]))
        start[0] = end[0] = 0
        count = 2 * top_k + 10 if whole_words else top_k  # words may be equal where tokens differ
        for i, j, score in _best_spans(start, end, own, count, max_answer_tokens):
            first, last = (window.word_span(place) if whole_words else None for place in (i, j))
            if first is None or last is None:
                first, last = window.spans[i], window.spans[j]
            _add(answers, Answer(context[first[0] : last[1]], score, first[0], last[1]))
    if allow_none:
        answers.append(Answer("", least_none, 0, 0))
    return sorted(answers, key=lambda answer: -answer.score)[:top_k]


def _best_spans(
    start: NDArray[np.float32], end: NDArray[np.float32], own: NDArray[np.bool_], count: int, longest: int
) -> list[tuple[int, int, float]]:
    """First and last token and the probability of the likeliest spans. [T], [T], [T]"""
    scores = np.tril(np.triu(np.outer(start, end)), longest - 1)  # [T] x [T] -> [T, T]
    order = np.argsort(-scores, axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(order, scores.shape), strict=True)
    return [(int(i), int(j), float(scores[i, j])) for i, j in places if own[i] and own[j]]


def _add(answers: list[Answer], answer: Answer) -> None:
    """Add an answer, or its probability to that of an equal one."""
    for i, other in enumerate(answers):
        if other.answer.lower() == answer.answer.lower():
            answers[i] = replace(other, score=other.score + answer.score)
            return
    answers.append(answer)
