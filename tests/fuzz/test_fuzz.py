"""10,000 random inputs: each is answered or refused in one line, and leaves the engine as it was."""

import pytest

from .harness import run_batch

INPUTS = {
    "files": 3500,
    "arguments": 3000,
    "guides": 1000,
    "templates": 1000,
    "mixes": 750,
    "commands": 750,
}
BATCH = 250
SHOWN = 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "start"), [(subject, start) for subject, count in INPUTS.items() for start in range(0, count, BATCH)]
)
def test_every_input_is_answered_or_refused(subject, start):
    if subject == "guides":
        pytest.importorskip("llguidance")
    batch = run_batch(subject, start, min(start + BATCH, INPUTS[subject]))
    if batch.faults:
        shown = "\n".join(f"  {fault}" for fault in batch.faults[:SHOWN])
        first = batch.faults[0]
        pytest.fail(
            f"{len(batch.faults)} of {BATCH} inputs; the first of them:\n{shown}\n"
            f"To repeat one: python -m tests.fuzz {subject} {first.number}",
            pytrace=False,
        )
    least = BATCH // 20  # input that is all refused, or all answered, would try little
    assert batch.counts["answered"] > least and batch.counts["refused"] > least, batch.counts
