"""The prefix cache: which sequences are kept, which prompts reuse them, and when they are evicted."""

import numpy as np
import pytest

from minillm.batch import TokenSequence, common_prefix
from minillm.cache import PrefixCache
from minillm.errors import CacheFullError
from minillm.runner import Runner

from ..tiny import logits_of, tiny_runner


@pytest.fixture
def runner() -> Runner:
    return tiny_runner(seed=2, pages=12, page_size=4)


def kept(runner: Runner, prefixes: PrefixCache, *tokens: int) -> None:
    sequence = TokenSequence(list(tokens))
    runner.prefill(sequence)
    prefixes.keep(sequence)
    runner.cache.free(sequence)


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)]
)
def test_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == length


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        ([5, 6, 7, 8, 9, 10, 20], 6),  # the longest of three, to its end
        ([5, 6, 7, 8, 9, 10], 5),  # the last token is left to compute
        ([5, 6, 7, 21, 22], 3),
        ([5, 6, 30, 31, 32, 33], 5),
    ],
)
def test_the_longest_common_prefix_is_taken_over(runner: Runner, prompt: list[int], cached: int) -> None:
    prefixes = PrefixCache(runner.cache)
    for line in ([5, 6], [5, 6, 7, 8, 9, 10], [5, 6, 30, 31, 32]):
        kept(runner, prefixes, *line)
    match = prefixes.match(prompt)
    assert (match.token_ids, match.cached) == (prompt[:cached], cached)
    match.token_ids += prompt[cached:]
    np.testing.assert_allclose(runner.prefill(match).logits[0], logits_of(runner, prompt)[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("prompt", [[9, 8, 7], [5]])
def test_nothing_in_common_is_no_match(runner: Runner, prompt: list[int]) -> None:
    prefixes = PrefixCache(runner.cache)
    assert prefixes.match(prompt) is None
    kept(runner, prefixes, 5, 6, 7)
    assert prefixes.match(prompt) is None


def test_the_oldest_goes_when_there_are_too_many(runner: Runner) -> None:
    prefixes = PrefixCache(runner.cache, capacity=2)
    for first in (10, 20, 30):
        kept(runner, prefixes, first, 1, 2)
    assert prefixes.match([10, 1, 9]) is None
    assert prefixes.match([20, 1, 9]).cached == prefixes.match([30, 1, 9]).cached == 2


def test_pages_that_run_out_are_taken_from_the_oldest(runner: Runner) -> None:
    prefixes = PrefixCache(runner.cache)
    for first in (10, 20, 30):
        kept(runner, prefixes, *range(first, first + 10))  # 3 pages each: 9 of 12
    sequence = TokenSequence([7] * 17)  # 5 pages: 3 are free
    runner.prefill(sequence)
    assert prefixes.match([10, 11, 12]) is None
    assert prefixes.match([20, 21, 22]).cached == 2


def test_a_kept_sequence_that_somebody_uses_is_not_lost_with_its_eviction(runner: Runner) -> None:
    prefixes = PrefixCache(runner.cache)
    kept(runner, prefixes, *range(10, 20))
    match = prefixes.match([*range(10, 20), 50])
    while prefixes.evict():
        pass
    match.token_ids.append(50)
    expected = logits_of(runner, [*range(10, 20), 50])[-1]
    np.testing.assert_allclose(runner.prefill(match).logits[0], expected, rtol=0, atol=1e-5)
    runner.cache.free(match)
    assert runner.cache.free_pages == 12


def test_when_nothing_is_kept_a_full_cache_is_full(runner: Runner) -> None:
    prefixes = PrefixCache(runner.cache)
    kept(runner, prefixes, 5, 6, 7)
    with pytest.raises(CacheFullError):
        runner.prefill(TokenSequence([7] * 49))
    assert not prefixes.evict()
