"""The closed form against published sizes, against brute force, and against the calls that an engine really makes."""

import math

import pytest

from minillm import Engine, accounting
from minillm.accounting import Part, Step, generation
from minillm.backends.observe import counting
from minillm.models import opt

from ..shapes import BASE, VARIANTS
from .agreement import assert_agree


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a random shape, one for each variant of OPT."""
    monkeypatch.setitem(opt.SHAPES, "variant", VARIANTS[request.param])
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
    assert accounting.parameter_count(opt.read_config(opt.SHAPES[shape])) == parameters


def test_parameter_count_of_every_variant_is_what_its_tensors_hold(variant: str) -> None:
    config = opt.read_config(opt.SHAPES[variant])
    held = sum(math.prod(shape) for shape in opt.tensor_table(config).values())
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


def test_generation_feeds_every_token_but_the_last() -> None:
    cached = list(generation([3, 5], 3, use_cache=True))
    assert cached == [
        Step((Part(3, 3), Part(5, 5)), 2),
        Step((Part(1, 4), Part(1, 6)), 2),
        Step((Part(1, 5), Part(1, 7)), 2),
    ]
    naive = list(generation([3], 3, use_cache=False))
    assert naive == [Step((Part(3, 3),), 1), Step((Part(4, 4),), 1), Step((Part(5, 5),), 1)]


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
    monkeypatch.setitem(opt.SHAPES, "long", BASE | {"max_position_embeddings": 700})
    lengths = [600, 20, 300]  # chunks of 512, and no more than two sequences at once
    with Engine.random("long", max_batch_size=2, backend="numpy") as engine, counting(engine.runner) as counted:
        engine.generate([[3] * length for length in lengths], max_new_tokens=2, eos_token_id=())
        expected = accounting.flops(engine.config, generation(lengths, 2, use_cache=True))
        assert counted.total.flops == expected
