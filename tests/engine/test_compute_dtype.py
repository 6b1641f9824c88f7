"""Activations that are rounded to bfloat16 before they meet matrices of bfloat16: `compute_dtype`."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.formats import BFLOAT16
from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import expand, narrow
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.errors import UsageError

from ..families import CONFIGS
from ..tiny import model_of, runner_of, write_checkpoint

LINE = np.random.default_rng(0).integers(3, 90, 40).tolist()
IN_BFLOAT16 = {"backend": "cpu", "dtype": "bfloat16", "compute_dtype": "bfloat16"}


class Rounding(NumpyBackend):
    """NumPy that rounds what enters a product."""

    def linear(self, x: Any, weight: Weight, **options: Any) -> Any:
        return super().linear(expand(narrow(x, BFLOAT16)), weight, **options)

    def linear_experts(self, x: Any, *others: Any) -> Any:
        return super().linear_experts(expand(narrow(x, BFLOAT16)), *others)

    def linear_heads(self, x: Any, weight: Weight) -> Any:
        copied = x.shape[2] - weight.shape[1]  # numbers of each head that meet no matrix
        x = x.copy()
        x[:, :, copied:] = expand(narrow(x[:, :, copied:], BFLOAT16))
        return super().linear_heads(x, weight)


def logits(raw: dict[str, Any], backend: Any) -> np.ndarray:
    """The logits of each position of a line, in one pass. [T, V]"""
    runner = runner_of(model_of(raw, backend=backend), backend=backend)
    output = runner.forward([TokenSequence(LINE)], [len(LINE)], rows=range(len(LINE)))
    return output.logits.copy()


@pytest.mark.parametrize("family", ["opt", "llama", "mixtral", "deepseek_v3"])
def test_activations_are_rounded_before_each_product_and_nowhere_else(family: str) -> None:
    raw = next(iter(CONFIGS[family].values()))
    ours = logits(raw, CpuBackend(weights="bfloat16", compute="bfloat16"))
    unrounded = logits(raw, CpuBackend(weights="bfloat16"))
    expected = logits(raw, Rounding(weights="bfloat16"))
    effect = np.abs(unrounded - expected).mean()
    assert 1e-4 < effect < 0.2 and np.abs(ours - expected).mean() < effect / 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("opt"), num_hidden_layers=2, max_position_embeddings=256)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_bits_of_a_text_do_not_depend_on_a_batch(folder: Path, deterministic: bool) -> None:
    fields = {"max_new_tokens": 4, "top_logprobs": 3}
    with Engine(folder, deterministic=deterministic, max_batch_size=40, **IN_BFLOAT16) as engine:
        alone = engine.generate(LINE, **fields).completions[0]
        beside = engine.generate([LINE, *([*LINE, i + 1] for i in range(30))], **fields)[0].completions[0]
    assert alone.token_ids == beside.token_ids
    if deterministic:
        assert alone.top_logprobs == beside.top_logprobs


def test_it_is_said_where_nothing_is_of_bfloat16(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "minillm"), Engine(folder, **IN_BFLOAT16):
        assert not caplog.messages
    with caplog.at_level(logging.WARNING, "minillm"), Engine(folder, **IN_BFLOAT16 | {"dtype": "int8"}):
        assert caplog.messages == [
            "compute_dtype 'bfloat16' is without effect: it is for matrices of bfloat16, which dtype='bfloat16' makes"
        ]


def test_keys_and_values_of_another_arithmetic_are_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "line.safetensors"
    with Engine(folder, **IN_BFLOAT16) as engine:
        engine.save_prefix(path, LINE)
        engine.load_prefix(path)
    refused = pytest.raises(UsageError, match="backend 'cpu that multiplies bfloat16', and this engine has backend")
    with Engine(folder, **IN_BFLOAT16 | {"compute_dtype": "float32"}) as engine, refused:
        engine.load_prefix(path)
