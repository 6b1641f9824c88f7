"""Pages shared by texts with the same beginning: who finds what, who computes what, and what is evicted."""

import random
from typing import Any

import numpy as np
import pytest

from minillm.batch import TokenSequence, common_prefix
from minillm.errors import CacheFullError
from minillm.runner.runner import Runner

from ..tiny import logits_of, runner_of, tiny_model
from .books import check_books, check_contents, nodes_of, text_of

LINE = np.random.default_rng(0).integers(3, 96, 40).tolist()


def caching_runner(pages: int = 12, page_size: int = 4, **fields: Any) -> Runner:
    runner = runner_of(tiny_model(seed=2, **fields), pages=pages, page_size=page_size)
    runner.cache.prefix_cache = True
    return runner


@pytest.fixture
def runner() -> Runner:
    return caching_runner()


def computed(runner: Runner, tokens: list[int]) -> TokenSequence:
    """A sequence whose tokens are computed but for what the cache has; the logits are right."""
    sequence = TokenSequence(list(tokens))
    runner.cache.match(sequence)
    expected = logits_of(runner, tokens)[-1]
    np.testing.assert_allclose(runner.prefill(sequence).logits[0], expected, rtol=0, atol=1e-5)
    return sequence


def kept(runner: Runner, *tokens: int) -> None:
    runner.cache.retire(computed(runner, list(tokens)))


def found(runner: Runner, tokens: list[int]) -> int:
    """Number of tokens that a prompt finds."""
    sequence = TokenSequence(list(tokens))
    count = runner.cache.match(sequence)
    assert count == sequence.cached == sequence.reused
    runner.cache.free(sequence)
    return count


# --- what a prompt finds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)]
)
def test_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == common_prefix(tuple(a), tuple(b)) == length


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        ([5, 6, 7, 8, 9, 10, 20], 6),  # the longest of three, to its end
        ([5, 6, 7, 8, 9, 10], 5),  # the last token is left to compute
        ([5, 6, 7, 21, 22], 3),
        ([5, 6, 30, 31, 32, 33], 5),
        ([5, 6, 30, 31], 3),
        ([9, 8, 7], 0),
        ([5], 0),
    ],
)
def test_the_longest_common_prefix_is_taken_over(runner: Runner, prompt: list[int], cached: int) -> None:
    for line in ([5, 6], [5, 6, 7, 8, 9, 10], [5, 6, 30, 31, 32]):
        kept(runner, *line)
    assert found(runner, prompt) == cached
    runner.cache.retire(computed(runner, prompt))
    check_contents(runner)


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [1, 4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 8, 16))])
def test_a_fork_at_any_token_computes_only_its_branch(page_size: int) -> None:
    """Of a finished text, and of one that still runs; neither is changed."""
    for finished in (True, False):
        runner = caching_runner(pages=64, page_size=page_size)
        trunk = computed(runner, LINE[:21])
        if finished:
            runner.cache.retire(trunk)
        for at in random.Random(0).sample(range(1, 21), 20):
            branch = [*LINE[:at], 1, 2]
            assert found(runner, branch) == at
            runner.cache.free(computed(runner, branch))
        assert found(runner, LINE[:21]) == 20
        assert found(runner, [*LINE[:21], 1]) == 21
        check_contents(runner)
        check_books(runner.cache, [] if finished else [trunk])


def test_tokens_generated_one_by_one_are_found_once_their_page_is_full(runner: Runner) -> None:
    sequence = computed(runner, LINE[:3])
    for count, known in ((4, 4), (5, 4), (6, 4), (7, 4), (8, 8), (9, 8)):
        sequence.token_ids.append(LINE[count - 1])
        runner.prefill(sequence)
        assert found(runner, LINE) == known
    runner.cache.retire(sequence)
    assert found(runner, LINE) == 9


def test_a_text_goes_on_in_the_page_in_which_it_ended(runner: Runner) -> None:
    """The next turn of a chat copies nothing."""
    kept(runner, *LINE[:10])
    before = runner.cache.copied_positions
    turn = computed(runner, LINE[:15])
    assert (turn.reused, runner.cache.copied_positions) == (10, before)
    second = computed(runner, [*LINE[:10], 1, 2])  # while the first is running, in the same page
    assert (second.reused, runner.cache.copied_positions) == (10, before + 2)
    check_books(runner.cache, [turn, second])
    check_contents(runner)


def test_texts_of_other_adapters_are_not_found(runner: Runner) -> None:
    for adapter in ("one", None, "two"):
        sequence = TokenSequence(LINE[:9], adapter=adapter)
        assert runner.cache.match(sequence) == 0
        runner.cache.reserve(sequence, 9)
        runner.cache.advance(sequence, 9)
        runner.cache.retire(sequence)
    for adapter in ("one", "two", None):
        assert runner.cache.match(TokenSequence(LINE[:9], adapter=adapter)) == 8


def test_a_prompt_waits_only_for_one_whose_pages_it_may_find(runner: Runner) -> None:
    leader = TokenSequence(LINE[:30])
    for follower, waits in (
        (TokenSequence(LINE), True),
        (TokenSequence(LINE[:18]), True),
        (TokenSequence(LINE[:16]), False),  # the last token is computed in any case
        (TokenSequence([*LINE[:15], 1, *LINE]), False),
        (TokenSequence(LINE, adapter="one"), False),
        (TokenSequence(LINE, private=True), False),
    ):
        assert runner.cache.computes_next(leader, 30, follower) == waits
    follower = computed(runner, LINE[:12])
    follower.token_ids += LINE[12:]
    assert not runner.cache.computes_next(leader, 12, follower)
    assert runner.cache.computes_next(leader, 13, follower)
    runner.cache.prefix_cache = False
    assert not runner.cache.computes_next(leader, 30, TokenSequence(LINE))


def test_private_sequences_neither_find_nor_leave_anything(runner: Runner) -> None:
    sequence = TokenSequence(LINE[:9], private=True)
    runner.prefill(sequence)
    runner.cache.retire(sequence)
    assert (found(runner, LINE[:9]), runner.cache.cached_pages) == (0, 0)
    kept(runner, *LINE[:9])
    assert runner.cache.match(TokenSequence(LINE[:9], private=True)) == 0


def test_without_the_prefix_cache_nothing_is_kept(runner: Runner) -> None:
    runner.cache.prefix_cache = False
    kept(runner, *LINE[:9])
    assert (found(runner, LINE[:9]), runner.cache.cached_pages) == (0, 0)


def test_the_same_page_computed_twice_is_kept_once(runner: Runner) -> None:
    first, second = TokenSequence(LINE[:10]), TokenSequence(LINE[:10])
    runner.forward([first, second], [10, 10])
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    check_books(runner.cache, [first, second])
    for sequence in (first, second):
        sequence.token_ids += LINE[10:12]
        runner.prefill(sequence)
    assert first.pages == second.pages


def test_a_text_that_is_cut_and_goes_on_otherwise_is_not_found_by_its_old_tokens(runner: Runner) -> None:
    """As when guesses are rejected: the pages are written over."""
    sequence = computed(runner, LINE[:12])
    runner.cache.truncate(sequence, 6)
    assert found(runner, LINE) == 12  # not yet
    sequence.token_ids += [1, 2, 3]
    runner.prefill(sequence)
    assert found(runner, LINE) == 6
    assert found(runner, [*LINE[:6], 1, 2, 3, 4]) == 9
    check_contents(runner)
    check_books(runner.cache, [sequence])


def test_a_fork_onto_a_spare_whose_page_is_known(runner: Runner) -> None:
    first = computed(runner, LINE[:9])
    second = runner.cache.fork(first)
    for sequence, tokens in ((first, [50, 51]), (second, [60, 61])):
        sequence.token_ids += tokens
        runner.prefill(sequence)
    assert found(runner, [*LINE[:9], 60, 61, 1]) == 11
    twin = runner.cache.fork(first, spares=[second])
    runner.cache.free(second)
    assert found(runner, [*LINE[:9], 60, 61, 1]) == 9
    twin.token_ids.append(70)
    expected = logits_of(runner, twin.token_ids)[-1]
    np.testing.assert_allclose(runner.prefill(twin).logits[0], expected, rtol=0, atol=1e-5)
    check_contents(runner)
    check_books(runner.cache, [first, twin])


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_pages_that_run_out_are_taken_from_the_text_used_longest_ago(runner: Runner) -> None:
    for first in (10, 20, 30):
        kept(runner, *range(first, first + 10))  # 3 pages each: 9 of 12
    assert found(runner, [10, 11, 12, 13, 14]) == 4  # its first page is the newest now
    sequence = computed(runner, [7] * 17)  # 5 pages, 3 are free
    assert found(runner, list(range(10, 25))) == 4
    assert found(runner, list(range(20, 35))) == 10
    check_books(runner.cache, [sequence])


def test_a_page_that_would_have_been_found_counts_as_used() -> None:
    runner = caching_runner(pages=5)
    for first in (10, 20):
        kept(runner, *range(first, first + 6))
    kept(runner, *range(10, 15))  # the token after the first page is computed, and known already
    computed(runner, [7] * 8)  # two pages, one is free
    assert found(runner, [*range(10, 16), 1]) == 6
    assert found(runner, [*range(20, 26), 1]) == 4


def test_used_pages_are_not_evicted(runner: Runner) -> None:
    kept(runner, *range(10, 20))
    again = computed(runner, [*range(10, 20), 50])
    large = TokenSequence([7] * 37)
    with pytest.raises(CacheFullError):
        runner.prefill(large)
    assert found(runner, [*range(10, 20), 50]) == 8  # no page is left for a copy of two positions
    runner.cache.free(large)
    assert found(runner, [*range(10, 20), 50]) == 10
    again.token_ids.append(60)
    expected = logits_of(runner, again.token_ids)[-1]
    np.testing.assert_allclose(runner.prefill(again).logits[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("second", "cached"), [([*LINE[:4], 1, 2], 4), (LINE[:6], 5), ([*LINE[:2], 1], 2)])
def test_where_one_page_is_all_there_is_it_is_written_over(second: list[int], cached: int) -> None:
    runner = caching_runner(pages=1, page_size=16)
    kept(runner, *LINE[:6])
    assert computed(runner, second).reused == cached
    check_contents(runner)


class LeastRecentlyUsed:
    """The cache as a specification: pages by their whole texts, and when each was used last."""

    def __init__(self, pages: int, size: int) -> None:
        self.pages, self.size, self.clock = pages, size, 0
        self.used: dict[tuple[int, ...], tuple[int, int]] = {}

    def run(self, text: list[int]) -> int:
        """Compute a text of whole pages. Returns the tokens found."""
        self.clock += 1
        count = len(text) // self.size
        prefixes = [tuple(text[: (i + 1) * self.size]) for i in range(count)]
        hits = next((i for i, prefix in enumerate(prefixes) if prefix not in self.used), count)
        mine = {prefix: (self.clock, -i) for i, prefix in enumerate(prefixes)}
        while len(self.used.keys() | mine.keys()) > self.pages:
            del self.used[min(self.used.keys() - mine.keys(), key=self.used.__getitem__)]
        self.used |= mine
        return hits * self.size


def test_eviction_is_in_the_order_of_use_leaves_first() -> None:
    """Random texts on few pages against the specification: the same pages are known after each."""
    runner, rng = caching_runner(pages=9, page_size=2), random.Random(5)
    model = LeastRecentlyUsed(9, 2)
    for _ in range(300):
        text = [t for _ in range(rng.randint(1, 4)) for t in rng.choice(((5, 6), (7, 8), (9, 10)))]
        sequence = TokenSequence([*text, 11])  # the last token is left to compute, and dropped
        assert runner.cache.match(sequence) == model.run(text)
        runner.cache.reserve(sequence, len(text))
        runner.cache.advance(sequence, len(text) - sequence.cached)
        runner.cache.free(sequence)
        assert {tuple(text_of(node)) for node in nodes_of(runner.cache).values()} == set(model.used)
