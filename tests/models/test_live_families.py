"""Three configurations of each family against transformers as it runs."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.batch import TokenSequence  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.runner.runner import Runner  # noqa: E402

from .. import huggingface  # noqa: E402
from ..comparing import assert_same_tokens  # noqa: E402
from ..families import CASES, CONFIGS, IDS  # noqa: E402
from ..tiny import NO_REPEATS, generate, loop_of, random_prompts, request_for, run, runner_of  # noqa: E402

pytestmark = pytest.mark.reference

LINE = np.random.default_rng(3).integers(0, 96, 50).tolist()
SEEDS = [13, pytest.param(12, marks=pytest.mark.exhaustive)]


FIRST = {family: next(iter(configs)) for family, configs in CONFIGS.items()}


@pytest.fixture(params=CASES, ids=IDS)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A configuration: every one has transformers' logits and hidden states."""
    family, name = request.param
    return CONFIGS[family][name]


@pytest.fixture(
    params=[pytest.param(case, marks=[] if case[1] == FIRST[case[0]] else [pytest.mark.exhaustive]) for case in CASES],
    ids=IDS,
)
def usual(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The first configuration of a family: tokens, beams and 16 bits follow from logits alike in the others."""
    family, name = request.param
    return CONFIGS[family][name]


def load(folder: Path) -> Runner:
    return runner_of(load_model(folder, NumpyBackend()), pages=128, page_size=16)


def assert_equal_logits(folder: Path, model: Any) -> None:
    runner = load(folder)
    output = runner.forward([TokenSequence(LINE)], [len(LINE)], rows=range(len(LINE)))
    near = huggingface.tolerance(runner.model.config)
    np.testing.assert_allclose(output.logits, huggingface.logits(model, LINE), rtol=0, atol=near)
    np.testing.assert_allclose(output.hidden, huggingface.hidden(model, LINE), rtol=0, atol=near)


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_hidden_states(raw: dict[str, Any], seed: int, tmp_path: Path) -> None:
    model = huggingface.build_model(raw, seed)
    huggingface.save(model, tmp_path)
    assert_equal_logits(tmp_path, model)


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_tokens(usual: dict[str, Any], seed: int, tmp_path: Path) -> None:
    model = huggingface.build_model(usual, seed)
    huggingface.save(model, tmp_path)
    runner, ragged = load(tmp_path), random_prompts(3, seed=seed)[1:]  # a long one and a short one
    for prompts, fields in ((ragged[:1], {}), (ragged, NO_REPEATS)):
        expected = [huggingface.generate(model, prompt, max_new_tokens=20, **fields)[0][0] for prompt in prompts]
        assert not fields or min(len(set(line)) for line in expected) >= 6
        for use_cache in (True, False):
            outputs = generate(runner, prompts, max_new_tokens=20, use_cache=use_cache, **fields)
            for prompt, ours, theirs in zip(prompts, outputs, expected, strict=True):
                assert_same_tokens(ours, theirs, lambda tokens, p=prompt: huggingface.logits(model, p + tokens)[-1])


def test_beams_and_their_scores(usual: dict[str, Any], tmp_path: Path) -> None:
    model, fields = huggingface.build_model(usual, 5), {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 10}
    huggingface.save(model, tmp_path)
    prompts = random_prompts(2, seed=5)
    results = run(loop_of(target=load(tmp_path)), [request_for(prompt, **fields) for prompt in prompts])
    for prompt, ours in zip(prompts, results, strict=True):
        sequences, scores = huggingface.generate(model, prompt, **fields)
        assert [result.token_ids for result in ours] == sequences
        np.testing.assert_allclose([result.score for result in ours], scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_weights_of_16_bits_are_read_bit_by_bit(usual: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    model = huggingface.build_model(usual, 4)
    rounded = copy.deepcopy(model).to(getattr(torch, dtype))
    huggingface.save(rounded, tmp_path, max_shard_size="12KB")
    model.load_state_dict(rounded.state_dict())  # what 16 bits have kept, and rotary frequencies in 32
    assert_equal_logits(tmp_path, model)


def test_the_comparison_can_fail(usual: dict[str, Any], tmp_path: Path) -> None:
    model = huggingface.build_model(usual, 6)
    huggingface.save(model, tmp_path)
    with torch.no_grad():
        [p for p in model.parameters() if p.ndim == 2][-1][:10].mul_(1.01)  # all of it some norms would undo
    with pytest.raises(AssertionError):
        assert_equal_logits(tmp_path, model)
