"""Whisper against transformers as it runs: spectrograms, encoder states, logits, greedy search and beams."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from minillm import Engine  # noqa: E402
from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.encoder_input import AudioFeatures  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.tasks.log_mel import log_mel  # noqa: E402

from .. import huggingface  # noqa: E402
from ..tiny import runner_of  # noqa: E402
from ..whisper import CASES, CONFIGS, frames_for, logits_of, tone  # noqa: E402

pytestmark = pytest.mark.reference

LINE = np.random.default_rng(4).integers(3, 96, 30).tolist()
SEARCHES: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": list(range(40, 90)), "begin_suppress_tokens": list(range(20, 40))},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -0.5, "eos_token_id": [*range(40, 60, 3)]},
]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model in transformers, and its folder."""
    model = huggingface.build_model(CONFIGS[request.param], seed=7)
    folder = huggingface.save(model, tmp_path_factory.mktemp("live"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model, folder


def theirs_of(model: Any, frames: np.ndarray) -> dict[str, Any]:
    return {"input_features": torch.tensor(frames.T[None])}


@torch.no_grad()
def assert_equal_logits(model: Any, folder: Path) -> None:
    frames, line = frames_for(model.config.to_dict()), [model.config.decoder_start_token_id, *LINE]
    ours = logits_of(runner_of(load_model(folder, NumpyBackend()), pages=64), frames, line)
    theirs = model(**theirs_of(model, frames), decoder_input_ids=torch.tensor([line])).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_logits_of_every_position(pair: tuple[Any, Path]) -> None:
    assert_equal_logits(*pair)


@pytest.mark.parametrize("name", ["conv1", "conv2"])
def test_the_comparison_can_fail(pair: tuple[Any, Path], name: str) -> None:
    model, folder = pair
    kernels = getattr(model.get_encoder(), name).weight
    with torch.no_grad():
        kept = kernels.clone()
        kernels[:, :, 0] *= 1.1
    with pytest.raises(AssertionError):
        assert_equal_logits(model, folder)
    with torch.no_grad():
        kernels.copy_(kept)


def test_states_of_the_encoder(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    frames = frames_for(model.config.to_dict())
    engine = Engine(folder, backend="numpy", progress=False)
    answer = engine.generate(AudioFeatures(frames), max_new_tokens=1, watch=["encoder.final"])
    with torch.no_grad():
        theirs = model.get_encoder()(**theirs_of(model, frames)).last_hidden_state[0].numpy()
    np.testing.assert_allclose(answer.watched["encoder.final"], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fields", SEARCHES, ids=" ".join)
def test_tokens_and_scores_of_a_batch(pair: tuple[Any, Path], fields: dict[str, Any]) -> None:
    """Each sound alone there, and all together here."""
    model, folder = pair
    engine = Engine(folder, backend="numpy", progress=False)
    engine.generation_defaults = {}
    asked = {"max_new_tokens": 14, "eos_token_id": []} | fields
    if "num_beams" in asked:
        asked["renormalize_logits"] = False
    sounds = [frames_for(model.config.to_dict(), seed) for seed in range(3)]
    for frames, ours in zip(sounds, engine.generate([*map(AudioFeatures, sounds)], **asked), strict=True):
        options = {name: value for name, value in asked.items() if name != "renormalize_logits"}
        options["eos_token_id"] = options["eos_token_id"] or None
        config = transformers.GenerationConfig(
            **{"pad_token_id": 0, "decoder_start_token_id": 2, "do_sample": False, "output_scores": True} | options,
            return_dict_in_generate=True,
        )
        out = transformers.GenerationMixin.generate(model, **theirs_of(model, frames), generation_config=config)
        lines = [huggingface._unpadded(line, fields.get("eos_token_id", [])) for line in out.sequences[:, 1:].tolist()]
        assert [completion.token_ids for completion in ours.completions] == lines
        if "num_beams" in fields:
            scores = [completion.score for completion in ours.completions]
            np.testing.assert_allclose(scores, out.sequences_scores.numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize(
    "samples",
    [tone(1.3, (440, 1000.5, 3000), seed=1), tone(3.7, seed=2), tone(0.004), np.zeros(5000, np.float32)],
    ids=["cut short", "longer", "shorter than a frame", "silent"],
)
def test_spectrograms_are_those_of_the_feature_extractor(samples: np.ndarray, bins: int) -> None:
    """Those of its NumPy, in float64; its PyTorch, in float32, rounds what is nearly silent to 2e-5 of it."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=2)
    theirs = extractor(samples, sampling_rate=16000, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(log_mel(samples, bins, 200), theirs.T, rtol=0, atol=4e-5)
    padded = np.zeros(32000, np.float32)
    padded[: len(samples)] = samples[:32000]
    [exact] = extractor._np_extract_fbank_features([padded], "cpu")
    np.testing.assert_allclose(log_mel(samples, bins, 200), exact.T, rtol=0, atol=1e-6)
    if len(samples) > 400:
        whole = extractor(samples, sampling_rate=16000, return_tensors="np", truncation=False, padding="longest")
        np.testing.assert_allclose(log_mel(samples, bins), whole["input_features"][0].T, rtol=0, atol=4e-5)
