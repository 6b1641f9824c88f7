"""BART, mBART, Pegasus and MarianMT against transformers as it runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from minillm import Engine  # noqa: E402
from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402

from .. import huggingface  # noqa: E402
from ..seq2seq import CONFIGS, logits_of  # noqa: E402
from ..tiny import random_prompts, runner_of  # noqa: E402
from .test_bart import FAMILIES  # noqa: E402

pytestmark = pytest.mark.reference

CASES = [(family, name) for family in FAMILIES for name in CONFIGS[family]]
SOURCE = np.random.default_rng(3).integers(3, 96, 50).tolist()
LINE = np.random.default_rng(4).integers(3, 96, 30).tolist()
SOURCES = random_prompts(4, seed=12, longest=30)
EOS = [5, 17, 60]

SEARCHES: list[dict[str, Any]] = [
    {},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    {"encoder_repetition_penalty": 1.4, "eos_token_id": EOS},
    {"encoder_no_repeat_ngram_size": 1, "no_repeat_ngram_size": 2},
    {"forced_bos_token_id": 33, "forced_eos_token_id": 5, "eos_token_id": EOS},
    {"decoder_start_token_id": 44, "eos_token_id": EOS, "min_new_tokens": 4},
    {"decoder_prompt": [21, 22, 23], "no_repeat_ngram_size": 1, "min_length": 6, "eos_token_id": EOS},
    {"suppress_tokens": list(range(40, 90)), "begin_suppress_tokens": list(range(20, 40)), "bad_words_ids": [[8]]},
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -0.5, "eos_token_id": [*range(40, 60, 3)]},
    {"num_beams": 3, "early_stopping": True, "eos_token_id": [*range(40, 60, 3)], "encoder_repetition_penalty": 1.4},
    {"num_beams": 3, "forced_bos_token_id": 33, "encoder_no_repeat_ngram_size": 2, "length_penalty": 2.0,
     "eos_token_id": EOS, "decoder_start_token_id": 44},
]  # fmt: skip
SOME = [SEARCHES[3], SEARCHES[9]]
"""Those that every configuration runs"""


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model in transformers, and its folder."""
    family, name = request.param
    model = huggingface.build_model(CONFIGS[family][name], seed=7)
    folder = huggingface.save(model, tmp_path_factory.mktemp("live"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model, folder


def assert_equal_logits(model: Any, folder: Path) -> None:
    start = model.config.decoder_start_token_id
    ours = logits_of(runner_of(load_model(folder, NumpyBackend()), pages=64), SOURCE, [start, *LINE])
    np.testing.assert_allclose(ours, huggingface.decoder_logits(model, SOURCE, [start, *LINE]), rtol=0, atol=1e-4)


def test_logits_of_every_position(pair: tuple[Any, Path]) -> None:
    assert_equal_logits(*pair)


def test_the_comparison_can_fail(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    matrix = model.get_encoder().layers[0].fc1.weight
    with torch.no_grad():
        kept = matrix.clone()
        matrix[:10] *= 1.1
    with pytest.raises(AssertionError):
        assert_equal_logits(model, folder)
    with torch.no_grad():
        matrix.copy_(kept)


@pytest.mark.parametrize(
    ("pair", "fields"),
    [
        pytest.param(case, fields, marks=() if case == CASES[0] or fields in SOME else pytest.mark.exhaustive)
        for case in CASES
        for fields in SEARCHES
    ],
    indirect=["pair"],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else " ".join(value),
)
def test_tokens_and_scores_of_a_ragged_batch(pair: tuple[Any, Path], fields: dict[str, Any]) -> None:
    """Each source alone there, and all together here."""
    model, folder = pair
    engine = Engine(folder, backend="numpy", progress=False)
    engine.generation_defaults = {}  # the fields alone count there, without a forced EOS token of config.json
    asked = {"max_new_tokens": 14, "eos_token_id": []} | fields
    if asked.get("num_beams", 1) > 1:
        asked["renormalize_logits"] = False
    for source, ours in zip(SOURCES, engine.generate(SOURCES, **asked), strict=True):
        theirs = asked | {"eos_token_id": asked["eos_token_id"] or None}
        sequences, scores = huggingface.generate(model, source, **theirs)
        assert [completion.token_ids for completion in ours.completions] == sequences
        if not scores:
            continue
        np.testing.assert_allclose([one.score for one in ours.completions], scores, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits(pair: tuple[Any, Path], dtype: str, tmp_path: Path) -> None:
    model, _ = pair
    rounded = type(model)(model.config).to(getattr(torch, dtype)).eval()
    rounded.load_state_dict(model.state_dict())
    huggingface.save(rounded, tmp_path)
    kept = {name: tensor.float() for name, tensor in rounded.state_dict().items() if name not in computed(model)}
    exact = type(model)(model.config).eval()
    exact.load_state_dict(model.state_dict() | kept)
    assert_equal_logits(exact, tmp_path)


def computed(model: Any) -> set[str]:
    """Names of what is computed: sinusoidal positions."""
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
