"""Watermarks against transformers' processors and detector; torch's random permutations against torch."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import OPTConfig, WatermarkDetector
from transformers.generation.configuration_utils import SynthIDTextWatermarkingConfig, WatermarkingConfig

from minillm import Engine
from minillm.decoding.watermark import watermark
from minillm.decoding.watermark_config import watermarking
from minillm.errors import ParameterError
from minillm.measure.watermark import detect
from minillm.reference.mt19937 import bits, permutation_start, starts_with

from ..tiny import write_checkpoint
from .histories import history

V = 512
GREEN: dict[str, dict[str, Any]] = {
    "lefthash": {"bias": 2.5},
    "other share": {"greenlist_ratio": 0.6, "bias": 1.5, "hashing_key": 2**40 + 7},
    "selfhash": {"bias": 2.0, "seeding_scheme": "selfhash"},
    "wide selfhash": {"bias": 2.0, "seeding_scheme": "selfhash", "context_width": 3, "hashing_key": 99},
}
SYNTH: dict[str, dict[str, Any]] = {
    "three keys": {"ngram_len": 3, "keys": [654, 400, 836]},
    "short memory": {"ngram_len": 2, "keys": [7] * 9, "context_history_size": 2, "sampling_table_size": 1000},
    "later": {"ngram_len": 4, "keys": [1, 2**62], "skip_first_ngram_calls": True, "sampling_table_seed": 5},
}


@pytest.mark.parametrize("seed", [0, 12345, 2**32 + 3, 2**63])
def test_permutations_and_bits_are_those_of_torch(seed: int) -> None:
    generator = torch.Generator()
    for n in (1, 2, 96, 1009):
        expected = torch.randperm(n, generator=generator.manual_seed(seed)).tolist()
        assert permutation_start(seed, n, n).tolist() == expected
        count = n // 3
        assert permutation_start(seed, n, count).tolist() == expected[:count]
        assert [starts_with(seed, n, count, i) for i in range(n)] == [i in expected[:count] for i in range(n)]
    assert bits(seed, 50).tolist() == torch.randint(0, 2, (50,), generator=generator.manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", GREEN)
def test_green_lists_are_those_of_transformers(name: str) -> None:
    rng = np.random.default_rng(3)
    theirs = WatermarkingConfig(**GREEN[name]).construct_processor(V, "cpu")
    ours = watermark(watermarking(GREEN[name]))
    for length in (1, 2, 3, 9):
        lines = rng.integers(V, size=(3, length))
        logits = rng.standard_normal((3, V)).astype(np.float32)
        expected = theirs(torch.from_numpy(lines), torch.from_numpy(logits.copy())).numpy()
        got = ours(history(*(([], line.tolist()) for line in lines)), logits.copy(), np)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", SYNTH)
def test_scores_of_synthid_are_those_of_transformers(name: str) -> None:
    """Token by token, with contexts that come again."""
    rng = np.random.default_rng(4)
    theirs = SynthIDTextWatermarkingConfig(**SYNTH[name]).construct_processor(V, "cpu")
    ours = watermark(watermarking(SYNTH[name]))
    prompt, generated = [5, 6, 7], rng.integers(3, size=(2, 30))
    unchanged = 0
    for length in range(30):
        logits = (rng.standard_normal((2, V)) * 3).astype(np.float32)
        ids = torch.tensor([[*prompt, *line[:length]] for line in generated])
        expected = theirs(ids, torch.from_numpy(logits.copy())).numpy()
        got = ours(history(*((prompt, line[:length].tolist()) for line in generated)), logits.copy(), np)
        np.testing.assert_allclose(np.exp(got), np.exp(expected), rtol=1e-4, atol=1e-7)
        unchanged += (got == logits).all(axis=-1).sum()
    assert 0 < unchanged < 55


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", GREEN)
def test_scores_of_the_detector_are_those_of_transformers(name: str, once: bool) -> None:
    line = np.random.default_rng(5).integers(3, 40, size=60)
    config = OPTConfig(vocab_size=V)
    theirs = WatermarkDetector(config, "cpu", WatermarkingConfig(**GREEN[name]), ignore_repeated_ngrams=once)
    expected = theirs(torch.from_numpy(line[None]), return_dict=True)
    got = detect(line.tolist(), GREEN[name], V, ignore_repeated_ngrams=once)
    assert (got.scored, got.marked) == (expected.num_tokens_scored[0], expected.num_green_tokens[0])
    np.testing.assert_allclose([got.z_score, got.p_value], [expected.z_score[0], expected.p_value[0]])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("model"), seed=3), max_batch_size=4, prefix_cache=False)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"no_repeat_ngram_size": 1},
    "sampled": {"do_sample": True, "seed": 1, "temperature": 1.5},
    "beams": {"num_beams": 2, "no_repeat_ngram_size": 1},
    "order": {"do_sample": True, "seed": 1, "samplers": "llama.cpp", "temperature": 1.5},
}


@pytest.mark.parametrize(
    ("way", "config"),
    [
        ("greedy", GREEN["lefthash"] | {"bias": 9.0}),
        ("sampled", GREEN["selfhash"]),
        ("beams", GREEN["lefthash"] | {"bias": 9.0}),
        ("order", SYNTH["three keys"]),
    ],
    ids=WAYS,
)
def test_generated_texts_are_detected_and_others_are_not(engine: Engine, config: Any, way: str) -> None:
    fields = WAYS[way] | {"max_new_tokens": 40, "eos_token_id": []}
    marked = engine.generate([40, 41], watermarking_config=config, **fields).token_ids
    plain = engine.generate([40, 41], **fields).token_ids
    assert detect(marked, config, V).z_score > 4
    assert abs(detect(plain, config, V).z_score) < 3.5
    assert marked != plain


def test_watermarked_requests_are_the_same_beside_others(engine: Engine) -> None:
    each = [WAYS["sampled"] | {"watermarking_config": config} for config in (*GREEN.values(), *SYNTH.values())]
    each = [fields | {"max_new_tokens": 8, "eos_token_id": []} for fields in [*each, {}, WAYS["sampled"]]]
    ids = [engine.add([40, 41], **fields) for fields in each]
    tokens: dict[Any, list[int]] = {request_id: [] for request_id in ids}
    while engine.busy:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert [*tokens.values()] == [engine.generate([40, 41], **fields).token_ids for fields in each]


def test_texts_that_are_too_short_and_mirostat_are_refused() -> None:
    with pytest.raises(ParameterError, match="the text has 1 tokens: its watermark needs at least 2"):
        detect([5], {}, V)
    with pytest.raises(ParameterError, match=r"watermarking_config=.*'a' is none of its settings"):
        detect([5], {"a": 1}, V)
