"""Ceilings and what follows from them."""

import pytest

from minillm.ops.cost import Cost
from minillm.probe import Ceilings, probe


@pytest.mark.parametrize(
    ("cost", "seconds", "bound"),
    [
        (Cost(1000, 30, 10), 10.0, "compute"),  # 40 bytes at 8 a second take 5 s, 1000 FLOPs at 100 a second 10 s
        (Cost(100, 30, 10), 5.0, "memory"),
        (Cost(500, 40), 5.0, "memory"),  # at the ridge both take as long
    ],
)
def test_the_slower_of_two_ways_is_the_floor(cost: Cost, seconds: float, bound: str) -> None:
    ceilings = Ceilings(bandwidth=8, flop_rate=100)
    assert ceilings.floor(cost) == seconds
    assert ceilings.bound(cost) == bound


def test_a_machine_is_faster_than_a_snail(monkeypatch: pytest.MonkeyPatch) -> None:
    """And slower than any there is: units are bytes and FLOPs a second, and neither is upside down."""
    monkeypatch.setattr("minillm.probe.MEBIBYTES", 4)
    monkeypatch.setattr("minillm.probe.SIDE", 256)
    bandwidth, flop_rate = probe(threads=1)
    assert 1e7 < bandwidth < 1e14
    assert 1e7 < flop_rate < 1e15
