r"""Guided generation: only tokens that keep the text within a JSON schema, a regular expression, a grammar or a list.

The method is Willard and Louf's ("Efficient guided generation for large language models", arXiv 2307.09702): a
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
could write spaces without end. For the same reason the digits of its numbers have a limit (`number_limit`). Numbers of
a schema that llguidance would read inexactly are refused, or moved inwards (`schemas`).

A mask may take a millisecond (a counted repetition such as `[a-z]{1,400}`). Where the last one took long, the next one
is begun as soon as the token is known, in a thread beside the forward pass: llguidance works without Python's lock.
"""

import json
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.token_sampler import TokenSampler
from ..errors import ParameterError, install
from ..text.schemas import LIMIT_LINE, USUAL_DIGITS, digits_in, exact
from .number_limit import NumberLimit, TokenDigits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPACT_JSON: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_LIMITED = re.compile(re.escape(LIMIT_LINE).replace(re.escape("{}"), "([0-9]{1,4})"))
SLOW = 1e-4
"""CPU seconds of a mask from which on the next one is computed ahead: more than the hand-over to a thread costs"""


class Guide:
    """Grammar state of one continuation, which determines the allowed next tokens."""

    def __init__(
        self,
        field: str,
        matcher: "LLMatcher",
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        limit: NumberLimit | None = None,
    ) -> None:
        """`vocab_size`: the matcher's tokenizer's, at least the model's."""
        self._field = field
        self._limit = limit
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._next: _NextMask | None = None
        """The mask after the tokens so far, once it is computed or begun"""

    @property
    def words(self) -> int:
        """W, the number of words of 32 bits in a mask."""
        return -(-self._vocab_size // 32)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Set one bit for each allowed next token, the first in the lowest bit, and clear all others. mask: [W]

        Some token is always allowed: where a text can only end, the end-of-sequence tokens.

        Raises:
            ParameterError: nothing can follow, or the grammar exceeds a limit of llguidance; the message says which.
        """
        if self._next is None:
            self._next = self._new_mask()
        mask[:] = self._next.result()

    def push(self, token_id: int) -> None:
        """Advance by a token that `fill` allowed and that does not end the sequence.

        Raises:
            ParameterError: the grammar exceeds a limit of llguidance; the message says which.
        """
        before, self._next = self._next, None
        if before is not None:
            before.wait()
        with _refused(self._field):
            consumed = self._matcher.consume_token(token_id)
        if not consumed:
            raise _unsatisfied(self._field, self._matcher)
        if self._limit is not None:
            self._limit = self._limit.after(token_id)
        if before is not None and before.seconds > SLOW:
            self._next = self._new_mask()
            _HELPERS.compute(self._next)

    def fork(self) -> "Guide":
        """An independent copy, for a continuation that branches."""
        if self._next is not None:
            self._next.wait()
        twin = Guide(self._field, self._matcher.deep_copy(), self._eos_token_ids, self._vocab_size, self._limit)
        twin._next = self._next
        return twin

    def _new_mask(self) -> "_NextMask":
        return _NextMask(self._field, self._matcher, self._eos_token_ids, self.words, self._limit)


class _NextMask:
    """The mask of a matcher's next token: computed once, by the thread that comes first; others wait for it."""

    def __init__(
        self,
        field: str,
        matcher: "LLMatcher",
        eos_token_ids: tuple[int, ...],
        words: int,
        limit: NumberLimit | None,
    ) -> None:
        self.seconds = 0.0
        """CPU time that it took"""
        self._limit = limit
        self._field, self._matcher, self._eos_token_ids = field, matcher, eos_token_ids
        self._mask = np.zeros(words, np.uint32)
        self._error: BaseException | None = None
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._ended.acquire()

    def compute(self) -> None:
        """Compute it, unless some thread has begun."""
        if not self._begun.acquire(blocking=False):
            return
        began = time.thread_time()
        try:
            self._compute(self._mask)
        except BaseException as error:  # of the thread that asks for the result
            self._error = error
        finally:
            self.seconds = time.thread_time() - began
            self._ended.release()

    def wait(self) -> None:
        """Compute it, or wait until it is: from then on the matcher is free."""
        self.compute()
        with self._ended:
            pass

    def result(self) -> NDArray[np.uint32]:
        """The mask, [W].

        Raises:
            ParameterError: as `Guide.fill`.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._mask

    def _compute(self, mask: NDArray[np.uint32]) -> None:
        with _refused(self._field):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        may_end = self._matcher.is_accepting()
        if self._matcher.is_stopped() and not may_end:
            raise _unsatisfied(self._field, self._matcher)
        for token in self._eos_token_ids:  # one of them may be a text token, which would end the text too early
            bit = np.uint32(1 << token % 32)
            mask[token // 32] = mask[token // 32] | bit if may_end else mask[token // 32] & ~bit
        if self._limit is not None:
            self._limit.apply(mask)


class _Helpers:
    """Threads that compute masks beside a forward pass. They end when there is nothing to do."""

    def __init__(self) -> None:
        self._waiting: deque[weakref.ref[_NextMask]] = deque()  # of those that nobody wants any more nothing is done
        self._threads, self._most = 0, max(1, min(4, (os.cpu_count() or 1) // 2))
        self._lock = threading.Lock()

    def compute(self, mask: _NextMask) -> None:
        """Have a mask computed."""
        with self._lock:
            self._waiting.append(weakref.ref(mask))
            if self._threads == self._most or (self._threads and len(self._waiting) < 2):
                return
            self._threads += 1
        try:
            # No daemon: the interpreter waits for it at its end, and does not unwind it inside llguidance.
            threading.Thread(target=self._work, name="minillm-masks", daemon=False).start()
        except RuntimeError:  # the system has no thread left: the mask is computed where it is needed
            with self._lock:
                self._threads -= 1

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                mask = self._waiting.popleft()()
            if mask is not None:
                mask.compute()
            del mask


_HELPERS = _Helpers()


def _unsatisfied(field: str, matcher: "LLMatcher") -> ParameterError:
    reason = _first_words(matcher.get_error())
    return ParameterError(f"{field} cannot be satisfied: no token is allowed next (llguidance: {reason})")


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


def restrict(
    sampler: TokenSampler, logits: Any, rows: Sequence[int], guides: Sequence[Guide], originals: Sequence[Any]
) -> list[tuple[int, Exception]]:
    """Set tokens that each guide does not allow to -inf in its row, in place.

    Args:
        sampler: the host's sampler
        logits: [R, V], after the processors
        rows: [G], the row of each guide
        guides: G of them, of one model
        originals: each guide's row before the processors [V], used if these leave no allowed token; None if there
            are none

    Returns:
        The guides that failed, by index, with their errors; their rows are as they were.
    """
    masks = np.empty((len(guides), guides[0].words), np.uint32)
    failures: list[tuple[int, Exception]] = []
    for i, guide in enumerate(guides):
        try:
            guide.fill(masks[i])
        except Exception as error:
            failures.append((i, error))
            masks[i] = ~np.uint32(0)
    for i in np.flatnonzero(~sampler.keep_allowed(logits, rows, masks)).tolist():
        if originals[i] is not None:
            logits[rows[i]] = originals[i]
            sampler.keep_allowed(logits, rows[i : i + 1], masks[i : i + 1])
    return failures


class GuideMaker:
    """Makes the guides of one model's requests. Compiled grammars are cached."""

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        """Take the text of a tokenizer.json and its number of tokens.

        The model may have more or fewer: ids beyond the tokenizer's have no text and are never allowed.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._tokenizer_for = lru_cache(maxsize=4)(self._read_tokenizer)
        self._digits_for = lru_cache(maxsize=4)(self._read_digits)
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
            raise ParameterError(f"{field} needs llguidance: {install('guided')}") from None
        size = max(vocab_size, self._vocab_size)
        tokenizer = self._tokenizer_for(field, eos_token_ids, size)
        with _refused(field):
            matcher = LLMatcher(tokenizer, _grammar(field, value), log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        most = _most_digits(field, value)
        limit = None if most is None else NumberLimit(self._digits_for(field, eos_token_ids, size), most)
        guide = Guide(field, matcher, eos_token_ids, size, limit)
        guide.fill(np.zeros(guide.words, np.uint32))
        return guide

    def _read_tokenizer(self, field: str, eos_token_ids: tuple[int, ...], size: int) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._tokenizer_json, n_vocab=size, eos_token=list(eos_token_ids))
        except ValueError as error:
            reason = _first_words(str(error))
            raise ParameterError(f"{field}: llguidance cannot read this model's tokenizer: {reason}") from None

    def _read_digits(self, field: str, eos_token_ids: tuple[int, ...], size: int) -> TokenDigits:
        return TokenDigits(self._tokenizer_for(field, eos_token_ids, size), size, eos_token_ids)


def _most_digits(field: str, value: str) -> int | None:
    """The most digits of a part of a number; None if a guide is not of JSON, or the user's own grammar."""
    if field == "guided_json":
        return digits_in(value)
    limited = _LIMITED.match(value) if field == "guided_grammar" else None
    return None if limited is None else max(USUAL_DIGITS, int(limited[1]))


def _grammar(field: str, value: Any) -> str:
    """The grammar in llguidance's format.

    While a grammar allows only one next byte, llguidance looks ahead. In a grammar that can never end
    (`start: /a*/ start`) this loops without a limit and ignores Ctrl-C; detecting such grammars would take a parser of
    our own. So lookahead is switched off in grammars (the last such line counts). The other kinds of guide cannot
    express such grammars.
    """
    from llguidance import LLMatcher

    if field == "guided_json":
        schema = exact(json.loads(value), field)
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT_JSON))
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
