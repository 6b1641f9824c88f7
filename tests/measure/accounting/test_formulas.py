"""The closed form against a model of shapes, published figures, brute force, and the calls that an engine makes."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.observe import counting
from minillm.batch import Batch, TokenSequence
from minillm.measure import accounting
from minillm.measure.accounting import Conventions, Part, Step, Storage, generation
from minillm.models import opt, published, published_config, tensor_shapes
from minillm.reference.attention import AttentionSpec, attention_cost
from minillm.reference.cost import Cost
from minillm.reference.gates import scale_logits_cost
from minillm.reference.linear import embed_cost
from minillm.reference.norm import rms_norm_cost

from ...families import has_experts
from ...shapes import BASE, VARIANTS
from . import closed_form
from .agreement import assert_agree
from .components import Attend, Component, Embed, Norm, ScaleLogits
from .outlines import has_outline, layers_with_keys


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a random shape, one for each variant of OPT."""
    monkeypatch.setitem(published(), "variant", VARIANTS[request.param])
    return "variant"


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("opt-125m", 125_239_296),
        ("opt-350m", 331_196_416),
        ("opt-1.3b", 1_315_758_080),
        ("opt-13b", 12_853_473_280),
        ("opt-175b", 174_604_468_224),
    ],
)
def test_parameter_count_of_published_sizes(shape: str, parameters: int) -> None:
    assert accounting.parameter_count(published_config(shape)) == parameters


def test_parameter_count_of_every_variant_is_what_its_tensors_hold(variant: str) -> None:
    config = published_config(variant)
    held = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert accounting.parameter_count(config) == held


def test_pairs_are_those_that_the_causal_mask_leaves() -> None:
    for context in range(1, 8):
        for new in range(1, context + 1):
            visible = sum(key <= query for query in range(context - new, context) for key in range(context))
            assert Part(new, context).pairs() == visible


def test_one_step_worked_out_by_hand() -> None:
    """E = 4, H = K = 2, D = 2, F = 8, V = 10, one layer; two tokens after three cached ones, one row of logits."""
    config = opt.read_config(
        BASE | {"hidden_size": 4, "num_attention_heads": 2, "ffn_dim": 8, "vocab_size": 10, "num_hidden_layers": 1}
    )
    embedding = 2 * 4
    norm = 2 * (4 * 7 + 5)
    pairs = 4 + 5  # the fourth token sees four, the fifth five
    attention = (2 * 2 * 4 * 12 + 2 * 12) + 2 * 4 + pairs * 2 * (4 + 4 + 4) + (2 * 2 * 4 * 4 + 2 * 4 + 2 * 4)
    mlp = (2 * 2 * 4 * 8 + 2 * 8 + 2 * 8) + (2 * 2 * 8 * 4 + 2 * 4 + 2 * 4)
    head = 2 * 4 * 10
    expected = embedding + 3 * norm + attention + mlp + head
    assert accounting.step_flops(config, Step((Part(2, 5),), 1)) == expected
    assert sum(row.flops for row in closed_form.operations(config, Step((Part(2, 5),), 1))) == expected


STEPS = {
    "prefill": Step((Part(512, 512),), 1),
    "decode": Step((Part(1, 700),) * 3, 3),
    "ragged": Step((Part(300, 5000), Part(1, 40), Part(7, 7), Part(6, 90, (0, 0, 1, 2))), 9),
    "a chunk without logits": Step((Part(64, 200),), 0),
}
STORAGES = [
    Storage(),
    Storage.all_in("float16"),
    Storage(weights="bfloat16", cache="int8", activations="float32"),
    Storage(weights="int8", cache="float16", activations="bfloat16", checkpoint="bfloat16"),
    Storage(weights="int4", cache="bfloat16", activations="float16", checkpoint="float16", group=64),
]
CONVENTIONS = [
    Conventions(),
    Conventions(full_square=True),
    Conventions(products_only=True, multiply_add=1),
    Conventions(full_square=True, multiply_add=3),
]


BATCH = Batch.of([TokenSequence([0] * 30, 20, [0, 1]), TokenSequence([0] * 14, 13, [2])], [10, 1], 16)
RAGGED = Step((Part(10, 30), Part(1, 14)), 2)
SLOPES, BIAS, CACHED = np.ones(4, np.float32), np.ones((4, 9), np.float32), 2 * 2 * 8 * 4


def attention(**terms: Any) -> tuple[Attend, Cost]:
    """A component of four heads, and the cost of the operation with these terms."""
    fields = {"capped": "softcap" in terms, "biased": "slopes" in terms, "distances": 9 * ("bias" in terms)}
    fields["sunk"] = "sinks" in terms
    component = Attend(name="", heads=4, kv_heads=2, head_dim=8, **fields)
    return component, attention_cost(BATCH, 4, 8, CACHED, AttentionSpec(1.0, **terms))


@pytest.mark.parametrize(
    ("component", "cost"),
    [
        attention(slopes=SLOPES),
        attention(softcap=2.0),
        attention(softcap=2.0, bias=BIAS),
        attention(sinks=SLOPES),
        (
            Embed(name="", width=6, vectors=9, positions=5, types=2, scaled=True),
            embed_cost(11, 6, 24, 24, type_row_bytes=24, scaled=True),
        ),
        (Embed(name="", width=6, vectors=9, positions=5, computed=True), embed_cost(11, 6, 24, 24)),
        (Norm(name="", width=6, mean=False, residual=True), rms_norm_cost(11, 6, affine=True, residual=True)),
        (ScaleLogits(name="", width=9, capped=True), scale_logits_cost(11, 9, scaled=False, capped=True)),
        (ScaleLogits(name="", width=9, scaled=True, capped=True), scale_logits_cost(11, 9, scaled=True, capped=True)),
    ],
    ids=[
        "ALiBi",
        "soft cap",
        "cap and bias",
        "sinks",
        "types",
        "computed positions",
        "residual norm",
        "cap",
        "scale and cap",
    ],
)
def test_components_of_families_without_an_outline(component: Component, cost: Cost) -> None:
    """What BLOOM, Gemma, OLMo 2, BERT and Marian have and no outline."""
    amounts = closed_form.amounts_of(component, 11, RAGGED, Storage(), Conventions())
    assert Cost(2 * amounts.products + amounts.other, *amounts[2:]) == cost


FIRST = {config["model_type"]: name for name, config in reversed(published().items())}
EACH_SIZE = [
    pytest.param(name, marks=[] if name in FIRST.values() else [pytest.mark.exhaustive])
    for name in published()
    if has_outline(published_config(name))
]
"""The first published size of each family that has an outline; the others are exhaustive"""


@pytest.fixture
def shape_of_few_layers(shape: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A published size with five layers where it has experts in each: all kinds are among them."""
    raw = dict(published()[shape])
    if has_experts(raw) and "num_hidden_layers" in raw and "layer_types" not in raw:
        raw["num_hidden_layers"] = 5
    monkeypatch.setitem(published(), "few layers", raw)
    return "few layers"


@pytest.mark.slow
@pytest.mark.parametrize("shape", EACH_SIZE)
def test_a_model_of_shapes_costs_what_the_formula_says(shape: str, shape_of_few_layers: str) -> None:
    """Every row of every published size, by name and in order; of the first in all formats of all steps."""
    config = published_config(shape_of_few_layers)
    steps = list(STEPS.values())
    if config.encoder_layers:  # these are the encoder's, and here the decoder's
        steps += [step._replace(parts=tuple(p._replace(source=99 + p.new) for p in step.parts)) for step in steps]
    pairs = list(enumerate(itertools.product(STORAGES, steps)))
    for i, (storage, step) in pairs if shape == next(iter(published())) else pairs[::3]:  # each storage, each step
        conventions = CONVENTIONS[(i + i // 4) % 4]  # in time each with each storage and each step
        expected = closed_form.operations(config, step, storage, conventions)
        assert accounting.operations(config, step, storage, conventions) == expected


@pytest.mark.parametrize("shape", EACH_SIZE)
@pytest.mark.slow
def test_memory_of_a_model_of_shapes_is_what_the_formula_says(shape: str, shape_of_few_layers: str) -> None:
    config = published_config(shape_of_few_layers)
    assert accounting.parameter_count(config) == closed_form.parameter_count(config)
    shapes = [(512, 512), (1, 1), (512, 1), (64, 0), (70, 3)]
    for i, storage in enumerate(STORAGES):
        assert accounting.weights_bytes(config, storage) == closed_form.weights_bytes(config, storage)
        layers = layers_with_keys(config)[: 1 if config.bidirectional else None]  # an encoder's share one's pages
        joined = bool(config.value_dim)
        token = sum(closed_form.position_bytes(storage, *config.kv_shape(i), joined=joined) for i in layers)
        assert accounting.cache_bytes_per_token(config, storage) == token
        for T, R in shapes if shape == next(iter(published())) else shapes[i : i + 1 : 2]:  # of every other storage
            held = closed_form.activation_bytes(config, storage, T, R)
            assert accounting.activation_bytes(config, storage, T, R) == held


def test_generation_feeds_every_token_but_the_last() -> None:
    cached = list(generation([3, 5], 3, use_cache=True))
    assert cached == [
        Step((Part(3, 3), Part(5, 5)), 2),
        Step((Part(1, 4), Part(1, 6)), 2),
        Step((Part(1, 5), Part(1, 7)), 2),
    ]
    naive = list(generation([3], 3, use_cache=False))
    assert naive == [Step((Part(3, 3),), 1), Step((Part(4, 4),), 1), Step((Part(5, 5),), 1)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
@pytest.mark.parametrize("lengths", [[7], [1, 12, 5, 20]], ids=["single", "ragged"])
def test_every_step_counts_what_the_formula_says(variant: str, lengths: list[int], use_cache: bool) -> None:
    new_tokens = 6
    with Engine.random(variant, std=0.3, backend="numpy") as engine, counting(engine.runner) as counted:
        for length in lengths:
            engine.add([3] * length, max_new_tokens=new_tokens, use_cache=use_cache, eos_token_id=())
        for step in generation(lengths, new_tokens, use_cache=use_cache):
            counted.reset()
            engine.step()
            assert counted.total.flops == accounting.step_flops(engine.config, step)
            assert_agree(engine.config, [step], counted)
        assert not engine.busy


def test_logits_of_all_positions_go_through_the_head(variant: str) -> None:
    with Engine.random(variant, backend="numpy") as engine, counting(engine.runner) as counted:
        engine.forward([5] * 9)
        assert_agree(engine.config, [Step((Part(9, 9),), 9)], counted)


def test_chunks_of_a_prompt_and_turns_of_a_batch_take_the_same_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(published(), "long", BASE | {"max_position_embeddings": 700})
    lengths = [600, 20, 300]  # chunks of 512, and no more than two sequences at once
    with Engine.random("long", max_batch_size=2, backend="numpy") as engine, counting(engine.runner) as counted:
        engine.generate([[3] * length for length in lengths], max_new_tokens=2, eos_token_id=())
        expected = accounting.flops(engine.config, generation(lengths, 2, use_cache=True))
        assert counted.total.flops == expected
