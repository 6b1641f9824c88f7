"""The whole model on the kernels in C, against the reference with the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.formats import FORMATS
from minillm.backends.numpy import NumpyBackend
from minillm.cache import PagedCache
from minillm.runner.runner import Runner

from ...tiny import VARIANTS, chunks, tiny_model

LINE = [3 + (7 * i) % 50 for i in range(40)]


def logits_of(backend: Any, variant: str, line: list[int], chunk: int) -> np.ndarray:
    """The logits of every position, computed in chunks."""
    model = tiny_model(variant, backend=backend)
    runner = Runner(model, backend, PagedCache(model.config, backend, 16, 8))
    return chunks(runner, line, chunk)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("chunk", [1, 11, 40])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_logits_are_the_references(variant: str, weights: str, chunk: int) -> None:
    """Equal in float32 arithmetic; products with 8 and 4 bits round their activations to 8."""
    expected = logits_of(NumpyBackend(weights=weights), variant, LINE, 40)
    got = logits_of(CpuBackend(weights=weights), variant, LINE, chunk)
    rounds = weights in ("int8", "int4")
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error < (0.05 if rounds else 3e-6)


@pytest.mark.parametrize(("cache_dtype", "within"), [("bfloat16", 0.02), ("int8", 0.03), ("int4", 0.3)])
@pytest.mark.parametrize("chunk", [1, 40])
def test_a_narrower_cache_moves_the_logits_a_little(cache_dtype: str, within: float, chunk: int) -> None:
    expected = logits_of(NumpyBackend(), "pre-norm", LINE, 40)
    got = logits_of(CpuBackend(cache=cache_dtype), "pre-norm", LINE, chunk)
    assert 0 < np.abs(got - expected).max() / np.abs(expected).max() < within


def test_a_narrower_cache_takes_less_memory(checkpoint: Path) -> None:
    sizes = {}
    for cache_dtype in ("float32", "bfloat16", "int8", "int4"):
        with Engine(checkpoint, backend="cpu", cache_dtype=cache_dtype) as engine:
            cache = engine.runner.cache
            sizes[cache_dtype] = cache.storage.nbytes / cache.num_pages
            config = engine.config
            position = engine.runner.backend.memory.position_bytes(config.num_kv_heads, config.head_dim)
            assert sizes[cache_dtype] == config.num_layers * position * cache.page_size
    D = config.head_dim
    assert sizes["float32"] / sizes["bfloat16"] == 2 and sizes["float32"] / sizes["int8"] == 4 * D / (D + 4)
    assert sizes["float32"] / sizes["int4"] == 4 * D / (-(-D // 32) * (16 + 2))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 7, "top_k": 0, "temperature": 1.2},
    {"do_sample": True, "seed": 7, "top_p": 0.9, "min_p": 0.05, "num_return_sequences": 2},
    {"num_beams": 3, "num_return_sequences": 2},
    {"lookahead_window": 4},
    {"penalty_alpha": 0.5, "top_k": 4},
    {"guidance_scale": 2.0, "negative_prompt": "Once upon a time"},
    {"dola_layers": "high"},
    {"use_cache": False},
    {"repetition_penalty": 1.3, "logprobs": True},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    [pytest.param(way, marks=[] if i in (1, 3) else [pytest.mark.slow]) for i, way in enumerate(SETTINGS)],
    ids=str,
)
def test_every_way_to_generate_gives_the_same_tokens(settings: dict[str, Any]) -> None:
    """With the demo model, ragged batches; its choices are clear enough that rounding decides none of them."""
    prompts = ["A list of colors: red,", "Two and", "A list of animals: cat, dog,"]
    lines = {}
    for backend in ("numpy", "cpu"):
        with Engine(backend=backend) as engine:
            generations = engine.generate(prompts, max_new_tokens=16, **settings)
            lines[backend] = [c.token_ids for generation in generations for c in generation.completions]
    assert lines["cpu"] == lines["numpy"]


def test_one_row_has_the_same_bits_alone_and_in_a_batch(checkpoint: Path) -> None:
    """Reductions are ours: what a sequence is batched with changes nothing, not even the last bit."""
    with Engine(checkpoint, backend="cpu") as engine:
        alone = engine.generate([5, 6, 7], max_new_tokens=9, logprobs=True, eos_token_id=[])
        beside = engine.generate([[5, 6, 7], [9] * 6, [4, 8]], max_new_tokens=9, logprobs=True, eos_token_id=[])[0]
        assert alone.completions[0].logprobs == beside.completions[0].logprobs
