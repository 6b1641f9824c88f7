"""Operations on every backend: variants of attention without a kernel, and formats that are chosen one by one."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.formats import ACTIVATION_FORMATS, CACHE_FORMATS, FORMATS, INT4, INT8, WEIGHT_FORMATS
from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import counting
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.measure.accounting import Part, Step, Storage
from minillm.models.base import weights_of
from minillm.reference.attention import AttentionSpec
from minillm.reference.quantize import Quantized

from ..families import CONFIGS
from ..measure.accounting.agreement import assert_agree
from ..tiny import logits_of, model_of, runner_of, tiny_model

LINE = np.random.default_rng(5).integers(3, 96, 24).tolist()
CAP = 0.5


DISTANCES = np.arange(-16, 17)
BIAS = Weight("bias", np.float32([0.1, -0.2, 0.3, 0.0])[:, None] * np.log1p(np.abs(DISTANCES)).astype(np.float32))
"""[H, 33], by the distance, as T5's relative positions are"""


def vary_attention(backend: Any, **variant: Any) -> None:
    """Make a backend's attention a variant."""
    plain = backend.attend

    def attend(q: Any, cache: Any, layer: int, batch: Any, spec: AttentionSpec) -> Any:
        return plain(q, cache, layer, batch, replace(spec, **variant))

    backend.attend = attend


@pytest.mark.parametrize("variant", [{"softcap": CAP}, {"causal": False}, {}, {"softcap": CAP, "window": 7}], ids=str)
def test_kernels_in_c_run_variants_as_the_reference(variant: dict[str, Any]) -> None:
    logits = []
    for backend in (NumpyBackend(), CpuBackend()):
        vary_attention(backend, bias=BIAS, **variant)
        runner = runner_of(model_of(CONFIGS["llama"]["grouped"], backend=backend), backend=backend, page_size=8)
        sequence = TokenSequence(LINE[:20])
        found = [runner.prefill(sequence).logits.copy()]
        for token in LINE[20:] if variant.get("causal", True) else ():  # both ways a prompt is one pass
            sequence.token_ids.append(token)
            found.append(runner.decode([sequence]).logits.copy())
        logits.append(np.concatenate(found))
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-4)
    plain = logits_of(runner_of(model_of(CONFIGS["llama"]["grouped"])), LINE)
    assert np.abs(logits[0][0] - plain[19]).max() > 1e-2, "the variant changes something"


def test_a_bias_of_slopes_is_alibi() -> None:
    """BLOOM's logits, with its slopes given as a bias instead."""
    raw = next(iter(CONFIGS["bloom"].values()))
    expected = logits_of(runner_of(model_of(raw)), LINE)
    backend = NumpyBackend()
    model: Any = model_of(raw, backend=backend)
    slopes = model.layers[0].attention.spec.slopes.data
    distances = np.arange(-len(LINE), len(LINE) + 1, dtype=np.float32)
    vary_attention(backend, bias=Weight("bias", slopes[:, None] * np.minimum(distances, 0)), slopes=None)
    runner = runner_of(model, backend=backend, page_size=8)
    output = runner.forward([TokenSequence(LINE)], [len(LINE)], rows=range(len(LINE)))
    np.testing.assert_allclose(output.logits, expected, rtol=0, atol=1e-5)


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("weights", "activations", "cache"), list(product(FORMATS, ACTIVATION_FORMATS, CACHE_FORMATS)), ids=str
)
def test_weights_activations_and_cache_have_formats_of_their_own(weights: str, activations: str, cache: str) -> None:
    backend = NumpyBackend(weights=weights, activations=activations, cache=cache)
    runner = runner_of(tiny_model(seed=2, backend=backend), backend=backend, pages=2)
    expected = logits_of(runner_of(tiny_model(seed=2)), LINE)[-1]
    with counting(runner) as counted:
        output = runner.prefill(TokenSequence(list(LINE)))
    assert output.logits.dtype == np.float32
    assert output.hidden.dtype.name == activations
    assert backend.memory.arena.take((1,)).dtype.name == activations
    assert runner.cache.storage.nbytes == 2 * 2 * 4 * runner.cache.page_size * backend.memory.position_bytes(1, 8)
    error = np.abs(output.logits[0] - expected).max() / np.abs(expected).max()
    assert error < {"int4": 0.4}.get(weights, 0.2 if cache == "int4" else 0.05)
    assert (error > 1e-6) == ((weights, activations, cache) != ("float32",) * 3)
    storage = Storage(weights=weights, activations=activations, cache=cache)
    assert_agree(runner.model.config, [Step((Part(len(LINE), len(LINE)),), 1)], counted, storage)


def test_each_role_may_have_a_format() -> None:
    """Names stand for a choice of formats; any other choice is made from the formats themselves."""
    formats = WEIGHT_FORMATS["int4"].in_groups(64)
    assert [form and form.group for form in (formats.projection, formats.vocabulary, formats.positions)] == [
        64,
        64,
        None,
    ]
    model: Any = tiny_model(backend=NumpyBackend(weights=formats))
    projection, vocabulary = model.layers[0].mlp.up.data, model.embedding.tokens.data
    assert isinstance(projection, Quantized) and isinstance(vocabulary, Quantized)
    assert (projection.bits, projection.group, vocabulary.bits, vocabulary.group) == (4, 64, 8, 64)
    assert model.embedding.positions.data.dtype == np.float32
    for weight in weights_of(model):
        if isinstance(weight.data, Quantized):
            form = formats.of(weight.role)
            assert form is not None
            assert weight.data.nbytes == weight.shape[0] * form.row_bytes(weight.shape[1])


def test_a_format_knows_its_name_and_size() -> None:
    assert [form.name for form in FORMATS.values()] == list(FORMATS)
    assert [form.row_bytes(70) for form in FORMATS.values()] == [280, 140, 140, 3 * (32 + 2), 3 * (16 + 2)]
    assert [form.row_bytes(8) for form in CACHE_FORMATS.values()] == [32, 16, 8 + 4, 16 + 2]
    assert (INT8.dtype, INT4.dtype) == (np.int8, np.uint8)
