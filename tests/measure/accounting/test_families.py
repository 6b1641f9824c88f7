"""The closed form, or the model of shapes, against the calls that are really made, for every family."""

import math
from typing import Any

import numpy as np
import pytest

from minillm.backends.observe import counting
from minillm.batch import TokenSequence
from minillm.measure import accounting
from minillm.measure.accounting import Part, Step, activation_bytes, generation
from minillm.measure.accounting.storage import Storage
from minillm.models import family_of, published, published_config, tensor_shapes

from ...families import CASES, CONFIGS, each_of
from ...tiny import loop_of, model_of, request_for, runner_of
from . import closed_form
from .agreement import assert_agree
from .outlines import has_outline


@pytest.fixture(params=each_of(CASES))
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    family, name = request.param
    return CONFIGS[family][name]


def test_parameter_count_is_what_the_tensors_hold(raw: dict[str, Any]) -> None:
    config = family_of(raw).read_config(raw)
    held = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert accounting.parameter_count(config) == held
    if has_outline(config):
        assert closed_form.parameter_count(config) == held


@pytest.mark.sampled(8, slow=2)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
def test_every_step_counts_what_the_formula_says(raw: dict[str, Any], use_cache: bool) -> None:
    runner, lengths = runner_of(model_of(raw), page_size=16), [7, 1, 30, 12]
    loop = loop_of(target=runner)
    for length in lengths:
        loop.add(request_for([3] * length, max_new_tokens=6, use_cache=use_cache))
    with counting(runner) as counted:
        for step in generation(lengths, 6, use_cache=use_cache):
            counted.reset()
            loop.step()
            assert_agree(runner.model.config, [step], counted)
    assert not loop.busy


@pytest.mark.sampled(8, slow=2)
@pytest.mark.parametrize("parents", [(-1, 0, 0, 2), (-1, -1, -1, 1, 3, 4)])
def test_a_tree_of_guesses(raw: dict[str, Any], parents: tuple[int, ...]) -> None:
    runner = runner_of(model_of(raw), page_size=16)
    sequence = TokenSequence([5] * 20)
    runner.prefill(sequence)
    sequence.token_ids += [7] * (1 + len(parents))
    sequence.tree = parents
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    with counting(runner) as counted:
        runner.forward([sequence], [sequence.pending])
    new = 1 + len(parents)
    assert_agree(runner.model.config, [Step((Part(new, 20 + new, tuple(depths)),), 1)], counted)


@pytest.mark.sampled(4)
def test_memory_of_activations_is_what_the_arena_holds(raw: dict[str, Any]) -> None:
    runner = runner_of(model_of(raw), page_size=16)
    for _ in range(3):  # each pass in the memory of the one before
        runner.forward([TokenSequence(list(range(3, 20)))], [17], rows=[2, 16])
        assert runner.backend.memory.arena.nbytes == activation_bytes(runner.model.config, Storage(), 17, 2)


@pytest.mark.slow
def test_memory_of_activations_of_every_published_shape() -> None:
    """Two layers stand for all where these are alike; tiny models often have no more."""
    for name in published():
        config = published_config(name)
        assert activation_bytes(config, Storage(), 17, 2) >= 4 * 17 * config.hidden_size, name


def test_visible_pairs_by_brute_force() -> None:
    for window in (None, 1, 3, 5, 30):
        for context in range(1, 9):
            for new in range(1, context + 1):
                queries = np.arange(context - new, context)[:, None]
                keys = np.arange(context)
                seen = (keys <= queries) & (queries - keys < (window or context))
                assert Part(new, context).pairs(window) == seen.sum()
                assert Part(new, context).reach(window) == seen.any(axis=0).sum()
            near = np.abs(np.arange(context)[:, None] - np.arange(context)) < (window or context)
            assert Part(context, context).pairs(window, causal=False) == near.sum()
