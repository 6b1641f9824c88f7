"""The whole real model on the GPU kernels, run by the emulator: transformers' first tokens.

Each token takes seconds, so there are few of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.emulator import Emulator, missing
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.placement import Placement
from tests.backends.cuda.recording import Recorder, RecordingDevice

pytestmark = pytest.mark.real


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDevice]:
    """An emulated GPU of one multiprocessor, on which engines of device "cuda" then compute."""
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setattr(Kernels, "processors", 1)
    device = RecordingDevice(Recorder(Emulator()))

    def choose(placement: Placement, max_batch_size: int) -> CudaBackend:
        assert placement.device == "cuda"
        return CudaBackend(device, device.recorder, placement.dtype, max_batch_size=max_batch_size)

    monkeypatch.setattr("minillm.engine.assembly.choose_backend", choose)
    yield device


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "float16"])
def test_the_first_tokens_are_those_of_transformers(
    dtype: str, device: RecordingDevice, model_file: Path, expected: dict[str, Any]
) -> None:
    """The prompt, two plain decode steps, of which the second is recorded, and one that replays the record."""
    case = expected["continuations"][0]
    with Engine(model_file, device="cuda", dtype=dtype, max_batch_size=1, cache_bytes=64 << 20) as engine:
        assert engine.generate(case["prompt"], max_new_tokens=4).token_ids == case["tokens"][:4]
    assert device.replays == 2
