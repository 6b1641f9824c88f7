"""The gated delta rule, a linear attention whose state forgets and corrects itself (Yang et al., arXiv 2412.06464).

Each head of a text has a matrix S [dk, dv] that maps keys to values. A token with query q, key k and value v lets it
decay by e^g, corrects what it says of k by a share beta, and asks it for q:

    q = q / |q| / sqrt(dk),  k = k / |k|                      |x|^2 = sum(x x) + 1e-6
    beta = sigmoid(b),  g = -exp(A_log) softplus(a + dt_bias)
    S = e^g S;  S = S + k (beta (v - S^T k))^T;  o = S^T q

So a text needs no more than S, whatever its length. Groups of value heads share a query and a key. A token finds the
state before it, and leaves the one after it, by the numbers `before` and `after` of `convolution.py`: tokens may form
a tree. The sums of a token have one order, so results do not depend on the pieces in which a text is computed.

`chunked_delta_rule` computes C tokens of a line at a time by matrix products (section 3.3): within a chunk the
corrections d [C, dv] solve a unit lower triangular system, with c_i the product of the decays up to token i:

    d_i + sum_{j < i} beta_i (k_i k_j) c_i / c_j d_j = beta_i (v_i - c_i S^T k_i)
    o_i = c_i S^T q_i + sum_{j <= i} (q_i k_j) c_i / c_j d_j;   S = c_C S + sum_j c_C / c_j k_j d_j^T

It equals the recurrence but for rounding. All backends run the recurrence, whose bits do not depend on where a chunk
begins; this is what a kernel for long prompts would compute.
"""

from typing import Any

from ..batch import BEGINNING, state_before
from .cost import Cost

EPSILON = 1e-6
"""Added to the square of a query's or a key's length"""
CHUNK = 64
"""The longest chunk"""


def unit_heads(x: Any, key_heads: int, states: Any, xp: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values of each value head, the first two of unit length, queries over sqrt(dk) besides.

    Args:
        x: [T, 2 K dk + V dv], queries, keys and values side by side
        key_heads: K
        states: [slots, V, dk, dv]
        xp: the array module

    Returns:
        q [T, V, dk], k [T, V, dk], v [T, V, dv]
    """
    (T, _), (_, V, dk, dv) = x.shape, states.shape
    both = x[:, : 2 * key_heads * dk].reshape(T, 2, key_heads, dk)
    both = both / xp.sqrt((both * both).sum(axis=3, keepdims=True) + EPSILON)
    q, k = (xp.repeat(heads, V // key_heads, axis=1) for heads in (both[:, 0] * dk**-0.5, both[:, 1]))
    return q, k, x[:, 2 * key_heads * dk :].reshape(T, V, dv)  # [T, K, dk] -> [T, V, dk]


def gate_values(gates: Any, decay: Any, step_bias: Any, xp: Any) -> tuple[Any, Any]:
    """beta and g of each token and value head, from b and a side by side. [T, 2 V] -> [T, V], [T, V]"""
    V = decay.shape[0]
    beta = 1 / (1 + xp.exp(-gates[:, :V]))
    y = gates[:, V:] + step_bias
    return beta, -xp.exp(decay) * (xp.maximum(y, 0) + xp.log1p(xp.exp(-xp.abs(y))))


def delta_rule(
    x: Any,
    gates: Any,
    decay: Any,
    step_bias: Any,
    states: Any,
    before: Any,
    after: Any,
    xp: Any,
    out: Any,
    *,
    key_heads: int,
) -> Any:
    """The gated delta rule token by token; the states after the tokens are in `states`.

    Args:
        x: [T, 2 K dk + V dv], queries, keys and values side by side
        gates: [T, 2 V], the logits of beta, and what is added to `step_bias`
        decay: [V], the logarithm of the rate of decay
        step_bias: [V]
        states: [slots, V, dk, dv]
        before: [T], see `convolution.py`
        after: [T]
        xp: the array module
        out: [T, V dv]
        key_heads: K

    Returns:
        [T, V dv]
    """
    q, k, v = unit_heads(x, key_heads, states, xp)
    beta, g = gate_values(gates, decay, step_bias, xp)
    decays, rows = xp.exp(g), out.reshape(v.shape)
    first, last = before.tolist(), after.tolist()
    S = None

    def advance(S: Any, t: int) -> Any:
        S = S * decays[t][:, None, None]
        corrections = (v[t] - (k[t][:, None] @ S)[:, 0]) * beta[t][:, None]  # [V, dv]
        return S + k[t][:, :, None] * corrections[:, None]  # [V, dk, dv]

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

    for t in range(len(x)):
        S = advance(S if t and first[t] == t - 1 else after_row(first[t]), t)
        rows[t] = (q[t][:, None] @ S)[:, 0]  # [V, dk], [V, dk, dv] -> [V, dv]
        if last[t] >= 0:
            states[last[t]] = S
    return out


def chunked_delta_rule(
    x: Any,
    gates: Any,
    decay: Any,
    step_bias: Any,
    states: Any,
    before: Any,
    after: Any,
    xp: Any,
    out: Any,
    *,
    key_heads: int,
    longest: int = CHUNK,
) -> Any:
    """As `delta_rule`, up to `longest` tokens of a line at a time; a chunk ends where a state is kept. [T, V dv]"""
    q, k, v = (heads.transpose(1, 0, 2) for heads in unit_heads(x, key_heads, states, xp))  # [T, V, d] -> [V, T, d]
    beta, g = (values.T[:, :, None] for values in gate_values(gates, decay, step_bias, xp))  # [T, V] -> [V, T, 1]
    rows, first, last = out.reshape(len(x), states.shape[1], -1), before.tolist(), after.tolist()
    branches = {place for t, place in enumerate(first) if place >= 0 and place != t - 1}
    after_chunks: dict[int, Any] = {}  # the state after the last row of each
    start = 0
    for stop in range(1, len(x) + 1):
        goes_on = stop < len(x) and first[stop] == stop - 1 and stop - 1 not in branches and last[stop - 1] < 0
        if goes_on and stop - start < longest:
            continue
        place, chunk = first[start], slice(start, stop)
        if place >= 0:
            S = after_chunks[place]
        else:
            S = xp.zeros(states.shape[1:], states.dtype) if place == BEGINNING else states[state_before(place)]
        y, S = _chunk(q[:, chunk], k[:, chunk], v[:, chunk], beta[:, chunk], g[:, chunk], S, xp)
        rows[chunk] = y.transpose(1, 0, 2)  # [V, C, dv] -> [C, V, dv]
        after_chunks[stop - 1] = S
        if last[stop - 1] >= 0:
            states[last[stop - 1]] = S
        start = stop
    return out


def _chunk(q: Any, k: Any, v: Any, beta: Any, g: Any, S: Any, xp: Any) -> tuple[Any, Any]:
    """Results of C tokens, and the state after them. 2 x [V, C, dk], [V, C, dv], 2 x [V, C, 1], [V, dk, dv]"""
    C = q.shape[1]
    decays = xp.cumsum(g, axis=1)  # [V, C, 1]: logarithms of c_i
    upto = xp.tril(xp.ones((C, C), bool))
    ratios = xp.exp(xp.where(upto, decays - decays.swapaxes(1, 2), -xp.inf))  # [V, C, C]: c_i / c_j
    keys = k.swapaxes(1, 2)  # [V, C, dk] -> [V, dk, C]
    system = xp.where(xp.eye(C, dtype=bool), 1, beta * (k @ keys) * ratios)  # [V, C, C]
    corrections = xp.linalg.solve(system, beta * (v - xp.exp(decays) * (k @ S)))  # [V, C, dv]
    y = xp.exp(decays) * (q @ S) + (q @ keys * ratios) @ corrections  # [V, C, dv]
    whole = decays[:, -1:]
    return y, xp.exp(whole) * S + (k * xp.exp(whole - decays)).swapaxes(1, 2) @ corrections


def delta_rule_cost(
    T: int, key_heads: int, value_heads: int, dk: int, dv: int, sequences: int, number_bytes: int = 4
) -> Cost:
    """Seven FLOPs a number of each value head's matrix: the decay, and a multiply-add each to ask, correct and ask.

    Besides, of each of them 2 dv for the corrections and 10 for its gates, a key head's 7 dk + 4 for both lengths, and
    the exponentials of the rates once. The state of each sequence is read and written once, in float32. Unfused, each
    token's queries and keys of unit length would be written and read, and each token's state.
    """
    V, K = value_heads, key_heads
    flops = T * V * (7 * dk * dv + 2 * dv + 10) + V + T * K * (7 * dk + 4)
    state = 4 * V * dk * dv
    results = number_bytes * T * V * dv
    read = number_bytes * T * (2 * K * dk + V * dv + 2 * V) + 8 * V + sequences * state
    unfused = 2 * number_bytes * T * 2 * K * dk + 2 * (T - sequences) * state
    return Cost(flops, read, results + sequences * state, unfused)
