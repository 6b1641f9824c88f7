"""Launchers for kernels: emulated GPUs, which run threads in one order or another."""

import pytest

from tests.cuda_emulator import SCHEDULES, Emulator, missing


@pytest.fixture
def emulator() -> Emulator:
    """An emulated GPU that runs the threads of a block by number."""
    return _emulator("forward")


@pytest.fixture(params=SCHEDULES)
def any_emulator(request: pytest.FixtureRequest) -> Emulator:
    """One emulated GPU after another, each with its own order of threads. A kernel must not care."""
    return _emulator(request.param)


def _emulator(schedule: str) -> Emulator:
    if reason := missing():
        pytest.skip(reason)
    return Emulator(schedule)
