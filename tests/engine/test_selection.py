"""Best of n by a scorer, and self-consistency by a vote."""

import math
from typing import Any

import numpy as np
import pytest

from minillm import Completion, Engine, Generation
from minillm.engine.selection import likelihood
from minillm.errors import ParameterError


def generation(*texts: str) -> Generation:
    """Completions of two tokens each, of falling probability."""
    completions = [Completion(text, [5, 6], logprobs=[-0.5 * i, -0.25]) for i, text in enumerate(texts)]
    return Generation([2], completions)


def test_completions_rank_by_the_scorer_and_equal_ones_stay_in_order() -> None:
    several = generation("aa", "b", "cc", "dddd")
    assert [one.text for one in several.ranked(lambda one: len(one.text))] == ["dddd", "aa", "cc", "b"]
    assert [one.text for one in several.ranked()] == ["aa", "b", "cc", "dddd"]
    assert several.best(lambda one: -len(one.text)).text == "b"
    short = Completion("e", [5], logprobs=[-0.1])  # the mean, not the sum
    several.completions += [short]
    assert several.best() is short


def test_the_default_is_the_models_own_mean_log_probability() -> None:
    engine = Engine()
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, "num_return_sequences": 5, "seed": 1}
    answers = engine.generate("Once upon a time", max_new_tokens=6, logprobs=True, **sampled)
    means = []
    for one in answers.completions:
        score = engine.score(answers.prompt_token_ids + one.token_ids)
        means.append(float(np.mean(score.logprobs[-len(one.token_ids) :])))
    assert answers.best() is answers.completions[means.index(max(means))]
    with pytest.raises(ParameterError, match="generate with logprobs=True, or give a scorer"):
        engine.generate("Once", max_new_tokens=2, **sampled).best()


def test_a_vote_counts_answers_or_their_weights() -> None:
    several = generation("so it is 7", "hence 8", "thus 8", "I do not know", "7")
    result = several.vote(number)
    assert (result.answer, result.share, result.weights) == ("7", 0.5, {"7": 2.0, "8": 2.0}), "the first of equal ones"
    assert [one.text for one in result.completions] == ["so it is 7", "7"]
    weighted = generation("8", "7", "7", "7").vote(number, likelihood)
    expected = [math.exp((-0.5 * i - 0.25) / 2) for i in range(4)]
    assert weighted.weights == pytest.approx({"7": sum(expected[1:]), "8": expected[0]})
    assert (weighted.answer, weighted.share) == ("7", pytest.approx(sum(expected[1:]) / sum(expected)))
    nobody = several.vote(lambda text: None)
    assert (nobody.answer, nobody.share, nobody.weights, nobody.completions) == (None, 0.0, {}, [])


def number(text: str) -> str | None:
    """The last word, if it is a number."""
    word = text.split()[-1]
    return word if word.isdigit() else None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.best(5), "scorer should be a function of a completion, found 5"),
        (lambda g: g.ranked(lambda one: one.text), "scorer should return a number, found 'a'"),
        (lambda g: g.ranked(lambda one: math.nan), "scorer should return a number, found nan"),
        (lambda g: g.vote("a"), "answer should be a function of a text, found 'a'"),
        (lambda g: g.vote(list), r"answer should return something hashable, such as a text, found \['a'\]"),
        (lambda g: g.vote(str, lambda one: -1), "weight should return a finite number of at least 0, found -1"),
        (lambda g: g.vote(str, lambda one: None), "weight should return a number, found None"),
    ],
)
def test_mistakes_are_told_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}$"):
        call(generation("a", "b"))
