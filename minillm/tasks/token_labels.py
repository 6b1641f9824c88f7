"""Labels of tokens, and entities: neighbouring tokens of one label, as transformers' token-classification finds them.

Source: transformers 5.23, `pipelines/token_classification.py`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..reference.softmax import softmax
from ..text.tokenizer import Tokenizer
from ..text.tokenizer.aligned import AlignedText, joined_tokens, marks_continued_words, unknown_id

Aggregation = Literal["none", "simple", "first", "average", "max"]
"""Each token by itself; or entities by the likeliest label of each token, or of each word, which is that of its first
token, the likeliest in the mean of its tokens, or that of its surest token"""
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True)
class Entity:
    """A token or a run of tokens with its label."""

    label: str
    """Without B- and I- if tokens are joined"""
    score: float
    """Its probability; of several tokens or words the mean"""
    word: str
    """The tokens as text"""
    start: int
    """Its first character in the text"""
    end: int
    """The character after its last"""
    index: int | None = None
    """Number of the token in the text, special tokens counted; None if tokens are joined"""


@dataclass(frozen=True)
class _Token:
    word: str
    scores: NDArray[np.float32]
    """[labels]"""
    start: int
    end: int
    index: int
    continues: bool
    """Whether it continues the word of the token before"""


def entities_of(
    text: str,
    windows: Sequence[AlignedText],
    logits: Sequence[NDArray[np.float32]],
    names: Sequence[str],
    tokenizer: Tokenizer,
    aggregation: Aggregation,
    ignored: Collection[str],
) -> list[Entity]:
    """The entities of a text.

    Args:
        text: it
        windows: in which it was computed
        logits: of each window's tokens [T, labels]
        names: of the labels
        tokenizer: the model's
        aggregation: how tokens are joined
        ignored: labels that are left out
    """
    entities: list[Entity] = []
    for window, rows in zip(windows, logits, strict=True):
        tokens = _tokens(text, window, softmax(rows, np), tokenizer)
        if aggregation in ("none", "simple"):
            labelled = [_labelled(token.scores, names, [token]) for token in tokens]
        else:
            labelled = [_word(word, names, aggregation, tokenizer) for word in _words(tokens)]
        if aggregation != "none":
            labelled = [_joined(run, tokenizer) for run in _runs(labelled)]
        entities += [entity for entity in labelled if entity.label not in ignored]
    return _distinct(entities) if len(windows) > 1 else entities


def _tokens(text: str, window: AlignedText, scores: NDArray[np.float32], tokenizer: Tokenizer) -> list[_Token]:
    """The tokens of a text, without the special ones around it."""
    marked, unknown = marks_continued_words(tokenizer), unknown_id(tokenizer)
    tokens = []
    for i, owner in enumerate(window.owners):
        if owner is None:
            continue
        name, (start, end) = window.tokens[i], window.spans[i]
        after_space = start == 0 or " " in text[start - 1 : start + 1]
        continues = len(name) != end - start if marked else not after_space
        if window.encoded.token_ids[i] == unknown:
            name, continues = text[start:end], False
        tokens.append(_Token(name, scores[i], start, end, i, continues))
    return tokens


def _labelled(
    scores: NDArray[np.float32], names: Sequence[str], tokens: Sequence[_Token], word: str | None = None
) -> Entity:
    """Tokens with the likeliest label by these scores [labels]."""
    best = int(scores.argmax())
    first, last = tokens[0], tokens[-1]
    index = first.index if len(tokens) == 1 else None
    return Entity(names[best], float(scores[best]), first.word if word is None else word, first.start, last.end, index)


def _words(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """Runs of tokens that are one word."""
    words: list[list[_Token]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _word(tokens: Sequence[_Token], names: Sequence[str], aggregation: Aggregation, tokenizer: Tokenizer) -> Entity:
    """A word with its label."""
    if aggregation == "first":
        scores = tokens[0].scores
    elif aggregation == "max":
        scores = max(tokens, key=lambda token: float(token.scores.max())).scores
    else:
        scores = np.mean([token.scores for token in tokens], axis=0)  # [tokens, labels] -> [labels]
    return _labelled(scores, names, tokens, joined_tokens(tokenizer, [token.word for token in tokens]))


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, "B-", and its name without that or "I-"."""
    return (label[:2] == "B-", label[2:]) if label[:2] in ("B-", "I-") else (False, label)


def _runs(entities: Sequence[Entity]) -> list[list[Entity]]:
    """Neighbours of one tag, of which none but the first begins an entity."""
    runs: list[list[Entity]] = []
    for entity in entities:
        begins, tag = _tag(entity.label)
        if runs and tag == _tag(runs[-1][-1].label)[1] and not begins:
            runs[-1].append(entity)
        else:
            runs.append([entity])
    return runs


def _joined(run: Sequence[Entity], tokenizer: Tokenizer) -> Entity:
    """A run as one entity."""
    return Entity(
        run[0].label.split("-", 1)[-1],
        float(np.mean([entity.score for entity in run])),
        joined_tokens(tokenizer, [entity.word for entity in run]),
        run[0].start,
        run[-1].end,
    )


def _distinct(entities: Sequence[Entity]) -> list[Entity]:
    """Entities of several windows by their place; of two that overlap the longer, or of equal ones the surer."""
    distinct: list[Entity] = []
    for entity in sorted(entities, key=lambda entity: entity.start):
        before = distinct[-1] if distinct else None
        if before is None or not before.start <= entity.start < before.end:
            distinct.append(entity)
        elif (entity.end - entity.start, entity.score) > (before.end - before.start, before.score):
            distinct[-1] = entity
    return distinct
