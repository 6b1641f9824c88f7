"""Encoders on the kernels, run by the emulator: NumPy's hidden states and logits of labels."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.numpy import NumpyBackend
from minillm.batch import TokenSequence
from tests.encoders import CONFIGS, runner_over, states, texts
from tests.tiny import model_of

from .recording import RecordingDevice

FURTHER = ("electra, labels", "nomic_bert, labels", "gte, labels", "deberta-v2, labels", "deberta-v2, apart")
FURTHER += ("deberta", "deberta, labels", "jina_bert_v2")
"""Configurations whose layers another one's test runs too"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in FURTHER)) for name in CONFIGS]
)
@pytest.mark.parametrize(("storage", "tolerance"), [("float32", 1e-4), ("float16", 0.1)])
def test_states_and_labels_are_numpys(
    name: str, storage: str, tolerance: float, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention by kernels, but with relative positions."""
    if not name.startswith("deberta"):
        monkeypatch.delattr("minillm.backends.cuda.attention.attend_by_reference")
    raw, ids = CONFIGS[name], [*texts(3, seed=6, longest=20), [5], [7]]
    expected = states(runner_over(model_of(raw), NumpyBackend()), ids)
    backend = CudaBackend(device, device.recorder, storage, max_batch_size=4)
    runner = runner_over(model_of(raw, backend=backend), backend)
    for ours, theirs in zip(states(runner, ids), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    for _ in range(3):  # single tokens are recorded where they are all of a pass
        for each in (4, 3):
            np.testing.assert_allclose(states(runner, [ids[each]])[0], expected[each], rtol=0, atol=tolerance)


@pytest.mark.slow
def test_tokens_that_no_token_attends_to_are_numpys(device: RecordingDevice) -> None:
    """As the expansion of a query for late interaction: rows that attend to all before them, and more than those."""

    def run(backend: Any) -> np.ndarray:
        runner = runner_over(model_of(CONFIGS["bert"], backend=backend), backend)
        texts = [TokenSequence([5, 9, *[3] * 6], types=[0] * 8, unseen=6)]
        texts.append(TokenSequence([7, 8, 4, 6, 2, 3, 3], types=[0] * 7, unseen=2))
        return np.array(backend.sampler.to_host(runner.forward(texts, [8, 7], rows=range(15)).logits))

    expected = run(NumpyBackend())
    ours = run(CudaBackend(device, device.recorder, "float32", max_batch_size=4))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
