"""What ranks really send equals what `analyze` says, and the closed form."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.formats import open_model
from minillm.measure.accounting.hardware import CHIPS
from minillm.measure.accounting.roofline import Analysis, Workload
from minillm.measure.accounting.storage import Storage
from minillm.models import published_config
from minillm.parallel import Parallel

from ..families import GOLDEN_CASES
from ..tiny import write_checkpoint
from .ranks import DEGREES, on_all_degrees, on_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
QUICK = [("opt", "pre-norm"), ("llama", "grouped")]


def analysis_of(config: Any, parallel: Parallel, prompt_length: int) -> Analysis:
    return Analysis(
        config=config,
        storage=Storage(),
        workload=Workload(prompt_length=prompt_length, context=prompt_length + 1),
        hardware=next(iter(CHIPS.values())),
        parallel=parallel,
    )


def assert_counted(folder: Path, parallel: Parallel) -> None:
    T, config = 7, open_model(folder).config
    shared = on_ranks(
        parallel, lambda engine: engine.generate([4, 5, 6, 7, 8, 9, 10], max_new_tokens=2, eos_token_id=[]), folder
    )
    analysis = analysis_of(config, parallel, T)
    E, L, tensor = config.hidden_size, config.num_layers, parallel.tensor
    W = getattr(config, "embedding_size", E) + config.per_layer_width
    parts = {"nemotron_h": 1, "falcon_h1": 3}.get(config.model_type, 2) * L + config.shared_expert_layers
    for i in range(tensor):  # ranks with the same heads in all stages: together they have the model
        own = [shared.traffic[stage * tensor + i] for stage in range(parallel.pipeline)]
        reduced = [traffic.of("all-reduce") for traffic in own]
        expected = analysis.all_reduce_bytes(analysis.prefill) + analysis.all_reduce_bytes(analysis.decode)
        assert sum(sent.bytes for sent in reduced) == expected
        assert sum(sent.messages for sent in reduced) == analysis.prefill.all_reduces + analysis.decode.all_reduces
        if tensor > 1:
            assert expected == 4 * (T + 1) * (parts * E + W)
        for traffic in own[:-1]:
            assert traffic.of("stage").messages == 2
            assert traffic.of("stage").bytes == analysis.prefill.message_bytes + analysis.decode.message_bytes
            assert traffic.of("stage").bytes == 4 * (T + 1) * E
        assert own[-1].of("stage").messages == 0
    for rank, traffic in enumerate(shared.traffic):
        sends = rank != 0 and parallel.stage_of(rank) == parallel.pipeline - 1
        assert traffic.of("logits").bytes == (2 * analysis.choice_bytes(analysis.decode) if sends else 0)
    steps = shared.traffic[0].of("step")
    assert steps.messages == 3 * (parallel.devices - 1)  # two passes and the end, to each of the others
    assert steps.bytes < 1000 * steps.messages


@pytest.mark.parametrize("parallel", DEGREES, ids=str)
def test_bytes_of_a_prompt_and_a_step(parallel: Parallel, tmp_path: Path) -> None:
    assert_counted(write_checkpoint(tmp_path / "m", num_hidden_layers=4), parallel)


FEW = sorted({family for family, _ in GOLDEN_CASES})[::3]
"""Families that run; what is sent follows from widths and layers, of which the others have the same kinds"""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "parallel"), on_all_degrees(GOLDEN_CASES, FEW))
def test_bytes_of_every_family(family: str, name: str, parallel: Parallel) -> None:
    folder = GOLDEN / family / name.replace(" ", "-")
    config = open_model(folder).config
    staged = parallel.pipeline > 1 and (config.num_layers < parallel.pipeline or config.per_layer_width)
    if config.num_heads % parallel.tensor or staged:
        pytest.skip("it cannot be shared")
    assert_counted(folder, parallel)


@pytest.mark.slow
def test_a_draw_among_the_best_sends_these_alone() -> None:
    """A draw from all tokens needs all logits; each rank then sends its part once."""
    best = on_ranks(
        Parallel(tensor=2), lambda engine: engine.generate("A", max_new_tokens=4, do_sample=True, top_k=8, seed=1)
    )
    tokens = len(best.result.token_ids)
    assert best.traffic[1].of("logits").bytes == tokens * 16 * (1 + 9)
    whole = on_ranks(
        Parallel(tensor=2), lambda engine: engine.generate("A", max_new_tokens=4, do_sample=True, top_k=0, seed=1)
    )
    V, tokens = Engine(backend="numpy", cache_bytes=1 << 22).config.vocab_size, len(whole.result.token_ids)
    assert whole.traffic[1].of("logits").bytes == tokens * (16 + 4 * (V - V // 2))


def test_opt_350m_embeds_in_a_narrower_width() -> None:
    analysis = analysis_of(published_config("opt-350m"), Parallel(tensor=2), 512)
    assert analysis.all_reduce_bytes(analysis.prefill) == 4 * 512 * (2 * 24 * 1024 + 512)


@pytest.mark.parametrize("stages", range(1, 6))
def test_stages_are_balanced(stages: int) -> None:
    rng = np.random.default_rng(stages)
    for _ in range(20):
        sizes = rng.integers(1, 50, rng.integers(stages, 9) + 1).tolist()
        parallel, L = Parallel(pipeline=stages), len(sizes) - 1
        parts = [parallel.layers_of(rank, sizes) for rank in range(stages)]
        assert [layer for part in parts for layer in part] == list(range(L)) and all(parts)
        costs = [*sizes[: L - 1], sizes[L - 1] + sizes[L]]
        assert max(sum(costs[layer] for layer in part) for part in parts) == least_largest(costs, stages)


def least_largest(costs: list[int], parts: int) -> int:
    """By trying every way to cut."""
    if parts == 1:
        return sum(costs)
    return min(
        max(sum(costs[:first]), least_largest(costs[first:], parts - 1)) for first in range(1, len(costs) - parts + 2)
    )
