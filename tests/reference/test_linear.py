"""The projection against its formula in float64; the embedding."""

import itertools

import numpy as np
import pytest

from minillm.reference.linear import embed, embed_cost, linear, linear_cost

CASES = list(itertools.product([1, 5], [True, False], [None, "relu"], [True, False]))


def arrays(T: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = [(T, 24), (40, 24), (40,), (T, 40)]
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize(("T", "with_bias", "activation", "with_residual"), CASES)
def test_linear_is_its_formula(T: int, with_bias: bool, activation: str | None, with_residual: bool) -> None:
    x, weight, bias, residual = arrays(T)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    expected = expected + bias if with_bias else expected
    expected = np.maximum(expected, 0) if activation else expected
    expected = expected + residual if with_residual else expected
    before = residual.copy()
    y = linear(
        x, weight, bias if with_bias else None, np, np.empty((T, 40), np.float32),
        activation=activation, residual=residual if with_residual else None,
    )  # fmt: skip
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(residual, before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_bytes_are_those_of_the_arrays_named(bias: bool, residual: bool) -> None:
    x, weight, b, r = arrays(3)
    stored = weight.nbytes + (b.nbytes if bias else 0)
    counted = linear_cost(3, 24, 40, stored, bias=bias, activation=None, residual=residual)
    assert counted.bytes_read == x.nbytes + stored + (r.nbytes if residual else 0)
    assert counted.bytes_written == r.nbytes
    assert counted.intensity == counted.flops / (counted.bytes_read + r.nbytes)


@pytest.mark.parametrize(
    ("bias", "activation", "residual", "steps"),
    [(False, None, False, 0), (True, None, False, 1), (True, "relu", False, 2), (True, "relu", True, 3)],
)
def test_fusion_saves_a_result_read_and_written_for_each_step(
    bias: bool, activation: str | None, residual: bool, steps: int
) -> None:
    y = arrays(3)[3]
    assert (
        linear_cost(3, 24, 40, 0, bias=bias, activation=activation, residual=residual).fusion_saves
        == steps * 2 * y.nbytes
    )


def test_costs_add_up() -> None:
    one = linear_cost(1, 2, 3, 4, bias=False, activation=None, residual=False)
    assert one + one == tuple(2 * part for part in one)


def test_each_id_gets_its_row() -> None:
    table = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    ids = np.array([3, 9, 3, 0])
    out = np.empty((4, 4), np.float32)
    assert embed(table, ids, np, out) is out
    np.testing.assert_array_equal(out, np.stack([table[i] for i in ids]))


def test_cost_of_an_embedding_is_the_bytes_of_the_arrays() -> None:
    ids, rows = np.zeros(5, np.int64), np.zeros((5, 4), np.float32)
    assert embed_cost(5, 4, row_bytes=16) == (0, ids.nbytes + rows.nbytes, rows.nbytes, 0)
    assert embed_cost(5, 4, row_bytes=8) == (0, ids.nbytes + rows.nbytes // 2, rows.nbytes, 0)
