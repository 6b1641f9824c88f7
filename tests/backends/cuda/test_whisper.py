"""Whisper on the emulated GPU: NumPy's tokens, and logits within the rounding of 16 bits.

Windows of convolutions have no kernel: they are copied by the array module, in the encoder's pass, which is never
recorded.
"""

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from tests.tiny import model_of, runner_of
from tests.whisper import CASES, CONFIGS, frames_for, generate, logits_of

from .recording import RecordingDevice

pytestmark = pytest.mark.slow

each = pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES[1:])]
)


@each
@pytest.mark.parametrize("storage", ["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_logits_are_numpys(case: str, storage: str, device: RecordingDevice) -> None:
    raw, line = CONFIGS[case], [2, 9, 7]
    backend = CudaBackend(device, device.recorder, storage, max_batch_size=4)
    ours = logits_of(runner_of(model_of(raw, seed=2, backend=backend), backend=backend), frames_for(raw), line)
    expected = logits_of(runner_of(model_of(raw, seed=2)), frames_for(raw), line)
    unit = {"float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8}[storage]
    assert np.abs(ours - expected).max() < 30 * unit * np.abs(expected).max()


@each
def test_tokens_are_numpys(case: str, device: RecordingDevice) -> None:
    raw = CONFIGS[case]
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4)
    sounds = [frames_for(raw, 1), frames_for(raw, 2)[:6]]
    ours = generate(runner_of(model_of(raw, seed=2, backend=backend), backend=backend), sounds, max_new_tokens=5)
    assert ours == generate(runner_of(model_of(raw, seed=2)), sounds, max_new_tokens=5)
