"""Whisper on every backend: what transformers computed once, NumPy's tokens, counts, and what its encoder refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minillm import Engine
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import counting
from minillm.batch import Span
from minillm.encoder_input import AudioFeatures
from minillm.errors import ParameterError, PromptError
from minillm.formats.load_model import load_model
from minillm.measure import accounting
from minillm.measure.accounting import Part, Step
from minillm.reference.activation import FLOPS_PER_ELEMENT
from minillm.reference.convolution import unfold
from minillm.runner.runner import Runner

from ..tiny import NO_REPEATS, loop_of, model_of, run, runner_of
from ..whisper import CASES, CONFIGS, frames_for, generate, logits_of, request_for

GOLDEN = Path(__file__).parents[1] / "golden_speech" / "whisper"

every_case = pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES[1:])]
)


@pytest.fixture
def golden() -> tuple[Runner, dict[str, Any]]:
    expected = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
    return runner_of(load_model(GOLDEN, NumpyBackend()), pages=128, page_size=16), expected


def test_logits_are_those_that_transformers_computed(golden: tuple[Runner, dict[str, Any]]) -> None:
    runner, expected = golden
    logits = load_file(GOLDEN / "expected.safetensors")["logits"]
    ours = logits_of(runner, frames_for(CONFIGS["base"]), expected["token_ids"])
    np.testing.assert_allclose(ours, logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cached", "naive"])
def test_greedy_tokens_are_transformers(golden: tuple[Runner, dict[str, Any]], use_cache: bool) -> None:
    runner, expected = golden
    sounds = [frames_for(CONFIGS["base"], seed) for seed in range(3)]
    assert len({*map(tuple, expected["greedy"])}) == 3
    assert generate(runner, sounds, max_new_tokens=30, use_cache=use_cache, **NO_REPEATS) == expected["greedy"]


@every_case
def test_the_c_backend_has_numpys_logits(case: str) -> None:
    raw, line = CONFIGS[case], [2, *range(10, 30)]
    backend = CpuBackend()
    ours = logits_of(runner_of(model_of(raw, backend=backend), backend=backend), frames_for(raw), line)
    np.testing.assert_allclose(ours, logits_of(runner_of(model_of(raw)), frames_for(raw), line), rtol=0, atol=1e-4)


@pytest.mark.longer
@every_case
@pytest.mark.parametrize("fields", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_sounds_in_one_batch_get_the_tokens_that_each_gets_alone(case: str, fields: dict[str, Any]) -> None:
    """Of different lengths, in one encoder pass."""
    raw = CONFIGS[case]
    sounds = [frames_for(raw, 1), frames_for(raw, 2)[:6], frames_for(raw, 3)[:10]]
    runner = runner_of(model_of(raw), pages=128)
    alone = [generate(runner, [sound], max_new_tokens=8, **fields)[0] for sound in sounds]
    for chunk in (8, 512):
        assert generate(runner, sounds, chunk=chunk, max_new_tokens=8, **fields) == alone
    assert len({*map(tuple, alone)}) > 1


@pytest.mark.parametrize(("width", "stride"), [(3, 1), (3, 2), (5, 2), (1, 1)])
def test_windows_and_a_product_are_a_convolution(width: int, stride: int) -> None:
    """Over each of two texts by itself, the sum written out."""
    draw = np.random.default_rng(0)
    C, E = 3, 4
    x, kernels = draw.normal(size=(8, C)), draw.normal(size=(E, C, width))
    spans = [Span(0, 3, 3, 3, ()), Span(3, 4, 1, 1, ())]
    windows = unfold(x, width, spans, np.full((8 // stride, width * C), np.nan), rows=2, stride=stride)
    ours = windows @ kernels.transpose(0, 2, 1).reshape(E, -1).T
    at = 0
    for text in (x[:6], x[6:]):
        for t in range(0, len(text), stride):
            rows = [(j, t + j - width // 2) for j in range(width)]
            total = sum(kernels[:, :, j] @ text[row] for j, row in rows if 0 <= row < len(text))
            np.testing.assert_allclose(ours[at], total, rtol=1e-12, atol=1e-12)
            at += 1
    assert at == len(ours)


def test_counts_are_those_of_the_model_of_shapes_and_of_a_formula() -> None:
    raw = CONFIGS["base"]
    runner = runner_of(model_of(raw), page_size=16)
    loop, config, sound = loop_of(target=runner), runner.model.config, frames_for(raw)
    loop.add(request_for(runner, sound, max_new_tokens=1))
    with counting(runner) as counted:
        while loop.busy:
            loop.step()
    steps = [Step((Part(20, 20),), 0), Step((Part(1, 1, source=20),), 1)]
    rows = [row for step in steps for row in accounting.operations(config, step)]
    for kind in {operation for operation, _ in counted.costs}:
        costs = [cost for (operation, _), cost in counted.costs.items() if operation == kind]
        assert sum(cost.flops for cost in costs) == sum(row.flops for row in rows if row.kind == kind)
        assert sum(cost.bytes_read for cost in costs) == sum(row.bytes_read for row in rows if row.kind == kind)
    E, M, T = 32, 12, 20
    first, second = (row.flops for row in rows if row.name in ("encoder.embedding.first", "encoder.embedding.second"))
    gelu = FLOPS_PER_ELEMENT["gelu"]
    assert first == 2 * T * E * (2 * 3 * M + 1 + gelu)
    assert second == T * E * (2 * 3 * E + 1 + gelu + 1)
    moved = [(row.bytes_read, row.bytes_written) for row in rows if row.kind == "unfold"]
    assert moved == [(4 * 2 * T * M, 4 * 2 * T * 3 * M), (4 * 2 * T * E, 4 * T * 3 * E)]


@pytest.mark.longer
def test_a_preempted_request_reads_its_sound_again() -> None:
    raw = CONFIGS["base"]
    sounds = [frames_for(raw, seed) for seed in range(3)]
    roomy, tight = (runner_of(model_of(raw), pages=pages, page_size=4) for pages in (200, 24))
    requests = [request_for(roomy, sound, max_new_tokens=20, **NO_REPEATS) for sound in sounds]
    results = run(loop_of(target=tight, headroom=1), requests)
    assert [line[0].token_ids for line in results] == generate(roomy, sounds, max_new_tokens=20, **NO_REPEATS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(GOLDEN, backend="numpy", progress=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", "this model's encoder reads sound, found 'text': give its samples to Engine.transcribe"),
        ([3, 4], "this model's encoder reads sound, found"),
        (AudioFeatures(np.zeros((41, 12), np.float32)), "frames, 12., their number even and at most 40, found .*41"),
        (AudioFeatures(np.zeros((42, 12), np.float32)), "at most 40, found float32 .42, 12."),
        (AudioFeatures(np.zeros((40, 13), np.float32)), "found float32 .40, 13."),
        (AudioFeatures(np.zeros((0, 12), np.float32)), "found float32 .0, 12."),
        (AudioFeatures(np.zeros((40, 12), np.int64)), "found int64"),  # type: ignore[arg-type]
        (AudioFeatures(np.full((40, 12), np.nan, np.float32)), "frames should be finite"),
    ],
    ids=str,
)
def test_other_prompts_are_refused_by_name(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        engine.generate(prompt, max_new_tokens=1)


@pytest.mark.longer
def test_sound_is_refused_by_a_model_of_text() -> None:
    with pytest.raises(PromptError, match="this model reads text, found frames of sound"):
        Engine(progress=False).generate(AudioFeatures(np.zeros((2, 3), np.float32)))


@pytest.mark.parametrize("fields", [{"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 2}], ids=str)
def test_fields_of_a_source_of_tokens_are_refused(engine: Engine, fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="this model's encoder reads sound, not tokens"):
        engine.generate(AudioFeatures(frames_for(CONFIGS["base"])), **fields)


def test_given_texts_are_scored_after_a_sound(engine: Engine) -> None:
    frames, line = frames_for(CONFIGS["base"]), [2, 10, 11, 12]
    ours = engine.forward(line, source=AudioFeatures(frames))
    np.testing.assert_allclose(ours, logits_of(engine.runner, frames, line), rtol=0, atol=1e-5)
    shorter = engine.forward(line, source=AudioFeatures(frames[:20]))
    assert np.abs(ours - shorter).max() > 0.1
