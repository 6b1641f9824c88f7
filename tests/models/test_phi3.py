"""Phi-3's configuration: fused projections, partial rotary embedding, LongRoPE; texts that outgrow its first length."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.models import phi3

from ..tiny import NO_REPEATS, generate, loop_of, model_of, request_for, run, runner_of
from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "phi3", "pad_token_id": 0}

SHORT = 24
"""Original length of the tiny LongRoPE"""
LONGROPE: dict[str, Any] = CONFIG | {
    "original_max_position_embeddings": SHORT,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.5],
        "long_factor": [1.5, 2.0, 4.0, 9.0],
    },
}

CONFIGS: dict[str, dict[str, Any]] = {
    "longrope": LONGROPE,
    "window": CONFIG | {"sliding_window": 7, "num_key_value_heads": 4},
    "partial, tied": LONGROPE
    | {
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.3, 1.4],
            "long_factor": [2.0, 4.0, 9.0],
            "attention_factor": 1.3,
        },
    },
}

PARAMETERS = {
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
}
"""As the published checkpoints have them."""

LINE = np.random.default_rng(4).integers(3, 96, 40).tolist()
OUTGROWING: dict[str, Any] = {"max_new_tokens": 30, **NO_REPEATS}


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = phi3.read_config({k: v for k, v in CONFIG.items() if not k.endswith(("_eps", "_heads"))} | HEADS)
    assert (config.num_kv_heads, config.epsilon, config.eos_token_ids) == (4, 1e-5, (32_000,))
    assert (config.windows, config.keys_change_beyond, config.tied_head) == ((None, None), None, False)


HEADS = {"num_attention_heads": 4}


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope(name: str) -> None:
    older = LONGROPE | {"rope_scaling": LONGROPE["rope_scaling"] | {"type": name}}
    assert phi3.read_config(older) == phi3.read_config(LONGROPE)


def test_the_factor_of_attention_follows_from_the_lengths() -> None:
    config = phi3.read_config(LONGROPE)
    assert config.rotary.scale == pytest.approx(np.sqrt(1 + np.log(64 / SHORT) / np.log(SHORT)))
    assert config.keys_change_beyond == SHORT
    assert config.keys_follow_length


@pytest.mark.slow
@pytest.mark.parametrize("make", [NumpyBackend, pytest.param(CpuBackend, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"num_beams": 3}, marks=pytest.mark.slow)], ids=["greedy", "beams"]
)
def test_a_text_that_outgrows_the_first_length_is_computed_anew(make: Any, fields: dict[str, Any]) -> None:
    """With the cache as without: also beside texts that stay shorter, or are longer from the beginning."""
    backend: Backend = make()
    runner = runner_of(model_of(LONGROPE, backend=backend), backend=backend, pages=256, page_size=8)
    prompts = [LINE[:20], LINE[:4], LINE[:30], LINE[:SHORT]]
    naive = generate(runner, prompts, use_cache=False, **OUTGROWING, **fields)
    assert generate(runner, prompts, **OUTGROWING, **fields) == naive
    assert generate(runner, prompts, chunk=7, **OUTGROWING, **fields) == naive
    assert runner.cache.free_pages == runner.cache.num_pages
    kept = model_of({**LONGROPE, "original_max_position_embeddings": 64}, backend=backend)  # the short factors for all
    assert generate(runner_of(kept, backend=backend, pages=256), prompts, **OUTGROWING, **fields) != naive


@pytest.mark.reference
@pytest.mark.parametrize("name", ["longrope", "partial, tied"])
@pytest.mark.parametrize("length", [SHORT - 5, SHORT - 1, SHORT, SHORT + 1])
def test_texts_around_the_first_length_are_those_of_transformers(name: str, length: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the reference extra")
    from .. import huggingface

    model = huggingface.build_model(CONFIGS[name], 3)
    huggingface.save(model, tmp_path)
    runner = runner_of(load_model(tmp_path, NumpyBackend()), pages=128, page_size=16)
    expected = huggingface.generate(model, LINE[:length], **OUTGROWING)[0][0]
    assert len(set(expected)) >= 8
    assert generate(runner, [LINE[:length]], **OUTGROWING)[0] == expected
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 10}
    [ours] = run(loop_of(target=runner), [request_for(LINE[:length], **beams)])
    sequences, scores = huggingface.generate(model, LINE[:length], **beams)
    assert [result.token_ids for result in ours] == sequences
    np.testing.assert_allclose([result.score for result in ours], scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "4 should be a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, UnsupportedModelError, "is 'linear'; minillm runs 'defa"),
        ({"rope_scaling": {"type": "longrope"}}, CheckpointError, "short_factor should be 4 numbers above 0, one for"),
        ({"partial_rotary_factor": 0.5}, CheckpointError, "short_factor should be 2 numbers above 0, .* found 4: "),
        ({"partial_rotary_factor": 1.5}, CheckpointError, "partial_rotary_factor should be at most 1, found 1.5"),
        ({"partial_rotary_factor": 0.4}, CheckpointError, "needs an even width of at least 2, found 3"),
        ({"original_max_position_embeddings": 65}, CheckpointError, "should be at most max_position_embeddings 64, f"),
        ({"layer_types": ["sliding_attention"] * 2}, UnsupportedModelError, "layer_types has 'sliding_attention'"),
        ({"sliding_window": 0}, CheckpointError, "sliding_window should be at least 1, found 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        phi3.read_config(LONGROPE | change)
