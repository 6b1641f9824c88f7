"""Small passes are recorded once and replayed: to the last bit what the same operations give call by call."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu import memory as steps
from minillm.backends.cpu.backend import ACTIVATIONS, CpuBackend
from minillm.backends.cpu.launching import num_threads, set_threads
from minillm.backends.cpu.memory import FEW_ROWS
from minillm.backends.observe import WrappedBackend, counting
from minillm.backends.timing import TimingBackend
from minillm.batch import TokenSequence
from minillm.runner.runner import Runner

from ...families import CASES, CONFIGS, IDS, marks_of_further
from ...tiny import model_of, runner_of

pytestmark = pytest.mark.slow  # the default backend: what else runs engines tests it too

OPT = CONFIGS["opt"]["pre-norm"]
WINDOWED = CONFIGS["mistral"]["window"]
EXPERTS = CONFIGS["mixtral"]["two of six, window"]
LINE = np.random.default_rng(5).integers(3, 96, 60).tolist()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many launches each replay had."""
    seen: list[int] = []
    run = steps.Program.run

    def counted(program: steps.Program, **options: bool) -> None:
        seen.append(len(program))
        run(program, **options)

    monkeypatch.setattr(steps.Program, "run", counted)
    return seen


def pair(raw: dict[str, Any], **options: Any) -> tuple[Runner, Runner]:
    """A runner that replays, and one that sees every operation called."""
    backend = CpuBackend(**options)
    model = model_of(raw, backend=backend)
    replaying, calling = (runner_of(model, backend=backend, page_size=16, pages=64) for _ in range(2))
    calling.backend = WrappedBackend(backend)
    return replaying, calling


def decode(runner: Runner, lines: list[list[int]], prompts: list[int]) -> Iterator[np.ndarray]:
    """Logits of decode steps, token by token, after prompts of these lengths; a line that ends leaves the batch."""
    sequences = [TokenSequence(line[:length]) for line, length in zip(lines, prompts, strict=True)]
    for sequence in sequences:
        runner.prefill(sequence)
    for _ in range(max(map(len, lines))):
        live = [(s, line) for s, line in zip(sequences, lines, strict=True) if s.cached < len(line)]
        if not live:
            return
        for sequence, line in live:
            sequence.token_ids.append(line[sequence.cached])
        yield runner.decode([sequence for sequence, _ in live]).logits.copy()


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*case, marks=marks_of_further(case)) for case in CASES], ids=IDS
)
def test_replayed_steps_have_the_bits_of_called_ones(family: str, name: str, replays: list[int]) -> None:
    """Ragged lines that end at different times, past pages, chunks and windows."""
    lines = [LINE, LINE[:33], LINE[20:50]]
    replaying, calling = pair(CONFIGS[family][name])
    for got, expected in zip(decode(replaying, lines, [3, 17, 5]), decode(calling, lines, [3, 17, 5]), strict=True):
        assert np.array_equal(got, expected)
    assert len(replays) > 40  # all but the first step of each batch size


def test_a_soft_cap_is_replayed_too(replays: list[int]) -> None:
    """As Gemma 2 has it. Of both runners, since they share the backend."""
    replaying, calling = pair(CONFIGS["llama"]["grouped"])
    plain = [logits.copy() for logits in decode(calling, [LINE], [3])]
    backend: Any = replaying.backend
    attend = backend.attend
    backend.attend = lambda *given: attend(*given[:-1], replace(given[-1], softcap=0.1))
    for got, expected, uncapped in zip(
        decode(replaying, [LINE], [3]), decode(calling, [LINE], [3]), plain, strict=True
    ):
        assert np.array_equal(got, expected) and np.abs(got - uncapped).max() > 1e-3
    assert len(replays) == len(LINE) - 4


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_replayed_steps_have_the_bits_of_called_ones_in_every_format(
    weights: str, cache_dtype: str, replays: list[int]
) -> None:
    replaying, calling = pair(WINDOWED, weights=weights, cache=cache_dtype)
    for got, expected in zip(decode(replaying, [LINE] * 2, [9, 2]), decode(calling, [LINE] * 2, [9, 2]), strict=True):
        assert np.array_equal(got, expected)
    assert len(replays) > 50


def test_a_context_of_several_chunks(replays: list[int]) -> None:
    """A longer context leaves results of more pieces, which take more memory."""
    raw = OPT | {"max_position_embeddings": 700}
    line = (LINE * 12)[:600]
    replaying, calling = pair(raw)
    for i, (got, expected) in enumerate(
        zip(decode(replaying, [line], [250]), decode(calling, [line], [250]), strict=True)
    ):
        assert np.array_equal(got, expected), i
    assert len(replays) == 349


def test_guesses_that_are_looked_at_together_are_replayed_too(replays: list[int]) -> None:
    """Lines of 4, and trees of 5 tokens whose shape changes."""
    replaying, calling = pair(OPT)
    outputs = []
    for runner in (replaying, calling):
        sequence, logits = TokenSequence(LINE[:8]), []
        runner.prefill(sequence)
        for _ in range(4):
            sequence.token_ids += LINE[20:24]
            logits.append(runner.forward([sequence], [4], rows=range(4)).logits.copy())
            runner.cache.truncate(sequence, sequence.cached - 2)
        for tree in [(-1, 0, 0, 2, 1), (-1, -1, 0, 1, 3), (-1, 0, 1, 2, 3)]:
            sequence.token_ids += LINE[30:35]
            sequence.tree = tree
            logits.append(runner.forward([sequence], [5], rows=range(5)).logits.copy())
            runner.cache.truncate(sequence, sequence.line)
            sequence.tree = ()
        outputs.append(logits)
    assert all(np.array_equal(got, expected) for got, expected in zip(*outputs, strict=True))
    assert len(replays) == 5


def test_an_operation_without_a_kernel_keeps_a_step_from_being_replayed(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program does not see results that the reference computes, and would leave them as they were."""
    monkeypatch.delitem(ACTIVATIONS, "relu")
    replaying, calling = pair(OPT)
    for got, expected in zip(decode(replaying, [LINE], [9]), decode(calling, [LINE], [9]), strict=True):
        assert np.array_equal(got, expected)
    assert not replays


def test_models_that_share_a_back_end_have_steps_of_their_own(replays: list[int]) -> None:
    backend = CpuBackend()
    runners = [runner_of(model_of(OPT, seed=seed, backend=backend), backend=backend, page_size=16) for seed in (1, 2)]
    alone = [list(decode(runner, [LINE[:30]], [4])) for runner in runners]
    in_turn = [decode(runner, [LINE[:30]], [4]) for runner in runners]
    for first, second, *expected in zip(*in_turn, *alone, strict=True):
        assert np.array_equal(first, expected[0]) and np.array_equal(second, expected[1])
    assert not np.array_equal(alone[0][0], alone[1][0])


def test_only_so_many_kinds_of_steps_are_kept(replays: list[int]) -> None:
    replaying, _ = pair(OPT)
    assert isinstance(replaying.backend, CpuBackend)
    sequences = [TokenSequence(LINE[i : i + 5]) for i in range(12)]
    for sequence in sequences:
        replaying.prefill(sequence)
    for size in (*range(1, 13), 12, 1):
        for sequence in sequences[:size]:
            sequence.token_ids.append(7)
        replaying.decode(sequences[:size])
    assert len(replaying.backend.memory._steps[replaying]) == steps.MOST_STEPS
    assert len(replays) == 1  # of twelve, which is known; one has made room


@pytest.mark.parametrize("count", [2, 9, FEW_ROWS, FEW_ROWS + 1, 50])
def test_a_sequence_may_bring_as_many_rows_as_a_program_takes(replays: list[int], count: int) -> None:
    """Guesses are looked at together, at the price of a step."""
    replaying, calling = pair(OPT)
    for _ in range(3):
        outputs = [
            runner.forward([TokenSequence(LINE[:count])], [count], rows=range(count)) for runner in (replaying, calling)
        ]
        assert np.array_equal(outputs[0].logits, outputs[1].logits)
    assert len(replays) == 2


def test_a_pass_of_many_rows_or_with_unwanted_rows_is_called(replays: list[int]) -> None:
    replaying, _ = pair(OPT)
    for _ in range(3):
        for count, rows in [(FEW_ROWS + 1, None), (4, [3]), (2, [])]:
            sequence = TokenSequence(LINE[:count])
            replaying.forward([sequence], [count], rows=rows)
            replaying.cache.free(sequence)
    assert not replays


def test_other_numbers_of_threads_have_steps_of_their_own(replays: list[int]) -> None:
    before = num_threads()
    replaying, calling = pair(OPT)
    try:
        steps_of = decode(replaying, [LINE], [3])
        expected = list(decode(calling, [LINE], [3]))
        for i, logits in enumerate(steps_of):
            assert np.array_equal(logits, expected[i])
            set_threads(1 + i % 2)
    finally:
        set_threads(before)
    assert replays


def test_what_is_no_number_is_found_in_a_replayed_step(replays: list[int]) -> None:
    from minillm.errors import NumericalError

    replaying, _ = pair(OPT)
    sequence = TokenSequence(LINE[:5])
    replaying.prefill(sequence)
    for token in LINE[5:8]:
        sequence.token_ids.append(token)
        replaying.decode([sequence])
    layer = replaying.model.layers[1]
    layer.mlp.down.data[0, 0] = np.nan
    sequence.token_ids.append(9)
    with pytest.raises(NumericalError, match=r"layers\.1"):
        replaying.decode([sequence])
    assert len(replays) == 3


def test_a_counted_step_is_called_though_it_was_recorded(replays: list[int]) -> None:
    """A replayed one would show no operation."""
    replaying, _ = pair(OPT)
    sequence = TokenSequence(LINE[:5])
    replaying.prefill(sequence)
    costs = []
    for i, token in enumerate(LINE[5:9]):
        sequence.token_ids.append(token)
        with counting(replaying) if i >= 2 else nullcontext() as counted:
            replaying.decode([sequence])
        costs.append(counted and counted.total.flops)
    assert len(replays) == 1
    assert costs[:2] == [None, None] and 0 < costs[2] < costs[3]


@pytest.mark.parametrize("raw", [WINDOWED, EXPERTS], ids=["window", "experts"])
def test_a_watched_pass_that_is_replayed_tells_what_a_called_one_does(raw: dict[str, Any], replays: list[int]) -> None:
    """The same operations, layers and costs, one after the other within the pass; nothing of the pass before."""
    replaying, calling = pair(raw)
    assert isinstance(calling.backend, WrappedBackend)
    watched, plain = TimingBackend(replaying.backend), TimingBackend(calling.backend.inner)
    plain.replays = False
    replaying.backend, calling.backend = watched, plain
    runs = zip(decode(replaying, [LINE] * 2, [9, 2]), decode(calling, [LINE] * 2, [9, 2]), strict=True)
    start, before = time.perf_counter_ns(), len(replays)
    for _ in runs:
        whole = (time.perf_counter_ns() - start) / 1e9
        got, expected = ([c for c in timing.take(start) if c.cost is not None] for timing in (watched, plain))
        assert [(c.name, c.layer, c.cost) for c in got] == [(c.name, c.layer, c.cost) for c in expected]
        if len(replays) > before:
            within = [c for c in got if c.cost is not None]
            assert all(a.ended <= b.began + 1e-12 for a, b in pairwise(within))
            assert within[0].began > 0 and within[-1].ended < whole
            assert all(c.seconds > 0 for c in within)
        start, before = time.perf_counter_ns(), len(replays)
    assert len(replays) > 45
