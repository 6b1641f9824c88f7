"""T5 and mT5 against transformers as it runs: logits, greedy search, beams with their scores, other searches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.runner.runner import Runner  # noqa: E402

from .. import huggingface  # noqa: E402
from ..comparing import assert_same_tokens  # noqa: E402
from ..seq2seq import CONFIGS, generate, logits_of, request_for  # noqa: E402
from ..tiny import NO_REPEATS, loop_of, random_prompts, run, runner_of  # noqa: E402

pytestmark = pytest.mark.reference

CASES = [(family, name) for family in ("t5", "mt5") for name in CONFIGS[family]]
SOURCE = np.random.default_rng(3).integers(3, 96, 50).tolist()
LINE = np.random.default_rng(4).integers(3, 96, 40).tolist()
SOURCES = random_prompts(4, seed=12, longest=40)


@pytest.fixture(params=CASES, ids="-".join)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    family, name = request.param
    return CONFIGS[family][name]


def build(raw: dict[str, Any], seed: int) -> Any:
    """A model in transformers, which ties the head of every new T5: one of its own is untied here."""
    model = huggingface.build_model(raw, seed)
    if raw.get("tie_word_embeddings") is False:
        generator = torch.Generator().manual_seed(seed + 1)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape, generator=generator) / 2)
    return model


def load(folder: Path) -> Runner:
    return runner_of(load_model(folder, NumpyBackend()), pages=128, page_size=16)


def assert_equal_logits(folder: Path, model: Any) -> None:
    runner = load(folder)
    line = [runner.model.config.decoder_start_token_id, *LINE]
    ours, theirs = logits_of(runner, SOURCE, line), huggingface.decoder_logits(model, SOURCE, line)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_logits_and_greedy_tokens(raw: dict[str, Any], tmp_path: Path) -> None:
    model = build(raw, 12)
    huggingface.save(model, tmp_path)
    assert_equal_logits(tmp_path, model)
    runner = load(tmp_path)
    start = [runner.model.config.decoder_start_token_id]
    for fields in ({}, NO_REPEATS, NO_REPEATS | {"decoder_prompt": LINE[:3]}):
        expected = [huggingface.generate(model, source, max_new_tokens=20, **fields)[0][0] for source in SOURCES[:2]]
        assert not fields or min(len(set(line)) for line in expected) >= 6
        before = start + fields.get("decoder_prompt", [])

        def scores(source: list[int], tokens: list[int], before: list[int] = before) -> np.ndarray:
            return huggingface.decoder_logits(model, source, before + tokens)[-1]

        for use_cache in (True, False):
            outputs = generate(runner, SOURCES[:2], max_new_tokens=20, use_cache=use_cache, **fields)
            for source, ours, theirs in zip(SOURCES[:2], outputs, expected, strict=True):
                assert_same_tokens(ours, theirs, lambda tokens, s=source, scores=scores: scores(s, tokens))


SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 3, "num_return_sequences": 3},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -0.5, "eos_token_id": [22, 24, 28, 35, 62]},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.0, "eos_token_id": [*range(40, 60, 3)]},
    {"num_beams": 3, "early_stopping": True, "eos_token_id": [*range(40, 60, 3)]},
    {"num_beams": 2, "early_stopping": "never", "eos_token_id": [*range(40, 60, 3)]},
    {"num_beams": 2, "no_repeat_ngram_size": 2, "decoder_prompt": LINE[:2]},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 5, "eos_token_id": [*range(3, 60)]},
    {"suppress_tokens": [*range(10, 40)], "begin_suppress_tokens": [*range(40, 70)]},
    {"forced_bos_token_id": 17, "forced_eos_token_id": 18, "eos_token_id": [18]},
    {"bad_words_ids": [[i] for i in range(20, 50)]},
    {"sequence_bias": [[[i], 1.5] for i in range(20, 30)], "num_beams": 2},
]


@pytest.mark.parametrize("fields", SEARCHES, ids=" ".join)
def test_searches_and_their_scores(fields: dict[str, Any], tmp_path: Path) -> None:
    raw = next(iter(CONFIGS["t5"].values()))
    model, fields = build(raw, 5), {"max_new_tokens": 12} | fields
    huggingface.save(model, tmp_path)
    results = run(loop_of(target=load(tmp_path)), [request_for(source, **fields) for source in SOURCES])
    for source, ours in zip(SOURCES, results, strict=True):
        sequences, scores = huggingface.generate(model, source, **fields)
        assert [result.token_ids for result in ours] == sequences
        if scores:
            np.testing.assert_allclose([result.score for result in ours], scores, rtol=0, atol=1e-4)


def test_beams_of_every_family(raw: dict[str, Any], tmp_path: Path) -> None:
    model, fields = build(raw, 5), {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 10}
    huggingface.save(model, tmp_path)
    start = model.config.decoder_start_token_id
    requests = [request_for(source, start=start, **fields) for source in SOURCES[:2]]
    for source, ours in zip(SOURCES, run(loop_of(target=load(tmp_path)), requests), strict=False):
        sequences, scores = huggingface.generate(model, source, **fields)
        assert [result.token_ids for result in ours] == sequences
        np.testing.assert_allclose([result.score for result in ours], scores, rtol=0, atol=1e-4)


def test_the_comparison_can_fail(raw: dict[str, Any], tmp_path: Path) -> None:
    model = build(raw, 6)
    huggingface.save(model, tmp_path)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "encoder" in name and p.ndim == 2)[:8].mul_(1.02)
    with pytest.raises(AssertionError):
        assert_equal_logits(tmp_path, model)


@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 20), (12, 16), (64, 300), (6, 100)])
def test_buckets_of_distances_are_those_of_transformers(buckets: int, longest: int) -> None:
    """Also where the logarithm of a distance is at the edge of a bucket."""
    from transformers.models.t5.modeling_t5 import T5Attention

    from minillm.models.distance_bias import buckets_of

    distances = np.arange(-2 * longest, 2 * longest + 1)
    for both in (True, False):
        theirs = T5Attention._relative_position_bucket(torch.tensor(distances), both, buckets, longest)
        ours = buckets_of(distances, buckets, longest, both=both)
        visible = slice(None) if both else slice(2 * longest + 1)
        np.testing.assert_array_equal(ours[visible], theirs.numpy()[visible])
        clipped = buckets_of(np.clip(distances, -longest, longest), buckets, longest, both=both)
        np.testing.assert_array_equal(clipped, ours)
