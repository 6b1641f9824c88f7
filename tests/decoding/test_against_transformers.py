"""Processors, filters and defaults against the library that they take their meaning from."""

import dataclasses
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.decoding.field_values import ByIdentity  # noqa: E402
from minillm.decoding.fields import FIELDS  # noqa: E402
from minillm.decoding.filters import (  # noqa: E402
    EpsilonCutoff,
    EtaCutoff,
    MinP,
    Renormalize,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
    build_filters,
)
from minillm.decoding.foreign import TRANSFORMERS, WORDS, refused  # noqa: E402
from minillm.decoding.processors import (  # noqa: E402
    EncoderNoRepeatNGram,
    EncoderRepetitionPenalty,
    ExponentialDecayLengthPenalty,
    ForcedBeginning,
    ForcedEnd,
    MinLength,
    MinNewTokens,
    NoRepeatNGram,
    PrefixAllowedTokens,
    RepetitionPenalty,
    SequenceBias,
    SuppressTokens,
    SuppressTokensAtBegin,
    build_processors,
)
from minillm.decoding.resolving import new_token_limit, resolve  # noqa: E402
from minillm.decoding.settings import GenerationConfig  # noqa: E402

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


def some_allowed(batch_id: int, ids) -> list[int]:
    """A rule that can be computed from an array and from a tensor."""
    return sorted({int(ids[-1]) % 7, int(ids[0]), len(ids)})


BIASES = {(3,): 1.5, (4,): -0.7, (4, 3): 0.25, (5, 3): -2.25, (3, 4, 5): 4.0, (8, 1): 9.5, (1, 2): 0.1, (9,) * 20: 1.0}
BAD_WORDS = [[3], [4, 5], [5, 4], [1, 2, 3], [2], [7, 7]]

PROCESSORS = {
    "repetition 1.3": (RepetitionPenalty(1.3), lambda _: transformers.RepetitionPenaltyLogitsProcessor(1.3)),
    "repetition 0.7": (RepetitionPenalty(0.7), lambda _: transformers.RepetitionPenaltyLogitsProcessor(0.7)),
    "min_length": (MinLength(8, (2, 5)), lambda _: transformers.MinLengthLogitsProcessor(8, [2, 5])),
    "min_new_tokens": (
        MinNewTokens(4, (2, 5)),
        lambda prompt: transformers.MinNewTokensLengthLogitsProcessor(prompt, 4, [2, 5]),
    ),
    "sequence bias": (SequenceBias(tuple(BIASES.items())), lambda _: transformers.SequenceBiasLogitsProcessor(BIASES)),
    "bad words": (
        SequenceBias(tuple((tuple(word), -np.inf) for word in BAD_WORDS if word != [2])),
        lambda _: transformers.NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=2),
    ),
    **{
        f"no repeated {n}-gram": (NoRepeatNGram(n), lambda _, n=n: transformers.NoRepeatNGramLogitsProcessor(n))
        for n in (1, 2, 3)
    },
    "allowed by a function": (
        PrefixAllowedTokens(ByIdentity(some_allowed), beams=False),
        lambda _: transformers.PrefixConstrainedLogitsProcessor(some_allowed, num_beams=1),
    ),
    "forced beginning": (ForcedBeginning(5), lambda _: transformers.ForcedBOSTokenLogitsProcessor(5)),
    "forced end": (
        ForcedEnd((2, 5)),
        lambda prompt: transformers.ForcedEOSTokenLogitsProcessor(prompt + LIMIT, [2, 5]),
    ),
    "decay above 1": (
        ExponentialDecayLengthPenalty(3, 1.37, (2, 5)),
        lambda prompt: transformers.ExponentialDecayLengthPenalty((3, 1.37), [2, 5], prompt),
    ),
    "decay below 1": (
        ExponentialDecayLengthPenalty(0, 0.8, (2,)),
        lambda prompt: transformers.ExponentialDecayLengthPenalty((0, 0.8), [2], prompt),
    ),
    "suppressed": (SuppressTokens((0, 7)), lambda _: transformers.SuppressTokensLogitsProcessor([0, 7])),
    "suppressed at the beginning": (
        SuppressTokensAtBegin((0, 7), forced_beginning=False),
        lambda prompt: transformers.SuppressTokensAtBeginLogitsProcessor([0, 7], prompt),
    ),
    "suppressed after a forced beginning": (
        SuppressTokensAtBegin((0, 7), forced_beginning=True),
        lambda prompt: transformers.SuppressTokensAtBeginLogitsProcessor([0, 7], prompt + (prompt == 1)),
    ),
}
LIMIT = 6
"""New tokens that a sequence may have"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_give_identical_scores(name: str, kind: str) -> None:
    ours, make = PROCESSORS[name]
    seen = random_history(np.random.default_rng(1), ROWS, V, max_new_tokens=LIMIT)
    if (few := {"no ": 3, "seq": 6, "bad": 6}.get(name[:3])) is not None:
        seen = dataclasses.replace(seen, lines=[line % few for line in seen.lines])  # so that sequences do come again
    logits = random_logits(kind)
    expected = theirs(make, seen, logits)
    assert (expected != logits).any()
    np.testing.assert_array_equal(ours(seen, logits.copy(), np), expected)


ENCODER_PROCESSORS = {
    "penalty 1.3": (
        EncoderRepetitionPenalty(1.3),
        lambda source: transformers.EncoderRepetitionPenaltyLogitsProcessor(1.3, source),
    ),
    "penalty 0.7": (
        EncoderRepetitionPenalty(0.7),
        lambda source: transformers.EncoderRepetitionPenaltyLogitsProcessor(0.7, source),
    ),
    **{
        f"no {n}-gram": (
            EncoderNoRepeatNGram(n),
            lambda source, n=n: transformers.EncoderNoRepeatNGramLogitsProcessor(n, source),
        )
        for n in (1, 2, 3)
    },
}


@pytest.mark.parametrize("with_encoder", [True, False], ids=["encoder", "decoder-only"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ENCODER_PROCESSORS)
def test_processors_that_read_the_source_give_identical_scores(name: str, kind: str, with_encoder: bool) -> None:
    """The penalty up to the last bit: a float64 is inverted there, and rounded once."""
    ours, make = ENCODER_PROCESSORS[name]
    rng = np.random.default_rng(1)
    seen = random_history(rng, ROWS, V)
    seen = dataclasses.replace(seen, lines=[line % 6 for line in seen.lines])
    if with_encoder:
        seen = dataclasses.replace(seen, given=[rng.integers(6, size=rng.integers(3, 40)) for _ in range(ROWS)])
    logits, expected = random_logits(kind), []
    for row in range(ROWS):
        processor = make(torch.tensor(seen.source(row))[None])
        expected.append(processor(torch.tensor(seen.sequence(row))[None], torch.tensor(logits[row : row + 1]))[0])
    assert (np.stack(expected) != logits).any()
    np.testing.assert_allclose(ours(seen, logits.copy(), np), np.stack(expected), rtol=3e-7)


@pytest.mark.parametrize("alive", ["all", "none", "one"])
def test_beams_whose_allowed_tokens_are_all_forbidden(alive: str) -> None:
    """Allowed again when that holds for every beam of the request, and only then."""
    seen = dataclasses.replace(
        random_history(np.random.default_rng(1), 4, V), requests=np.zeros(4, np.int64), batch_ids=np.zeros(4, np.int64)
    )
    length = int(seen.lengths.min())
    lines = np.stack([seen.sequence(row)[:length] for row in range(4)])
    seen = dataclasses.replace(seen, lines=list(lines), prompt_lengths=np.ones(4, np.int64))
    logits = random_logits("different scores")[:4]
    for row in {"all": [], "none": [0, 1, 2, 3], "one": [0, 1, 3]}[alive]:
        logits[row, some_allowed(0, lines[row])] = -np.inf
    processor = transformers.PrefixConstrainedLogitsProcessor(some_allowed, num_beams=4)
    expected = processor(torch.tensor(lines), torch.tensor(logits)).numpy()
    ours = PrefixAllowedTokens(ByIdentity(some_allowed), beams=True)
    np.testing.assert_array_equal(ours(seen, logits.copy(), np), expected)


ASKED = {
    "sequence_bias": [[[3], 1.5], [[4, 3], 0.5]],
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.1,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[4], [1, 2]],
    "min_new_tokens": 2,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": (1, 1.2),
    "suppress_tokens": [9],
    "begin_suppress_tokens": [8],
    "temperature": 0.7,
    "top_h": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.001,
    "typical_p": 0.97,
    "epsilon_cutoff": 1e-4,
    "eta_cutoff": 1e-4,
}


@pytest.mark.parametrize(("sampled", "num_beams"), [(True, 1), (False, 1), (False, 3)])
def test_the_order_is_theirs(sampled: bool, num_beams: int) -> None:
    asked = {k: v for k, v in ASKED.items() if sampled or FIELDS[k].needs is None} | {"num_beams": num_beams}
    if num_beams > 1:
        asked["renormalize_logits"] = True
    settings = resolve(GenerationConfig(do_sample=sampled, **asked), {}, vocab_size=V, eos_token_id=2)
    model = transformers.OPTForCausalLM(
        transformers.OPTConfig(vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, ffn_dim=8)
    )
    config = transformers.GenerationConfig(do_sample=sampled, eos_token_id=2, **asked)
    config._eos_token_tensor = torch.tensor([2])
    config.max_length = 9
    chain = model._get_logits_processor(config, input_ids_seq_length=4, encoder_input_ids=torch.tensor([[3, 4]]))
    pairs = {
        "SequenceBiasLogitsProcessor": "SequenceBias", "RepetitionPenaltyLogitsProcessor": "RepetitionPenalty",
        "EncoderRepetitionPenaltyLogitsProcessor": "EncoderRepetitionPenalty",
        "EncoderNoRepeatNGramLogitsProcessor": "EncoderNoRepeatNGram",
        "NoRepeatNGramLogitsProcessor": "NoRepeatNGram", "NoBadWordsLogitsProcessor": "SequenceBias",
        "MinLengthLogitsProcessor": "MinLength", "MinNewTokensLengthLogitsProcessor": "MinNewTokens",
        "ForcedBOSTokenLogitsProcessor": "ForcedBeginning", "ForcedEOSTokenLogitsProcessor": "ForcedEnd",
        "ExponentialDecayLengthPenalty": "ExponentialDecayLengthPenalty",
        "SuppressTokensLogitsProcessor": "SuppressTokens",
        "SuppressTokensAtBeginLogitsProcessor": "SuppressTokensAtBegin", "TemperatureLogitsWarper": "Temperature",
        "TopHLogitsWarper": "TopH", "TopKLogitsWarper": "TopK", "TopPLogitsWarper": "TopP",
        "MinPLogitsWarper": "MinP", "TypicalLogitsWarper": "Typical", "EpsilonLogitsWarper": "EpsilonCutoff",
        "EtaLogitsWarper": "EtaCutoff", "LogitNormalization": "Renormalize",
    }  # fmt: skip
    ours = build_processors(settings) + build_filters(settings)
    assert [type(p).__name__ for p in ours] == [pairs[type(p).__name__] for p in chain]


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
        (TopK(1, least=3), lambda: transformers.TopKLogitsWarper(1, min_tokens_to_keep=3)),
        (Typical(0.2), lambda: transformers.TypicalLogitsWarper(0.2)),
        (Typical(0.95), lambda: transformers.TypicalLogitsWarper(0.95)),
        (EpsilonCutoff(0.01), lambda: transformers.EpsilonLogitsWarper(0.01)),
        (EpsilonCutoff(0.9), lambda: transformers.EpsilonLogitsWarper(0.9)),
        (EpsilonCutoff(0.9, least=3), lambda: transformers.EpsilonLogitsWarper(0.9, min_tokens_to_keep=3)),
        (EtaCutoff(0.02), lambda: transformers.EtaLogitsWarper(0.02)),
        (EtaCutoff(0.9), lambda: transformers.EtaLogitsWarper(0.9)),
        (EtaCutoff(0.9, least=3), lambda: transformers.EtaLogitsWarper(0.9, min_tokens_to_keep=3)),
    ],
    ids=lambda value: repr(value) if dataclasses.is_dataclass(value) else "",
)
def test_filters_give_identical_scores(ours, make, kind: str) -> None:
    seen = random_history(np.random.default_rng(1), ROWS, V)
    logits = random_logits(kind)
    np.testing.assert_array_equal(ours(seen, logits.copy(), np), theirs(lambda _: make(), seen, logits))


@pytest.mark.parametrize(
    ("ours", "make"),
    [
        (MinP(0.9, least=3), lambda: transformers.MinPLogitsWarper(0.9, min_tokens_to_keep=3)),
        (TopP(0.01, least=3), lambda: transformers.TopPLogitsWarper(0.01, min_tokens_to_keep=3)),
        (Typical(0.01, least=3), lambda: transformers.TypicalLogitsWarper(0.01, min_tokens_to_keep=3)),
        (TopH(0.3), lambda: transformers.TopHLogitsWarper(0.3)),
        (TopH(0.87), lambda: transformers.TopHLogitsWarper(0.87)),
    ],
    ids=lambda value: repr(value) if dataclasses.is_dataclass(value) else "",
)
def test_filters_that_break_ties_by_chance_give_identical_scores(ours, make) -> None:
    seen = random_history(np.random.default_rng(1), ROWS, V)
    for kind in ("different scores", "forbidden"):
        logits = random_logits(kind)
        expected = theirs(lambda _: make(), seen, logits)
        assert (expected != logits).any()
        np.testing.assert_array_equal(ours(seen, logits.copy(), np), expected)


def test_renormalisation() -> None:
    seen, logits = random_history(np.random.default_rng(1), ROWS, V), random_logits("forbidden")
    expected = theirs(lambda _: transformers.LogitNormalization(), seen, logits)
    np.testing.assert_allclose(Renormalize()(seen, logits.copy(), np), expected, atol=2e-6)


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
    ours = {name: rule.default for name, rule in FIELDS.items()}
    for name, value in transformers.GenerationConfig._get_default_generation_params().items():
        if name == "max_length":
            settings = resolve(GenerationConfig(), {}, vocab_size=9, eos_token_id=None)
            assert new_token_limit(settings, 7) == value
        elif name == "num_assistant_tokens":
            assert ours[name] == 5  # constant, as in the paper; theirs begins at 20 and follows what is accepted
        elif name in ours:
            assert ours[name] == (() if value is None and ours[name] == () else value)
        elif name in refused(TRANSFORMERS):
            assert value in (None, *WORDS[TRANSFORMERS][name].neutral)


def test_every_field_of_theirs_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = set(vars(transformers.GenerationConfig())) | set(transformers.GenerationConfig().to_dict())
    unknown = names - FIELDS.keys() - WORDS[TRANSFORMERS].keys()
    assert not unknown
    GenerationConfig.from_dict(
        {k: v for k, v in transformers.GenerationConfig().to_dict().items() if k != "transformers_version"}
    )
