"""Figures that others published, and those of another tool where it counts the same things."""

import pytest

from minillm.measure.accounting import Conventions, Part, Row, Step, Storage, operations
from minillm.measure.accounting.memory import cache_bytes_per_token, parts_held, weights_bytes
from minillm.models import opt, published, published_config

HALF = Storage(weights="float16", cache="float16", activations="float16")


def test_cache_of_a_token_is_the_vllm_papers_800_kb() -> None:
    """OPT-13B in 16 bits: "2 x 5120 x 40 x 2" (arXiv 2309.06180, section 3)."""
    assert cache_bytes_per_token(published_config("opt-13b"), HALF) == 819_200


def test_cache_of_flexgens_example_is_1_2_terabytes() -> None:
    """OPT-175B, batch 512, prompts of 512 and 32 new tokens: 1.2 TB of cache, 3.8 times the weights.

    arXiv 2303.06865, section 3; its TB is 2^40 bytes.
    """
    config = published_config("opt-175b")
    cache = 512 * (512 + 32) * cache_bytes_per_token(config, HALF)
    assert cache / 2**40 == pytest.approx(1.2, abs=0.01)
    assert cache / weights_bytes(config, HALF) == pytest.approx(3.8, abs=0.05)


LLM_VIEWER: dict[str, dict[str, tuple[int, ...]]] = {
    "prefill": {  # FLOPs, bytes of weights, of activations read, of activations and cache written
        "q_proj": (429_496_729_600, 52_428_800, 83_886_080, 83_886_080),
        "out_proj": (429_496_729_600, 52_428_800, 83_886_080, 83_886_080),
        "up_proj": (1_717_986_918_400, 209_715_200, 83_886_080, 335_544_320),
        "down_proj": (1_717_986_918_400, 209_715_200, 335_544_320, 83_886_080),
        "qk_matmul": (171_798_691_840, 0, 83_886_080, 1_342_177_280),
        "sv_matmul": (171_798_691_840, 0, 1_342_177_280, 83_886_080),
        "softmax": (3_355_443_200, 0, 1_342_177_280, 1_342_177_280),
        "attn_norm": (293_601_280, 0, 83_886_080, 83_886_080),
        "attn_add": (41_943_040, 0, 83_886_080, 83_886_080),
    },
    "decode": {
        "q_proj": (209_715_200, 52_428_800, 40_960, 40_960),
        "out_proj": (209_715_200, 52_428_800, 40_960, 40_960),
        "up_proj": (838_860_800, 209_715_200, 40_960, 163_840),
        "down_proj": (838_860_800, 209_715_200, 163_840, 40_960),
        "qk_matmul": (83_886_080, 0, 40_960, 655_360),
        "sv_matmul": (83_886_080, 0, 655_360, 40_960),
        "softmax": (1_638_400, 0, 655_360, 655_360),
        "attn_norm": (143_360, 0, 40_960, 40_960),
        "attn_add": (20_480, 0, 40_960, 40_960),
    },
}
"""One layer of OPT-13B, batch 4, length 2048, 16 bits, as hahnyuan/LLM-Viewer (commit 472f71f) prints it.

Left out: `gate_proj`, which OPT does not have; `mlp_act`, counted at a width of E instead of F; the head, where a
multiply-add is one FLOP and the batch is forgotten; the residuals, which are rows of their own there and part of a
projection here.
"""
CACHED = 83_886_080
"""Bytes that `qk_matmul` reads of the keys, and `sv_matmul` of the values"""


@pytest.mark.parametrize("phase", LLM_VIEWER)
def test_rows_of_a_layer_are_llm_viewers(phase: str) -> None:
    batch, length = 4, 2048
    config = opt.read_config(published()["opt-13b"] | {"enable_bias": False})  # it counts no biases
    theirs = LLM_VIEWER[phase]
    step = Step((Part(length if phase == "prefill" else 1, length),) * batch, batch)
    T, E, H = step.tokens, config.hidden_size, config.num_heads

    def rows(conventions: Conventions) -> dict[str, Row]:
        return {row.name: row for row in operations(config, step, HALF, conventions) if row.layer == 7}

    products = rows(Conventions(full_square=True, products_only=True))  # it counts the full square of pairs
    for name, other, times in (
        ("attention.qkv", "q_proj", 3),
        ("attention.out", "out_proj", 1),
        ("mlp.up", "up_proj", 1),
        ("mlp.down", "down_proj", 1),
    ):
        flops, weights, read, written = theirs[other]
        residual = 2 * T * E if other in ("out_proj", "down_proj") else 0
        row = products[name]
        assert row.flops == times * flops
        assert row.bytes_read == times * weights + read + residual  # fused, Q, K and V read their input once
        assert row.bytes_written == times * written
    attention, norm = products["attend"], theirs["attn_norm"]
    assert attention.flops == theirs["qk_matmul"][0] + theirs["sv_matmul"][0]
    assert attention.bytes_read == theirs["qk_matmul"][2] + 2 * CACHED
    assert attention.bytes_written == theirs["sv_matmul"][3]
    scores = theirs["qk_matmul"][3] + theirs["softmax"][2] + theirs["softmax"][3] + theirs["sv_matmul"][2]
    assert attention.fusion_saves == scores
    assert products["attention.out"].fusion_saves == sum(theirs["attn_add"][2:])  # its second input is read either way
    everything = rows(Conventions(full_square=True))
    assert everything["attention.out"].flops - products["attention.out"].flops == theirs["attn_add"][0]
    softmax = everything["attend"].flops - attention.flops - T * E  # without the scaling of Q
    assert softmax == theirs["softmax"][0] * 4 // 5  # its fifth is the maximum, which is no arithmetic here
    assert everything["attention_norm.weight"].flops - 5 * T == norm[0]
    assert everything["attention_norm.weight"].bytes_read - 8 * E == norm[2]  # it reads no gain and bias
    assert everything["attention_norm.weight"].bytes_written == norm[3]
    assert H * step.square * 2 == theirs["softmax"][2]


T, E, F, V, L = 1024, 768, 4 * 768, 50257, 12
"""GPT-2 with 124 million parameters, and the longest text that it takes."""

NANOGPT_FLOPS: dict[str, tuple[int, ...]] = {
    "attention.qkv": (3_623_878_656,),  # "attention/kqv"
    "attend": (1_610_612_736, 1_610_612_736),  # "attention/scores", "attention/reduce"
    "attention.out": (1_207_959_552,),  # "attention/proj"
    "mlp.up": (4_831_838_208,),  # "mlp/ffw1"
    "mlp.down": (4_831_838_208,),  # "mlp/ffw2"
    "head.weight": (79_047_426_048,),  # "dense"
}
"""One forward pass over T tokens, a layer's part alone, as karpathy/nanoGPT's transformer_sizing.ipynb prints it."""

NANOGPT_PARAMETERS: dict[str, tuple[int, ...]] = {
    "embedding.tokens": (38_597_376,),  # "embedding/token"
    "embedding.positions": (786_432,),  # "embedding/position"
    "attention_norm.weight": (768,),
    "attention.qkv": (1_769_472,),
    "attention.out": (589_824,),
    "mlp_norm.weight": (768,),
    "mlp.up": (2_359_296,),
    "mlp.down": (2_359_296,),
    "final_norm.weight": (768,),
}
"""Likewise; it leaves all biases out, and a layer has six: of four products and two norms."""
BIASES = {"attention.qkv": 3 * E, "mlp.up": F, "embedding.tokens": 0, "embedding.positions": 0}
"""Sizes in which there are not E of them."""


def test_flops_of_gpt2_are_nanogpts() -> None:
    by_hand = {
        "attention.qkv": 2 * T * E * 3 * E,
        "attend": 2 * T * T * E + 2 * T * T * E,
        "attention.out": 2 * T * E * E,
        "mlp.up": 2 * T * E * F,
        "mlp.down": 2 * T * F * E,
        "head.weight": 2 * T * E * V,
    }
    everything = operations(
        published_config("gpt2"),
        Step((Part(T, T),), T),  # a row of logits for each token
        conventions=Conventions(full_square=True, products_only=True),
    )
    rows = [row for row in everything if row.flops]
    assert {(row.name, row.flops) for row in rows} == set(by_hand.items())
    assert by_hand == {name: sum(flops) for name, flops in NANOGPT_FLOPS.items()}
    assert [sum(row.name == name for row in rows) for name in by_hand] == [L, L, L, L, L, 1]
    assert sum(row.flops for row in rows) == 291_648_307_200  # "forward_total"


def test_parameters_of_gpt2_are_nanogpts_and_its_biases() -> None:
    held = {part.name: part.parameters for part in parts_held(published_config("gpt2"), Storage())}
    assert list(held) == list(NANOGPT_PARAMETERS)
    for name, parameters in NANOGPT_PARAMETERS.items():
        times = L if "attention" in name or "mlp" in name else 1
        assert held[name] == times * (sum(parameters) + BIASES.get(name, E)), name
    assert sum(held.values()) == 124_439_808
    biases = L * (3 * E + E + F + E + 2 * E) + E
    assert sum(held.values()) - biases == 124_337_664  # its "total"
