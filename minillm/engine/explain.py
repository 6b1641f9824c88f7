"""The distribution of the next token, before and after each thing that a request's settings do to it.

The steps are those of `decoding/row_processing.py`, in its order and by the same objects: processors, then the guide,
then the filters of sampling.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.token_sampler import TokenSampler
from ..decoding.guided import restrict
from ..decoding.history import History, TokenCounts
from ..decoding.processors import no_token_left, rows_without_a_token
from ..decoding.row_pipeline import RowPipeline
from ..decoding.sampling import Sampling
from ..decoding.strategy import Request
from ..encoder_input import EncoderInput
from ..errors import ParameterError, printable
from ..reference.softmax import softmax
from ..runner.runner import Runner
from ..text.display import brief, grid_html, percent
from ..text.tokenizer import Tokenizer
from .inspect import Turn, logits_by_chunk

MODEL = "model"
"""Name of the first step: softmax of the logits"""


@dataclass(frozen=True)
class DistributionStep:
    """The distribution of the next token after a step."""

    name: str
    """The processor or filter, such as "top_p 0.9"; "model" of the first"""
    probabilities: NDArray[np.float64]
    """[V]; exactly 0 for a token that cannot be chosen"""

    @property
    def tokens_left(self) -> int:
        """Number of tokens that can be chosen."""
        return int(np.count_nonzero(self.probabilities))

    @property
    def entropy(self) -> float:
        """In nats: -sum p log p."""
        p = self.probabilities[self.probabilities > 0]
        return abs(float((p * np.log(p)).sum()))

    def __repr__(self) -> str:
        return brief("DistributionStep", name=self.name, tokens_left=self.tokens_left, entropy=round(self.entropy, 3))


@dataclass(frozen=True)
class Explanation:
    """How the next token after a prompt is chosen. A notebook shows the likeliest tokens, a column for each step."""

    token_ids: list[int]
    """The prompt's"""
    steps: tuple[DistributionStep, ...]
    """The model's own distribution, then what is left after each step; the last is what the token is drawn from"""
    greedy: bool
    """True if no token is drawn: the likeliest of the last step is taken"""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    def likeliest(self, top: int = 8) -> list[int]:
        """The `top` likeliest tokens of the model, and those of the last step that are not among them."""
        orders = [np.argsort(-step.probabilities, kind="stable")[:top] for step in (self.steps[0], self.steps[-1])]
        last = [token for token in orders[1].tolist() if self.steps[-1].probabilities[token] > 0]
        return list(dict.fromkeys([*orders[0].tolist(), *last]))

    @property
    def head(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["token", *(step.name for step in self.steps)]

    def rows(self, top: int = 8) -> list[list[str]]:
        """The likeliest tokens with their probability after each step; below, how many are left, and the entropy."""
        named = self.tokenizer.token if self.tokenizer is not None else "#{}".format
        rows = [
            [
                f'"{printable(named(token))}"',
                *(percent(p) if (p := float(step.probabilities[token])) else "-" for step in self.steps),
            ]
            for token in self.likeliest(top)
        ]
        left = ["tokens left", *(f"{step.tokens_left:,}" for step in self.steps)]
        return [*rows, left, ["entropy, nats", *(f"{step.entropy:.2f}" for step in self.steps)]]

    def _repr_html_(self) -> str:
        choice = "the likeliest is taken" if self.greedy else "the token is drawn from the last column"
        return grid_html("the next token", self.head, self.rows(), choice)


def explain(
    runner: Runner, request: Request, tokenizer: Tokenizer | None = None, turn: Turn = nullcontext
) -> Explanation:
    """The distribution of a request's first token, before and after each step.

    Raises:
        ParameterError: its strategy is neither greedy search nor sampling, or no token is left.
    """
    if type(request.strategy) is not Sampling:
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", type(request.strategy).__name__).lower()
        raise ParameterError(f"explain shows the choice of greedy search and of sampling, found {name}: leave it out")
    last = np.empty((1, 0), np.float32)
    source = None if request.source_ids is None else EncoderInput(request.source_ids, request.frames)
    for _, logits in logits_by_chunk(runner, request.prompt_ids, turn, request.settings.lora, source):
        last = np.array(logits[-1:], np.float32)  # [chunk, V] -> [1, V]
    steps = [DistributionStep(MODEL, _probabilities(last))]
    steps += [DistributionStep(name, _probabilities(scores)) for name, scores in _changed(request, last)]
    return Explanation(list(request.prompt_ids), tuple(steps), not request.settings.do_sample, tokenizer)


def _changed(request: Request, logits: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The scores after each step, with the step's name. [1, V]"""
    pipeline = RowPipeline.of(request.settings, masked=True)
    history = History.of([(request, [])], None, [TokenCounts(request)], [0])
    scores = logits.copy()
    for _, processor in pipeline.processors:
        scores = processor(history, scores, np)
        yield _name(processor), _checked(scores)
    if (guide := request.continuation(0).guide) is not None:
        before = logits[0].copy() if pipeline.processors else None
        for _, error in restrict(TokenSampler(), scores, [0], [guide], [before]):
            raise error
        yield "guide", _checked(scores)
    for filter_ in pipeline.filters:
        scores = filter_(history, scores, np)
        yield _name(filter_), _checked(scores)


def _checked(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    if rows_without_a_token(scores, np)[0]:
        raise no_token_left()
    return scores


def _probabilities(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """[1, V] -> [V]"""
    probabilities: NDArray[np.float64] = softmax(scores.astype(np.float64), np)[0]  # in float32 small ones would be 0
    return probabilities


def _name(processor: Any) -> str:
    """A processor's name and numbers, as its field has them: "top_p 0.9"."""
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", type(processor).__name__).lower()
    values: Sequence[Any] = [value for name, value in vars(processor).items() if name != "least"]
    numbers = [f"{value:g}" for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return " ".join([words, ", ".join(numbers)]).strip()
