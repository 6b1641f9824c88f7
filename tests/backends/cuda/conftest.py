"""Launchers for kernels: emulated GPUs, which run threads in one order or another, or a real one (`launchers.py`)."""

import pytest

from minillm.backends.cuda.kernels import Launcher
from tests import cuda_emulator
from tests.cuda_emulator import SCHEDULES, Emulator

from .launchers import ON_GPU, launcher, missing


@pytest.fixture
def emulator() -> Launcher:
    """An emulated GPU that runs the threads of a block by number; or the real one."""
    if reason := missing():
        pytest.skip(reason)
    return launcher()


@pytest.fixture
def checking_emulator() -> Emulator:
    """One that ends a launch at the first race or access outside an argument, and names the line. Never a real GPU:
    what it is shown would end the process there.
    """
    if reason := cuda_emulator.missing():
        pytest.skip(reason)
    return Emulator(checks=True)


@pytest.fixture(params=["gpu"] if ON_GPU else ["checks", *SCHEDULES])
def any_emulator(request: pytest.FixtureRequest) -> Launcher:
    """One emulated GPU after another: one that checks memory and races, then one for each order of threads; or the
    real one.
    """
    if reason := missing():
        pytest.skip(reason)
    return Emulator(checks=True) if request.param == "checks" else launcher(request.param)
