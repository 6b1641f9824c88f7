"""12,000 random inputs: each is answered or refused in one line, and leaves the engine as it was."""

from random import Random

import pytest

from .harness import run_batch

INPUTS = {
    "files": 3500,
    "arguments": 3000,
    "guides": 1000,
    "templates": 1000,
    "mixes": 750,
    "commands": 750,
    "contradictions": 2000,
}
BATCH = 125
OTHER_BATCHES = {"mixes": 94, "commands": 94}
SHARE = 1 / 16
"""Of each subject's batches, rounded up, that run every time; the others are exhaustive"""
BATCHES: list[object] = []
for subject, count in INPUTS.items():
    size = OTHER_BATCHES.get(subject, BATCH)
    starts = range(0, count, size)
    chosen = Random(subject).sample(starts, -int(-SHARE * len(starts) // 1))
    for start in starts:
        marks = pytest.mark.slow if start in chosen else pytest.mark.exhaustive
        BATCHES.append(pytest.param(subject, start, min(start + size, count), marks=marks))
NEEDS = {"guides": ["llguidance"], "contradictions": ["torch", "transformers", "gguf"]}
SHOWN = 10


@pytest.mark.parametrize(("subject", "start", "stop"), BATCHES)
def test_every_input_is_answered_or_refused(subject, start, stop):
    for package in NEEDS.get(subject, ()):
        pytest.importorskip(package)
    batch = run_batch(subject, start, stop)
    if batch.faults:
        shown = "\n".join(f"  {fault}" for fault in batch.faults[:SHOWN])
        first = batch.faults[0]
        pytest.fail(
            f"{len(batch.faults)} of {stop - start} inputs; the first of them:\n{shown}\n"
            f"To repeat one: python -m tests.fuzz {subject} {first.number}",
            pytrace=False,
        )
    least = (stop - start) // 20  # input that is all refused, or all answered, would try little
    assert batch.counts["answered"] > least and batch.counts["refused"] > least, batch.counts
