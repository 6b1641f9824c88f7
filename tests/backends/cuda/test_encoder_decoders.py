"""Encoder-decoders on the emulated GPU: NumPy's tokens, and logits within the rounding of 16 bits.

Decode steps are recorded: their attention over sources is that of a decode step, over the sources' pages.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.attention import has_kernel
from minillm.backends.cuda.backend import CudaBackend
from minillm.runner.runner import Runner
from tests.comparing import assert_same_tokens
from tests.seq2seq import CASES, CONFIGS, GOLDEN_CASES, generate, logits_of
from tests.tiny import model_of, random_prompts, runner_of

from .recording import RecordingDevice

SOURCES = random_prompts(2, seed=3, longest=30)


@pytest.fixture(
    params=[pytest.param(case, marks=[] if case in GOLDEN_CASES else pytest.mark.exhaustive) for case in CASES],
    ids="-".join,
)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    family, name = request.param
    return CONFIGS[family][name]


@pytest.fixture
def runner_on(device: RecordingDevice, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runner]:
    """Makes a runner whose attention is by kernels, where these take its heads."""

    def make(storage: str = "float32") -> Runner:
        backend = CudaBackend(device, device.recorder, storage, max_batch_size=4)
        runner = runner_of(model_of(raw, seed=2, backend=backend), backend=backend)
        if has_kernel(storage, runner.model.config.head_dim):
            monkeypatch.delattr("minillm.backends.cuda.attention.attend_by_reference")
        return runner

    return make


@pytest.mark.parametrize("fields", [{}, pytest.param({"num_beams": 3}, marks=pytest.mark.slow)], ids=str)
def test_ragged_tokens_are_numpys(
    raw: dict[str, Any], device: RecordingDevice, runner_on: Callable[..., Runner], fields: dict[str, Any]
) -> None:
    reference = runner_of(model_of(raw, seed=2))
    ours_by = runner_on()
    start = [reference.model.config.decoder_start_token_id]
    ours, expected = (generate(runner, SOURCES, max_new_tokens=6, **fields) for runner in (ours_by, reference))
    recorded = has_kernel("float32", reference.model.config.head_dim) and not fields  # six beams are too many
    assert device.replays == (5 if recorded else 0), "of six passes the first runs plainly"
    for source, tokens, line in zip(SOURCES, ours, expected, strict=True):
        if fields:
            assert tokens == line
        assert_same_tokens(tokens, line, lambda said, s=source: logits_of(reference, s, start + said)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_logits_in_16_bits(raw: dict[str, Any], runner_on: Callable[..., Runner], storage: str) -> None:
    source, line = SOURCES[0], [5, 9, 7]
    ours = logits_of(runner_on(storage), source, line)
    expected = logits_of(runner_of(model_of(raw, seed=2)), source, line)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[storage]
    assert np.abs(ours - expected).max() < 30 * unit * np.abs(expected).max()
