"""Answers to the exercises of lesson 9."""


def waiting_steps(lengths: list[int], size: int) -> int:
    """A batch takes as long as its longest request."""
    return sum(max(lengths[first : first + size]) for first in range(0, len(lengths), size))


def continuous_steps(lengths: list[int], size: int) -> int:
    """The next request takes the place that is free first."""
    ends = [0] * size
    for length in lengths:
        place = ends.index(min(ends))
        ends[place] += length
    return max(ends)
