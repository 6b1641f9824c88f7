"""The stated costs of operations against the arithmetic that they do, counted by instrumented numbers.

NumPy adds n numbers with n - 1 additions where the convention says n, so each test adds one for every sum. Masked
scores are computed and not counted; attention is therefore tested with one query.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.batch import Batch, TokenSequence
from minillm.reference.activation import ACTIVATIONS
from minillm.reference.attention import AttentionSpec, attention_cost
from minillm.reference.gates import GATES, glu_cost, multiply_cost, scale_logits_cost
from minillm.reference.linear import embed_cost, linear_cost
from minillm.reference.norm import layer_norm_cost, rms_norm_cost
from minillm.reference.rotary import rotary_cost


class Number:
    """A float that counts what is done with it."""

    arithmetic = 0
    comparisons = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def _made(self, value: float) -> "Number":
        Number.arithmetic += 1
        return Number(value)

    def __add__(self, other: Any) -> "Number":
        return self._made(self.value + float(other))

    def __mul__(self, other: Any) -> "Number":
        return self._made(self.value * float(other))

    def __sub__(self, other: Any) -> "Number":
        return self._made(self.value - float(other))

    def __rsub__(self, other: Any) -> "Number":
        return self._made(float(other) - self.value)

    def __truediv__(self, other: Any) -> "Number":
        return self._made(self.value / float(other))

    def __rtruediv__(self, other: Any) -> "Number":
        return self._made(float(other) / self.value)

    __radd__, __rmul__ = __add__, __mul__

    def exp(self) -> "Number":
        return self._made(float(np.exp(self.value)))

    def log1p(self) -> "Number":
        return self._made(float(np.log1p(self.value)))

    def sqrt(self) -> "Number":
        return self._made(float(np.sqrt(self.value)))

    def cos(self) -> "Number":
        return self._made(float(np.cos(self.value)))

    def sin(self) -> "Number":
        return self._made(float(np.sin(self.value)))

    def tanh(self) -> "Number":
        return self._made(float(np.tanh(self.value)))

    def __ge__(self, other: Any) -> bool:
        Number.comparisons += 1
        return self.value >= float(other)

    def __le__(self, other: Any) -> bool:
        Number.comparisons += 1
        return self.value <= float(other)

    def __lt__(self, other: Any) -> bool:
        return self.value < float(other)  # of a choice, which is no arithmetic

    def __abs__(self) -> "Number":
        return Number(abs(self.value))

    def __neg__(self) -> "Number":
        return Number(-self.value)

    def __float__(self) -> float:
        return self.value


class Module:
    """NumPy, with the one function that it does not have for objects."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def copysign(x: Any, sign: Any) -> Any:
        return np.vectorize(lambda a, b: Number(float(np.copysign(float(a), float(b)))), otypes=[object])(x, sign)


XP = Module()


@pytest.fixture(autouse=True)
def _start_at_nothing() -> Iterator[None]:
    Number.arithmetic = Number.comparisons = 0
    yield


def numbers(*shape: int) -> Any:
    """Random numbers that count. [*shape]"""
    values = np.random.default_rng(0).standard_normal(shape)
    return np.vectorize(Number, otypes=[object])(values)


def empty(*shape: int) -> Any:
    return np.empty(shape, object)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("positions", [True, False])
def test_embed(positions: bool, scaled: bool) -> None:
    learned = (np.array([0, 2, 1]), numbers(3, 4)) if positions else ()
    scale: Any = Number(2.0) if scaled else 1.0
    reference.embed(numbers(5, 4), np.array([4, 0, 4]), XP, empty(3, 4), *learned, scale=scale)
    cost = embed_cost(3, 4, 16, 16 * positions, scaled=scaled)
    assert cost.flops == Number.arithmetic == 12 * (positions + scaled)


COUNTED = [name for name in GATES if name != "relu2"]
"""Those whose results are numbers that count; ReLU's zeros, which are squared, are none"""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("activation", [None, *(name for name in COUNTED if name in ACTIVATIONS)])
def test_linear(bias: bool, residual: bool, activation: str | None) -> None:
    T, inputs, outputs = 3, 5, 4
    reference.linear(
        numbers(T, inputs), numbers(outputs, inputs), numbers(outputs) if bias else None, XP, empty(T, outputs),
        activation=activation, residual=numbers(T, outputs) if residual else None,
    )  # fmt: skip
    cost = linear_cost(T, inputs, outputs, 0, bias=bias, activation=activation, residual=residual)
    sums = T * outputs
    assert cost.flops == Number.arithmetic + sums + Number.comparisons
    assert Number.comparisons == (T * outputs if activation == "relu" else 0)


@pytest.mark.parametrize(("has_gain", "has_bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm(has_gain: bool, has_bias: bool) -> None:
    T, E = 3, 6
    gain, bias = (numbers(E) if there else None for there in (has_gain, has_bias))
    reference.layer_norm(numbers(T, E), gain, bias, 1e-5, XP, empty(T, E))
    sums = T  # the mean's; einsum begins the other at zero and makes the n-th addition itself
    assert layer_norm_cost(T, E, gain=has_gain, bias=has_bias).flops == Number.arithmetic + sums


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(affine: bool, residual: bool) -> None:
    T, E = 3, 6
    added = numbers(T, E) if residual else None
    reference.rms_norm(numbers(T, E), numbers(E) if affine else None, 1e-5, XP, empty(T, E), added)
    cost = rms_norm_cost(T, E, affine=affine, residual=residual)
    assert cost.flops == Number.arithmetic  # einsum makes n additions for n numbers


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_scale_logits(scale: float, cap: float | None) -> None:
    factor: Any = 1.0 if scale == 1 else Number(scale)
    limit: Any = None if cap is None else Number(cap)
    reference.scale_logits(numbers(2, 7), factor, limit, XP)
    assert scale_logits_cost(2, 7, scaled=scale != 1, capped=cap is not None).flops == Number.arithmetic


@pytest.mark.parametrize("activation", COUNTED)
def test_glu(activation: str) -> None:
    reference.glu(numbers(3, 8), activation, XP, empty(3, 4))
    assert glu_cost(3, 4, activation).flops == Number.arithmetic + Number.comparisons


@pytest.mark.parametrize(("by_others", "factors"), [(True, 0), (False, 1), (True, 1), (False, 4), (True, 4)])
def test_products_of_rows(by_others: bool, factors: int) -> None:
    x, others, factor = numbers(3, 4), numbers(3, 4) if by_others else None, numbers(factors) if factors else None
    reference.multiply(x, others, factor, XP, empty(3, 4))
    cost = multiply_cost(3, 4, by_others=by_others, factors=factors)
    assert cost.flops == Number.arithmetic
    assert cost.bytes_read == 48 * (1 + by_others) + 4 * factors
    assert cost.bytes_written == 48


def test_rotary() -> None:
    """The turn itself; angles, cosines and sines are counted beside their formula."""
    T, heads, D, half = 3, 2, 8, 3
    reference.rotary(numbers(T, heads, D), numbers(T, half), numbers(T, half), XP, empty(T, heads, D))
    whole = rotary_cost(T, heads, D, half, scaled=False, stretched=False).flops
    assert whole - 3 * T * half == Number.arithmetic


def test_alibi_takes_a_product_and_a_subtraction_for_each_key() -> None:
    H, D, S = 4, 3, 11
    batch = Batch.of([TokenSequence([0] * S, S - 1, [0])], [1], 16)
    cache = numbers(1, H, 16, D)
    spec = AttentionSpec(D**-0.5, slopes=numbers(H))
    reference.attend(numbers(1, H, D), cache, cache, batch, spec, XP, empty(1, H, D))
    assert attention_cost(batch, H, D, 0, spec).flops == Number.arithmetic + H * (S + 1 + D)


def test_a_soft_cap_takes_three_for_each_key_and_a_bias_one() -> None:
    H, D, S = 4, 3, 11
    batch = Batch.of([TokenSequence([0] * S, S - 1, [0])], [1], 16)
    spec: Any = AttentionSpec(D**-0.5, bias=numbers(H, 9), softcap=Number(2.0))
    cache = numbers(1, H, 16, D)
    reference.attend(numbers(1, H, D), cache, cache, batch, spec, XP, empty(1, H, D))
    assert attention_cost(batch, H, D, 0, spec).flops == Number.arithmetic + H * (S + 1 + D)


def test_a_sink_takes_three_for_each_head() -> None:
    H, D, S = 4, 3, 11
    batch = Batch.of([TokenSequence([0] * S, S - 1, [0])], [1], 16)
    cache, spec = numbers(1, H, 16, D), AttentionSpec(D**-0.5, sinks=numbers(H))
    reference.attend(numbers(1, H, D), cache, cache, batch, spec, XP, empty(1, H, D))
    assert attention_cost(batch, H, D, 0, spec).flops == Number.arithmetic + H * (S + 1 + D)


@pytest.mark.parametrize("page_size", [16, 4], ids=["one page", "three pages"])
@pytest.mark.parametrize("K", [4, 2], ids=["own keys", "grouped"])
def test_attention_of_one_query(page_size: int, K: int) -> None:
    H, D, S = 4, 3, 11
    pages = list(range(-(-S // page_size)))
    batch = Batch.of([TokenSequence([0] * S, S - 1, pages)], [1], page_size)
    cache = numbers(len(pages), K, page_size, D)
    spec = AttentionSpec(D**-0.5)
    reference.attend(numbers(1, H, D), cache, cache, batch, spec, XP, empty(1, H, D))
    sums = H * (S + 1 + D)  # each score, softmax's denominator, each element of the result
    assert attention_cost(batch, H, D, 0, spec).flops == Number.arithmetic + sums
