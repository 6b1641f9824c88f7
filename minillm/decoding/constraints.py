"""Constraints of beam search: phrases that a text has to contain, and how far a text has come with them.

A constraint is an object of the form that transformers 4.55 gave them, so that those written for it work here:

    seqlen                most tokens that it takes
    advance()             the next token, or a list of tokens any of which is a next one; None if there is none
    does_advance(token)   whether a token is a next one
    update(token)         take a token; returns (stepped, completed, reset)
    remaining()           tokens that are still to come
    copy()                a new one, from the beginning

A text works at one constraint at a time. Its next token is that of the constraint begun, or else it may begin any that
is pending; a token that breaks a constraint off puts it back among those pending, and begins no other.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ParameterError, shown
from .field_values import phrases as read_phrases
from .functions import called

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

Phrase = tuple[int, ...]


class DisjunctiveConstraint:
    """One of several phrases of token ids, none of which begins with another.

    Example:
        >>> color = DisjunctiveConstraint([[843], [804]])  # " black", " white"
        >>> engine.generate("A list of colors: red,", num_beams=3, max_new_tokens=6, constraints=[color]).text
        ' black, orange, yellow,'
    """

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]) -> None:
        """Take the phrases.

        Raises:
            ParameterError: there is none, or one is empty or begins with another.
        """
        try:
            self.phrases: tuple[Phrase, ...] = read_phrases(nested_token_ids)
        except ValueError:
            self.phrases = ()
        if not self.phrases:
            raise ParameterError(
                "a constraint takes phrases of token ids, at least one, none empty, found " + shown(nested_token_ids)
            )
        if (pair := redundant(self.phrases)) is not None:
            raise ParameterError(f"the phrase {list(pair[1])} begins with {list(pair[0])}: leave it out")
        self.seqlen = max(map(len, self.phrases))
        self.begun: Phrase = ()
        """The tokens of a phrase so far"""

    def advance(self) -> list[int] | None:
        """The next tokens."""
        length = len(self.begun)
        following = [p[length] for p in self.phrases if p[:length] == self.begun and len(p) > length]
        return list(dict.fromkeys(following)) or None

    def does_advance(self, token_id: int) -> bool:
        """True if a token is a next one."""
        return token_id in (self.advance() or ())

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take a token. Returns whether it was a next one, whether it was the last, and whether all begins anew."""
        stepped = self.does_advance(token_id)
        self.begun = (*self.begun, token_id) if stepped else ()
        return stepped, self.begun in self.phrases, not stepped

    def remaining(self) -> int:
        """The number of tokens to come, by the longest phrase."""
        return 0 if self.begun in self.phrases else self.seqlen - len(self.begun)

    def copy(self) -> "DisjunctiveConstraint":
        """A new one, from the beginning."""
        twin = copy.copy(self)
        twin.begun = ()
        return twin


class PhrasalConstraint(DisjunctiveConstraint):
    """A phrase of token ids.

    Example:
        >>> moon = PhrasalConstraint(engine.tokenizer.encode(" moon", add_special_tokens=False))
        >>> engine.generate("Once upon a time", num_beams=3, max_new_tokens=8, constraints=[moon]).text
        ' there was a kind wolf named moon'
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Take the phrase.

        Raises:
            ParameterError: it is empty.
        """
        super().__init__([token_ids])


def redundant(phrases: Sequence[Phrase]) -> tuple[Phrase, Phrase] | None:
    """Two phrases of which the second begins with the first, or is the same; None if there are none."""
    pairs = pairwise(sorted(phrases))  # a phrase comes right after one that it begins with
    return next(((first, second) for first, second in pairs if second[: len(first)] == first), None)


def phrases_of(words: Sequence[Sequence[str]], tokenizer: "Tokenizer", vocab_size: int) -> list[tuple[Phrase, ...]]:
    """The phrases of words, each with alternatives: the tokens of each text where it follows another and a space.

    Raises:
        ParameterError: a text has no tokens, or others than those of the vocabulary.
    """
    before = tokenizer.encode("a", add_special_tokens=False)  # at the beginning, some tokenizers add a space
    forced = []
    for texts in words:
        text_of: dict[Phrase, str] = {}
        for text in texts:
            spaced = f" {text.removeprefix(' ')}"
            ids = tokenizer.encode(f"a{spaced}", add_special_tokens=False)
            apart = ids[: len(before)] == before
            ids = ids[len(before) :] if apart else tokenizer.encode(spaced, add_special_tokens=False)
            if not ids or max(ids) >= vocab_size:
                raise ParameterError(f"force_words: {shown(text)} has no tokens of the model's vocabulary")
            text_of[tuple(ids)] = text
        if (pair := redundant([*text_of])) is not None:
            shorter, longer = (shown(text_of[ids]) for ids in pair)
            raise ParameterError(f"force_words: {longer} begins with the tokens of {shorter}: leave it out")
        forced.append(tuple(text_of))
    return forced


class Progress(NamedTuple):
    """How far a text has come with its constraints."""

    pending: tuple[Any, ...]
    longest: int
    """The most tokens of a constraint"""
    current: Any = None
    """The constraint that has begun"""
    completed: int = 0

    @classmethod
    def of(cls, constraints: Sequence[Any]) -> "Progress":
        """The progress of an empty text."""
        return cls(tuple(constraint.copy() for constraint in constraints), max(c.seqlen for c in constraints))

    @property
    def done(self) -> bool:
        """True once the text has them all."""
        return not self.pending and self.current is None

    @property
    def bank(self) -> int:
        """The tokens that the longest constraint has for each completed one, and the longest less what is to come.

        Texts compete with those of their bank.
        """
        begun = 0 if self.current is None else self.longest - self.current.remaining()
        return self.completed * self.longest + begun

    def next_tokens(self) -> list[int]:
        """Tokens that bring a text forward.

        Raises:
            ParameterError: a constraint names something else than tokens.
        """
        tokens: list[int] = []
        for constraint in self.pending if self.current is None else (self.current,):
            answer = called(constraint.advance)
            answers = [] if answer is None else answer if isinstance(answer, list | tuple) else [answer]
            if not all(isinstance(token, Integral) for token in answers):
                raise ParameterError(f"constraints: {constraint!r} should advance by token ids, found {shown(answer)}")
            tokens += map(int, answers)
        return tokens

    def after(self, token: int) -> "Progress":
        """The progress with one more token."""
        if self.current is not None:
            return self._taken(token, self.current, self.pending)
        for i, constraint in enumerate(self.pending):
            if called(constraint.does_advance, token):
                return self._taken(token, constraint, self.pending[:i] + self.pending[i + 1 :])
        return self

    def _taken(self, token: int, constraint: Any, others: tuple[Any, ...]) -> "Progress":
        """The progress after a constraint has taken a token; the constraint itself stays as it is, for other texts."""
        ours = isinstance(constraint, DisjunctiveConstraint)
        current = copy.copy(constraint) if ours else copy.deepcopy(constraint)
        answer = called(current.update, token)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise ParameterError(
                f"constraints: {constraint!r} should return (stepped, completed, reset) from update, found"
                f" {shown(answer)}"
            )
        _, completed, reset = answer
        if reset:
            return self._replace(pending=(*others, constraint.copy()), current=None)
        if completed:
            return self._replace(pending=others, current=None, completed=self.completed + 1)
        return self._replace(pending=others, current=current)
