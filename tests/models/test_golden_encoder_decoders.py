"""Every encoder-decoder against what transformers computed once (scripts/make_golden.py). Needs no torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minillm.backends.numpy import NumpyBackend
from minillm.formats.load_model import load_model
from minillm.runner.runner import Runner

from ..comparing import assert_same_tokens
from ..seq2seq import GOLDEN_CASES, generate, logits_of, request_for
from ..tiny import NO_REPEATS, loop_of, run, runner_of

GOLDEN = Path(__file__).parents[1] / "golden_encoder_decoders"

every_case = pytest.mark.parametrize("case", GOLDEN_CASES, ids="-".join)


def folder_of(case: tuple[str, str]) -> Path:
    family, name = case
    return GOLDEN / family / name.replace(",", "").replace(" ", "-")


def load(case: tuple[str, str]) -> tuple[Runner, dict[str, Any]]:
    folder = folder_of(case)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return runner_of(load_model(folder, NumpyBackend()), pages=128, page_size=16), expected


def test_every_case_has_its_folder_and_every_folder_its_case() -> None:
    assert set(GOLDEN.glob("*/*")) == {folder_of(case) for case in GOLDEN_CASES}


@every_case
def test_logits_of_every_position(case: tuple[str, str]) -> None:
    runner, expected = load(case)
    ids = [runner.model.config.decoder_start_token_id, *expected["token_ids"][:20]]
    logits = load_file(folder_of(case) / "expected.safetensors")["logits"]
    np.testing.assert_allclose(logits_of(runner, expected["token_ids"], ids), logits, rtol=0, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cached", "naive"])
@every_case
def test_greedy_tokens_of_a_ragged_batch(case: tuple[str, str], use_cache: bool) -> None:
    runner, expected = load(case)
    start = [runner.model.config.decoder_start_token_id]
    outputs = generate(runner, expected["prompts"], max_new_tokens=30, use_cache=use_cache, **NO_REPEATS)
    assert len({tuple(line) for line in expected["greedy"]}) > 4
    for source, ours, theirs in zip(expected["prompts"], outputs, expected["greedy"], strict=True):
        assert len(theirs) == 30
        assert_same_tokens(ours, theirs, lambda tokens, s=source: logits_of(runner, s, start + tokens)[-1])


@pytest.mark.longer
@pytest.mark.sampled(3)
@every_case
def test_beams_and_their_scores(case: tuple[str, str]) -> None:
    runner, expected = load(case)
    start = runner.model.config.decoder_start_token_id
    for search in expected["beams"]:
        requests = [request_for(source, start=start, **search["fields"]) for source in expected["prompts"][:3]]
        results = run(loop_of(target=runner), requests)
        assert [[r.token_ids for r in line] for line in results] == search["sequences"]
        np.testing.assert_allclose([[r.score for r in line] for line in results], search["scores"], rtol=0, atol=1e-4)
