"""Runs: requests, or parts of them, while they are queued or run; and the chunks that a pass computes of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..batch import TokenSequence
from ..decoding.event import Event, FinishReason
from ..decoding.hooks import Watched
from ..decoding.prompt_scores import PromptScores
from ..decoding.strategy import Feed, Request, State
from ..encoder_input import EncoderInput
from ..runner.hooked_backend import Probe
from ..runner.runner import Slice
from .recompute import Recompute


@dataclass(eq=False)
class Run:
    """A queued or running request, or a part of one."""

    id: int
    """The request's number"""
    request: Request
    max_sequences: int
    """How many sequences it runs at once, at most"""
    order: int = 0
    """Place in the order of arrival"""
    first_pages: int = 0
    """Number of pages that must be free for it to begin"""
    max_pages: int = 0
    """Maximum number of pages it needs"""
    state: State | None = None
    live: dict[str, list[TokenSequence]] = field(default_factory=dict)
    """Sequences by model, in the order of the last feeds to it"""
    feeds: list[Feed] = field(default_factory=list)
    fed: list[TokenSequence] = field(default_factory=list)
    """The sequence of each feed"""
    outputs: list[Slice | None] = field(default_factory=list)
    """Output of each feed; None until it is computed"""
    started: bool = False
    """True once the prompt has been computed"""
    recompute: dict[str, Recompute] = field(default_factory=dict)
    """By model, what is to be recomputed after a preemption before its feeds go on"""
    times_passed_over: int = 0
    """Number of later requests admitted before it"""
    admitted_at: float | None = None
    """When it began, in seconds of `time.monotonic`"""
    started_at: float | None = None
    """When its prompt was computed"""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None before the first pass"""
    prompt_scores: PromptScores | None = None
    """Receiver of the prompt's log-probabilities, until they are reported"""
    encoder_inputs: dict[str, EncoderInput] = field(default_factory=dict)
    """By model, the source that all of its sequences attend to, if they have one"""
    probe: Probe | None = None
    """Its hooks inside the model, if it has any"""
    batch_key: object = field(init=False)
    """Its strategy's: runs with equal ones are advanced by one call"""

    def __post_init__(self) -> None:
        self.batch_key = self.request.strategy.batch_key
        if self.request.hooks is not None:
            self.probe = Probe(self.request.hooks, self.id)

    @property
    def ready(self) -> bool:
        """True if the outputs of all feeds are computed, and its sequences are in the cache."""
        return bool(self.outputs) and None not in self.outputs and not self.recompute

    def keep_outputs(self) -> None:
        """Copy the outputs so far, so that they outlive the next forward pass."""
        self.outputs = [output and output.copy() for output in self.outputs]

    def skips(self, feed: Feed) -> bool:
        """True if positions of a feed need not be computed where the cache has them: nobody wants their logits."""
        return feed.rows == "last" and (self.prompt_scores is None or self.started or feed.model != "target")

    @property
    def longest(self) -> int:
        """Maximum number of cache positions of one of its sequences."""
        request = self.request
        return max(map(len, request.beginnings)) + request.max_new_tokens + request.strategy.extra_positions

    def events(self) -> list[Event]:
        """The events of its results since the last call."""
        results = () if self.state is None else self.state.results
        events = []
        for result in results:
            if (event := result.take()) is not None:
                events.append(self.addressed(event))
                if self.probe is not None:
                    event.watched = self._watched(result.index, result.token_ids)
        return events

    def _watched(self, index: int, token_ids: Sequence[int] = ()) -> Watched | None:
        """Rows of a result that were watched since the last call; with the first, those of the encoder's text.

        Args:
            index: of the result
            token_ids: its tokens so far
        """
        assert self.probe is not None
        ids = [*self.request.prompt_ids, *token_ids]
        watched = self.probe.take(index, ids[: max(len(self.request.prompt_ids), len(ids) - 1)])
        source = self.probe.take(index, self.request.source_ids or (), "encoder.")
        return watched if source is None else {**source, **(watched or {})}

    def last_events(self, reason: FinishReason, error: Exception | None = None) -> list[Event]:
        """The events of its results if it ends now, early: one for each that has not ended.

        Args:
            reason: why it ends
            error: the cause, if the reason is "error"
        """
        results = [] if self.state is None else self.state.results
        for continuation in results:
            if continuation.finish_reason is None:
                continuation.cut_off(reason)
        events = self.events()
        missing = set(self.request.indices) - {continuation.index for continuation in results}
        for i in sorted(missing):
            event = self.addressed(Event(self.id, i, "", (), finish_reason=reason))
            if self.probe is not None:
                event.watched = self._watched(i)  # of the prompt, as far as it was computed
            events.append(event)
        for event in events:
            event.error = error if event.finish_reason == "error" else None
        return events

    def addressed(self, event: Event) -> Event:
        """An event of one of its results, with the request's number and what is known of the request."""
        event.request_id = self.id
        event.prompt_tokens, event.cached_tokens = len(self.request.given_ids), self.cached_tokens or 0
        if event.finish_reason is not None:
            now = time.monotonic()
            admitted = now if self.admitted_at is None else self.admitted_at
            started = now if self.started_at is None else self.started_at
            event.queued_seconds = admitted - self.request.created
            event.prefill_seconds, event.decode_seconds = started - admitted, now - started
        if self.prompt_scores is not None and self.prompt_scores.complete:
            scores, self.prompt_scores = self.prompt_scores, None
            event.prompt_logprobs, event.prompt_top_logprobs = scores.log_probs, scores.top_log_probs or None
        return event


class Chunk(NamedTuple):
    """Tokens of one sequence to compute in a forward pass."""

    run: Run
    feed: int | None
    """Index among the feeds of the run; None: positions that are recomputed, whose logits nobody needs"""
    sequence: TokenSequence
    tokens: int
    """Number of tokens"""
    whole: int = 0
    """Number of the last of them that may not be split"""

    @property
    def skips(self) -> bool:
        """True if what the cache has of it need not be computed."""
        return self.feed is None or self.run.skips(self.run.feeds[self.feed])

    @property
    def encodes(self) -> int:
        """Tokens of its source that the encoder has to read first."""
        source = self.sequence.encoder_input
        return 0 if source is None or source.computed else len(source.token_ids)

    @property
    def scored(self) -> range:
        """Positions whose logits the log-probabilities of the prompt need."""
        run, scores = self.run, self.run.prompt_scores
        if scores is None or run.started or self.feed != 0:  # the first is the prompt's
            return range(0)
        return scores.wanted(self.sequence.cached, self.tokens)
