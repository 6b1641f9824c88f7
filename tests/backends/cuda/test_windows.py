"""Layers with a window keep what a query can see, on the kernels, run by the emulator: the tokens of NumPy's."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.memory import Memory
from minillm.cache import Concurrency
from minillm.runner.runner import Runner
from tests.comparing import assert_same_tokens
from tests.models import test_gemma3_text, test_mistral
from tests.tiny import generate, logits_of, model_of, runner_of

from .recording import RecordingDevice

LONG: dict[str, Any] = {"sliding_window": 20, "max_position_embeddings": 256}
CONFIGS = {"some layers": test_gemma3_text.CONFIG | LONG, "all layers": test_mistral.CONFIG | LONG}
PROMPTS = [np.random.default_rng(n).integers(3, 96, count).tolist() for n, count in enumerate((130, 7, 100))]


@pytest.fixture
def launches(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The decode steps that are launched ahead."""
    steps: list[object] = []
    launch = CudaBackend(device, device.recorder, "float32", max_batch_size=4).memory.launch.__func__

    def noting(memory: Memory, owner: object, step: object) -> Any:
        read = launch(memory, owner, step)
        steps.extend([step] if read is not None else [])
        return read

    monkeypatch.setattr("minillm.backends.cuda.memory.CudaMemory.launch", noting)
    return steps


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS])
def test_recorded_steps_and_steps_ahead_read_the_parts(
    name: str, device: RecordingDevice, launches: list[object]
) -> None:
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4)
    reference = runner_of(model_of(CONFIGS[name], seed=2))
    runner: Runner = runner_of(
        model_of(CONFIGS[name], seed=2, backend=backend), backend=backend, concurrency=Concurrency(3, 64)
    )
    [window] = runner.cache.windows
    window.storage.keys[...] = window.storage.values[...] = np.nan  # whatever was there
    ours = generate(runner, PROMPTS, chunk=64, max_new_tokens=30)
    for prompt, tokens, expected in zip(PROMPTS, ours, generate(reference, PROMPTS, max_new_tokens=30), strict=True):
        assert_same_tokens(tokens, expected, lambda said, p=prompt: logits_of(reference, p + said)[-1])
    assert device.records and len(launches) > 20
    assert window.backed < runner.cache.backed_pages
