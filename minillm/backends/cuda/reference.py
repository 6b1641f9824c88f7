"""Attention without a kernel (a tree of guesses, heads of an unsupported width), by the reference implementation."""

from collections.abc import Sequence
from typing import Any

from ...batch import Batch
from ...reference.attention import attention_scores, merge_values
from ...reference.softmax import softmax


def attend_by_reference(
    q: Any,
    keys: Any,
    values: Any,
    batch: Batch,
    scale: float,
    xp: Any,
    out: Any,
    *,
    bias: Sequence[Any] | None = None,
    **variant: Any,
) -> Any:
    """`reference.attend` in float32, each sequence's pages first gathered into one.

    Pages are small here, and a loop over them would take a launch for each. Arguments as of `reference.attend`.
    """
    for i, span in enumerate(batch.spans):
        n = span.stop - span.start
        alone = span._replace(start=0, stop=n, pages=(0,))
        queries = q[span.start : span.stop].astype(xp.float32)
        paged = _gathered(keys, span.pages, xp)
        own = None if bias is None else bias[i]
        scores = attention_scores(queries, paged, alone, n, scale, xp, **variant, bias=own)  # -> [K, G n, S]
        softmax(scores, xp, out=scores)
        z = xp.empty(queries.shape, xp.float32)
        merge_values(scores, _gathered(values, span.pages, xp), alone, z, xp)
        out[span.start : span.stop] = z.astype(out.dtype)
    return out


def _gathered(pages: Any, wanted: tuple[int, ...], xp: Any) -> Any:
    """Gather pages into one long page of float32. [pages, K, P, D] -> [1, K, B P, D]"""
    _, K, _, D = pages.shape
    picked = pages[xp.asarray(wanted)].astype(xp.float32)  # -> [B, K, P, D]
    return picked.transpose(1, 0, 2, 3).reshape(1, K, -1, D)  # -> [K, B, P, D] -> [1, K, B P, D]
