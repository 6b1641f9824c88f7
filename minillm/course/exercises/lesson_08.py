"""Exercises of lesson 8: ragged batches and pages."""

from . import Answer, compare

EXERCISES = ("slot", "free")


def slot(answer: Answer) -> str | None:
    """Page and place of a position."""
    for position, expected in ((0, (7, 0)), (3, (7, 3)), (4, (2, 0)), (9, (5, 1))):
        value = answer([7, 2, 5], position, 4)
        if value == (position // 4, position % 4):
            return f"{value[0]} is the page's place in the table: the page is what stands there."
        if (problem := compare(f"slot([7, 2, 5], {position}, 4)", value, expected)) is not None:
            return problem
    return None


def free(answer: Answer) -> str | None:
    """Counts of owners."""
    owners = [1, 2, 1, 3]
    value = answer([1, 2, 3], owners)
    if value is None:
        return "It returns None: return the pages that nobody uses any more."
    if sorted(value) == [1, 2, 3]:
        return "Pages 1 and 3 have other owners: they stay."
    problem = compare("The owners [1, 2, 1, 3] after free([1, 2, 3], owners)", owners, [1, 1, 0, 2])
    return problem or compare("free([1, 2, 3], [1, 2, 1, 3])", sorted(value), [2])
