"""The likeliest tokens that a program finds in its own logits; `test_sample.py` has the kernel's own tests."""

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.batch import TokenSequence
from minillm.errors import NumericalError

from ...families import CONFIGS
from ...tiny import model_of, runner_of

RNG = np.random.default_rng(11)


def line_of(length: int) -> TokenSequence:
    return TokenSequence(RNG.integers(3, 90, length).tolist())


def test_a_step_answers_for_its_own_logits_and_no_others() -> None:
    """Whatever was found belongs to one array as it was: not to another one, nor to a step before."""
    backend = CpuBackend()
    runner = runner_of(model_of(CONFIGS["opt"]["pre-norm"], backend=backend), backend=backend, page_size=16, pages=64)
    first, second = line_of(9), line_of(5)
    for sequence in (first, second):
        runner.prefill(sequence)
    for length in range(6):
        for sequence in (first, second):
            sequence.token_ids.append(3 + length)
        before = runner.decode([first]).logits
        kept = before.copy()
        assert isinstance(backend.sampler.argmax(before), list)  # NumPy was not asked
        assert list(backend.sampler.argmax(before)) == before.argmax(axis=-1).tolist()
        logits = runner.decode([second]).logits
        assert list(backend.sampler.argmax(logits)) == logits.argmax(axis=-1).tolist()
        assert list(backend.sampler.argmax(kept)) == kept.argmax(axis=-1).tolist()
        logits[:, int(logits.argmax())] = -np.inf  # as a processor does
        assert list(backend.sampler.host.argmax(logits)) == logits.argmax(axis=-1).tolist()
        sequence = line_of(30)  # a pass that is no program
        prefilled = runner.prefill(sequence).logits
        assert list(backend.sampler.argmax(prefilled)) == prefilled.argmax(axis=-1).tolist()
        runner.cache.free(sequence)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_replayed_step_that_is_not_finite_is_noticed(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits have never passed through NumPy."""
    backend = CpuBackend()
    runner = runner_of(model_of(CONFIGS["opt"]["pre-norm"], backend=backend), backend=backend, page_size=16, pages=64)
    sequence = line_of(4)
    runner.prefill(sequence)
    for _ in range(3):
        sequence.token_ids.append(7)
        logits = runner.decode([sequence]).logits
    assert backend.sampler.finite(logits)
    runner.model.embedding.tokens.data[8] = bad
    sequence.token_ids.append(8)
    with pytest.raises(NumericalError):
        runner.decode([sequence])
