"""Passes that the kernels in C record: pieces of a program, with what ranks send between them."""

from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cpu.launching import Glu, Program, aligned, call, filled, launch, recording
from minillm.parallel import Parallel

from .ranks import DEGREES, NAMES, on_ranks

TEXT = "A list of colors: red,"


def steps_of(engine: Engine) -> list[Any]:
    """What rank 0 has recorded."""
    return [step for steps in engine.runner.backend.memory._steps.values() for step in steps.values()]


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("parallel", DEGREES, ids=NAMES)
def test_decode_steps_are_replayed_with_their_all_reduces(parallel: Parallel) -> None:
    prompts = [TEXT, "Count from 3 to 9:"]

    def run(engine: Engine) -> Any:
        several = [g.token_ids for g in engine.generate(prompts, max_new_tokens=12)]
        return several, engine.generate(TEXT, max_new_tokens=12, prompt_lookup_num_tokens=3).token_ids

    def on_rank_0(engine: Engine) -> Any:
        found = run(engine)
        return found, [(step.complete, len(step._program._functions)) for step in steps_of(engine)]

    shared = on_ranks(parallel, on_rank_0, backend="cpu", threads=1)
    tokens, recorded = shared.result
    assert tokens == run(Engine(backend="numpy", cache_bytes=1 << 24))
    layers = 6 // parallel.pipeline
    functions = 2 * layers + 1 if parallel.tensor > 1 else 0  # two in each layer and that of the embedding
    assert recorded and all(complete and count == functions for complete, count in recorded)


@pytest.mark.slow
def test_replayed_passes_send_what_others_send() -> None:
    def run(engine: Engine) -> Any:
        return engine.generate([5, 9, 17, 33], max_new_tokens=9, eos_token_id=[]).token_ids

    parallel = Parallel(tensor=2, pipeline=2)
    recorded, called = (on_ranks(parallel, run, backend=backend, threads=1) for backend in ("cpu", "numpy"))
    assert recorded.result == called.result
    for ours, theirs in zip(recorded.traffic, called.traffic, strict=True):
        assert {kind: ours.of(kind) for kind in ("all-reduce", "stage", "logits")} == {
            kind: theirs.of(kind) for kind in ("all-reduce", "stage", "logits")
        }


def test_functions_run_between_launches_each_time() -> None:
    """x is gated, a function adds to the result, and the sum is gated again."""
    x, middle, out = (aligned(4 * size).view(np.float32).reshape(2, -1) for size in (128, 64, 32))
    program, calls = Program(), []

    def add() -> None:
        calls.append(middle.copy())
        middle[...] += 1

    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    with recording(program):
        launch("glu", filled(Glu, x=x, out=middle, T=2, F=32, activation=1))
        call(add)
        launch("glu", filled(Glu, x=middle, out=out, T=2, F=16, activation=1))
        call(add)
    for seed in range(1, 4):
        x[...] = np.random.default_rng(seed).standard_normal(x.shape)
        program.run(watched=True)
        first = np.maximum(x[:, :32], 0) * x[:, 32:]
        np.testing.assert_allclose(calls[-2], first, rtol=1e-6)
        np.testing.assert_allclose(out, np.maximum(first[:, :16] + 1, 0) * (first[:, 16:] + 1), rtol=1e-5, atol=1e-6)
        ended = program.ended()
        assert len(ended) == len(program) == 4 and (np.diff(ended) >= 0).all() and ended[0] > 0
    assert len(calls) == 8
