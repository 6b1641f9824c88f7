"""Answers to the exercises of lesson 8."""


def slot(table: list[int], position: int, page_size: int) -> tuple[int, int]:
    """The table says which page; its places are in order."""
    return table[position // page_size], position % page_size


def free(table: list[int], owners: list[int]) -> list[int]:
    """A page without owners is free."""
    for page in table:
        owners[page] -= 1
    return [page for page in table if not owners[page]]
