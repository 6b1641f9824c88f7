r"""Guided generation: only tokens that keep the text within a JSON schema, a regular expression, a grammar or a list.

The method is that of Willard and Louf ("Efficient guided generation for large language models", arXiv 2307.09702): a
parser follows the generated text and determines, before each choice, which tokens of the vocabulary can come next; the
scores of all others become -inf. The rest keep their proportions, so sampling draws from the model's own distribution,
renormalised over the allowed tokens, token by token. The parser is the library llguidance (extra `guided`).

The end-of-sequence tokens are allowed exactly where the text may end, so a result that ends by itself is always valid;
one cut off by max_new_tokens or a stop string need not be. Where only one text can follow, llguidance allows only the
tokens that the tokenizer would split it into (not with guided_grammar, see `_grammar`). A grammar describes the
generated text from its first character: most models need a leading space in it (" red" rather than "red").

The mask is applied after the logits processors. If these leave no token that the guide allows (min_new_tokens forbids
the end of a complete text), the guide wins: the tokens it allows get back the model's scores.

A regular expression is written as in Rust, without look-around; \d is any digit of Unicode, [0-9] the usual ten. A
JSON schema allows no white space outside of strings, unless its "x-guidance" says otherwise: if it did, a weak model
could write spaces without end.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPACT_JSON: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class Guide:
    """Grammar state of one continuation, which determines the allowed next tokens."""

    def __init__(self, field: str, matcher: "LLMatcher", eos_token_ids: tuple[int, ...]) -> None:
        self._field = field
        self._matcher = matcher
        self._eos_token_ids = list(eos_token_ids)

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Mask of allowed next tokens, [V]. Never empty: a text that can only end allows the end-of-sequence tokens.

        Raises:
            ParameterError: nothing can follow, or the grammar exceeds a limit of llguidance; the message says which.
        """
        with _refused(self._field):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)  # one bit a token
        allowed = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(np.bool_)  # [V / 8] -> [V]
        may_end = self._matcher.is_accepting()
        if self._matcher.is_stopped() and not may_end:
            self._fail()
        allowed[self._eos_token_ids] = may_end  # one of them may be a text token, which would end the text too early
        return allowed

    def push(self, token_id: int) -> None:
        """Advance by a token that `allowed` marked and that does not end the sequence.

        Raises:
            ParameterError: the grammar exceeds a limit of llguidance; the message says which.
        """
        with _refused(self._field):
            consumed = self._matcher.consume_token(token_id)
        if not consumed:
            self._fail()

    def fork(self) -> "Guide":
        """An independent copy, for a continuation that branches."""
        return Guide(self._field, self._matcher.deep_copy(), tuple(self._eos_token_ids))

    def _fail(self) -> None:
        reason = _first_words(self._matcher.get_error())
        raise ParameterError(f"{self._field} cannot be satisfied: no token is allowed next (llguidance: {reason})")


@contextmanager
def _refused(field: str) -> Iterator[None]:
    """Convert llguidance's exceptions, panics included, to ParameterError."""
    try:
        yield
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        if not (isinstance(error, ValueError) or type(error).__name__ == "PanicException"):
            raise
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"{field} was refused by llguidance: {_first_words(str(error))}") from None


def restrict(logits: Any, guides: Sequence[Guide | None], model_logits: Any, xp: ModuleType) -> None:
    """Set tokens that each row's guide does not allow to -inf, in place.

    Args:
        logits: [R, V], after the processors
        guides: one for each of the R rows; None leaves a row as it is
        model_logits: [R, V], before the processors: used for rows in which these leave no allowed token
        xp: the array module of both
    """
    for row, guide in enumerate(guides):
        if guide is None:
            continue
        allowed = xp.asarray(guide.allowed(logits.shape[-1]))
        scores = xp.where(allowed, logits[row], -xp.inf)
        if scores.max() == -xp.inf:
            scores = xp.where(allowed, model_logits[row], -xp.inf)
        logits[row] = scores


class GuideMaker:
    """Makes the guides of one model's requests. Compiled grammars are cached."""

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        """Take the text of a tokenizer.json and its number of tokens.

        The model may have more or fewer: ids beyond the tokenizer's have no text and are never allowed.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._tokenizer_for = lru_cache(maxsize=4)(self._read_tokenizer)
        self._compiled = lru_cache(maxsize=32)(self._compile)

    def maker(self, field: str, value: Any, eos_token_ids: tuple[int, ...], vocab_size: int) -> Callable[[], Guide]:
        """A factory of guides, called for each continuation of a request.

        Args:
            field: one of settings.GUIDES
            value: its value in Settings
            eos_token_ids: at least one
            vocab_size: vocabulary size of the model

        Raises:
            ParameterError: llguidance is not installed, or it cannot use the value; the message quotes its reason.
        """
        return self._compiled(field, value, eos_token_ids, vocab_size).fork

    def _compile(self, field: str, value: Any, eos_token_ids: tuple[int, ...], vocab_size: int) -> Guide:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ParameterError(f"{field} needs llguidance: pip install 'minillm[guided]'") from None
        tokenizer = self._tokenizer_for(field, eos_token_ids, max(vocab_size, self._vocab_size))
        with _refused(field):
            matcher = LLMatcher(tokenizer, _grammar(field, value), log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        guide = Guide(field, matcher, eos_token_ids)
        guide.allowed(vocab_size)
        return guide

    def _read_tokenizer(self, field: str, eos_token_ids: tuple[int, ...], size: int) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._tokenizer_json, n_vocab=size, eos_token=list(eos_token_ids))
        except ValueError as error:
            reason = _first_words(str(error))
            raise ParameterError(f"{field}: llguidance cannot read this model's tokenizer: {reason}") from None


def _grammar(field: str, value: Any) -> str:
    """The grammar in llguidance's format.

    While a grammar allows only one next byte, llguidance looks ahead. In a grammar that can never end
    (`start: /a*/ start`) this loops without a limit and ignores Ctrl-C; detecting such grammars would take a parser of
    our own. So lookahead is switched off in grammars (the last such line counts). The other kinds of guide cannot
    express such grammars.
    """
    from llguidance import LLMatcher

    if field == "guided_json":
        return str(LLMatcher.grammar_from_json_schema(value, defaults=COMPACT_JSON))
    if field == "guided_regex":
        return str(LLMatcher.grammar_from_regex(value))
    if field == "guided_grammar":
        return str(LLMatcher.grammar_from_lark(f'{value}\n%llguidance {{"no_forcing": true}}\n'))
    # One terminal: the parser can follow at most 2,000 alternatives at once, a regular expression any number.
    return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}\n"))


def _first_words(message: str, most: int = 300) -> str:
    """The reason in an llguidance message, in one line of at most `most` characters; further lines show the place."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    words = " ".join([*lines[:1], *reasons])
    return words if len(words) <= most else f"{words[:most]}..."
