"""Cache memory of forks: the prompt's full pages are held once, however many sequences share them."""

from typing import Any

import pytest

from minillm.runner.runner import Runner

from ..tiny import loop_of, random_prompts, request_for, run, runner_of, tiny_model

PAGE, PROMPT, NEW = 4, 42, 12


@pytest.fixture(scope="module")
def runner() -> Runner:
    return runner_of(tiny_model(seed=2), pages=200, page_size=PAGE)


def most_pages(runner: Runner, length: int, **fields: Any) -> int:
    """Pages in use at the most while one request with a prompt of that length runs."""
    request = request_for(list(range(3, 3 + length)), max_new_tokens=NEW, **fields)
    loop, most = loop_of(target=runner), 0
    loop.add(request)
    while loop.busy:
        loop.step()
        most = max(most, runner.cache.num_pages - runner.cache.free_pages)
    return most


SEARCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "beams": (8, {"num_beams": 8}),
    "sampled beams": (8, {"num_beams": 8, "do_sample": True, "seed": 1, "temperature": 3.0, "top_k": 0}),
    "groups": (8, {"num_beams": 8, "num_beam_groups": 4, "diversity_penalty": 1.0}),
    "contrastive search": (8, {"penalty_alpha": 0.6, "top_k": 8}),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_sequences_share_the_pages_of_the_prompt(runner: Runner, name: str) -> None:
    width, fields = SEARCHES[name]
    shared = PROMPT // PAGE
    own = -(-(PROMPT + NEW) // PAGE) - shared
    assert shared < most_pages(runner, PROMPT, **fields) <= shared + width * own
    assert shared + width * own < width * shared  # so it is far from a prompt for each of them
    assert runner.cache.free_pages == runner.cache.num_pages


def test_a_longer_prompt_takes_its_own_pages_and_no_more(runner: Runner) -> None:
    """What is left belongs to generated tokens, which the beams share more or less."""
    short, long = (most_pages(runner, length, num_beams=8) - length // PAGE for length in (8, 40))
    assert abs(short - long) <= 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SEARCHES)
def test_sharing_changes_no_result(runner: Runner, name: str) -> None:
    _, fields = SEARCHES[name]
    lines = []
    for use_cache in (True, False):
        requests = [request_for(p, max_new_tokens=8, use_cache=use_cache, **fields) for p in random_prompts(2, seed=8)]
        lines.append([[r.token_ids for r in one] for one in run(loop_of(target=runner), requests)])
    assert lines[0] == lines[1]
