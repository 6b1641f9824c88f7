"""The fuzzer finds faults of every kind that are planted, by their numbers, and nothing else."""

import pytest

from .harness import Limits, run_batch
from .planted import ENDS

LIMITS = Limits(memory=1 << 30, cpu=0.5, wall=4)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, len(ENDS) // 2])
def test_planted_faults_are_found_and_the_others_go_on(start):
    stop = min(start + len(ENDS) // 2, len(ENDS))
    found = {fault.number: fault.kind for fault in run_batch("planted", start, stop, LIMITS).faults}
    assert found == {number: kind for number, (kind, _) in enumerate(ENDS) if kind and start <= number < stop}


@pytest.mark.longer
def test_a_fault_says_how_to_repeat_it():
    [fault] = run_batch("planted", 2, 3, LIMITS).faults
    assert str(fault) == "planted 2: KeyError at outside minillm: 'no such key'"


def test_a_child_that_cannot_begin_is_no_success():
    with pytest.raises(RuntimeError, match="no_such_subject"):
        run_batch("no_such_subject", 0, 1, LIMITS)
