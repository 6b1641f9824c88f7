"""transformers reads the checkpoints that we write in 16 bits, and says the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.formats.write_checkpoint import write_checkpoint  # noqa: E402

from .. import huggingface  # noqa: E402
from ..families import CASES, CONFIGS, IDS, marks_of_further  # noqa: E402
from ..tiny import logits_of, runner_of  # noqa: E402

pytestmark = pytest.mark.reference

LINE = [3, 4, 5, 6, 7, 3, 90]


def in_turn(*dtypes: str) -> list[Any]:
    """Every case with every dtype. In the slow tests the first configuration of a family has one of them, in turn: its
    names and layouts are those of the others, whose checkpoints test_live_families.py reads.
    """
    turn = {family: i for i, family in enumerate(CONFIGS)}
    return [
        pytest.param(
            case,
            dtype,
            marks=marks_of_further(case) if turn[case[0]] % len(dtypes) == j else pytest.mark.exhaustive,
            id=f"{name}-{dtype}",
        )
        for case, name in zip(CASES, IDS, strict=True)
        for j, dtype in enumerate(dtypes)
    ]


@pytest.mark.parametrize(("case", "dtype"), in_turn("bfloat16", "float16"))
def test_the_same_logits(tmp_path: Path, case: tuple[str, str], dtype: str) -> None:
    family, name = case
    source = huggingface.save(huggingface.build_model(CONFIGS[family][name], 3), tmp_path / "source")
    write_checkpoint(source, tmp_path / "out", dtype)
    theirs, report = huggingface.class_of(CONFIGS[family][name]).from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ours = logits_of(runner_of(load_model(tmp_path / "out", NumpyBackend(weights="auto"))), LINE)
    np.testing.assert_allclose(ours, huggingface.logits(theirs.eval(), LINE), atol=1e-4)
    plain = logits_of(runner_of(load_model(source, NumpyBackend())), LINE)
    assert np.abs(ours - plain).max() > 1e-4, "the weights are rounded"
    np.testing.assert_array_equal(ours, logits_of(runner_of(load_model(source, NumpyBackend(weights=dtype))), LINE))


@pytest.mark.parametrize(("case", "dtype"), in_turn("int8", "int4"))
def test_fewer_bits_are_those_that_the_source_would_be_rounded_to(
    tmp_path: Path, case: tuple[str, str], dtype: str
) -> None:
    family, name = case
    source = huggingface.save(huggingface.build_model(CONFIGS[family][name], 3), tmp_path / "source")
    write_checkpoint(source, tmp_path / "out", dtype)
    written, at_load, plain = (
        logits_of(runner_of(load_model(folder, NumpyBackend(weights=weights))), LINE)
        for folder, weights in ((tmp_path / "out", "auto"), (source, dtype), (source, "float32"))
    )
    np.testing.assert_array_equal(written, at_load)
    assert np.abs(written - plain).max() > 1e-4
