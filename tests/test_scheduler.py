"""The scheduler: which requests run in the next step, with how much of each prompt."""

from dataclasses import dataclass

import pytest

from minillm.batch import TokenSequence
from minillm.loop import Limits, Scheduler


@dataclass(eq=False)
class Work:
    name: str
    width: int = 1
    pages: int = 1


def scheduler_with(*works: Work, places: int = 4, pages: int = 10, chunk: int = 8) -> Scheduler:
    scheduler = Scheduler(Limits(places, chunk), pages)
    scheduler.waiting.extend(works)
    return scheduler


def names(works: list[Work]) -> str:
    return "".join(work.name for work in works)


def test_places_and_pages_bound_the_batch() -> None:
    assert names(scheduler_with(*map(Work, "abcdef")).admit()) == "abcd"
    assert names(scheduler_with(*map(Work, "abcdef"), pages=3).admit()) == "abc"
    assert names(scheduler_with(Work("a", width=3), Work("b", width=2), Work("c")).admit()) == "a"


def test_nobody_overtakes() -> None:
    scheduler = scheduler_with(Work("a", pages=6), Work("b", pages=6), Work("c"))
    assert names(scheduler.admit()) == "a"
    assert names(scheduler.admit()) == ""
    scheduler.remove(scheduler.running[0])
    assert names(scheduler.admit()) == "bc"


def test_what_leaves_makes_room_for_as_much() -> None:
    works = [Work("a", 2, 5), Work("b", 2, 5), Work("c", 2, 5), Work("d", 1, 5)]
    scheduler = scheduler_with(*works)
    assert names(scheduler.admit()) == "ab"
    scheduler.remove(works[2])  # waits, and holds nothing
    assert names(scheduler.admit()) == ""
    scheduler.remove(works[0])
    assert names(scheduler.admit()) == "d"
    assert names(scheduler.running) == "bd"


@pytest.mark.parametrize(
    ("pending", "counts"),
    [
        ([(20, True)], [8]),
        ([(3, True), (20, True), (5, True)], [3, 5, 0]),
        ([(1, False), (20, True), (1, False)], [1, 8, 1]),  # those that decode are not held up
        ([(20, False), (20, True)], [20, 8]),  # what cannot be cut is computed whole
        ([], []),
    ],
)
def test_prompts_share_the_chunk_in_their_order(pending: list[tuple[int, bool]], counts: list[int]) -> None:
    sequences = [(TokenSequence([0] * (2 + count), cached=2), divisible) for count, divisible in pending]
    assert scheduler_with().counts(sequences) == counts
