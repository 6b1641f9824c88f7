"""Every family against what transformers computed once (scripts/make_golden.py). Needs no torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minillm.backends.numpy import NumpyBackend
from minillm.batch import TokenSequence
from minillm.formats.load_model import load_model
from minillm.runner.runner import Runner

from ..comparing import assert_same_tokens
from ..families import GOLDEN_CASES, each_of
from ..tiny import NO_REPEATS, generate, logits_of, loop_of, request_for, run, runner_of

GOLDEN = Path(__file__).parents[1] / "golden"


every_case = pytest.mark.parametrize("case", each_of(GOLDEN_CASES))


def folder_of(case: tuple[str, str]) -> Path:
    family, name = case
    return GOLDEN / family / name.replace(" ", "-")


def load(case: tuple[str, str]) -> tuple[Runner, dict[str, Any]]:
    folder = folder_of(case)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return runner_of(load_model(folder, NumpyBackend()), pages=128, page_size=16), expected


def test_every_case_has_its_folder_and_every_folder_its_case() -> None:
    assert set(GOLDEN.glob("*/*")) == {folder_of(case) for case in GOLDEN_CASES}


@every_case
def test_logits_and_hidden_states_of_every_position(case: tuple[str, str]) -> None:
    runner, expected = load(case)
    arrays = load_file(folder_of(case) / "expected.safetensors")
    ids = expected["token_ids"]
    output = runner.forward([TokenSequence(ids)], [len(ids)], rows=range(len(ids)))
    np.testing.assert_allclose(output.logits, arrays["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(output.hidden, arrays["hidden"], rtol=0, atol=1e-4)


@pytest.mark.sampled(8, slow=4)  # test_live_families.py has every family
@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cached", "naive"])
@every_case
def test_greedy_tokens_of_a_ragged_batch(case: tuple[str, str], use_cache: bool) -> None:
    runner, expected = load(case)
    count = 4 if use_cache else len(expected["prompts"])
    prompts, lines = expected["prompts"][:count], expected["greedy"][:count]
    outputs = generate(runner, prompts, max_new_tokens=30, use_cache=use_cache, **NO_REPEATS)
    for prompt, ours, theirs in zip(prompts, outputs, lines, strict=True):
        assert_same_tokens(ours, theirs, lambda tokens, p=prompt: logits_of(runner, p + tokens)[-1])


@every_case
def test_the_golden_lines_do_not_repeat_themselves(case: tuple[str, str]) -> None:
    greedy = load(case)[1]["greedy"]
    assert all(len(line) == 30 and len(set(line)) >= 8 for line in greedy)
    assert len({tuple(line) for line in greedy}) > 6


@pytest.mark.longer
@pytest.mark.sampled(8)
@every_case
def test_beams_and_their_scores(case: tuple[str, str]) -> None:
    runner, expected = load(case)
    ended = False
    for search in expected["beams"]:
        requests = [request_for(prompt, **search["fields"]) for prompt in expected["prompts"][:3]]
        results = run(loop_of(target=runner), requests)
        assert [[r.token_ids for r in line] for line in results] == search["sequences"]
        np.testing.assert_allclose([[r.score for r in line] for line in results], search["scores"], rtol=0, atol=1e-4)
        ended |= any(r.finish_reason == "stop" for line in results for r in line)
    assert ended
