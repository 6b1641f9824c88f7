"""Against transformers as it runs: beam search in random configurations, and processors inside greedy search."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.engine.inspect import all_logits, score_tokens  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.reference.philox import BEAMS, uniform  # noqa: E402
from minillm.reference.sampling_without_replacement import sample_without_replacement  # noqa: E402

from .. import huggingface  # noqa: E402
from ..comparing import assert_same_tokens  # noqa: E402
from ..tiny import VARIANTS, loop_of, random_prompts, request_for, run, runner_of  # noqa: E402

pytestmark = pytest.mark.reference

CONFIGURATIONS, BLOCKS = 200, 4
MODELS = ["pre-norm", "post-norm", "galactica"]
RELATIVE = 1e-6
"""A length penalty of -2 multiplies a score by the squared length: numbers in the thousands, rounded as float32 is."""


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A model in transformers, and a runner of ours that has read it."""
    model = huggingface.build(request.param, seed=21)
    folder = huggingface.save(model, tmp_path_factory.mktemp("model"))
    return model, runner_of(load_model(folder, NumpyBackend()), pages=2000, page_size=8)


def random_fields(seed: int) -> dict[str, Any]:
    """A configuration of beam search; in many of them the end is likely."""
    rng = np.random.default_rng(seed)
    num_beams = int(rng.integers(2, 7))
    fields: dict[str, Any] = {
        "num_beams": num_beams,
        "num_return_sequences": int(rng.integers(1, num_beams + 1)),
        "max_new_tokens": int(rng.integers(1, 16)),
        "early_stopping": [True, False, "never"][seed % 3],
        "length_penalty": float(rng.choice([-2.0, -0.5, 0.0, 0.7, 1.0, 3.0])),
    }
    ends = int(rng.choice([0, 1, 2, 5, 12]))
    if ends:
        fields["eos_token_id"] = rng.choice(96, ends, replace=False).tolist()
        if rng.random() < 0.25:
            fields["min_new_tokens"] = int(rng.integers(1, fields["max_new_tokens"] + 1))
    if rng.random() < 0.25:
        fields["repetition_penalty"] = float(rng.choice([0.8, 1.2, 1.7]))
    return fields


def test_the_configurations_cover_what_they_should() -> None:
    drawn = [random_fields(seed) for seed in range(CONFIGURATIONS // BLOCKS)]  # of the first block
    assert {(f["early_stopping"], np.sign(f["length_penalty"])) for f in drawn} == {
        (early, sign) for early in (True, False, "never") for sign in (-1, 0, 1)
    }
    assert sum(len(f.get("eos_token_id", ())) > 1 for f in drawn) > len(drawn) // 3


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [pytest.param(-50.0, marks=pytest.mark.exhaustive), -10.0, -3.0, 10.0])
def test_extreme_length_penalties(pair, penalty: float, early_stopping: Any) -> None:
    """transformers gives up where scores fall below -1e9: its "results" are lines of that score that never ended."""
    model, runner = pair
    fields: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40}
    fields |= {"length_penalty": penalty, "early_stopping": early_stopping}
    [ours] = run(loop_of(target=runner), [request_for([5, 6, 7], **fields)])
    prompt = torch.tensor([[5, 6, 7]])
    settings = {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **settings, **fields)
    assert [len(result.token_ids) for result in ours] == [40] * 3
    if penalty <= -10:
        assert (theirs.sequences_scores == -1e9).all()
        assert (theirs.sequences.shape[1] - 3) < 40
        assert all(np.isfinite(result.score) and result.score < -1e9 for result in ours)
    else:
        assert [result.token_ids for result in ours] == [line[3:] for line in theirs.sequences.tolist()]
        np.testing.assert_allclose([r.score for r in ours], theirs.sequences_scores.tolist(), rtol=1e-5)


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, BLOCKS))])
def test_beams_and_scores_in_random_configurations(pair, block: int, request: pytest.FixtureRequest) -> None:
    """Each configuration runs on one of the models."""
    model, runner = pair
    turn, ended = MODELS.index(request.node.callspec.params["pair"]), 0
    for seed in range(block * CONFIGURATIONS // BLOCKS, (block + 1) * CONFIGURATIONS // BLOCKS):
        if seed // 3 % 3 != turn:
            continue
        fields, prompts = random_fields(seed), random_prompts(3, seed=seed, longest=10)
        found = run(loop_of(target=runner, max_batch_size=24), [request_for(p, **fields) for p in prompts])
        for prompt, results in zip(prompts, found, strict=True):
            sequences, scores = huggingface.generate(model, prompt, **fields)
            assert [r.token_ids for r in results] == sequences, (seed, fields, prompt)
            np.testing.assert_allclose(
                [r.score for r in results], scores, rtol=RELATIVE, atol=1e-4, err_msg=str(fields)
            )
            ended += sum(r.finish_reason == "stop" for r in results)
    assert ended
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(8, 24))])
def test_beams_that_sample_do_the_same_with_the_same_draws(pair, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers with our draws in the place of its own: filters, ranks, results and scores are the same."""
    model, runner = pair
    rng, [prompt] = np.random.default_rng(seed), random_prompts(1, seed=seed, longest=10)
    fields = random_fields(seed) | {"do_sample": True, "temperature": float(rng.choice([0.5, 1.0, 2.0]))}
    fields |= [{"top_k": 0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 0, "top_p": 0.6}, {"min_p": 0.1}][seed % 5]
    steps = iter(range(100))

    def draw(probabilities: Any, num_samples: int) -> Any:
        [row] = probabilities.double().log().float().numpy()
        uniforms = uniform(seed, np.arange(num_samples), len(prompt) + next(steps), BEAMS)
        return torch.tensor(sample_without_replacement(row, uniforms, np)[None])

    [ours] = run(loop_of(target=runner), [request_for(prompt, seed=seed, **fields)])
    monkeypatch.setattr(torch, "multinomial", draw)
    sequences, scores = huggingface.generate(model, prompt, **fields)
    assert [r.token_ids for r in ours] == sequences
    np.testing.assert_allclose([r.score for r in ours], scores, rtol=1e-5, atol=1e-4)


GREEDY = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encouraged repetition": {"repetition_penalty": 0.8},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(10, 60))},
    "min_length": {"min_length": 14, "eos_token_id": list(range(10, 60))},
    "all": {"min_new_tokens": 9, "repetition_penalty": 1.2, "eos_token_id": list(range(10, 90, 2))},
}


@pytest.mark.parametrize("fields", GREEDY.values(), ids=GREEDY)
def test_processors_inside_greedy_search(pair, fields: dict[str, Any]) -> None:
    model, runner = pair
    prompts = random_prompts(4, seed=9)
    requests = [request_for(p, max_new_tokens=20, **fields) for p in prompts]
    expected = [huggingface.generate(model, p, max_new_tokens=20, **fields)[0][0] for p in prompts]
    plain = [huggingface.generate(model, p, max_new_tokens=20)[0][0] for p in prompts]
    assert expected != plain
    for (result,), theirs in zip(run(loop_of(target=runner), requests), expected, strict=True):
        assert result.token_ids == theirs


@pytest.mark.parametrize("eos", [[5], [20, 40, 60, 80]])
def test_greedy_search_ends_where_theirs_ends(pair, eos: list[int]) -> None:
    model, runner = pair
    prompts = random_prompts(4, seed=3)
    requests = [request_for(p, max_new_tokens=30, eos_token_id=eos) for p in prompts]
    for prompt, (result,) in zip(prompts, run(loop_of(target=runner), requests), strict=True):
        theirs = huggingface.generate(model, prompt, max_new_tokens=30, eos_token_id=eos)[0][0]
        assert_same_tokens(result.token_ids, theirs, lambda t, p=prompt: huggingface.logits(model, p + t)[-1])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_log_probabilities_are_their_log_softmax(pair, num_beams: int) -> None:
    model, runner = pair
    prompts = random_prompts(8, seed=5)
    requests = [request_for(p, max_new_tokens=15, logprobs=True, num_beams=num_beams) for p in prompts]
    for prompt, (result,) in zip(prompts, run(loop_of(target=runner), requests), strict=True):
        logits = torch.tensor(huggingface.logits(model, prompt + result.token_ids))[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(logits)), result.token_ids]
        np.testing.assert_allclose(result.log_probs, expected.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_given_tokens(variant: str, tmp_path) -> None:
    model = huggingface.build(variant, seed=8)
    runner = runner_of(load_model(huggingface.save(model, tmp_path), NumpyBackend()))
    line = np.random.default_rng(1).integers(0, 96, 60).tolist()
    logits = torch.tensor(huggingface.logits(model, line))
    np.testing.assert_allclose(all_logits(runner, line), logits.numpy(), rtol=0, atol=1e-4)
    first, *rest = score_tokens(runner, line)
    assert first is None
    expected = logits.log_softmax(-1)[torch.arange(59), line[1:]]
    np.testing.assert_allclose(rest, expected.numpy(), rtol=0, atol=1e-4)
