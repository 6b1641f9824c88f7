"""Mamba-2's recurrence: a state space whose step, input and output depend on the token (arXiv 2405.21060, section 7).

Each head of a text has a state S [P, N]. A token with values x [P], a step, and B and C [N] of the head's group lets it
decay, adds to it, and reads it:

    step = softplus(step + step_bias), between two limits
    S = exp(-exp(decay) step) S + step x B^T
    y = S C + skip x

So a text needs no more than S, whatever its length. A token finds the state before it, and leaves the one after it, by
the numbers `before` and `after` of `convolution.py`: tokens may form a tree. The sums of a token have one order, so
results do not depend on the pieces in which a text is computed. (The paper's chunked form, section 6, equals this but
for rounding.)
"""

import math
from typing import Any

from ..batch import BEGINNING, state_before
from .cost import Cost

UNLIMITED = 0.0, math.inf
"""Limits that no step is beyond"""


def step_sizes(steps: Any, bias: Any, limits: tuple[float, float], xp: Any) -> Any:
    """softplus(steps + bias), the logarithm of 1 + e^x, between two limits. [T, H], [H] -> [T, H]"""
    y = steps + bias
    y = xp.maximum(y, 0) + xp.log1p(xp.exp(-xp.abs(y)))
    return y if limits == UNLIMITED else xp.minimum(xp.maximum(y, limits[0]), limits[1])


def selective_scan(
    x: Any,
    steps: Any,
    decay: Any,
    skip: Any,
    step_bias: Any,
    states: Any,
    before: Any,
    after: Any,
    xp: Any,
    out: Any,
    *,
    groups: int,
    limits: tuple[float, float] = UNLIMITED,
) -> Any:
    """The recurrence of T tokens, one by one; the states after them are in `states`.

    Args:
        x: [T, H P + 2 G N]: values of each head, then B and C of each group, side by side
        steps: [T, H]
        decay: [H], the logarithm of the rate of decay
        skip: [H], the factor of the values in the result
        step_bias: [H]
        states: [slots, H, P, N]
        before: [T], see `convolution.py`
        after: [T]
        xp: the array module
        out: [T, H P]
        groups: G, of H / G heads each
        limits: of the steps, the least and the largest

    Returns:
        [T, H P]
    """
    T, (_, H, P, N), G = len(x), states.shape, groups
    values = x[:, : H * P].reshape(T, H, P)
    B, C = (xp.repeat(both, H // G, axis=1) for both in x[:, H * P :].reshape(T, 2, G, N).swapaxes(0, 1))  # [T, H, N]
    sizes = step_sizes(steps, step_bias, limits, xp)
    decays, added = xp.exp(sizes * -xp.exp(decay)), values * sizes[:, :, None]
    rows, first, last = out.reshape(T, H, P), before.tolist(), after.tolist()

    def advance(S: Any, t: int) -> Any:
        return S * decays[t][:, None, None] + added[t][:, :, None] * B[t][:, None]  # [H, P, N]

    def after_row(place: int) -> Any:
        """The state after a row of this pass, or the one that it stands for."""
        line = []
        while place >= 0:
            line.append(place)
            place = first[place]
        S = xp.zeros(states.shape[1:], states.dtype) if place == BEGINNING else states[state_before(place)]
        for t in reversed(line):
            S = advance(S, t)
        return S

    S = None
    for t in range(T):
        S = advance(S if t and first[t] == t - 1 else after_row(first[t]), t)
        rows[t] = (S @ C[t][:, :, None])[:, :, 0] + skip[:, None] * values[t]  # [H, P, N], [H, N] -> [H, P]
        if last[t] >= 0:
            states[last[t]] = S
    return out


def selective_scan_cost(
    T: int, heads: int, head_dim: int, groups: int, state_size: int, sequences: int, number_bytes: int = 4
) -> Cost:
    """Five FLOPs for each number of a head's state: the decay, and a multiply-add each to add to it and to read it.

    Besides, for each of P values a product with the step, and a product and a sum to skip; for each head of a token six
    for its step and its decay; and the exponentials of the rates once. The state of each sequence is read and written
    once, in float32. Unfused, each token's state would be written and read.
    """
    H, P, N = heads, head_dim, state_size
    flops = T * H * (5 * P * N + 3 * P + 6) + H
    state, results = 4 * H * P * N, number_bytes * T * H * P
    read = results + number_bytes * T * (2 * groups * N + H) + 12 * H + sequences * state
    return Cost(flops, read, results + sequences * state, 2 * (T - sequences) * state)
