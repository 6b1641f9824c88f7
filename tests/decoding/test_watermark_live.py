"""Watermarks against transformers' processors and detector; torch's random permutations against torch."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch
from transformers import OPTConfig, WatermarkDetector
from transformers.generation.configuration_utils import SynthIDTextWatermarkingConfig, WatermarkingConfig

from minillm.decoding.watermark import watermark
from minillm.decoding.watermark_config import watermarking
from minillm.measure.watermark import detect
from minillm.reference.mt19937 import bits, permutation_start, starts_with

from .histories import history
from .test_watermark import GREEN, SYNTH, V

pytestmark = pytest.mark.reference


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
