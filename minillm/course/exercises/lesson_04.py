"""Exercises of lesson 4: naive and cached generation."""

from . import Answer, compare

EXERCISES = ("rows", "tokens_that_fit")


def rows(answer: Answer) -> str | None:
    """Rows through the layers."""
    naive = answer(5, 3, False)
    if naive == 5 + 6 + 7 + 8:
        return "The last generated token is not fed back: three tokens take three passes, of 5, 6 and 7 rows."
    problem = compare("rows(5, 3, cached=False)", naive, 5 + 6 + 7)
    return problem or compare("rows(5, 3, cached=True)", answer(5, 3, True), 5 + 1 + 1)


def tokens_that_fit(answer: Answer) -> str | None:
    """Keys and values of all layers."""
    value = answer(10**9, 32, 8, 128, 4)
    expected = 10**9 // (2 * 32 * 8 * 128 * 4)
    if value == 10**9 // (2 * 32 * 8 * 128):
        return "A number takes `size` bytes."
    if value == 10**9 // (32 * 8 * 128 * 4):
        return "A token has a key and a value in each layer: twice as many numbers."
    if isinstance(value, float) and int(value) == expected:
        return "Tokens are whole: round down."
    return compare("tokens_that_fit(10**9, 32, 8, 128, 4)", value, expected)
