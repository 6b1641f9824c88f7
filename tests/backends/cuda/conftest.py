"""Launchers for kernels: emulated GPUs, which run threads in one order or another."""

import pytest

from tests.cuda_emulator import SCHEDULES, Emulator, missing


@pytest.fixture
def emulator() -> Emulator:
    """An emulated GPU that runs the threads of a block by number."""
    if reason := missing():
        pytest.skip(reason)
    return Emulator()


@pytest.fixture
def checking_emulator() -> Emulator:
    """One that ends a launch at the first race or access outside an argument, and names the line."""
    if reason := missing():
        pytest.skip(reason)
    return Emulator(checks=True)


@pytest.fixture(params=["checks", *SCHEDULES])
def any_emulator(request: pytest.FixtureRequest) -> Emulator:
    """One emulated GPU after another: one that checks memory and races, then one for each order of threads."""
    if reason := missing():
        pytest.skip(reason)
    return Emulator(checks=True) if request.param == "checks" else Emulator(request.param)
