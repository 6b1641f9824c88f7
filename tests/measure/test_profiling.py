"""A profile of a real run: parts and whole, counts, floors, phases."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.observe import counting
from minillm.backends.storage import Joined
from minillm.backends.weights import Weight
from minillm.errors import ParameterError
from minillm.measure.accounting.hardware import Hardware
from minillm.measure.profiling import CachedProducts, Profile, layer_spans, probe_with, profile
from minillm.models import published
from minillm.reference.cost import Cost

from ..shapes import BASE, VARIANTS


def machine(bandwidth: float, rate: float) -> Hardware:
    """One that need not be probed."""
    return Hardware(name="a", rates={"float32": rate}, bandwidth=bandwidth, memory=1, source="thin air")


MACHINE = machine(1e10, 1e11)
RUNS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "naive": {"use_cache": False},
    "beams": {"num_beams": 2},
    "sampled": {"do_sample": True, "seed": 1},
    "guesses": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setitem(published(), "small", BASE)
    with Engine.random("small", std=0.3, backend="numpy") as engine:
        yield engine


def run(engine: Engine, lengths: list[int], hardware: Hardware = MACHINE, **fields: Any) -> Profile:
    options = {"max_new_tokens": 5, "eos_token_id": ()} | fields
    return profile(engine, [[3 + i] * n for i, n in enumerate(lengths)], hardware=hardware, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_costs_are_those_that_the_counting_backend_counts(engine: Engine, fields: dict[str, Any]) -> None:
    found = run(engine, [4, 9], **fields)
    with counting(engine.runner) as counted:
        engine.generate([[3] * 4, [4] * 9], max_new_tokens=5, eos_token_id=(), **fields)
    sums: dict[str, Cost] = {}
    for step in found.steps:
        for call in step.calls:
            if call.cost is not None:
                sums[call.operation] = sums.get(call.operation, Cost(0)) + call.cost
    assert sums == counted.by_operation()
    assert sum((phase.cost for phase in found.phases.values()), Cost(0)) == counted.total


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_parts_add_up_to_no_more_than_the_whole(engine: Engine, fields: dict[str, Any]) -> None:
    for phase in run(engine, [4, 9], **fields).phases.values():
        assert 0 < phase.in_operations < phase.seconds
        assert phase.between_operations > 0
        assert phase.around > 0
        parts = phase.in_operations + phase.between_operations + phase.around
        assert parts == pytest.approx(phase.seconds, rel=1e-9)
        assert sum(layer.seconds for layer in phase.layers) <= phase.seconds
        inside = sum(row.seconds for row in phase.operations if row.place != "outside the model")
        assert inside <= sum(layer.seconds for layer in phase.layers) * (1 + 1e-9)
        assert sum(layer.floor for layer in phase.layers) == pytest.approx(phase.floor)


def test_phases_steps_and_calls_are_those_of_the_run(engine: Engine) -> None:
    found = run(engine, [4, 9], max_new_tokens=6)
    prefill, decode = found.phases["prefill"], found.phases["decode"]
    assert (len(prefill.steps), prefill.tokens) == (1, 13)
    assert (len(decode.steps), decode.tokens) == (5, 10)
    L = BASE["num_hidden_layers"]
    calls = {(row.place, row.name): row.calls for row in decode.operations}
    layers = ["layer_norm self_attn_layer_norm", "linear self_attn.qkv", "store_kv", "attend"]
    layers += ["linear self_attn.out_proj", "layer_norm final_layer_norm", "linear fc1", "linear fc2"]
    assert calls == {("embedding", "embed embed_tokens"): 5} | {("layers", name): 5 * L for name in layers} | {
        ("head", "layer_norm final_layer_norm"): 5,
        ("head", "linear embed_tokens"): 5,
        ("outside the model", "upload"): 5,
        ("outside the model", "finite"): 5,
        ("outside the model", "argmax"): 5,
    }
    assert [layer.layer for layer in decode.layers] == [None, *range(L), L]
    assert len(found.overhead) == 6


def test_repeats_are_kept_and_the_first_round_is_not(engine: Engine) -> None:
    found = profile(engine, [[3, 4]], repeat=3, hardware=MACHINE, max_new_tokens=4, eos_token_id=())
    assert [step.phase for step in found.steps] == ["prefill", "decode", "decode", "decode"] * 3


def test_a_narrow_embedding_is_projected_before_and_after_the_layers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(published(), "narrow", VARIANTS["narrow embedding"])
    with Engine.random("narrow", backend="numpy") as narrow:
        rows = {(row.place, row.name) for row in run(narrow, [4]).phases["decode"].operations}
    assert ("embedding", "linear project_in") in rows
    assert ("head", "linear project_out") in rows


@pytest.mark.longer
def test_floors_stand_on_bytes_or_flops_whichever_takes_longer(engine: Engine) -> None:
    never = 1e300
    by_flops = run(engine, [4], machine(never, 2.0)).phases["decode"]
    assert by_flops.floor == pytest.approx(by_flops.cost.flops / 2)
    by_bytes = run(engine, [4], machine(4.0, never)).phases["decode"]
    assert by_bytes.floor == pytest.approx((by_bytes.cost.bytes_read + by_bytes.cost.bytes_written) / 4)
    both = run(engine, [4], machine(4.0, 2.0)).phases["decode"]
    assert max(by_flops.floor, by_bytes.floor) < both.floor < by_flops.floor + by_bytes.floor  # call by call
    head = next(row for row in by_flops.operations if row.place == "head" and row.name == "linear embed_tokens")
    assert head.floor == head.calls * BASE["vocab_size"] * BASE["hidden_size"]  # 2 V E FLOPs at 2 a second
    assert head.ratio == head.seconds / head.floor
    assert next(row for row in by_flops.operations if row.name == "argmax").ratio is None


class Timed:
    """A backend of which products take a time that is known: something each, and something for each output and row."""

    xp = np
    OUTPUT: ClassVar = {np.dtype(np.float32): 3.0, np.dtype(np.float16): 5.0}

    def __init__(self) -> None:
        self.seconds = 0.0
        self.products = 0

    def enter_layer(self, layer: int) -> None: ...

    def linear(self, x: Any, weight: Weight) -> None:
        assert x.shape[1] == weight.shape[1]
        self.seconds = 100.0 + weight.shape[0] * len(x) * self.OUTPUT[weight.data.dtype]
        self.products += 1

    def best_of(self, run: Callable[[], None]) -> float:
        run()
        return self.seconds


def test_products_in_the_cache_are_timed_without_what_a_call_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = Timed()
    monkeypatch.setattr("minillm.measure.profiling.best_of", backend.best_of)
    cached = CachedProducts(backend)
    wide, narrow = np.zeros((50_000, 32), np.float32), np.zeros((40, 32), np.float16)
    assert cached.seconds(Weight("", wide), 2) == pytest.approx(50_000 * 2 * 3.0)
    assert cached.seconds(Weight("", Joined((wide, narrow, narrow))), 2) == pytest.approx(2 * (150_000 + 2 * 40 * 5))
    products = backend.products
    assert cached.seconds(Weight("", narrow[:1]), 2) == pytest.approx(2 * 5)  # the same format, inputs and rows
    assert backend.products == products
    assert cached.seconds(Weight("", narrow[:1]), 7) == pytest.approx(
        100 + 7 * 5
    )  # of one output nothing is told apart
    assert backend.products > products


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_floors_of_products_stand_on_their_arithmetic_in_the_cache(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.measure.profiling.probe_with", lambda backend: machine(1e30, 1e30))
    monkeypatch.setattr(CachedProducts, "seconds", lambda self, weight, rows: 7.0 * rows * weight.shape[0])
    monkeypatch.setitem(published(), "small", BASE)
    with Engine.random("small", backend=backend) as engine:
        options: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": ()}
        found = profile(engine, [[3, 4, 5]], **options)
        named = profile(engine, [[3, 4, 5]], hardware=machine(1e30, 1e30), **options)
    outputs = BASE["num_hidden_layers"] * (4 * BASE["hidden_size"] + BASE["ffn_dim"] + BASE["hidden_size"])
    for phase, rows, steps in (("prefill", 3, 1), ("decode", 1, 2)):
        expected = steps * 7.0 * (rows * outputs + BASE["vocab_size"])
        assert found.phases[phase].floor == pytest.approx(expected)
        assert sum(layer.floor for layer in found.phases[phase].layers) == pytest.approx(expected)
        assert named.phases[phase].floor < 1


def test_layers_of_several_passes_in_a_step_are_apart(engine: Engine) -> None:
    """A step cut into spans gives each call once, in order."""
    for step in run(engine, [4], num_beams=2).steps:
        spans = list(layer_spans(step.calls))
        assert [call for span in spans for call in span.calls] == [c for c in step.calls if c.cost is not None]
        assert all({call.layer for call in span.calls} == {span.layer} for span in spans)
        assert all(a.began + a.seconds <= b.began + 1e-12 for a, b in pairwise(spans))


def test_the_engine_is_left_as_it_was(engine: Engine) -> None:
    backend, free = engine.runner.backend, engine.runner.cache.free_pages
    found = run(engine, [4])
    assert engine.runner.backend is backend
    assert engine.runner.cache.free_pages == free
    assert not engine.busy
    assert engine.stats.steps == 0
    assert math.isfinite(found.median_overhead)


@pytest.mark.slow
def test_the_rates_are_the_better_of_the_two(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.measure.profiling.read_bandwidth", lambda threads: threads * 2.0**100)
    monkeypatch.setattr("minillm.measure.profiling.probe", lambda: machine(5.0, 1.0))
    probed = probe_with(engine.runner.backend)  # both the backend's own
    assert 1e7 < probed.bandwidth < 1e13
    assert 1e7 < probed.rate("float32") < 1e15
    monkeypatch.setattr("minillm.measure.profiling.probe", lambda: machine(2.0**101, 1e30))
    assert probe_with(engine.runner.backend).bandwidth == 2.0**101
    assert probe_with(engine.runner.backend, threads=3).rate("float32") == 1e30
    assert probe_with(engine.runner.backend, threads=3).bandwidth == 3 * 2.0**100


def test_the_probe_does_not_pass_a_processor_off_as_a_gpu(engine: Engine) -> None:
    engine.runner.backend.name = "cuda"
    with pytest.raises(ParameterError, match="name the GPU with --hardware, one of a100"):
        probe_with(engine.runner.backend)
