"""Logits processors against their formulas, worked out token by token."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.decoding.field_values import ByIdentity
from minillm.decoding.fields import MASKED, PROCESSED
from minillm.decoding.filters import build_filters
from minillm.decoding.history import History
from minillm.decoding.processors import (
    EncoderNoRepeatNGram,
    EncoderRepetitionPenalty,
    ExponentialDecayLengthPenalty,
    LogitsProcessor,
    MinLength,
    MinNewTokens,
    NoRepeatNGram,
    PrefixAllowedTokens,
    PresenceFrequencyPenalty,
    RepetitionPenalty,
    SequenceBias,
    SuppressTokensAtBegin,
    build_processors,
    common_suffixes,
    numbered_processors,
)
from minillm.decoding.resolving import resolve
from minillm.decoding.settings import GenerationConfig

from .histories import history, random_history

INF = np.inf


def apply(processor: LogitsProcessor, seen: History, logits: list[list[float]]) -> list[list[float]]:
    return processor(seen, np.array(logits, np.float32), np).tolist()


def test_history_knows_its_rows_and_lengths() -> None:
    seen = history(([5, 6], [7]), ([], []), ([1], [2, 3]))
    assert seen.rows(np).tolist() == [0, 0, 0, 2, 2, 2]
    assert seen.lengths.tolist() == [3, 0, 3]
    assert seen.generated_lengths.tolist() == [1, 0, 2]


def test_repetition_penalty_counts_each_token_of_prompt_and_text_once() -> None:
    seen = history(([0, 0, 1], [0]), ([3], []))
    logits = [[4.0, -4.0, 1.0, -1.0], [4.0, -4.0, 1.0, -1.0]]
    assert apply(RepetitionPenalty(2.0), seen, logits) == [[2.0, -8.0, 1.0, -1.0], [4.0, -4.0, 1.0, -2.0]]


def test_encoder_penalty_raises_the_tokens_of_the_source() -> None:
    """The prompt's, where the model has no encoder."""
    seen, logits = history(([3], [2]), ([0, 0], [])), [[4.0, -4.0, 1.0, -1.0]] * 2
    assert apply(EncoderRepetitionPenalty(2.0), seen, logits) == [[4.0, -4.0, 1.0, -0.5], [8.0, -4.0, 1.0, -1.0]]
    sources = replace(seen, given=[[1, 0, 1], []])
    assert apply(EncoderRepetitionPenalty(2.0), sources, logits) == [[8.0, -2.0, 1.0, -1.0], logits[1]]
    assert apply(EncoderRepetitionPenalty(2.0), sources.take([1]).alone(), logits[:1]) == logits[:1]


def test_presence_and_frequency_penalty_count_generated_tokens_only() -> None:
    seen = history(([0, 0, 1], [1, 2, 1]), ([3], []))
    got = apply(PresenceFrequencyPenalty(presence=0.5, frequency=0.25), seen, [[0.0] * 4, [0.0] * 4])
    assert got == [[0.0, -1.0, -0.75, 0.0], [0.0] * 4]


def test_presence_and_frequency_penalty_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    seen = random_history(rng, rows=20, vocab_size=12)
    logits = rng.standard_normal((20, 12)).astype(np.float32)
    expected = logits.copy()
    for row in range(20):
        end = seen.starts[row + 1]
        generated = seen.token_ids[seen.starts[row] + seen.prompt_lengths[row] : end].tolist()
        for token, count in Counter(generated).items():
            expected[row, token] -= 0.7 * count + -0.3 * (count > 0)
    got = PresenceFrequencyPenalty(presence=-0.3, frequency=0.7)(seen, logits.copy(), np)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert (got != logits).sum() > 40


def test_min_length_counts_the_prompt_and_min_new_tokens_does_not() -> None:
    seen = history(([9, 9, 9], [9]), ([9], [9]), ([9, 9, 9], [9, 9]))
    logits = [[1.0, 2.0, 3.0]] * 3
    held, free = [-INF, 2.0, -INF], [1.0, 2.0, 3.0]
    assert apply(MinLength(4, (0, 2)), seen, logits) == [free, held, free]
    assert apply(MinNewTokens(2, (0, 2)), seen, logits) == [held, held, free]


def settings(**fields: object):
    return resolve(GenerationConfig(**fields), {}, vocab_size=100, eos_token_id=2)


def test_only_processors_with_an_effect_are_built_in_order() -> None:
    assert build_processors(settings()) == ()
    assert build_processors(settings(repetition_penalty=1.0, presence_penalty=0.0, min_new_tokens=0)) == ()
    assert build_processors(
        settings(min_new_tokens=3, frequency_penalty=0.5, repetition_penalty=1.2, eos_token_id=[2, 4])
    ) == (RepetitionPenalty(1.2), PresenceFrequencyPenalty(0.0, 0.5), MinNewTokens(3, (2, 4)))
    assert build_processors(settings(min_length=9, presence_penalty=1)) == (
        PresenceFrequencyPenalty(1.0, 0.0),
        MinLength(9, (2,)),
    )


def test_all_processors_are_built_in_transformers_order() -> None:
    asked = settings(
        logits_processor=[lambda history, logits, xp: logits], begin_suppress_tokens=[3], suppress_tokens=[4],
        exponential_decay_length_penalty=(1, 2.0), forced_eos_token_id=5, forced_bos_token_id=6, min_new_tokens=3,
        prefix_allowed_tokens_fn=lambda batch_id, ids: [1], bad_words_ids=[[7]], no_repeat_ngram_size=2,
        presence_penalty=1, repetition_penalty=2, sequence_bias=[[[8], 1.0]], encoder_repetition_penalty=3,
        encoder_no_repeat_ngram_size=4,
    )  # fmt: skip
    built = build_processors(asked)
    assert [type(processor).__name__ for processor in built] == [
        *("SequenceBias", "EncoderRepetitionPenalty", "RepetitionPenalty", "PresenceFrequencyPenalty"),
        *("NoRepeatNGram", "EncoderNoRepeatNGram", "SequenceBias", "MinNewTokens", "PrefixAllowedTokens"),
        *("ForcedBeginning", "ForcedEnd", "ExponentialDecayLengthPenalty", "SuppressTokens"),
        *("SuppressTokensAtBegin", "UserProcessor"),
    ]
    for processor in built:
        assert isinstance(hash(processor), int)
        assert processor(history(), np.empty((0, 100), np.float32), np).shape == (0, 100)


def test_what_a_short_history_can_complete_is_nothing() -> None:
    """A row may be shorter than a sequence to look for; the row before it must not be read in its place."""
    seen = history(([1, 3], [2]), ([3], []), ([2], [3]))
    bias = SequenceBias((((2, 3, 4), 1.0), ((3, 5), 2.0), ((9,) * 50, 3.0)))
    got = bias(seen, np.zeros((3, 10), np.float32), np)
    assert np.argwhere(got).tolist() == [[1, 5], [2, 4], [2, 5]]
    assert not np.isinf(NoRepeatNGram(50)(seen, got, np)).any()


def test_exponential_decay_is_its_formula() -> None:
    seen = history(([9] * 5, [9]), ([9], [9] * 3), ([9], [9] * 4), ([9], [9] * 4))
    logits = [[2.0, 5.0, -3.0]] * 3 + [[-INF, 5.0, 2.0]]
    got = apply(ExponentialDecayLengthPenalty(2, 1.5, (0, 2)), seen, logits)
    # |s| * (1.5 ** k - 1) more, for k = 1 and 2 tokens past the second generated one
    assert got == [[2.0, 5.0, -3.0], [3.0, 5.0, -1.5], [4.5, 5.0, 0.75], [-INF, 5.0, 4.5]]


def test_what_is_suppressed_at_the_beginning_comes_after_a_forced_one() -> None:
    seen = history(([9], []), ([9], [9]), ([9, 9], []), ([9, 9], [9]))
    plain, none = [-INF, 2.0], [1.0, 2.0]
    at_begin = [apply(SuppressTokensAtBegin((0,), forced), seen, [none] * 4) for forced in (False, True)]
    assert at_begin == [[plain, none, plain, none], [none, plain, plain, none]]


def test_allowed_tokens_that_are_all_forbidden_are_allowed_again() -> None:
    """In beam search, only where that holds for every beam of the request."""
    seen = replace(history(*[([9], [])] * 4), requests=np.array([0, 0, 1, 1]))
    logits = [[1.0, -INF], [-INF, 2.0], [1.0, -INF], [1.0, -INF]]
    only_1 = ByIdentity(lambda batch_id, ids: [1])
    dead, alive, again = [-INF, -INF], [-INF, 2.0], [-INF, 0.0]
    assert apply(PrefixAllowedTokens(only_1, beams=True), seen, logits) == [dead, alive, again, again]
    assert apply(PrefixAllowedTokens(only_1, beams=False), seen, logits) == [again, alive, again, again]


def test_the_order_matters_and_is_repetition_first() -> None:
    seen = history(([0], [1]))
    logits = np.array([[4.0, 4.0, 1.0]], np.float32)
    for processor in build_processors(settings(repetition_penalty=2.0, presence_penalty=1.0, min_new_tokens=2)):
        logits = processor(seen, logits, np)
    assert logits.tolist() == [[2.0, 4.0 / 2.0 - 1.0, -INF]]


@pytest.mark.parametrize(
    "processor", [RepetitionPenalty(1.5), PresenceFrequencyPenalty(1.0, 1.0), MinLength(9, (0,)), MinNewTokens(9, (0,))]
)
def test_processors_are_hashable_and_work_on_no_rows(processor: LogitsProcessor) -> None:
    assert isinstance(hash(processor), int)
    assert processor(history(), np.empty((0, 5), np.float32), np).shape == (0, 5)


@pytest.mark.parametrize("n", [10**6, 2**53, 2**70])
def test_n_grams_longer_than_the_text_cost_nothing(n: int) -> None:
    """A loop over n would not end."""
    seen = history(([0, 0, 1], [0]), ([], []))
    assert apply(NoRepeatNGram(n), seen, [[1.0] * 4] * 2) == [[1.0] * 4] * 2


def test_long_n_grams_are_found_as_short_ones_are() -> None:
    rng, found = np.random.default_rng(4), 0
    for _ in range(300):
        size = int(rng.integers(1, 4))
        beginning = rng.integers(size, size=rng.integers(1, 60)).tolist()
        lines = [beginning * 2 + beginning[: rng.integers(60)], rng.integers(size, size=40).tolist()]
        n = int(rng.integers(1, 60))
        [*rows] = apply(NoRepeatNGram(n), history(*((line, []) for line in lines)), [[0.0] * 4] * 2)
        for line, row in zip(lines, rows, strict=True):
            grams = [line[i : i + n] for i in range(len(line) - n + 1)]
            last = line[len(line) - n + 1 :] if n > 1 else []
            banned = {gram[-1] for gram in grams if gram[:-1] == last}
            assert row == [-INF if token in banned else 0.0 for token in range(4)]
            found += bool(banned) and n > 20
    assert found > 30


def test_n_grams_of_the_source_are_forbidden() -> None:
    """And of the prompt where the model has no encoder; those of generated tokens are not."""
    rng, found = np.random.default_rng(5), 0
    for _ in range(300):
        size = int(rng.integers(1, 4))
        n = int(rng.integers(1, 40))
        beginning = rng.integers(size, size=n - 1).tolist()
        source = [*rng.integers(size, size=9), *beginning, *rng.integers(4, size=2), *beginning]
        lines = [([0], [*rng.integers(size, size=rng.integers(3)), *beginning]), (source, beginning)]
        seen = history(*lines)
        for sources in ([source, source[: rng.integers(len(source))]], None):
            rows = apply(EncoderNoRepeatNGram(n), replace(seen, given=sources), [[0.0] * 4] * 2)
            for i, row in enumerate(rows):
                text, read = [*lines[i][0], *lines[i][1]], lines[i][0] if sources is None else sources[i]
                ends = [read[j + n - 1] for j in range(len(read) - n + 1)
                        if read[j : j + n - 1] == text[len(text) - n + 1 :][: n - 1]]  # fmt: skip
                banned = {*ends} if len(text) >= n - 1 else set()
                assert row == [-INF if token in banned else 0.0 for token in range(4)]
                found += bool(banned) and n > 20
    assert found > 100


class Counted(int):
    """A token that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("line", [[1] * 3000, [1, 2] * 1500, [1] * 1500 + [2] + [1] * 1499], ids=["1", "12", "121"])
def test_common_suffixes_are_found_in_linear_time(line: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Line(np.ndarray):
        def tolist(self) -> list[int]:
            return [Counted(token) for token in super().tolist()]

    Counted.compared = 0
    lengths = common_suffixes(np.asarray(line).view(Line))
    assert Counted.compared <= 2 * len(line)
    for place in (0, 1, 7, 1499, 1500, 1501, 2998, 2999):
        same = [a == b for a, b in zip(line[:place][::-1], line[::-1], strict=False)]
        assert lengths[place] == (same.index(False) if False in same else len(same))


def test_an_end_that_grows_likelier_stays_a_number() -> None:
    seen = history(([1], [2] * 15))
    (row,) = apply(ExponentialDecayLengthPenalty(0, 1e30, (0, 1)), seen, [[0.0, -3.0, 1.0]])
    assert row[0] == 0.0
    assert np.isfinite(row).all()
    assert row[1] > 1e29


def test_processors_and_filters_are_asked_for_by_the_listed_fields_alone() -> None:
    """Settings whose listed fields have their defaults are not searched for processors, nor for filters that mask."""
    asked: set[str] = set()

    class Asked:
        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(settings, name)

    settings = resolve(GenerationConfig(do_sample=True), {}, vocab_size=8, eos_token_id=2)
    assert numbered_processors(Asked()) == ()  # type: ignore[arg-type]
    assert asked == {*PROCESSED, "eos_token_ids", "samplers"}
    asked.clear()
    build_filters(Asked())  # type: ignore[arg-type]
    assert asked == {*MASKED, "do_sample", "num_beams", "temperature", "top_k", "top_p", "min_p"}
