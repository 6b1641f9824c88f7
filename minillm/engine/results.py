"""Results of requests: completions and generations."""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..decoding.event import Event, FinishReason
from ..decoding.hooks import Watched, join_watched
from ..decoding.prompt_scores import TopLogProbs
from ..text.display import brief
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..text.chat.reasoning import Thoughts
    from .selection import Scorer, Vote


@dataclass
class Completion:
    """One returned sequence, without the prompt unless `echo` asked for it. Attributes as of an `Event`.

    Example:
        >>> engine.generate("Monday,", num_beams=2, num_return_sequences=2, max_new_tokens=2).completions[0]
        Completion(text=' Tuesday,', token_ids=[1094, 15], finish_reason='length', score=-0.7...)
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_bytes: list[bytes] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogProbs] | None = None
    score: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    """The thoughts in an answer to a conversation, "" if there are none; None where they are not told from the text"""
    answer: str | None = None
    """The text after them"""
    watched: Watched | None = field(default=None, compare=False)
    """With `watch`: name of a point -> its rows, of prompt and answer but the last token. [tokens, ...]"""

    def __repr__(self) -> str:
        ending = {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason, "score": self.score}
        return brief("Completion", text=self.text, token_ids=self.token_ids, **ending)

    def __str__(self) -> str:
        return self.text

    def add(self, event: Event) -> None:
        """Append the contents of an event."""
        self.text += event.text
        self.token_ids += event.token_ids
        self.token_bytes += event.token_bytes
        if event.logprobs:
            self.logprobs = [*(self.logprobs or []), *event.logprobs]
        if event.top_logprobs:
            self.top_logprobs = [*(self.top_logprobs or []), *event.top_logprobs]
        self.score = event.score
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason


@dataclass
class Generation:
    """Result of one prompt. Two are equal if the results are, whatever was cached and however long they took.

    `str` of it is its text. A notebook shows the text; with `logprobs` each token has a shade, the deeper the less
    likely it was, and with `top_logprobs` the one under the pointer has its alternatives beside it.

    Example:
        >>> answer = engine.generate("A list of colors: red,", max_new_tokens=4, top_logprobs=2)
        >>> answer
        Generation(prompt_tokens=8, completions=[Completion(text=' orange, yellow,', ..., finish_reason='length')])
        >>> print(answer)
         orange, yellow,
        >>> [engine.tokenizer.token(token) for token, _ in answer.completions[0].top_logprobs[0]]
        [' orange', ' pink']
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float | None] | None = None
    """With `echo` and `logprobs`: log-probability of each prompt token given those before it; None for the first"""
    prompt_top_logprobs: list[TopLogProbs | None] | None = None
    """With `echo` and `top_logprobs`: the most likely tokens in each one's place, best first; None for the first"""
    cached_tokens: int = field(default=0, compare=False)
    """Number of prompt tokens whose keys and values were in the prefix cache, by the first completion"""
    queued_seconds: float = field(default=0.0, compare=False)
    """From the request's making to its first step. With several sequences, times of the last one to end"""
    prefill_seconds: float = field(default=0.0, compare=False)
    """From there until the prompt was computed"""
    decode_seconds: float = field(default=0.0, compare=False)
    """From there to the end"""

    def __post_init__(self) -> None:
        self._tokenizer: Tokenizer | None = None  # names the alternatives in a notebook

    def __repr__(self) -> str:
        return brief("Generation", prompt_tokens=self.prompt_tokens, completions=self.completions)

    def __str__(self) -> str:
        return self.text

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None}  # a pickle is of results, not of vocabularies

    def _repr_html_(self) -> str:
        from .notebook import results_in_html

        return results_in_html(self, self._tokenizer)

    @classmethod
    def of(
        cls,
        prompt_token_ids: list[int],
        events: Iterable[Event],
        tokenizer: Tokenizer | None = None,
        thoughts: "Thoughts | None" = None,
    ) -> "Generation":
        """All events of a finished request, merged.

        Args:
            prompt_token_ids: the prompt
            events: of the request
            tokenizer: names the alternatives of tokens in a notebook
            thoughts: how the texts tell their thoughts, if they do

        Raises:
            Exception: the error that ended it.
        """
        generation, completions = cls(prompt_token_ids, []), dict[int, Completion]()
        watched: dict[int, list[Watched]] = {}
        generation._tokenizer = tokenizer
        for event in events:
            if event.error is not None:
                raise event.error
            completions.setdefault(event.index, Completion()).add(event)
            if event.watched is not None:
                watched.setdefault(event.index, []).append(event.watched)
            generation._add(event)
        # beam search may return fewer than asked for
        ended = {index: completion for index, completion in completions.items() if completion.finish_reason is not None}
        generation.completions = [ended[index] for index in sorted(ended)]
        for index, chunks in watched.items():
            completions[index].watched = join_watched(chunks)
        if thoughts is not None:
            for completion in generation.completions:
                cut = completion.finish_reason != "stop" or isinstance(completion.stop_reason, str)
                completion.reasoning, completion.answer = thoughts.split(completion.text, cut=cut)
        return generation

    def _add(self, event: Event) -> None:
        """Take what an event says of the request."""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs, self.prompt_top_logprobs = event.prompt_logprobs, event.prompt_top_logprobs
        self.cached_tokens = event.cached_tokens if event.index == 0 else self.cached_tokens
        self.queued_seconds = event.queued_seconds or self.queued_seconds
        self.prefill_seconds = event.prefill_seconds or self.prefill_seconds
        self.decode_seconds = event.decode_seconds or self.decode_seconds

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def generated_tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def log_normalizer(self) -> float:
        """With `num_particles`: estimate of the log normalising constant, log of the sum of exp(score) of all."""
        scores = [completion.score for completion in self.completions if completion.score is not None]
        most = max(scores, default=-math.inf)
        return most + math.log(math.fsum(math.exp(score - most) for score in scores)) if scores else most

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def reasoning(self) -> str | None:
        """The first completion's thoughts."""
        return self.completions[0].reasoning

    @property
    def answer(self) -> str:
        """The first completion's text after its thoughts."""
        first = self.completions[0]
        return first.text if first.answer is None else first.answer

    @property
    def token_ids(self) -> list[int]:
        """The first completion's tokens."""
        return self.completions[0].token_ids

    def best(self, scorer: "Scorer | None" = None) -> Completion:
        """The completion with the highest score; see `ranked`."""
        return self.ranked(scorer)[0]

    def ranked(self, scorer: "Scorer | None" = None) -> list[Completion]:
        """The completions by falling score, `scorer(completion)`; by default the mean log-probability of their tokens.

        Raises:
            ParameterError: `scorer` is no function or returns no number; without one, there are no log-probabilities.

        Example:
            >>> answers = engine.generate("Monday,", num_return_sequences=4, do_sample=True, seed=1, logprobs=True)
            >>> answers.best().text == answers.ranked()[0].text
            True
        """
        from .selection import mean_log_prob, ranked

        return ranked(self.completions, mean_log_prob if scorer is None else scorer)

    def vote(self, answer: Callable[[str], Hashable | None], weight: "Scorer | None" = None) -> "Vote":
        """The answer that most completions agree on (self-consistency); see `selection.vote`.

        Example:
            >>> answers = engine.generate("Monday,", num_return_sequences=5, do_sample=True, seed=1, max_new_tokens=1)
            >>> answers.vote(str.strip).answer
            'Tuesday'
        """
        from .selection import vote

        return vote(self.completions, answer, weight)

    @property
    def watched(self) -> Watched:
        """Watched rows of the first completion: name of a point -> [tokens of prompt and answer but the last, ...].

        Empty without `watch`.
        """
        return self.completions[0].watched or {}
