"""Published quantised checkpoints on the emulated GPU: integers stay, and what is expanded has 16 bits."""

from pathlib import Path

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import format_of
from minillm.engine.inspect import all_logits
from minillm.formats.load_model import load_model
from minillm.models.base import weights_of
from tests.published import ALL, write_pair
from tests.tiny import runner_of

from .recording import RecordingDevice

LINE = np.random.default_rng(2).integers(3, 96, 20).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq-int4", "awq", "compressed-packed-int4-asymmetric", "fp8-small-blocks"])
def test_logits_are_those_of_the_dequantised_model(name: str, device: RecordingDevice, tmp_path: Path) -> None:
    quantised, plain = write_pair(tmp_path, "llama", ALL[name])
    backend = CudaBackend(device, device.recorder, "auto", max_batch_size=2)
    model = load_model(quantised, backend)
    kept = {
        format_of(weight.data).bits for weight in weights_of(model) if ".mlp" in weight.name and weight.data is not None
    }
    assert kept == {16 if name == "fp8-small-blocks" else 4}
    found = all_logits(runner_of(model, backend=backend), LINE)
    expected = all_logits(runner_of(load_model(plain, NumpyBackend())), LINE)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < (0.01 if ALL[name].stored == "float16" else 0.08)  # activations have the weights' 16 bits
