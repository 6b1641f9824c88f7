"""Token embedding, plus learned position embedding if the model has one."""

from typing import Any

from .cost import Cost


def embed(table: Any, ids: Any, xp: Any, out: Any, positions: Any = None, position_table: Any = None) -> Any:
    """table[ids], plus position_table[positions].

    Args:
        table: [V, E]
        ids: [T]
        xp: the array module
        out: [T, E], filled and returned
        positions: [T], or None
        position_table: [positions, E], or None
    """
    out[...] = table[ids]  # not xp.take: it would copy a column-major table
    if position_table is not None:
        out += position_table[positions]
    return out


def cost(T: int, E: int, row_bytes: int, position_row_bytes: int = 0, number_bytes: int = 4) -> Cost:
    """T E additions with positions, else none; T ids and T rows of each table read, T E numbers written.

    The `..._bytes` are the size of one row of each table; 0: no position table.
    """
    read = T * (8 + row_bytes)
    if not position_row_bytes:
        return Cost(0, read, number_bytes * T * E)
    result = number_bytes * T * E
    return Cost(T * E, read + T * (8 + position_row_bytes), result, 2 * result)
