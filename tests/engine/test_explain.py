"""The steps of the next token's distribution: by hand, by transformers' processors, and against what is drawn."""

import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from minillm import Engine
from minillm.cli.inspect import STEPS
from minillm.cli.main import run
from minillm.decoding.fields import FIELDS, MASKED, PROCESSED
from minillm.errors import ParameterError

PROMPT = "A list of colors:"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_batch_size=32) as engine:
        yield engine


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def test_the_steps_are_temperature_then_top_k_then_top_p_by_hand(engine: Engine) -> None:
    explanation = engine.explain(PROMPT, do_sample=True, temperature=0.7, top_k=6, top_p=0.9)
    assert [step.name for step in explanation.steps] == ["model", "temperature 0.7", "top_k 6", "top_p 0.9"]
    logits = engine.forward(PROMPT)[-1].astype(np.float64)
    cooler = softmax(logits / 0.7)
    order = np.argsort(-cooler, kind="stable")
    six, nucleus = np.zeros_like(cooler), np.zeros_like(cooler)
    six[order[:6]] = cooler[order[:6]] / cooler[order[:6]].sum()
    count = int((np.cumsum(six[order]) < 0.9).sum()) + 1
    nucleus[order[:count]] = six[order[:count]] / six[order[:count]].sum()
    for step, expected in zip(explanation.steps, (softmax(logits), cooler, six, nucleus), strict=True):
        np.testing.assert_allclose(step.probabilities, expected, rtol=1e-4, atol=1e-9)
        assert step.tokens_left == (expected > 0).sum()
        assert step.entropy == pytest.approx(-sum(p * np.log(p) for p in expected if p), rel=1e-4)
    assert 1 < count < 6


@pytest.mark.longer
def test_tokens_are_drawn_from_the_last_step(engine: Engine) -> None:
    fields = {"do_sample": True, "temperature": 1.3, "top_k": 5, "repetition_penalty": 1.1}
    probabilities = engine.explain(PROMPT, **fields).steps[-1].probabilities
    drawn = Counter(
        answer.token_ids[0] for answer in engine.generate([PROMPT] * 200, max_new_tokens=1, seed=1, **fields)
    )
    assert set(drawn) <= set(np.flatnonzero(probabilities).tolist())
    expected = {int(token): 200 * probabilities[token] for token in np.flatnonzero(probabilities)}
    chi_square = sum((drawn[token] - count) ** 2 / count for token, count in expected.items())
    assert chi_square < 23.5  # 4 degrees of freedom, p = 1e-4


def test_a_guide_and_a_user_function_are_steps(engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="guides need the extra guided")

    def no_blue(token_ids: object, scores: np.ndarray) -> np.ndarray:
        scores[..., blue] = -np.inf
        return scores

    [blue] = engine.tokenizer.encode(" blue", add_special_tokens=False)
    explanation = engine.explain(PROMPT, logits_processor=[no_blue], guided_regex=" (blue|pink|red)")
    model, processed, guided = explanation.steps
    assert model.probabilities[blue] > 0 == processed.probabilities[blue]
    assert guided.name == "guide" and guided.tokens_left < 20
    assert explanation.greedy


def test_greedy_search_has_the_models_distribution_alone(engine: Engine) -> None:
    explanation = engine.explain(PROMPT)
    [step] = explanation.steps
    assert [int(step.probabilities.argmax())] == engine.generate(PROMPT, max_new_tokens=1).token_ids
    assert explanation.likeliest(3) == np.argsort(-step.probabilities, kind="stable")[:3].tolist()
    assert "the likeliest is taken" in explanation._repr_html_()


def test_a_strategy_that_chooses_otherwise_is_refused(engine: Engine) -> None:
    with pytest.raises(ParameterError, match=r"greedy search and of sampling, found beam search: leave it out"):
        engine.explain(PROMPT, num_beams=2)


@pytest.mark.longer
def test_inspect_prints_the_steps(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["inspect", "--prompt", PROMPT, "--temperature", "0.7", "--top-p", "0.8"]
    assert run(options) == 0
    table = capsys.readouterr().out.split("the next token\n")[1].splitlines()
    assert table[0].split() == ["token", "model", "temperature", "0.7", "top_k", "50", "top_p", "0.8"]
    steps = engine.explain(PROMPT, do_sample=True, temperature=0.7, top_p=0.8).steps
    assert table[-2].split()[2:] == [f"{step.tokens_left:,}" for step in steps]
    assert run([*options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in data["steps"]] == [step.name for step in steps]
    assert data["steps"][1]["next"][0]["probability"] == pytest.approx(steps[1].probabilities.max())
    assert run(options[:3]) == 0
    assert "the next token" not in capsys.readouterr().out


def test_inspect_has_the_flags_of_all_that_changes_a_distribution() -> None:
    read = {"do_sample", "temperature", "top_k", "top_p", "min_p", "seed", *MASKED, *PROCESSED}
    of_these = {name for name, setting in FIELDS.items() if setting.needs in ("xtc_probability", "dry_multiplier")}
    assert set(STEPS) == {name for name in read | of_these if FIELDS[name].flag}


@pytest.mark.reference
def test_each_step_is_that_of_transformers_processors(engine: Engine) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    fields = {"repetition_penalty": 1.3, "temperature": 1.4, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    steps = engine.explain(PROMPT, do_sample=True, **fields, typical_p=0.9).steps
    scores = torch.from_numpy(engine.forward(PROMPT)[-1:])
    ids = torch.tensor([engine.explain(PROMPT).token_ids])
    processors = [
        theirs.RepetitionPenaltyLogitsProcessor(1.3),
        theirs.TemperatureLogitsWarper(1.4),
        theirs.TopKLogitsWarper(40),
        theirs.TopPLogitsWarper(0.95),
        theirs.MinPLogitsWarper(0.01),
        theirs.TypicalLogitsWarper(0.9),
    ]
    for step, processor in zip(steps[1:], processors, strict=True):
        scores = processor(ids, scores)
        np.testing.assert_allclose(step.probabilities, scores.double().softmax(-1)[0], rtol=1e-4, atol=1e-9)
