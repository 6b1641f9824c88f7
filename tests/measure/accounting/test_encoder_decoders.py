"""The closed form of T5, or the model of shapes, against the calls that encoder-decoders really make."""

import math
from typing import Any

import pytest

from minillm.backends.observe import counting
from minillm.errors import ParameterError
from minillm.measure import accounting
from minillm.measure.accounting import Part, Step, activation_bytes, generation
from minillm.measure.accounting.hardware import CHIPS
from minillm.measure.accounting.memory import weights_bytes
from minillm.measure.accounting.roofline import Analysis, Workload
from minillm.measure.accounting.storage import Storage
from minillm.models import family_of, published_config, tensor_shapes
from minillm.parallel import Parallel

from ...seq2seq import CASES, CONFIGS, request_for
from ...tiny import loop_of, model_of, runner_of
from . import closed_form
from .agreement import assert_agree, predicted
from .outlines import has_outline

SOURCES = [7, 1, 30, 12]


@pytest.fixture(params=CASES, ids="-".join)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    family, name = request.param
    return CONFIGS[family][name]


@pytest.mark.sampled(4)
def test_parameter_count_is_what_the_tensors_hold(raw: dict[str, Any]) -> None:
    config = family_of(raw).read_config(raw)
    held = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert accounting.parameter_count(config) == held
    if not has_outline(config):
        return
    assert closed_form.parameter_count(config) == held
    for storage in (Storage(), Storage(weights="float16"), Storage(weights="int8")):
        assert weights_bytes(config, storage) == closed_form.weights_bytes(config, storage)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
def test_every_step_counts_what_the_formula_says(raw: dict[str, Any], use_cache: bool) -> None:
    """The encoder's pass and the decoder's are counted in the step in which they run."""
    runner = runner_of(model_of(raw), page_size=16)
    loop, start = loop_of(target=runner), runner.model.config.decoder_start_token_id
    for length in SOURCES:
        request = request_for([3] * length, start=start, max_new_tokens=6, use_cache=use_cache)
        loop.add(request)
    steps = list(generation([1] * len(SOURCES), 6, use_cache=use_cache, sources=SOURCES))
    assert len(steps) == (7 if use_cache else 12)
    with counting(runner) as counted:
        while steps:
            passes = [steps.pop(0) for _ in range(2 if steps[0].encodes else 1)]
            counted.reset()
            loop.step()
            assert_agree(runner.model.config, passes, counted)
    assert not loop.busy


@pytest.mark.sampled(4)
def test_beams_read_the_source_of_each(raw: dict[str, Any]) -> None:
    runner = runner_of(model_of(raw), page_size=16)
    loop, config = loop_of(target=runner), runner.model.config
    request = request_for([3] * 9, start=config.decoder_start_token_id, max_new_tokens=5, num_beams=3)
    loop.add(request)
    with counting(runner) as counted:
        while loop.busy:
            loop.step()
    assert_agree(config, generation([1], 5, width=3, sources=[9]), counted)


@pytest.mark.sampled(4)
def test_memory_of_activations_is_what_the_arena_holds(raw: dict[str, Any]) -> None:
    runner = runner_of(model_of(raw), page_size=16)
    config, storage = runner.model.config, Storage()
    loop = loop_of(target=runner)
    request = request_for([3] * 17, start=config.decoder_start_token_id, decoder_prompt=[5] * 16, max_new_tokens=1)
    loop.add(request)
    while loop.busy:
        loop.step()
    assert runner.backend.memory.arena.nbytes == activation_bytes(config, storage, 17, 1)
    if has_outline(config):
        assert activation_bytes(config, storage, 17, 1) == closed_form.activation_bytes(config, storage, 17, 1)


@pytest.mark.sampled(4)
def test_a_recorded_run_is_the_schedule(raw: dict[str, Any]) -> None:
    runner = runner_of(model_of(raw), page_size=16)
    loop, start = loop_of(target=runner), runner.model.config.decoder_start_token_id
    with accounting.recording(runner) as recorded:
        for length in SOURCES:
            request = request_for([3] * length, start=start, max_new_tokens=4)
            loop.add(request)
        while loop.busy:
            loop.step()
    assert recorded.steps == list(generation([1] * len(SOURCES), 4, sources=SOURCES))


def test_analysis_has_the_encoder_as_prefill() -> None:
    config, chip = published_config("flan-t5-small"), next(iter(CHIPS.values()))
    analysis = Analysis(config=config, storage=Storage(), workload=Workload(batch=2, prompt_length=100), hardware=chip)
    for phase, step in (
        (analysis.prefill, Step((Part(100, 100),) * 2, 0)),
        (analysis.decode, Step((Part(1, 101, source=100),) * 2, 2)),
    ):
        assert phase.flops == sum(cost.flops for cost in predicted(config, [step]).values())
    with pytest.raises(ParameterError, match="pipeline_parallel 2 is not offered with an encoder-decoder"):
        Analysis(config=config, storage=Storage(), workload=Workload(), hardware=chip, parallel=Parallel(pipeline=2))
