"""Checkpoints of every family, as transformers saved them, written in 16, 8 or 4 bits. Needs no torch."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from minillm.backends.formats import FORMATS
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import expand, narrow
from minillm.formats import open_checkpoint
from minillm.formats.load_model import load_model
from minillm.formats.write_checkpoint import DTYPES, write_checkpoint
from minillm.models import family_of, tensor_shapes
from minillm.models.base import weights_of

from .. import seq2seq
from ..families import GOLDEN_CASES, each_of, has_experts, in_turn
from ..tiny import each_expert, logits_of, runner_of

GOLDEN = Path(__file__).parents[1] / "golden"
LINE = np.random.default_rng(2).integers(3, 96, 20).tolist()
NEAR = {"float16": 0.003, "bfloat16": 0.02, "int8": 0.1, "int4": 0.6}
"""Largest relative rms error of logits, compared with float32. Other weights would give about 1.4.

Where a token has experts, four times as much: rounding changes the choice for some tokens. Where there are delta nets,
twice as much: their norms enlarge it."""


@pytest.fixture(params=each_of(GOLDEN_CASES))
def source(request: pytest.FixtureRequest) -> Path:
    return folder_of(request.param)


def folder_of(case: tuple[str, str]) -> Path:
    family, name = case
    return GOLDEN / family / name.replace(" ", "-")


def logits(folder: Path, dtype: str) -> np.ndarray:
    return logits_of(runner_of(load_model(folder, NumpyBackend(weights=dtype))), LINE)


@pytest.mark.parametrize(("case", "dtype"), in_turn(GOLDEN_CASES, DTYPES))
@pytest.mark.slow
def test_what_is_written_is_what_would_be_rounded_at_load(case: tuple[str, str], dtype: str, tmp_path: Path) -> None:
    source = folder_of(case)
    write_checkpoint(source, tmp_path / "out", dtype)
    loaded = weights_of(load_model(tmp_path / "out", NumpyBackend(weights="auto")))
    expected = weights_of(load_model(source, NumpyBackend(weights=dtype)))
    for weight, other in zip(*(chain(*map(each_expert, weights)) for weights in (loaded, expected)), strict=True):
        assert weight.name == other.name
        assert (weight.data is None, weight.bias is None) == (other.data is None, other.bias is None)
        if other.data is not None:
            np.testing.assert_array_equal(expand(weight.data), expand(other.data), strict=True)
        if other.bias is not None:
            np.testing.assert_array_equal(weight.bias, other.bias)
    written, exact = logits(tmp_path / "out", "auto"), logits(source, "float32")
    np.testing.assert_allclose(written, logits(source, dtype), rtol=1e-4, atol=1e-5)
    error = np.linalg.norm(written - exact) / np.linalg.norm(exact)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    factor = (4 if has_experts(raw) else 1) * (2 if "linear_num_key_heads" in raw else 1)
    assert 1e-5 < error < NEAR[dtype] * (min(factor, 1 / NEAR[dtype]) if factor > 1 else 1)


@pytest.mark.sampled(8, slow=2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_keep_names_and_layout(source: Path, dtype: str, tmp_path: Path) -> None:
    """Each tensor alone is the source's, rounded: also where a model wants its numbers in another order."""
    write_checkpoint(source, tmp_path / "out", dtype)
    written, found = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    assert set(written) == set(found)
    for name, tensor in found.items():
        # a bias may be stored as a row, and all experts' matrices as one tensor
        stacked = ".experts." in name or (len(tensor.shape) == 3 and name.endswith("put_linear.weight"))
        matrix = (len(tensor.shape) == 2 or stacked) and not name.endswith("bias")
        expected = narrow(tensor.load(), FORMATS[dtype]) if matrix else tensor.load()
        assert written[name].dtype == (dtype if matrix else "float32")
        np.testing.assert_array_equal(written[name].stored(), expected, strict=True)


@pytest.mark.sampled(8, slow=2)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_8_and_4_bits_have_the_names_and_rows_of_the_familys_table(source: Path, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(source, tmp_path / "out", dtype)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    table = tensor_shapes(family_of(raw).read_config(raw))
    written = open_checkpoint(tmp_path / "out")
    assert {name for name in written if not name.endswith("_scale")} == set(table)
    for name, shape in table.items():
        assert written[name].shape[0] == shape[0]


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_the_head_that_a_checkpoint_stores_is_written_whatever_config_json_says(dtype: str, tmp_path: Path) -> None:
    """In the T5 families the tensors decide; the copy in 8 or 4 bits is read by its config.json alone."""
    source = seq2seq.write_checkpoint(tmp_path / "model", "t5", tie_word_embeddings=False)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}), encoding="utf-8")
    write_checkpoint(source, tmp_path / "out", dtype)
    loaded, original = (load_model(folder, NumpyBackend()) for folder in (tmp_path / "out", source))
    assert not loaded.config.tied_head and loaded.config == original.config
