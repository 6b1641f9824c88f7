"""Two ranks that share each layer, as two threads: weights cut by hand, hidden states summed at a barrier."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import CountingBackend
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.layers.mlp import GatedMLP
from minillm.runner import Runner

from ..families import CONFIGS
from ..tiny import logits_of, model_of, runner_of

MODELS = [
    CONFIGS["llama"]["grouped"],  # gated MLP, grouped heads, rotary embedding
    CONFIGS["opt"]["pre-norm"],  # biases
    CONFIGS["opt"]["post-norm"],
    CONFIGS["gpt_neox"]["parallel"],  # one residual for attention and MLP
]
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


def rows(weight: Weight, parts: list[int], rank: int) -> Weight:
    """Half of the rows of each part of a fused projection, with their biases."""
    of_parts = np.split(np.arange(sum(parts)), np.cumsum(parts)[:-1])
    picked = np.concatenate([part.reshape(2, -1)[rank] for part in of_parts])
    return replace(weight, data=weight.data[picked], bias=None if weight.bias is None else weight.bias[picked])


def columns(weight: Weight, rank: int) -> Weight:
    """Half of the columns; the bias is the first rank's."""
    half = weight.shape[1] // 2
    return replace(
        weight, data=weight.data[:, rank * half : (rank + 1) * half], bias=weight.bias if rank == 0 else None
    )


def shard(model: Any, rank: int) -> Any:
    """One of two ranks' parts of a model: half of the heads and of the MLP's width in each layer."""

    def of(layer: Any) -> Any:
        attention, mlp = layer.attention, layer.mlp
        H, K, D = attention.num_heads, attention.num_kv_heads, attention.out.shape[1] // attention.num_heads
        attention = replace(
            attention,
            num_heads=H // 2,
            num_kv_heads=K // 2,
            qkv=rows(attention.qkv, [H * D, K * D, K * D], rank),
            out=columns(attention.out, rank),
        )
        F = mlp.down.shape[1]
        gated = isinstance(mlp, GatedMLP)
        up = {"gate_up": rows(mlp.gate_up, [F, F], rank)} if gated else {"up": rows(mlp.up, [F], rank)}
        return replace(layer, attention=attention, mlp=replace(mlp, down=columns(mlp.down, rank), **up))

    halves = {name: getattr(model.config, name) // 2 for name in ("num_heads", "num_kv_heads")}
    return replace(model, config=replace(model.config, **halves), layers=tuple(map(of, model.layers)))


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


@pytest.mark.parametrize("raw", MODELS, ids=lambda raw: raw["model_type"])
def test_two_ranks_give_the_logits_of_one(raw: dict[str, Any]) -> None:
    """A prompt, then tokens one by one; the residual and the bias are added once, not by each rank."""
    model, total = model_of(raw, seed=2), Sum(2)
    expected = logits_of(runner_of(model), LINE)
    found: list[list[np.ndarray]] = [[], []]

    def run(rank: int) -> Callable[[], None]:
        runner = runner_of(shard(model, rank), backend=Rank(rank, 2, total), page_size=8)
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
    model, total = model_of(MODELS[0], seed=2), Sum(2)
    alone = CountingBackend(NumpyBackend())
    runner_of(model, backend=alone).prefill(TokenSequence(list(LINE)))
    assert "reduce" not in alone.by_operation()
    counted: list[Any] = []

    def run(rank: int) -> Callable[[], None]:
        counted.append(CountingBackend(Rank(rank, 2, total)))
        runner: Runner = runner_of(shard(model, rank), backend=counted[rank])
        return lambda: runner.prefill(TokenSequence(list(LINE))) and None

    together([run(0), run(1)])
    numbers = 2 * len(model.layers) * len(LINE) * model.config.hidden_size
    for one in counted:
        assert one.by_operation()["reduce"] == (numbers, 2 * 4 * numbers, 4 * numbers, 0)
    products = sum(one.by_operation()["attend"].flops for one in counted)
    assert products == alone.by_operation()["attend"].flops
    x = np.ones(3)
    assert NumpyBackend().reduce(x) is x
