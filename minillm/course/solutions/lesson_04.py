"""Answers to the exercises of lesson 4."""


def rows(prompt: int, new: int, cached: bool) -> int:
    """The first pass has the prompt's rows."""
    return prompt + new - 1 if cached else sum(prompt + i for i in range(new))


def tokens_that_fit(memory: int, L: int, K: int, D: int, size: int) -> int:
    """A key and a value for each head and layer."""
    return memory // (2 * L * K * D * size)
