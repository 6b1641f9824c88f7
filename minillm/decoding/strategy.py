"""The interface of search strategies: they take `Rows` and return `Feed`s, and never call a model.

A strategy reads the logits of the sequences it fed and returns, for each sequence that continues, its parent, the new
tokens, and how many cached positions to keep. The runner does the rest: it forks and truncates the cache, runs one
ragged forward per model, and calls the strategy again. Greedy search is the simplest case (one token, keep all, last
row); beam search names a parent more than once; speculation feeds several tokens, requests all rows and keeps fewer
positions in its next feed.

A strategy object holds settings and no state; a request's data is in the `State` that `begin` returns. Greedy search
and sampling serve all requests in one call, whatever their settings; other strategies that choose token by token, all
with equal settings. A failure of one of them is stored in that request's `State.error`, and the others continue. With
user code, or if requests are handled one by one anyway, each request has its own strategy object, which may raise.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.token_sampler import TokenSampler
from ..reference.sampling import Draw
from .acceptance import Speculation
from .continuation import Continuation, TextStream
from .functions import StoppingCriteria
from .guided import Guide
from .hooks import Hooks
from .prompt_scores import PromptScores
from .settings import Settings

__all__ = ["Candidate", "Feed", "Request", "Rows", "State", "Strategy"]

if TYPE_CHECKING:
    from ..text.chat.reasoning import Thoughts
    from .history import TokenCounts
    from .row_pipeline import RowPipeline


class Rows(NamedTuple):
    """Logits of the last feeds of some requests, in the order of their feeds."""

    logits: Any
    """[R, V], float32; may be changed in place"""
    starts: Sequence[int]
    """[feeds + 1]: feed i asked for the rows starts[i] : starts[i + 1]"""
    hidden: Any = None
    """[R, W], the hidden states before the LM head; None unless a feed requested them"""
    exits: Sequence[Any] = ()
    """[exits, V] float32 of each feed, on the host: logits of early exits; empty unless the feeds requested them"""


class Feed(NamedTuple):
    """One sequence to continue, and its next tokens."""

    tokens: Sequence[int]
    """One or more tokens to compute."""
    parent: int | None = None
    """Index of the sequence it continues among this request's last feeds to the same model. None: an empty one."""
    keep: int | None = None
    """Number of the parent's cached positions to keep; None: all, except a tree's."""
    rows: Literal["last", "all"] = "last"
    """Rows of logits to return: the last token's, or all."""
    model: str = "target"
    """Model to run: "target", or the name of another model of the engine."""
    tree: Sequence[int] = ()
    """Parents of the last tokens if these are a tree of guesses: indices among them, -1 for the token before it."""
    hidden: bool = False
    """Also return the hidden states before the LM head."""
    exits: tuple[int, ...] = ()
    """Also return the last token's logits after so many layers each, by early exits; 0: of the embedding."""
    draw: Draw | None = None
    """The `TokenSampler.sample` call for its last row, if known in advance: it can then run with the forward pass."""


class Candidate(NamedTuple):
    """One candidate of a beam search step."""

    parent: int
    """The beam that it continues"""
    token: int
    log_prob: float
    """Summed over the generated tokens, this one included; processors may have changed it"""
    beam: int | None
    """Index of the beam that it becomes, or None"""
    finished: bool
    """True if it has ended and ranks high enough to count as a result"""


@dataclass(frozen=True, eq=False)
class Request:
    """A request: a prompt's tokens, the settings, and the strategy that follows from these."""

    prompt_ids: list[int]
    settings: Settings
    strategy: "Strategy"
    text_stream: Callable[[], TextStream] | None = None
    """Makes a text stream for one continuation; None without a tokenizer."""
    token_bytes: Callable[[int], bytes] | None = None
    """The tokenizer's; None without one."""
    batch_id: int = 0
    """Its index in the list of prompts given to `Engine.generate`."""
    guide: Callable[[], Guide] | None = None
    """Makes a guide for one continuation; None if unguided."""
    watch: Callable[[list[Candidate]], None] | None = None
    """Called with the candidates of each beam search step, best first. For observation only."""
    part: range | None = None
    """Indices of the returned sequences that this part of a request generates; None: all."""
    spelled: Mapping[int, str] = field(default_factory=dict)
    """End-of-sequence tokens that a stop string spells"""
    created: float = field(default_factory=time.monotonic)
    """When it was made, in seconds of `time.monotonic`"""
    priority: int = 0
    """Requests with smaller ones come first"""
    timeout: float | None = None
    """Seconds from `created` after which it ends with what there is; None: never"""
    hooks: Hooks | None = None
    """Its hooks inside the model, if it has any"""
    thoughts: "Thoughts | None" = None
    """How it tells its thoughts, if it answers a conversation with a model that thinks"""
    source_ids: list[int] | None = None
    """The encoder's text; `prompt_ids` are then what the decoder's text begins with. None without an encoder"""
    frames: NDArray[np.float32] | None = None
    """Frames of sound that the encoder reads in place of a text, as of `EncoderInput`"""

    @cached_property
    def given_ids(self) -> list[int]:
        """The tokens of the user's prompt."""
        return self.prompt_ids if self.source_ids is None else self.source_ids

    @cached_property
    def beginnings(self) -> list[list[int]]:
        """The texts with which equally many of its sequences begin: the prompt, with guidance the negative one too."""
        if self.settings.guidance_scale == 1:
            return [self.prompt_ids]
        return [self.prompt_ids, [*(self.settings.negative_prompt or self.prompt_ids[-1:])]]

    @property
    def deadline(self) -> float | None:
        """When it ends at the latest, in seconds of `time.monotonic`."""
        return None if self.timeout is None else self.created + self.timeout

    @property
    def prompt_scores(self) -> PromptScores | None:
        """Receiver of the prompt's log-probabilities; None if the request, or this part of it, does not report them."""
        if not (self.settings.echo and self.settings.logprobs and 0 in self.indices):
            return None
        return PromptScores(self.prompt_ids, self.settings.top_logprobs)

    @property
    def indices(self) -> range:
        """Indices of the returned sequences to generate."""
        return range(self.settings.num_return_sequences) if self.part is None else self.part

    @cached_property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of each continuation, as resolved by the engine."""
        limit: int = self.settings.max_new_tokens
        return limit

    def continuation(self, index: int, *, text: bool = True) -> Continuation:
        """A new, empty continuation; with `text=False` its text is decoded at the end."""
        stream = self.text_stream() if self.text_stream is not None and text else None
        guide = self.guide() if self.guide is not None else None
        functions = self.settings.stopping_criteria
        criteria = StoppingCriteria(functions, self.prompt_ids) if functions else None
        ends = self.settings.eos_token_ids
        return Continuation(index, ends, self.max_new_tokens, stream, guide, self.spelled, criteria, self.token_bytes)


@dataclass(eq=False)
class State:
    """A strategy's state of one request between two steps."""

    request: Request
    results: list[Continuation] = field(default_factory=list)
    """Continuations returned to the user; tokens pushed here are streamed at once."""
    feeds: int = 1
    """Number of feeds in the last step; maintained by the engine."""
    speculation: Speculation | None = None
    """Counts of accepted guesses, for speculative strategies."""
    error: Exception | None = None
    """Error that ends the request. The loop ends it; the strategy ignores it from then on."""
    pipeline: "RowPipeline" = None  # type: ignore[assignment]
    """How the request's rows are treated; set by strategies that choose token by token, which alone read it"""
    token_counts: dict[int, "TokenCounts"] = field(default_factory=dict)
    """The tokens of continuations whose processors ask for them, by the continuation's index"""


class Strategy(ABC):
    """Base class of search strategies; see the module docstring."""

    guided: ClassVar[bool] = False
    """True if it obeys `Continuation.guide`; other strategies are refused with a guide."""
    shared: ClassVar[bool] = False
    """True if one call of `step` serves several requests and isolates their failures."""
    independent: ClassVar[bool] = False
    """True if returned sequences are independent, so that a request may run in parts."""
    sequences_per_result: ClassVar[int] = 1
    """Number of sequences that each returned one, or each beam, needs at once."""
    obeys: ClassVar[frozenset[str]] = frozenset()
    """Generation fields that a strategy of another package reads; others that shape the choice of tokens, or ask for
    log-probabilities, are refused beside it"""
    extra_positions: int = 0  # not a ClassVar: it depends on the settings
    """Cache positions that a sequence may need temporarily beyond its tokens' (a tree of guesses)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def batch_key(self) -> object:
        """Requests whose strategies have equal keys are advanced by one call of `step` of any of them."""
        return self

    @property
    def on_device(self) -> bool:
        """True if it takes logits on the device that computed them; otherwise they are copied to the host."""
        return False

    @property
    def max_sequences(self) -> int:
        """Maximum number of sequences that one request runs at once."""
        most: int = max(self.settings.num_beams, self.settings.num_return_sequences)
        return most * self.sequences_per_result

    @abstractmethod
    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Start a request. The first feeds usually hold the prompt."""

    def give_up(self, state: State) -> None:
        """Set the results to the best so far, for a request whose time is over; by default they are what they are."""
        return

    @abstractmethod
    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Advance each request by one step.

        Args:
            sampler: the sampler for the logits, or its `host`
            states: states of N requests; request i made `states[i].feeds` feeds
            rows: outputs of those feeds, concatenated over requests

        Returns:
            Next feeds of each request. Sequences that no feed names as parent are freed; a request without feeds is
            done. A model that is not fed keeps its sequences.

        Raises:
            Exception: the request cannot continue. A strategy that is `shared` sets `State.error` instead.
        """
