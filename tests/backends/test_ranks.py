"""Two ranks that share each layer, as two threads: each reads its share of the files; a barrier sums their results."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import CountingBackend
from minillm.batch import TokenSequence
from minillm.models import load_model
from minillm.runner import Runner

from ..tiny import logits_of, runner_of

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = [folder.parent for folder in sorted(GOLDEN.rglob("config.json"))]
LINE = np.random.default_rng(3).integers(3, 96, 12).tolist()


class Sum:
    """The sum of the arrays that all threads bring, handed to each of them."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._brought = threading.Barrier(ranks, timeout=60), [np.empty(0)] * ranks
        self.times = 0

    def __call__(self, rank: int, x: np.ndarray) -> None:
        self._brought[rank] = x
        self._barrier.wait()
        total = np.sum(self._brought, axis=0)
        self._barrier.wait()  # nobody writes before everybody has read
        x[...] = total
        self.times += rank == 0


class Rank(NumpyBackend):
    replays = False

    def __init__(self, rank: int, ranks: int, total: Sum) -> None:
        super().__init__()
        self.rank, self.ranks, self._total = rank, ranks, total

    def reduce(self, x: Any) -> Any:
        self._total(self.rank, x)
        return x


def rank_of(folder: Path, rank: int, total: Sum) -> Runner:
    """A runner of one of two ranks, which has read its share of a checkpoint: half of the heads and of the MLP."""
    backend = Rank(rank, 2, total)
    return runner_of(load_model(folder, backend, rank=rank, ranks=2), backend=backend, page_size=8)


def together(ranks: list[Callable[[], None]]) -> None:
    """Run each rank on a thread of its own; an error of one is raised."""
    errors: list[BaseException] = []

    def run(rank: Callable[[], None]) -> None:
        try:
            rank()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: "-".join(folder.relative_to(GOLDEN).parts))
def test_two_ranks_give_the_logits_of_one(folder: Path) -> None:
    """A prompt, then tokens one by one; the residual and the bias are added once, not by each rank."""
    model, total = load_model(folder, NumpyBackend()), Sum(2)
    expected = logits_of(runner_of(model), LINE)
    found: list[list[np.ndarray]] = [[], []]

    def run(rank: int) -> Callable[[], None]:
        runner = rank_of(folder, rank, total)
        sequence = TokenSequence(LINE[:8])

        def steps() -> None:
            found[rank].append(runner.prefill(sequence).logits[0].copy())
            for token in LINE[8:]:
                sequence.token_ids.append(token)
                found[rank].append(runner.decode([sequence]).logits[0].copy())

        return steps

    together([run(0), run(1)])
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(np.array(found[0]) - expected[7:]).max() < 1e-5 * np.abs(expected).max()
    assert total.times == 2 * len(model.layers) * len(found[0])


def test_messages_are_counted_and_one_rank_sends_none() -> None:
    """2 sums a layer; each rank reads the two messages of T E numbers, and writes one."""
    model, total = load_model(FOLDERS[0], NumpyBackend()), Sum(2)
    alone = CountingBackend(NumpyBackend())
    runner_of(model, backend=alone).prefill(TokenSequence(list(LINE)))
    assert "reduce" not in alone.by_operation()
    counted: list[Any] = []

    def run(rank: int) -> Callable[[], None]:
        runner = rank_of(FOLDERS[0], rank, total)
        counted.append(CountingBackend(runner.backend))
        runner.backend = counted[rank]
        return lambda: runner.prefill(TokenSequence(list(LINE))) and None

    together([run(0), run(1)])
    numbers = 2 * len(model.layers) * len(LINE) * model.config.hidden_size
    for one in counted:
        assert one.by_operation()["reduce"] == (numbers, 2 * 4 * numbers, 4 * numbers, 0)
    products = sum(one.by_operation()["attend"].flops for one in counted)
    assert products == alone.by_operation()["attend"].flops
    x = np.ones(3)
    assert NumpyBackend().reduce(x) is x
