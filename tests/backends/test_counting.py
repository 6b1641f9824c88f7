"""Counting: costs go to the right place, results stay the same, and no operation is missed."""

import inspect
from collections.abc import Iterator

import numpy as np
import pytest

from minillm import Engine
from minillm.backends import observe as module
from minillm.backends.observe import CountingBackend, counting
from minillm.backends.operations import Backend
from minillm.models import published

from ..shapes import BASE

UNCOUNTED = {"enter_layer", "join", "embed_reduced", "linear_reduced", "combine_reduced"}
"""What computes nothing, and what is made of other operations."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setitem(published(), "small", BASE)
    with Engine.random("small", std=0.3) as engine:
        yield engine


def test_results_stay_the_same_and_the_back_end_comes_back(engine: Engine) -> None:
    plain, backend = engine.forward([1, 2, 3]), engine.runner.backend
    with counting(engine.runner):
        np.testing.assert_allclose(engine.forward([1, 2, 3]), plain, rtol=1e-4, atol=1e-4)
    assert engine.runner.backend is backend


def test_the_back_end_comes_back_after_an_error(engine: Engine) -> None:
    backend = engine.runner.backend
    with pytest.raises(ZeroDivisionError), counting(engine.runner):
        raise ZeroDivisionError
    assert engine.runner.backend is backend


def test_costs_belong_to_their_operation_and_layer(engine: Engine) -> None:
    """After each step too: the embedding of a second step is not the first one's head."""
    with counting(engine.runner) as counted:
        engine.generate([1, 2, 3], max_new_tokens=4, eos_token_id=())
        places = {
            operation: {layer for name, layer in counted.costs if name == operation} for operation, _ in counted.costs
        }
    assert places == {
        "embed": {None},
        "layer_norm": {0, 1, 2, 3},
        "linear": {0, 1, 2, 3},
        "store_kv": {0, 1, 2},
        "attend": {0, 1, 2},
        "take_rows": {3},
    }


def test_groups_add_up_to_the_total(engine: Engine) -> None:
    with counting(engine.runner) as counted:
        engine.forward([1, 2, 3])
    assert counted.total.flops > 0
    for groups in (counted.by_operation(), counted.by_layer()):
        for i, field in enumerate(counted.total):
            assert sum(cost[i] for cost in groups.values()) == field
    assert counted.by_layer()[0] == counted.by_layer()[1]
    counted.reset()
    assert not any(counted.total)


def test_bytes_of_one_decode_step(engine: Engine) -> None:
    """Every weight once but the position table, of which one row is read."""
    engine.add([1, 2, 3], max_new_tokens=2, eos_token_id=())
    engine.step()
    with counting(engine.runner) as counted:
        engine.step()
    E, L, F, V = 24, 3, 40, 50
    T, S = 1, 4
    weights = V * E + L * (4 * E * E + 4 * E + 2 * E * F + F + E + 4 * E) + 2 * E
    embeddings = 2 * (8 + 4 * E)  # two look-ups, added as they are read
    activations = 4 * T * L * (2 * E + 2 * E)  # two norms, and the residuals of two projections
    inputs = 4 * T * (L * (E + E + E + F) + E + E)  # of the four projections, the head, the final norm
    cache = 4 * L * (2 * E + E + 2 * S * E)  # store reads K and V; attention reads Q and the context
    assert counted.total.bytes_read == 4 * weights + embeddings + activations + inputs + cache


def test_every_operation_of_a_back_end_is_counted() -> None:
    """A new operation that nobody counts shows here."""
    operations = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    assert operations - UNCOUNTED == set(module.COSTS)
    assert all(name in vars(CountingBackend.__mro__[1]) for name in module.COSTS)
