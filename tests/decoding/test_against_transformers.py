"""Processors, filters and defaults against the library that they take their meaning from."""

import dataclasses
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.decoding import fields  # noqa: E402
from minillm.decoding.filters import MinP, Temperature, TopK, TopP  # noqa: E402
from minillm.decoding.parameters import GenerationConfig, resolve  # noqa: E402
from minillm.decoding.processors import MinLength, MinNewTokens, RepetitionPenalty  # noqa: E402

from .histories import random_history  # noqa: E402

pytestmark = pytest.mark.reference

ROWS, V = 24, 60


def random_logits(kind: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((ROWS, V)) * 3
    if kind == "equal scores":
        logits = logits.round()
    if kind == "forbidden":
        logits[rng.random((ROWS, V)) < 0.4] = -np.inf
    return logits.astype(np.float32)


KINDS = ["different scores", "equal scores", "forbidden"]


def theirs(make, seen, logits: np.ndarray) -> np.ndarray:
    """Their processor on each sequence alone, unpadded; `make` gets the length of the prompt."""
    rows = []
    for row in range(len(logits)):
        ids = torch.tensor(seen.token_ids[seen.starts[row] : seen.starts[row + 1]])[None]
        processor = make(int(seen.prompt_lengths[row]))
        rows.append(processor(ids, torch.tensor(logits[row : row + 1]))[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["repetition 1.3", "repetition 0.7", "min_length", "min_new_tokens"])
def test_processors_give_identical_scores(name: str, kind: str) -> None:
    ours, make = {
        "repetition 1.3": (RepetitionPenalty(1.3), lambda _: transformers.RepetitionPenaltyLogitsProcessor(1.3)),
        "repetition 0.7": (RepetitionPenalty(0.7), lambda _: transformers.RepetitionPenaltyLogitsProcessor(0.7)),
        "min_length": (MinLength(8, (2, 5)), lambda _: transformers.MinLengthLogitsProcessor(8, [2, 5])),
        "min_new_tokens": (
            MinNewTokens(4, (2, 5)),
            lambda prompt: transformers.MinNewTokensLengthLogitsProcessor(prompt, 4, [2, 5]),
        ),
    }[name]
    seen = random_history(np.random.default_rng(1), ROWS, V)
    logits = random_logits(kind)
    expected = theirs(make, seen, logits)
    assert (expected != logits).any(axis=1).sum() > ROWS // 8
    np.testing.assert_array_equal(ours(seen, logits.copy(), np), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ours", "make"),
    [
        (Temperature(0.7), lambda: transformers.TemperatureLogitsWarper(0.7)),
        (Temperature(3.0), lambda: transformers.TemperatureLogitsWarper(3.0)),
        (TopK(1), lambda: transformers.TopKLogitsWarper(1)),
        (TopK(9), lambda: transformers.TopKLogitsWarper(9)),
        (TopK(V + 5), lambda: transformers.TopKLogitsWarper(V + 5)),
        (MinP(0.0), lambda: transformers.MinPLogitsWarper(0.0)),
        (MinP(0.07), lambda: transformers.MinPLogitsWarper(0.07)),
        (MinP(1.0), lambda: transformers.MinPLogitsWarper(1.0)),
    ],
    ids=lambda value: repr(value) if dataclasses.is_dataclass(value) else "",
)
def test_filters_give_identical_scores(ours, make, kind: str) -> None:
    seen = random_history(np.random.default_rng(1), ROWS, V)
    logits = random_logits(kind)
    np.testing.assert_array_equal(ours(seen, logits.copy(), np), theirs(lambda _: make(), seen, logits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [1e-6, 0.37, 0.913])
def test_top_p_keeps_the_same_scores(p: float, kind: str) -> None:
    """As sorted rows: which of several equal scores survives, their unstable sort leaves to chance."""
    seen = random_history(np.random.default_rng(1), ROWS, V)
    logits = random_logits(kind)
    ours = TopP(p)(seen, logits.copy(), np)
    expected = theirs(lambda _: transformers.TopPLogitsWarper(p), seen, logits)
    np.testing.assert_array_equal(np.sort(ours), np.sort(expected))
    if kind != "equal scores":
        np.testing.assert_array_equal(ours, expected)


def test_defaults_are_theirs() -> None:
    ours = {name: rule.default for name, rule in fields.RULES.items()}
    for name, value in transformers.GenerationConfig._get_default_generation_params().items():
        if name == "max_length":
            settings = resolve(GenerationConfig(), {}, vocab_size=9, eos_token_id=None)
            assert settings.new_token_limit(prompt_length=7) == value
        elif name in ours:
            assert ours[name] == value
        elif name in fields.NOT_OFFERED:
            assert fields.NOT_OFFERED[name] == value


def test_every_field_of_theirs_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = set(vars(transformers.GenerationConfig())) | set(transformers.GenerationConfig().to_dict())
    unknown = names - fields.RULES.keys() - fields.NOT_OFFERED.keys() - fields.NO_MEANING
    assert not unknown
    GenerationConfig.from_dict(
        {k: v for k, v in transformers.GenerationConfig().to_dict().items() if k != "transformers_version"}
    )
