"""12,000 random inputs: each is answered or refused in one line, and leaves the engine as it was."""

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
BATCH = 250
OTHER_BATCHES = {"contradictions": 500}
"""Whose children take long to begin: they import transformers"""
BATCHES = [
    (subject, start, min(start + size, count))
    for subject, count in INPUTS.items()
    for size in [OTHER_BATCHES.get(subject, BATCH)]
    for start in range(0, count, size)
]
NEEDS = {"guides": ["llguidance"], "contradictions": ["torch", "transformers", "gguf"]}
SHOWN = 10


@pytest.mark.slow
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
