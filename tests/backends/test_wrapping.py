"""A wrapped backend gives the same numbers, and shows every operation with the layer it belongs to."""

import inspect
from collections import Counter

import numpy as np

from minillm.backends.loader import RandomTensor, join
from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import WrappedBackend
from minillm.backends.operations import Backend
from minillm.batch import TokenSequence
from minillm.cache import PagedCache
from minillm.runner.runner import Runner

from ..tiny import logits_of, runner_of, tiny_model


class Watching(WrappedBackend):
    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.calls: list[tuple[int | None, str, str | None]] = []

    def observe(self, operation, weight, result, **arguments) -> None:
        self.calls.append((self.layer, operation, None if weight is None else weight.name))


def test_the_numbers_are_the_same_and_every_call_is_seen() -> None:
    model, line = tiny_model("untied", seed=2), [3, 4, 5, 6]
    backend = Watching(NumpyBackend())
    runner = Runner(model, backend, PagedCache(model.config, backend, 4))
    np.testing.assert_allclose(
        runner.prefill(TokenSequence(line)).logits[0], logits_of(runner_of(model), line)[-1], atol=1e-5
    )
    layer = ["layer_norm", "linear", "store_kv", "attend", "linear", "layer_norm", "linear", "linear"]
    assert [name for at, name, _ in backend.calls if at is None] == ["embed"]
    assert (
        [name for at, name, _ in backend.calls if at == 0]
        == [name for at, name, _ in backend.calls if at == 1]
        == layer
    )
    assert [(name, weight) for at, name, weight in backend.calls if at == 2] == [
        ("layer_norm", "final_layer_norm"),
        ("take_rows", None),
        ("linear", "lm_head"),
    ]
    assert Counter(name for _, name, _ in backend.calls)["linear"] == 2 * 4 + 1


def test_every_operation_of_a_backend_is_wrapped() -> None:
    operations = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    two_others = {"join", "embed_reduced", "linear_reduced", "combine_reduced"}  # the latter call two others each
    assert operations - two_others <= set(vars(WrappedBackend))


def test_several_tensors_become_one_weight() -> None:
    tensors = [RandomTensor(name, (rows, 4), 0, 1.0) for name, rows in (("q", 2), ("k", 3), ("v", 1))]
    weight = NumpyBackend().loader.prepare("qkv", tensors, [RandomTensor("b", (6,), 0, 1.0)])
    np.testing.assert_array_equal(weight.data, np.concatenate([tensor.load() for tensor in tensors]))
    assert (weight.shape, weight.nbytes) == ((6, 4), 4 * (24 + 6))
    np.testing.assert_array_equal(join(tensors[:1]), tensors[0].load())
