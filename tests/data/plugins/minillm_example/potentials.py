"""A potential."""

import math


def odd(token_ids: tuple[int, ...]) -> float:
    """Only tokens with odd ids."""
    return 0.0 if all(token % 2 for token in token_ids) else -math.inf


def failing(token_ids: tuple[int, ...]) -> float:
    """One that fails."""
    raise StopIteration("nothing here")
