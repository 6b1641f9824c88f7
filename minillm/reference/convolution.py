"""Causal depthwise convolution over each sequence's tokens, whose last inputs are a state (arXiv 2312.00752, figure 3).

Each channel c of a token is a weighted sum of the same channel of the token and of the k - 1 tokens before it:

    out[t, c] = activation(sum_j w[j, c] u[t - (k - 1) + j, c] + b[c])          u = x
    out[t, c] = C[t, c] * (sum_j w[j, c] u[t - (k - 1) + j, c] + b[c])          u = B * x, of a row (B, C, x): gated

The gated form is LFM2's ("LFM2 Technical Report", arXiv 2511.23404, section 2). Inputs before a text's beginning are
zero. So a sequence needs no more than its last k - 1 inputs, whatever its length: its state, float32, the newest last.

A pass reads and writes states by two numbers of each token:

    before[t]   the token before it: its row of the pass if >= 0; BEGINNING if there is none; else the state in slot
                `state_before(slot)` of what has been computed
    after[t]    the slot that takes the state after the token, or NO_SLOT

So tokens may also form a tree. A slot that a pass writes is none that it reads: a pass can be repeated. Each sum has
the same order, from the oldest input on, whatever is computed in one pass: results do not depend on the chunks.

`unfold` serves another kind, over all channels and neighbours on both sides: a product follows it.
"""

from collections.abc import Sequence
from typing import Any

from ..batch import BEGINNING, Span, state_before
from .activation import ACTIVATIONS, FLOPS_PER_ELEMENT
from .cost import Cost


def convolve(
    x: Any,
    weight: Any,
    bias: Any | None,
    states: Any,
    before: Any,
    after: Any,
    xp: Any,
    out: Any,
    *,
    gated: bool = False,
    activation: str | None = None,
) -> Any:
    """The convolution of T tokens; their states after it are in `states`.

    Args:
        x: [T, C]; or gated [T, 3 C], B, C and x side by side
        weight: [k, C], of the oldest input first
        bias: [C] or None
        states: [slots, k - 1, C], the newest input last
        before: [T], see above
        after: [T]
        xp: the array module
        out: [T, C]
        gated: whether the input is B * x, and the result is multiplied by C
        activation: name of the function of the result, if there is one

    Returns:
        [T, C]
    """
    (k, C), T = weight.shape, len(x)
    u = x[:, :C] * x[:, 2 * C :] if gated else x  # [T, 3 C] -> [T, C]
    inputs = [u]  # of each token, and of those before it: [T, C] each
    place, age = xp.arange(T), xp.zeros(T, int)  # of the token so many before: a row, or how far back in a state
    for _ in range(k - 1):
        place = xp.where(place >= 0, before[xp.maximum(place, 0)], place)
        age += place < 0
        older = xp.where((place >= 0)[:, None], u[xp.maximum(place, 0)], 0)
        stored = states[xp.maximum(state_before(place), 0), xp.clip(k - 1 - age, 0, k - 2)]
        inputs.append(xp.where((place < BEGINNING)[:, None], stored, older))
    y = inputs[-1] * weight[0]
    for j in range(1, k):
        y += inputs[k - 1 - j] * weight[j]
    if bias is not None:
        y += bias
    rows = xp.flatnonzero(after >= 0)
    if rows.size:
        states[after[rows]] = xp.stack([older[rows] for older in inputs[k - 2 :: -1]], axis=1)  # [n, k - 1, C]
    if gated:
        y *= x[:, C : 2 * C]
    out[...] = y if activation is None else ACTIVATIONS[activation](y, xp)
    return out


def convolution_cost(
    T: int,
    C: int,
    k: int,
    sequences: int,
    *,
    bias: bool = False,
    gated: bool = False,
    activation: str | None = None,
    number_bytes: int = 4,
) -> Cost:
    """Per number k products and k - 1 sums, and one FLOP each for bias and both gates.

    The state of each sequence is read and written once, in float32; further ones that the cache has written at borders
    of pages are not counted.
    """
    flops = T * C * (2 * k - 1 + bias + 2 * gated + (FLOPS_PER_ELEMENT[activation] if activation else 0))
    states = 4 * sequences * (k - 1) * C
    numbers = number_bytes * T * C
    steps = bias + 2 * gated + (activation is not None)
    return Cost(
        flops, numbers * (3 if gated else 1) + 4 * C * (k + bias) + states, numbers + states, 2 * numbers * steps
    )


def unfold(x: Any, width: int, spans: Sequence[Span], out: Any, *, rows: int = 1, stride: int = 1) -> Any:
    """Each row beside its neighbours, as many before as after it, for a convolution of all channels.

    With a matrix product it is the convolution ("im2col": Chellapilla, Puri, Simard, "High performance convolutional
    neural networks for document processing", 2006, section 3.1).

    Args:
        x: [R, E]
        width: k, odd: rows side by side, the first neighbour's first
        spans: the sequences, beyond whose ends rows are zero
        out: [R / s, k E], filled and returned
        rows: of x for each position of a sequence: two frames of sound
        stride: s: every s-th row, which each sequence has a multiple of
    """
    out[...] = 0
    by_place = out.reshape(len(out), width, -1)  # [R / s, k E] -> [R / s, k, E]
    for span in spans:
        start, stop = rows * span.start, rows * span.stop
        for j in range(width):
            shift = j - width // 2  # out[t, j] = x[s t + shift]
            first = max(start // stride, -(-(start - shift) // stride))
            last = min(stop // stride, -(-(stop - shift) // stride))
            if first < last:
                by_place[first:last, j] = x[stride * first + shift : stride * (last - 1) + shift + 1 : stride]
    return out


def unfold_cost(R: int, E: int, width: int, number_bytes: int = 4, *, stride: int = 1, result_bytes: int = 0) -> Cost:
    """No arithmetic; R E numbers read, k R E / s written, which a convolution in one step would not write and read."""
    written = width * (R // stride) * E * (result_bytes or number_bytes)
    return Cost(0, number_bytes * R * E, written, 2 * written)
