"""The choice among several completions of one prompt: the best of n by a score, and a vote of their answers."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError, shown

if TYPE_CHECKING:
    from .results import Completion

Scorer = Callable[["Completion"], float]


@dataclass(frozen=True)
class Vote:
    """The outcome of a vote."""

    answer: Any
    """The answer with the largest weight, of equal ones the first; None if no completion has one"""
    share: float
    """Its share in the weight of all answers, from 0 to 1"""
    weights: dict[Any, float]
    """Answer -> the weight of the completions that gave it, the largest first"""
    completions: "list[Completion]"
    """The completions that gave the answer"""


def mean_log_prob(completion: "Completion") -> float:
    """The mean log-probability of a completion's tokens under the model.

    Raises:
        ParameterError: it was generated without `logprobs`.
    """
    if completion.logprobs is None and completion.token_ids:
        raise ParameterError("ranking by log-probability needs them: generate with logprobs=True, or give a scorer")
    return math.fsum(completion.logprobs or ()) / max(1, len(completion.token_ids))


def likelihood(completion: "Completion") -> float:
    """The geometric mean of the tokens' probabilities, as the weight of a vote (2203.11171, equation 1).

    Raises:
        ParameterError: as `mean_log_prob`.
    """
    return math.exp(mean_log_prob(completion))


def ranked(completions: "Sequence[Completion]", scorer: Scorer = mean_log_prob) -> "list[Completion]":
    """The completions by falling score; equal ones stay in their order.

    Raises:
        ParameterError: `scorer` is no function, or returns something else than a number; as `mean_log_prob`.
    """
    scores = [_number("scorer", scorer, completion) for completion in completions]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [completions[i] for i in order]


def vote(
    completions: "Sequence[Completion]", answer: Callable[[str], Hashable | None], weight: Scorer | None = None
) -> Vote:
    """Self-consistency: the answer that most completions agree on, however they came to it.

    Wang et al., "Self-consistency improves chain of thought reasoning in language models", arXiv 2203.11171.

    Args:
        completions: of one prompt, sampled
        answer: the answer in a text; None if there is none, which is no vote
        weight: a completion's weight, at least 0; None: each counts 1

    Raises:
        ParameterError: `answer` or `weight` is no function, or returns what it may not.
    """
    if not callable(answer):
        raise ParameterError(f"answer should be a function of a text, found {shown(answer)}")
    weights: dict[Any, float] = {}
    voters: dict[Any, list[Completion]] = {}
    for completion in completions:
        choice = answer(completion.text)
        if choice is None:
            continue
        try:
            hash(choice)
        except TypeError:
            message = f"answer should return something hashable, such as a text, found {shown(choice)}"
            raise ParameterError(message) from None
        count = 1.0 if weight is None else _number("weight", weight, completion)
        if not 0 <= count < math.inf:
            raise ParameterError(f"weight should return a finite number of at least 0, found {count:g}")
        weights[choice] = weights.get(choice, 0.0) + count
        voters.setdefault(choice, []).append(completion)
    if not weights:
        return Vote(None, 0.0, {}, [])
    weights = dict(sorted(weights.items(), key=lambda pair: -pair[1]))
    winner, total = next(iter(weights)), math.fsum(weights.values())
    return Vote(winner, weights[winner] / total if total else 0.0, weights, voters[winner])


def _number(name: str, function: Any, completion: "Completion") -> float:
    """The number that a user's function returns for a completion."""
    if not callable(function):
        raise ParameterError(f"{name} should be a function of a completion, found {shown(function)}")
    value = function(completion)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) or isinstance(value, str):
        raise ParameterError(f"{name} should return a number, found {shown(value)}")
    return number
