"""Launchers for kernels: emulated GPUs, which run threads in one order or another, or a real one (`launchers.py`);
and a device on the first of them, for whole models.
"""

from pathlib import Path
from typing import Any

import pytest

from minillm.backends.cuda.emulator import SCHEDULES, Emulator
from minillm.backends.cuda.emulator import missing as missing_for_emulator
from minillm.backends.cuda.kernels import Kernels, Launcher

from .launchers import ON_GPU, exhaustive, launcher, missing
from .recording import Recorder, RecordingDevice

EMULATED = {"emulator", "device", "checking_emulator", "any_emulator"}
"""Fixtures of this file that compile kernels"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of emulated kernels and of the emulator are slow: most compile one. Those of the whole engine are not.

    Of a test with bfloat16, which is one more build of what float16 tests already, all cases but the last are
    exhaustive.
    """
    mine = [i for i in items if i.path.parent == Path(__file__).parent and isinstance(i, pytest.Function)]
    for item in mine if not ON_GPU else []:
        compiles = item.path.name == "test_emulator.py" or not EMULATED.isdisjoint(item.fixturenames)
        if compiles and item.path.name != "test_whole_engine.py":
            item.add_marker(pytest.mark.slow)
    cases: dict[Any, dict[str, list[pytest.Item]]] = {}
    for item in mine if not ON_GPU else []:
        name = getattr(getattr(item, "callspec", None), "id", "")
        storage = next((storage for storage in ("bfloat16", "float16", "float32") if storage in name), None)
        if storage is not None and item.get_closest_marker("exhaustive") is None:
            cases.setdefault(item.function, {}).setdefault(storage, []).append(item)
    for item in mine if ON_GPU else []:  # where none but slow tests are left out
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.slow)
    for storages in cases.values():
        for item in storages.get("bfloat16", [])[:-1]:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture
def emulator() -> Launcher:
    """An emulated GPU that runs the threads of a block by number; or the real one."""
    if reason := missing():
        pytest.skip(reason)
    return launcher()


@pytest.fixture
def device(emulator: Launcher, monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    """The GPU for a backend, emulated as one of one multiprocessor: on a larger one the products' grids would only be
    wider.
    """
    monkeypatch.setattr(Kernels, "processors", 1)
    return RecordingDevice(Recorder(emulator))


@pytest.fixture
def checking_emulator() -> Emulator:
    """One that ends a launch at the first race or access outside an argument, and names the line. Never a real GPU:
    what it is shown would end the process there.
    """
    if reason := missing_for_emulator():
        pytest.skip(reason)
    return Emulator(checks=True)


ORDERS = [(pytest.param if name in (SCHEDULES[0], SCHEDULES[-1]) else exhaustive)(name) for name in SCHEDULES]


@pytest.fixture(params=["gpu"] if ON_GPU else ["checks", *ORDERS])
def any_emulator(request: pytest.FixtureRequest) -> Launcher:
    """One emulated GPU after another: one that checks memory and races, then one for each order of threads; or the
    real one.
    """
    if reason := missing():
        pytest.skip(reason)
    return Emulator(checks=True) if request.param == "checks" else launcher(request.param)
