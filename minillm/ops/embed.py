"""Table look-up: a token's vector, and a position's."""

from typing import Any

from .cost import Cost


def embed(table: Any, ids: Any, xp: Any, out: Any) -> Any:
    """One row of the table for each id. [V, E], [T] -> [T, E]"""
    out[...] = table[ids]  # not xp.take: it would copy a table whose columns lie together
    return out


def cost(T: int, E: int, row_bytes: int) -> Cost:
    """No arithmetic; T ids and T rows of the table are read, T rows of E numbers written.

    `row_bytes` is what one row takes in the table.
    """
    return Cost(0, T * (8 + row_bytes), 4 * T * E)
