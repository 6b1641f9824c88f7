"""Bytes in every format: what the formula says against what arrays take and what a count adds up."""

from typing import Any

import pytest

from minillm.backends.formats import FORMATS
from minillm.backends.loader import Loader
from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import counting
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.errors import ParameterError
from minillm.measure.accounting import Part, Step, Storage
from minillm.measure.accounting.memory import activation_bytes, cache_bytes_per_token, parts_held, weights_bytes
from minillm.models import build_model, opt, tensor_shapes
from minillm.models.building import random_tensors
from minillm.runner.runner import Runner

from ...shapes import BASE, VARIANTS
from ...tiny import runner_of
from .agreement import assert_agree


class Holding(Loader):
    """Remembers the weights it has prepared."""

    def __init__(self, weights: str) -> None:
        super().__init__(weights)
        self.held: list[Weight] = []

    def prepare(self, *args: Any) -> Weight:
        self.held.append(super().prepare(*args))
        return self.held[-1]


class StoringBackend(NumpyBackend):
    """Any format of weights and cache, with a loader that remembers its weights."""

    loader: Holding

    def __init__(self, weights: str, cache: str) -> None:
        super().__init__(cache=cache)
        self.loader = Holding(weights)


def runner(raw: dict[str, Any], backend: StoringBackend) -> Runner:
    config = opt.read_config(raw)
    tensors = random_tensors(tensor_shapes(config), 0, 0.1, backend)
    return runner_of(build_model(config, tensors, backend), backend=backend, pages=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", ["pre-norm", "narrow embedding", "untied", "galactica"])
@pytest.mark.parametrize("weights", FORMATS)
def test_weights_are_as_large_as_stored_and_counted_bytes_are_the_formulas(weights: str, variant: str) -> None:
    """E = 24 and F = 40 fill no group of 32: rows are padded."""
    backend = StoringBackend(weights, "float32")
    model = runner(VARIANTS[variant], backend)
    config, storage = model.model.config, Storage(weights=weights)
    assert sum(weight.nbytes for weight in backend.loader.held) == weights_bytes(config, storage)
    assert sum(held.bytes for held in parts_held(config, storage)) == weights_bytes(config, storage)
    with counting(model) as counted:
        a, b = TokenSequence([1, 2, 3, 4, 5]), TokenSequence([6, 7])
        model.forward([a, b], [5, 2])
        a.token_ids.append(3)
        model.forward([a], [1])
    assert_agree(config, [Step((Part(5, 5), Part(2, 2)), 2), Step((Part(1, 6),), 1)], counted, storage)


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8", "int4"])
def test_cache_in_every_format(cache: str) -> None:
    backend = StoringBackend("float32", cache)
    model = runner(BASE, backend)
    storage = Storage(cache=cache)
    positions = 2 * backend.memory.page_size
    reserved = model.cache.storage.keys.nbytes + model.cache.storage.values.nbytes
    assert reserved == positions * cache_bytes_per_token(model.model.config, storage)
    with counting(model) as counted:
        model.prefill(TokenSequence([1, 2, 3]))
    assert_agree(model.model.config, [Step((Part(3, 3),), 1)], counted, storage)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("variant", ["pre-norm", "narrow embedding"])
def test_activations_are_what_the_arena_keeps(variant: str, tokens: int) -> None:
    backend = StoringBackend("float32", "float32")
    model = runner(VARIANTS[variant], backend)
    model.prefill(TokenSequence([3] * tokens))
    assert activation_bytes(model.model.config, Storage(), tokens, 1) == backend.memory.arena.nbytes


@pytest.mark.parametrize("field", ["weights", "cache", "activations", "checkpoint"])
def test_unknown_formats_are_named(field: str) -> None:
    with pytest.raises(ParameterError, match="'float8' is not known: expected one of float32, "):
        Storage(**{field: "float8"})
