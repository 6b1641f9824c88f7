"""The rules that a request's settings set for its rows of logits, applied to the rows of many requests in one pass.

The requests of a batch may have any settings. Each kind of processor runs once, with parameters for each row, over the
rows that it concerns; where it cannot, once for each group of equal ones. All work in place, so that a row costs only
what is done to it. A row's result is the same, bit for bit, whatever rows are beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.chooser import Chooser
from ..reference.sampling import Parameters
from .continuation import Continuation
from .filters import MinP, Temperature, TopK, TopP, build_filters
from .guided import restrict
from .history import History, Tally
from .processors import InPlace, LogitsProcessor, no_token_left, numbered_processors, rows_without_a_token
from .settings import Settings

if TYPE_CHECKING:
    from .strategy import State

Growing = Sequence[tuple["State", Continuation]]
"""Continuations that get a token, each with its request's state"""

FEW = 128
"""Tokens of a row that are looked at first"""

ARGMAX = Parameters(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
UNFILTERED = ARGMAX._replace(temperature=1.0)


@dataclass(frozen=True, eq=False)
class Rules:
    """A request's settings, as they are applied to each of its rows."""

    processors: tuple[tuple[int, LogitsProcessor], ...]
    """Each with its place in the order"""
    filters: tuple[LogitsProcessor, ...]
    """Filters that mask the row before the draw, which does not support them"""
    draw: Parameters
    """Parameters of `Chooser.sample`; a temperature of 0 takes the most likely token"""
    top_logprobs: int | None
    """Number of log-probabilities returned beside the chosen token's; None: not even its own"""

    @classmethod
    def of(cls, settings: Settings, *, masked: bool = False) -> "Rules":
        """The rules of some settings; if `masked`, all filters mask the row."""
        processors = numbered_processors(settings)
        top_logprobs = settings.top_logprobs if settings.logprobs else None
        if not settings.do_sample:
            return cls(processors, (), ARGMAX, top_logprobs)
        filters = build_filters(settings)
        if not masked and all(isinstance(filter_, Temperature | TopK | TopP | MinP) for filter_ in filters):
            draw = Parameters(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
            return cls(processors, (), draw, top_logprobs)
        return cls(processors, filters, UNFILTERED, top_logprobs)

    @cached_property
    def changes(self) -> bool:
        """Whether the logits are changed before a token is chosen."""
        return bool(self.processors or self.filters)

    @cached_property
    def forbids(self) -> bool:
        """Whether a processor may forbid a token."""
        return any(getattr(processor, "forbids", True) for _, processor in self.processors)


def rules_of(state: "State") -> Rules:
    """The rules of a request that a strategy has begun."""
    assert state.rules is not None
    return state.rules


def apply_rules(chooser: Chooser, logits: Any, places: Sequence[int], growing: Growing) -> None:
    """Apply processors, then guides, then filters to the row of each of C continuations, in place.

    A continuation that has no token left, or whose guide fails, gets the error in its request's `State.error`; any
    choice from its row will do.

    Args:
        chooser: the host's chooser
        logits: [R, V]
        places: [C], the row of each continuation
        growing: the C continuations
    """
    rules = [rules_of(state) for state, _ in growing]
    guided = [i for i, (_, continuation) in enumerate(growing) if continuation.guide is not None]
    unprocessed = {i: logits[places[i]].copy() for i in guided if rules[i].processors}
    _apply_processors(chooser, logits, places, growing, rules)
    if guided:
        guides = [guide for _, continuation in growing if (guide := continuation.guide) is not None]
        originals = [unprocessed.get(i) for i in guided]
        for i, error in restrict(chooser, logits, [places[i] for i in guided], guides, originals):
            growing[guided[i]][0].error = error
    # Before the filters: they keep a token in each row that has one, and fail on a row that has none.
    doubtful = [i for i, rule in enumerate(rules) if rule.forbids or growing[i][1].guide is not None]
    if doubtful:  # nearly always some of the first tokens are left
        few = logits[np.asarray([places[i] for i in doubtful]), :FEW]
        doubtful = [doubtful[n] for n in np.flatnonzero(rows_without_a_token(few, chooser.xp))]
    for i in doubtful:
        if rows_without_a_token(logits[places[i]], chooser.xp):
            growing[i][0].error = growing[i][0].error or no_token_left()
            logits[places[i]] = 0.0
    groups: dict[tuple[LogitsProcessor, ...], list[int]] = {}
    for place, rule in zip(places, rules, strict=True):
        if rule.filters:
            groups.setdefault(rule.filters, []).append(place)
    for filters, rows in groups.items():
        for filter_ in filters:
            _apply(filter_, History.of([]), logits, rows, chooser.xp)


def _apply_processors(
    chooser: Chooser, logits: Any, places: Sequence[int], growing: Growing, rules: Sequence[Rules]
) -> None:
    """Apply each kind of processor, in order, to all rows that have one."""
    kinds: dict[int, list[tuple[int, LogitsProcessor]]] = {}  # by place in the order: sequences with their processors
    changed = [i for i, rule in enumerate(rules) if rule.processors]
    for n, i in enumerate(changed):
        for place, processor in rules[i].processors:
            kinds.setdefault(place, []).append((n, processor))
    if not changed:
        return
    sequences = [(growing[i][0].request, growing[i][1].token_ids) for i in changed]
    history = History.of(sequences, [places[i] for i in changed], [_tally(*growing[i]) for i in changed])
    for _, kind in sorted(kinds.items()):
        for processor, members in _merged(kind):
            members_history = history if len(members) == len(changed) else history.take(members)
            if isinstance(processor, InPlace):
                processor(members_history, logits, chooser.xp)
            else:
                _apply(processor, members_history, logits, [places[changed[n]] for n in members], chooser.xp)


def _merged(kind: Sequence[tuple[int, LogitsProcessor]]) -> list[tuple[LogitsProcessor, list[int]]]:
    """Processors that together do what each of one kind does to its sequence, with the sequences of each."""
    sequences, processors = [n for n, _ in kind], [processor for _, processor in kind]
    first = processors[0]
    if all(processor is first for processor in processors):
        return [(first, sequences)]
    merged = type(first).together(processors) if isinstance(first, InPlace) else None
    if merged is not None:
        return [(merged, sequences)]
    groups: dict[LogitsProcessor, list[int]] = {}
    for n, processor in kind:
        groups.setdefault(processor, []).append(n)
    return [*groups.items()]


def _apply(processor: LogitsProcessor, history: History, logits: Any, rows: Sequence[int], xp: Any) -> None:
    """Apply a processor or filter that takes and returns whole arrays of scores."""
    whole = len(rows) == len(logits)  # rows ascend
    scores = logits if whole else logits[np.asarray(rows)]
    changed = processor(history.alone(), scores, xp)
    if changed is not logits:
        logits[slice(None) if whole else np.asarray(rows)] = changed


def _tally(state: "State", continuation: Continuation) -> Tally:
    """The tally of a continuation, up to date."""
    tally = state.tallies.get(continuation.index)
    if tally is None:
        tally = state.tallies[continuation.index] = Tally(state.request)
    tally.extend(continuation.token_ids[tally.length - len(state.request.prompt_ids) :])
    return tally
