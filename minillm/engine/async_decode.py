"""Decode steps that are launched before the host has read the tokens of the step before.

A step's tokens are chosen on the device, and the next step can read them there. So while the device computes step
n + 1, the host reads the tokens of step n, decodes their text and reports them; otherwise the device would stand idle
for as long as that takes. (vLLM does the same, as "asynchronous scheduling".)

    device   | step n     | step n + 1       | step n + 2       |
    host     | launch n+1 | read n           | launch n+2 | read n+1

It is done while nothing but tokens is wanted: greedy search and sampling whose logits nobody changes or reports, of
requests that have begun, with a backend that can (`Memory.launch`). Everything else goes the way of `StepLoop.step`,
where each pass is read before the next one is launched.

The host learns one step late that a sequence has ended (an end-of-sequence token, a stop string, an abort). Its row of
the step under way is then ignored. A position counts as cached only once its step has been read, so the ignored one
leaves nothing behind: its page, if it got one, goes back with the others of its sequence. Whatever uses that page next
is launched later, and so runs later. A sequence that reaches its last token is foreseen, and left out of the next step.

A step under way can also be forgotten as a whole: its tokens, which are still pending, are then computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from ..backends.recording import DecodeStep, TokensRead
from ..batch import IntArray, TokenSequence
from ..cache import PagedCache
from ..decoding.continuation import Continuation
from ..decoding.event import Event
from ..decoding.sampling import Sampling, TokenState
from ..errors import CacheFullError, DeviceError
from ..reference.sampling import DRAWS, Draw
from ..runner.runner import Runner
from .run import Run

DEVICE_ERRORS = (DeviceError, RuntimeError)
"""Failures of a launch or of what was launched; CuPy's are RuntimeErrors"""


@dataclass(eq=False, slots=True)
class Row:
    """A growing sequence."""

    run: Run
    continuation: Continuation
    sequence: TokenSequence


@dataclass(eq=False, slots=True)
class PendingStep:
    """A decode step that was launched, and whose tokens the host has not read."""

    rows: list[Row]
    step: DecodeStep
    left: IntArray
    """[N], how many more tokens each continuation may get after this step's"""
    read: TokensRead


def can_run_ahead(runners: Sequence[Runner]) -> bool:
    """Whether the models of an engine allow it: one model, whose cached keys never change, in one process that can."""
    return len(runners) == 1 and all(
        runner.backend.memory.runs_ahead
        and runner.backend.ranks == 1
        and len(runner.layers) == runner.model.config.num_layers
        and runner.model.config.keys_change_beyond is None
        and not runner.model.config.keys_follow_length
        and not runner.model.config.encoder_layers
        and not runner.cache.has_states
        for runner in runners
    )


def launch_first(runner: Runner, running: Sequence[Run]) -> PendingStep | None:
    """Launch a decode step of all running requests, whose last tokens the host knows.

    None: one of them needs the host between two steps, or the backend or the cache cannot do it.
    """
    if (
        not running
        or not runner.backend.replays
        or runner.hooks.functions
        or not all(map(_needs_tokens_alone, running))
    ):
        return None
    rows = [
        Row(run, continuation, sequence)
        for run in running
        if isinstance(run.state, TokenState)
        for continuation, sequence in zip(run.state.growing, run.live["target"], strict=True)
    ]
    try:
        for row in rows:
            if row.sequence.pending != 1:
                return None
            runner.cache.reserve(row.sequence, row.sequence.cached + 1)
    except CacheFullError:  # the scheduler decides who gives way
        return None
    pages = np.zeros((len(rows), max(len(row.sequence.pages) for row in rows)), np.int64)
    for i, row in enumerate(rows):
        pages[i, : len(row.sequence.pages)] = row.sequence.pages
    positions = np.array([row.sequence.cached for row in rows])
    draws = np.array([_draw(row) for row in rows], DRAWS)
    left = np.array([row.run.request.max_new_tokens - len(row.continuation.token_ids) - 1 for row in rows])
    token_ids = np.array([row.sequence.token_ids[-1] for row in rows])
    tables = _tables(runner, rows, pages.shape[1])
    return _launch(runner, rows, DecodeStep(token_ids, positions, pages, draws, _adapters(rows), tables), left)


def launch_next(pending: PendingStep, runner: Runner) -> PendingStep | None:
    """Launch the next step of the sequences that have not ended. None: the host has to read this one first."""
    if not _replays(runner):  # no longer: another backend has been put in its place since, or hooks
        return None
    cache, P = runner.cache, runner.cache.page_size
    rows, left, sources = pending.rows, pending.left, np.arange(len(pending.rows))
    positions, pages, draws = pending.step.positions + 1, pending.step.pages, pending.step.draws.copy()
    goes_on = left > 0
    goes_on &= [row.continuation.finish_reason is None for row in rows]
    if not goes_on.all():
        rows, left, sources = [*compress(rows, goes_on)], left[goes_on], sources[goes_on]
        positions, pages, draws = positions[goes_on], pages[goes_on], draws[goes_on]
    begins = np.flatnonzero(positions % P == 0).tolist()  # another page
    if not rows or len(begins) > cache.free_pages or (cache.windows and not cache.takes(len(begins))):
        return None
    if (columns := int(positions.max()) // P + 1) > pages.shape[1]:
        pages = np.pad(pages, ((0, 0), (0, columns)))
    for i in begins:
        sequence, at = rows[i].sequence, int(positions[i])
        cache.reserve(sequence, at + 1)
        pages[i, at // P] = sequence.pages[at // P]
    for i in np.flatnonzero((positions - 1) % P == 0).tolist():
        full = (int(positions[i]) - 2) // P  # completed by the step read last: now it may be a twin's
        pages[i, full] = rows[i].sequence.pages[full]
    draws["position"] += 1
    tables = _tables(runner, rows, pages.shape[1])
    step = DecodeStep(-1 - sources, positions, pages, draws, _adapters(rows), tables)
    return _launch(runner, rows, step, left - 1)


class TakenTokens(NamedTuple):
    """Results of the tokens of a pending step."""

    advanced: int
    """Number of sequences that had not ended since it was launched"""
    events: list[tuple[Run, Event]]
    ended: dict[Run, list[TokenSequence]]
    """Sequences whose continuations have ended with their tokens"""
    failed: dict[Run, Exception]
    """Requests that cannot take their tokens, and the errors that end them"""


def take_tokens(pending: PendingStep, tokens: list[int], cache: PagedCache) -> TakenTokens:
    """Give the sequences of a pending step their tokens, [N]."""
    advanced, events = 0, list[tuple[Run, Event]]()
    ended, failed = dict[Run, list[TokenSequence]](), dict[Run, Exception]()
    for row, token in zip(pending.rows, tokens, strict=True):
        run, continuation, sequence = row.run, row.continuation, row.sequence
        if continuation.finish_reason is not None or run in failed:
            continue
        advanced += 1
        cache.advance(sequence, 1)
        try:
            if continuation.push(token):
                ended.setdefault(run, []).append(sequence)
            else:
                sequence.token_ids.append(token)
        except Exception as error:
            failed[run] = error
            continue
        if (event := continuation.take()) is not None:
            events.append((run, event))
    return TakenTokens(advanced, events, ended, failed)


def hand_back(pending: PendingStep) -> None:
    """Give the requests of a step that nothing follows the feeds of the ordinary way: their last tokens."""
    for run in dict.fromkeys(row.run for row in pending.rows if row.continuation.finish_reason is None):
        assert isinstance(run.request.strategy, Sampling) and isinstance(run.state, TokenState)
        run.feeds, run.fed = run.request.strategy.next_feeds(run.state), [*run.live["target"]]
        run.outputs = [None] * len(run.feeds)


def _launch(runner: Runner, rows: list[Row], step: DecodeStep, left: IntArray) -> PendingStep | None:
    try:
        read = runner.backend.memory.launch(runner, step)
    except DEVICE_ERRORS:  # it will happen again in the ordinary way, which tells the requests
        return None
    return None if read is None else PendingStep(rows, step, left, read)


def _tables(runner: Runner, rows: list[Row], columns: int) -> dict[int, IntArray]:
    """The pages of groups of layers with a window. [N, columns] each"""
    tables = {}
    for window in runner.cache.windows:
        table = tables[window.group] = np.zeros((len(rows), columns), np.int64)
        for i, row in enumerate(rows):
            table[i, : len(row.sequence.pages)] = window.table(row.sequence)
    return tables


def _adapters(rows: list[Row]) -> tuple[str | None, ...]:
    """Each row's LoRA adapter; empty if none has one."""
    names = tuple(row.sequence.adapter for row in rows)
    return names if any(names) else ()


def _replays(runner: Runner) -> bool:
    return runner.backend.replays and not runner.hooks.functions


def _needs_tokens_alone(run: Run) -> bool:
    """Whether a request's next tokens follow from its logits as the model computes them, and nobody sees these."""
    state, settings = run.state, run.request.settings
    if type(run.request.strategy) is not Sampling or not isinstance(state, TokenState):
        return False
    pipeline = state.pipeline
    plain = not pipeline.changes and pipeline.top_logprobs is None and all(c.guide is None for c in state.growing)
    ordinary = settings.use_cache and run.prompt_scores is None and run.probe is None
    return plain and ordinary and run.started and not run.recompute


def _draw(row: Row) -> Draw:
    """The parameters by which the token after a sequence's last one is chosen."""
    state, sequence, index = row.run.state, row.sequence, row.continuation.index
    assert state is not None
    return Draw(*state.pipeline.draw, state.request.settings.seed, index, len(sequence.token_ids))
