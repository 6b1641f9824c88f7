"""Counted equals the closed form of the schedule, for every strategy, with its tokens and guesses as they come."""

from typing import Any

import pytest

from minillm.backends.observe import counting
from minillm.decoding.resolving import strategy_for
from minillm.measure.accounting import Step, generation, recording
from minillm.runner.runner import Runner

from ...decoding.test_guessing import draft_model, request_for, target_model
from ...tiny import loop_of, run
from .agreement import assert_agree

PROMPTS = [[5, 6, 7, 5, 6], [9, 4, 11, 12, 4, 9, 30, 31, 9, 4, 11]]
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "three samples": {"do_sample": True, "seed": 3, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "diverse beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "sampled beams": {"num_beams": 3, "do_sample": True, "seed": 1},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 3},
    "guidance": {"guidance_scale": 2.0, "negative_prompt": (7, 8, 9), "num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "lookahead": {"lookahead_window": 3},
    "draft": {"models": ("draft",)},
    "amateur": {"models": ("amateur",)},
}


def record(target: Runner, fields: dict[str, Any], chunk: int = 512) -> dict[str, list[Step]]:
    """Run the prompts side by side; hold each model's count against its schedule, and return the schedules."""
    runners = {"target": target} | {name: draft_model() for name in fields.get("models", ())}
    requests = [request_for(prompt, max_new_tokens=12, **fields) for prompt in PROMPTS]
    loop = loop_of(chunk=chunk, **runners)
    strategy = strategy_for(requests[0].settings)
    schedules = {}
    with counting(target) as counted, recording(target) as schedule:
        others = {name: runner for name, runner in runners.items() if name != "target"}
        for runner in others.values():
            with counting(runner) as theirs, recording(runner) as recorded:
                run(loop, requests, strategy)
            assert_agree(runner.model.config, recorded.steps, theirs)
            schedules["other"] = recorded.steps
        if not others:
            run(loop, requests, strategy)
    assert_agree(target.model.config, schedule.steps, counted)
    return schedules | {"target": schedule.steps}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_counted_is_what_the_formula_says(name: str) -> None:
    schedules = record(target_model(), STRATEGIES[name])
    assert all(len(steps) > 1 for steps in schedules.values())


@pytest.mark.parametrize("name", ["greedy", "beams", "three samples"])
def test_the_naive_way(name: str) -> None:
    steps = record(target_model(), STRATEGIES[name] | {"use_cache": False})["target"]
    assert all(part.new == part.context for step in steps for part in step.parts)


def test_chunks_without_rows() -> None:
    """A chunk that ends before its prompt does asks for no logits, and does not read the head."""
    assert any(step.rows == 0 for step in record(target_model(), {}, chunk=4)["target"])


def test_a_tree_of_guesses_hides_pairs() -> None:
    steps = record(target_model(), STRATEGIES["lookahead"])["target"]
    assert any(part.depths for step in steps for part in step.parts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
@pytest.mark.parametrize(("name", "width"), [("greedy", 1), ("three samples", 3), ("beams", 3)])
def test_schedules_that_follow_from_lengths_are_those_recorded(name: str, width: int, use_cache: bool) -> None:
    steps = record(target_model(), STRATEGIES[name] | {"use_cache": use_cache})["target"]
    expected = list(generation([len(prompt) for prompt in PROMPTS], 12, use_cache=use_cache, width=width))
    assert [(sorted(step.parts), step.rows) for step in steps] == [(sorted(s.parts), s.rows) for s in expected]
