"""The interface of every search strategy: it is given `Rows` and answers `Feed`s, and never calls a model.

A strategy looks at the logits of the sequences it asked for and says, for each sequence that goes on, which one it
continues, with which tokens, and how much of the past stays. The runner does the rest: it forks and truncates the
cache, runs one ragged forward per model, and asks again. Greedy search is the plainest case (one token, keep all, last
row); beam search names a parent more than once; speculation feeds several tokens, asks for all rows and keeps fewer
positions in its next feed.

A strategy object holds settings and no state; what belongs to a request lives in the `State` that `begin` returns.
Strategies that choose token by token serve all requests with equal settings in one call. There a failure belongs to one
of them: it goes into that request's `State.error`, and the others go on. Where the user's own code takes part (a
processor, a guide), or where requests are worked on one by one anyway, each request has a strategy object to itself,
and may raise.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from ..backends.base import Backend
from ..reference.sampling import Draw
from .continuation import Continuation, TextStream
from .guided import Guide
from .parameters import Settings


class Rows(NamedTuple):
    """Logits of the last feeds of some requests, in the order of their feeds."""

    logits: Any
    """[R, V], float32; may be changed in place"""
    starts: Sequence[int]
    """[feeds + 1]: feed i asked for the rows starts[i] : starts[i + 1]"""
    hidden: Any = None
    """[R, W], the states behind the logits; None unless a feed wanted them"""


class Feed(NamedTuple):
    """One sequence that goes on."""

    tokens: Sequence[int]
    """One or more tokens to compute."""
    parent: int | None = None
    """The sequence it continues: its place among this request's last feeds to the same model. None: an empty one."""
    keep: int | None = None
    """How many of the parent's cached positions stay; None: all, but for a tree."""
    rows: Literal["last", "all"] = "last"
    """Whose logits are wanted: of the last token, or of each."""
    model: str = "target"
    """Who computes: "target", or the name of another model that the engine was given."""
    tree: Sequence[int] = ()
    """Where the last tokens are a tree of guesses: of each its parent among them, -1 for the token before them all."""
    hidden: bool = False
    """Whether the hidden states behind the logits are wanted."""
    draw: Draw | None = None
    """What `Backend.sample` will be asked for its last row, where that is known: it may be made with the logits."""


class Candidate(NamedTuple):
    """One way on that beam search looked at."""

    parent: int
    """The beam that it continues"""
    token: int
    log_prob: float
    """Summed over the generated tokens, this one included; processors may have changed it"""
    beam: int | None
    """Which beam it is from now on; None: none"""
    finished: bool
    """It has ended, and ranked high enough to count as a result"""


@dataclass(eq=False)
class Request:
    """What a strategy may know of a request."""

    prompt_ids: list[int]
    settings: Settings
    text_stream: Callable[[], TextStream] | None = None
    """Makes a new stream of text for one continuation; None where there is no tokenizer."""
    batch_id: int = 0
    """Its place in the list of prompts that it came with."""
    guide: Callable[[], Guide] | None = None
    """Makes a new guide for one continuation; None where nothing guides it."""
    watch: Callable[[list[Candidate]], None] | None = None
    """Told of each step of beam search: its candidates, best first. Changes nothing."""
    part: range | None = None
    """Which of the returned sequences this part of a request has to find; None: all of them."""

    @property
    def indices(self) -> range:
        """Which of the returned sequences are to be found."""
        return range(self.settings.num_return_sequences) if self.part is None else self.part

    @property
    def max_new_tokens(self) -> int:
        """How many tokens each continuation may have; the engine has settled it."""
        assert self.settings.max_new_tokens is not None
        return self.settings.max_new_tokens

    def continuation(self, index: int, *, text: bool = True) -> Continuation:
        """A new, empty continuation; with `text=False` its text is made when it is done."""
        stream = self.text_stream() if self.text_stream is not None and text else None
        guide = self.guide() if self.guide is not None else None
        return Continuation(index, self.settings.eos_token_ids, self.max_new_tokens, stream, guide)


@dataclass
class Speculation:
    """Counts of speculative decoding over passes of the target, one for each sequence in a pass, and what they predict.

    With a the probability that a guess is right, a pass over g guesses in a row gives (1 - a**(g+1)) / (1 - a) tokens
    on average (Leviathan et al., arXiv 2211.17192, equation 1). If a guess costs c passes, generation is faster by that
    over g c + 1 (theorem 3.8), provided that a pass over g + 1 tokens costs what a pass over one does.
    """

    depths: Counter[int] = field(default_factory=Counter)
    """Passes by the number of guesses in a row that they held"""
    judged: int = 0
    """Guesses that were looked at: those accepted, and those at which a pass ended"""
    accepted: int = 0
    tokens: int = 0
    """Tokens that came out"""

    def add(self, other: "Speculation") -> None:
        """Count in what another has counted."""
        self.depths.update(other.depths)
        self.judged += other.judged
        self.accepted += other.accepted
        self.tokens += other.tokens

    @property
    def passes(self) -> int:
        """Passes in all."""
        return self.depths.total()

    @property
    def guesses(self) -> float:
        """Mean number of guesses in a row."""
        return sum(depth * count for depth, count in self.depths.items()) / max(1, self.passes)

    @property
    def acceptance_rate(self) -> float:
        """a: the share of the guesses looked at that were right."""
        return self.accepted / max(1, self.judged)

    @property
    def tokens_per_step(self) -> float:
        """Tokens for each pass of the target, as counted."""
        return self.tokens / max(1, self.passes)

    @property
    def predicted_tokens_per_step(self) -> float:
        """The same by the formula, each pass with its own number of guesses."""
        rate = self.acceptance_rate
        total = sum(count * expected_tokens(rate, depth) for depth, count in self.depths.items())
        return total / max(1, self.passes)

    def predicted_speed_up(self, cost: float) -> float:
        """Against one token a pass. `cost`: c, what one guess costs, in passes of the target."""
        return self.predicted_tokens_per_step / (self.guesses * cost + 1)


def expected_tokens(rate: float, guesses: int) -> float:
    """1 + a + a**2 + ... + a**g = (1 - a**(g+1)) / (1 - a)."""
    return float(guesses + 1) if rate == 1 else (1 - rate ** (guesses + 1)) / (1 - rate)


@dataclass(eq=False)
class State:
    """What a strategy remembers of one request between two steps."""

    request: Request
    results: list[Continuation] = field(default_factory=list)
    """What is returned to the user; tokens pushed here are on their way out."""
    feeds: int = 1
    """How many feeds were asked for last; the engine keeps it."""
    speculation: Speculation | None = None
    """What became of guesses, where the strategy makes some."""
    error: Exception | None = None
    """Why the request cannot go on. The loop ends it; the strategy leaves it alone from then on."""


class Strategy(ABC):
    """Chooses tokens. See the module's text."""

    guided: ClassVar[bool] = False
    """Whether it chooses only what `Continuation.guide` allows; one that does not is refused with a guide."""
    shared: ClassVar[bool] = False
    """Whether one call of `step` serves several requests, and keeps their failures apart."""
    independent: ClassVar[bool] = False
    """Whether each returned sequence is found without the others, so that a request may run in parts."""
    slack: int = 0  # not a ClassVar: it depends on the settings
    """Places in the cache that a sequence may take at once beyond those of its tokens (a tree of guesses)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def on_device(self) -> bool:
        """Whether all it does with logits is `Backend.argmax` or `Backend.sample`; if not, they come to the host.

        So do those of a request with a guide.
        """
        return False

    @property
    def max_sequences(self) -> int:
        """How many sequences one request may run at once."""
        return max(self.settings.num_beams, self.settings.num_return_sequences)

    @abstractmethod
    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Take up a request. The first feeds usually hold the prompt."""

    @abstractmethod
    def step(self, backend: Backend, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Go one step further with each request.

        Args:
            backend: the backend that made the logits, or its `host`
            states: of N requests; request i made `states[i].feeds` feeds
            rows: what those feeds gave, all requests' end to end

        Returns:
            For each request its next feeds. Sequences that no feed names as parent are freed; a request without
            feeds is done. A model that is not fed keeps its sequences.

        Raises:
            Exception: the request cannot go on. A strategy that is `shared` sets `State.error` instead.
        """
