"""Processes under mpiexec: the command line, the kernels in C, the formats of weights."""

import json
from pathlib import Path

import pytest

from minillm.formats.write_checkpoint import write_checkpoint as quantized

from ..task_models import BERT, T5, THREE_LABELS, write_task_model
from ..tiny import write_checkpoint
from .processes import alone, output, under_mpi

pytest.importorskip("mpi4py")
pytestmark = under_mpi


@pytest.mark.parametrize(
    ("backend", "tensor", "pipeline"),
    [
        ("cpu", 2, 2),
        ("numpy", 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [("cpu", 2, 1), ("cpu", 1, 2), ("numpy", 1, 2), ("numpy", 2, 2)]
        ),
    ],
)
def test_the_command_line(backend: str, tensor: int, pipeline: int) -> None:
    words = ["generate", "A list of colors: red,", "-n", 12, "--backend", backend, "--threads", 1]
    degrees = ["--tensor-parallel", tensor, "--pipeline-parallel", pipeline]
    assert output(tensor * pipeline, *words, *degrees) == alone(*words)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_formats_of_weights(form: str, tmp_path: Path) -> None:
    """Each rank has whole groups of the quantised columns."""
    folder = write_checkpoint(tmp_path / "whole", hidden_size=128, word_embed_proj_dim=128, ffn_dim=256)
    where = tmp_path / "stored"
    quantized(folder, where, form)
    words = ["generate", "a b c", "-m", where, "-n", 12, "--threads", 1]
    assert output(2, *words, "--tensor-parallel", 2) == alone(*words)


def test_commands_over_texts(tmp_path: Path) -> None:
    """Rank 0 alone reads the texts."""
    models = {"embed": BERT, "classify": BERT | THREE_LABELS, "summarize": T5}
    for command, raw in models.items():
        folder = write_task_model(tmp_path / command, raw)
        words = [command, "-m", folder, "the cat sat on a red house", "--threads", 1]
        ours, theirs = output(2, *words, "--tensor-parallel", 2), alone(*words)
        if command == "embed":
            vectors = [json.loads(text)["embedding"] for text in (ours, theirs)]
            assert vectors[0] == pytest.approx(vectors[1], abs=1e-4)
        else:
            assert ours == theirs
