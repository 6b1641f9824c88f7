"""DeBERTa: checkpoints in few bits, the numbers of relative positions, and a table of positions that nothing reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.formats.canonical import canonical_names
from minillm.formats.load_model import load_model
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models import config_of, tensor_shapes
from minillm.models.base import weight_paths

from ..encoders import CONFIGS, runner_over, states, texts
from ..tiny import Held, model_of, tiny_tensors

GOLDEN = Path(__file__).parents[1] / "golden_encoders"


@pytest.mark.parametrize("name", ["deberta", "deberta-v2-labels"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.01), ("int8", 0.15)])
def test_few_bits_are_near(name: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    write_checkpoint(GOLDEN / name, tmp_path / dtype, dtype, progress=False)
    backend, [ids] = NumpyBackend(), texts(1)
    exact, rounded = (
        states(runner_over(load_model(folder, backend), backend), [ids])[0]
        for folder in (GOLDEN / name, tmp_path / dtype)
    )
    assert 0 < np.abs(exact - rounded).mean() < tolerance


def test_projections_of_positions_are_the_layers_own() -> None:
    """Of the table's normed vectors, as of tokens: keys as they are, queries times the scale of scores."""
    raw, backend = CONFIGS["deberta-v2"], NumpyBackend()
    tensors = {name: tensor.load() for name, tensor in tiny_tensors(raw).items()}
    weights = dict(weight_paths(model_of(raw, backend=backend)))
    table = tensors["encoder.rel_embeddings.weight"]
    table = (table - table.mean(1, keepdims=True)) / np.sqrt(table.var(1, keepdims=True) + raw["layer_norm_eps"])
    table = table * tensors["encoder.LayerNorm.weight"] + tensors["encoder.LayerNorm.bias"]
    for kind, ours, factor in (("key", "keys", 1.0), ("query", "queries", (4 * 3) ** -0.5)):
        stem = f"encoder.layer.1.attention.self.{kind}_proj"
        expected = (table @ tensors[f"{stem}.weight"].T + tensors[f"{stem}.bias"]) * factor  # [R, E]
        expected = expected.reshape(16, 4, 4).swapaxes(0, 1)  # [R, H D] -> [H, R, D]
        np.testing.assert_allclose(
            weights[f"layers.1.attention.spec.relative.{ours}"].data, expected, rtol=1e-4, atol=1e-5
        )


def test_a_table_of_positions_that_nothing_reads_is_left_out() -> None:
    raw: dict[str, Any] = CONFIGS["deberta-v2"]  # published without architectures
    tensors, zeros = tiny_tensors(raw), Held(np.zeros((64, 16), np.float32))
    stored = {f"deberta.{name}": tensor for name, tensor in tensors.items()}
    stored |= {"deberta.embeddings.position_embeddings.weight": zeros, "lm_predictions.lm_head.dense.weight": zeros}
    assert set(canonical_names(stored, config_of(raw))) == set(tensor_shapes(config_of(raw)))


def test_vectors_and_labels_on_kernels_in_c_are_numpys() -> None:
    """Attention runs plainly between kernels, also with keys and values in 16 and 8 bits."""
    ids = texts(5, seed=9)
    with Engine(GOLDEN / "deberta-v2-labels", backend="numpy") as engine:
        vectors, labels = engine.embed(ids), engine.classify(ids)
    for cache, tolerance in (("float32", 1e-4), ("bfloat16", 0.05), ("int8", 0.05)):
        with Engine(GOLDEN / "deberta-v2-labels", backend="cpu", cache_dtype=cache) as engine:
            np.testing.assert_allclose(engine.embed(ids), vectors, rtol=0, atol=tolerance)
            for ours, theirs in zip(engine.classify(ids), labels, strict=True):
                np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=10 * tolerance)
