"""Models from GGUF files: the configuration, the order of rows, and the whole against transformers and llama.cpp."""

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.models import build_model, family_of

from ..gguf_files import LLAMA, write_llama
from ..tiny import Held, logits_of, runner_of

PROMPT = [5, 70, 200, 31, 31, 8]


def expected_logits(raw, values):
    model = build_model(family_of(raw).read_config(raw), {n: Held(v) for n, v in values.items()}, NumpyBackend())
    return logits_of(runner_of(model), PROMPT)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_a_file_gives_the_logits_of_the_checkpoint_it_was_made_of(tmp_path, architecture, fields):
    raw = LLAMA | {"model_type": architecture} | fields
    values = write_llama(tmp_path / "m.gguf", raw, architecture=architecture)
    with Engine(tmp_path / "m.gguf", backend="numpy") as engine:
        np.testing.assert_allclose(engine.forward(PROMPT), expected_logits(raw, values), rtol=1e-4, atol=1e-4)
