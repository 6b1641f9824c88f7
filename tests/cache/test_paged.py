"""Pages, their owners, and what forking, truncating and freeing do to them."""

import numpy as np
import pytest

from minillm.backends.memory import Memory
from minillm.backends.numpy import NumpyBackend
from minillm.batch import TokenSequence
from minillm.cache import PagedCache
from minillm.engine.loading import affordable_pages
from minillm.errors import CacheFullError, ParameterError
from minillm.runner.runner import Runner

from ..tiny import logits_of, loop_of, request_for, runner_of, tiny_model, tiny_runner

LINE = np.random.default_rng(0).integers(3, 96, 40).tolist()


@pytest.fixture
def runner() -> Runner:
    return tiny_runner(seed=2, pages=30, page_size=4)


def prefilled(runner: Runner, count: int) -> TokenSequence:
    sequence = TokenSequence(LINE[:count])
    runner.prefill(sequence)
    return sequence


def assert_continues(runner: Runner, sequence: TokenSequence, tokens: list[int]) -> None:
    """Feeding `tokens` gives the logits that the whole line gives in one pass."""
    sequence.token_ids += tokens
    expected = logits_of(runner, sequence.token_ids)[-1]
    np.testing.assert_allclose(runner.prefill(sequence).logits[0], expected, rtol=0, atol=1e-5)


def used(runner: Runner) -> int:
    return runner.cache.num_pages - runner.cache.free_pages


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (4, 1), (5, 2), (8, 2), (40, 10)])
def test_a_sequence_has_the_pages_it_needs(runner: Runner, tokens: int, pages: int) -> None:
    sequence = prefilled(runner, tokens)
    assert len(sequence.pages) == used(runner) == runner.cache.pages_for(tokens) == pages
    runner.cache.free(sequence)
    assert (sequence.pages, sequence.cached, sequence.token_ids, used(runner)) == ([], 0, [], 0)


def test_keys_and_values_have_the_documented_shape() -> None:
    cache = PagedCache(tiny_model().config, NumpyBackend(), 5, 7)
    assert cache.storage.keys.shape == cache.storage.values.shape == (2, 5, 4, 7, 8)  # L, pages, K, P, D
    assert cache.storage.nbytes == cache.storage.keys.nbytes + cache.storage.values.nbytes


def test_the_back_end_chooses_the_page_size_unless_one_is_given() -> None:
    assert PagedCache(tiny_model().config, NumpyBackend(), 1).page_size == Memory.page_size


# --- fork -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11])
def test_a_fork_goes_on_as_a_copy_would(runner: Runner, count: int) -> None:
    sequence = prefilled(runner, count)
    forks = [runner.cache.fork(sequence) for _ in range(3)]
    assert used(runner) == runner.cache.pages_for(count)
    for fork, token in zip(forks, (50, 60, 70), strict=True):
        assert_continues(runner, fork, [token, token + 1])
    assert_continues(runner, sequence, [80, 81])
    for owner in [sequence, *forks]:  # and nobody has written into another's past
        assert_continues(runner, owner, [90])
    for owner in [sequence, *forks]:
        runner.cache.free(owner)
    assert used(runner) == 0


@pytest.mark.parametrize("keep", [0, 1, 4, 6, 8, 9])
def test_a_fork_may_keep_less(runner: Runner, keep: int) -> None:
    sequence = prefilled(runner, 9)
    fork = runner.cache.fork(sequence, keep)
    assert (fork.token_ids, fork.cached, len(fork.pages)) == (LINE[:keep], keep, runner.cache.pages_for(keep))
    assert_continues(runner, fork, [33, 34])
    assert_continues(runner, sequence, [35])


def test_a_fork_leaves_waiting_tokens_behind(runner: Runner) -> None:
    sequence = prefilled(runner, 6)
    sequence.token_ids += [1, 2, 3]
    assert runner.cache.fork(sequence).token_ids == LINE[:6]


def test_writing_copies_the_shared_last_page_once_and_no_full_one(runner: Runner) -> None:
    sequence = prefilled(runner, 10)  # 3 pages, the last half full
    fork = runner.cache.fork(sequence)
    assert fork.pages == sequence.pages
    assert_continues(runner, fork, [50])
    assert fork.pages[:2] == sequence.pages[:2]
    assert fork.pages[2] != sequence.pages[2]
    assert used(runner) == 4
    assert_continues(runner, sequence, [60])  # its page is its own again
    assert used(runner) == 4


def test_a_page_is_free_when_its_last_owner_lets_go(runner: Runner) -> None:
    sequence = prefilled(runner, 8)
    first, second = runner.cache.fork(sequence), runner.cache.fork(sequence, 4)
    for owner, left in ((sequence, 2), (first, 1), (second, 0)):
        runner.cache.free(owner)
        assert used(runner) == left


def test_four_beams_on_a_long_prompt_do_not_take_four_times_its_pages() -> None:
    runner = tiny_runner(seed=2, pages=100, page_size=4)
    loop = loop_of(target=runner)
    request = request_for(LINE, num_beams=4, max_new_tokens=6)
    loop.add(request)
    most = 0
    while loop.busy:
        loop.step()
        most = max(most, used(runner))
    assert 10 < most <= 10 + 4 * 2
    assert used(runner) == 0


# --- truncate and forget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 5, 8, 13])
def test_truncating_and_going_on_equals_a_fresh_start(runner: Runner, keep: int) -> None:
    sequence = prefilled(runner, 13)
    sequence.token_ids += [1, 2]
    runner.cache.truncate(sequence, keep)
    assert (sequence.token_ids, sequence.cached) == (LINE[:keep], keep)
    assert used(runner) == runner.cache.pages_for(keep)
    assert_continues(runner, sequence, [50, 60, 70])


def test_truncating_a_fork_leaves_the_other_alone(runner: Runner) -> None:
    sequence = prefilled(runner, 10)
    fork = runner.cache.fork(sequence)
    runner.cache.truncate(fork, 6)
    assert_continues(runner, fork, [50, 60])
    assert_continues(runner, sequence, [70])


def test_what_is_forgotten_is_computed_again(runner: Runner) -> None:
    sequence = prefilled(runner, 10)
    runner.cache.forget(sequence)
    assert (sequence.token_ids, sequence.cached, sequence.pages, used(runner)) == (LINE[:10], 0, [], 0)
    assert_continues(runner, sequence, [50])


# --- a full cache -----------------------------------------------------------------------------------------------------


def test_a_full_cache_says_so_and_leaves_everything_usable() -> None:
    runner = tiny_runner(seed=2, pages=4, page_size=4)
    first, second = prefilled(runner, 8), prefilled(runner, 7)
    first.token_ids.append(50)
    with pytest.raises(CacheFullError, match=r"4 pages of 4 positions are all in use.*raise cache_bytes"):
        runner.prefill(first)
    assert (first.cached, first.pending, len(first.pages)) == (8, 1, 2)
    assert_continues(runner, second, [60])
    runner.cache.free(second)
    assert_continues(runner, first, [70])
    runner.cache.free(first)
    assert used(runner) == 0


def test_a_fork_that_cannot_be_copied_stays_as_it_was() -> None:
    runner = tiny_runner(seed=2, pages=2, page_size=4)
    sequence = prefilled(runner, 6)
    fork = runner.cache.fork(sequence)
    fork.token_ids.append(50)
    with pytest.raises(CacheFullError):
        runner.prefill(fork)
    assert fork.pages == sequence.pages
    runner.cache.free(fork)
    assert_continues(runner, sequence, [60])


# --- the budget -------------------------------------------------------------------------------------------------------


def test_a_budget_buys_whole_pages() -> None:
    config, backend = tiny_model().config, NumpyBackend()
    page = PagedCache(config, backend, 1).storage.nbytes
    assert affordable_pages(config, backend, 16, 3 * page + page // 2) == 3
    assert affordable_pages(config, backend, 16, 99 * page) == 16  # a full context has 64 positions and fits one page
    assert affordable_pages(config, backend, 5, None) == 5
    with pytest.raises(ParameterError, match=rf"cache_bytes should be at least {page} .* found {page - 1}"):
        affordable_pages(config, backend, 16, page - 1)


def test_a_batch_names_the_slots_of_its_tokens() -> None:
    runner = runner_of(tiny_model(), pages=9, page_size=4)
    a, b = prefilled(runner, 3), prefilled(runner, 6)
    a.token_ids += [50, 51, 52]
    b.token_ids += [60]
    runner.forward([a, b], [3, 1])
    stored = [
        [runner.cache.storage.keys[0, s.pages[i // 4], :, i % 4] for i in range(s.cached)] for s in (a, b)
    ]  # written where position i belongs
    for sequence, keys in zip((a, b), stored, strict=True):
        apart = runner_of(runner.model, pages=1, page_size=16)
        alone = TokenSequence(sequence.token_ids)
        apart.prefill(alone)
        np.testing.assert_allclose(
            keys, apart.cache.storage.keys[0, alone.pages[0]].swapaxes(0, 1)[: len(keys)], atol=1e-5
        )


# --- forks that write over what is about to be freed ------------------------------------------------------------------


def beams(runner: Runner) -> tuple[TokenSequence, TokenSequence]:
    """Two sequences of 11 tokens that part after 9, in the last of three pages."""
    first = prefilled(runner, 9)
    second = runner.cache.fork(first)
    first.token_ids += [50, 51]
    second.token_ids += [60, 61]
    for sequence in (first, second):
        runner.prefill(sequence)
    return first, second


def test_a_fork_onto_a_spare_copies_only_what_differs(runner: Runner) -> None:
    living, dying = beams(runner)
    before, pages = runner.cache.copied_positions, used(runner)
    twin = runner.cache.fork(living, spares=[dying])
    assert runner.cache.copied_positions == before + 2
    assert used(runner) == pages
    assert set(twin.pages[:2]) == set(living.pages[:2])
    assert twin.pages[2] != living.pages[2]
    runner.cache.free(dying)
    assert_continues(runner, twin, [70])
    assert_continues(runner, living, [71, 72])
    assert runner.cache.copied_positions == before + 2  # neither shares a page that it writes to
    for sequence in (twin, living):
        runner.cache.free(sequence)
    assert used(runner) == 0


def test_a_fork_of_a_part_onto_a_spare(runner: Runner) -> None:
    living, dying = beams(runner)
    twin = runner.cache.fork(living, 10, spares=[dying])
    runner.cache.free(dying)
    assert_continues(runner, twin, [70, 71, 72])
    assert_continues(runner, living, [73])


def test_of_several_spares_the_nearest_is_written_over(runner: Runner) -> None:
    living, far = beams(runner)
    near = runner.cache.fork(living, 10)
    near.token_ids += [80]
    runner.prefill(near)
    before = runner.cache.copied_positions
    runner.cache.fork(living, spares=[far, near])
    assert runner.cache.copied_positions == before + 1
    assert (len(far.pages), len(near.pages)) == (3, 2)


@pytest.mark.parametrize("case", ["shared", "other tokens", "fewer pages"])
def test_a_spare_that_will_not_do_is_left_alone(runner: Runner, case: str) -> None:
    living, spare = beams(runner)
    if case == "shared":
        runner.cache.fork(spare)
    elif case == "other tokens":
        spare = TokenSequence([*LINE[1:9], *LINE[:3]])
        runner.prefill(spare)
    else:
        runner.cache.truncate(spare, 8)
    before, pages = runner.cache.copied_positions, list(spare.pages)
    twin = runner.cache.fork(living, spares=[spare])
    assert (runner.cache.copied_positions, spare.pages, twin.pages) == (before, pages, living.pages)
    assert_continues(runner, twin, [70])
    assert_continues(runner, living, [71])
