"""Continuations of a text scored on its shared pages against each whole text scored alone."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from minillm import Engine
from minillm.engine import continuations
from minillm.engine.inspect import score_tokens
from minillm.errors import ParameterError, PromptError
from minillm.reference.softmax import log_softmax

from ..adapters import write_adapter
from ..families import CONFIGS
from ..seq2seq import write_checkpoint as write_encoder_decoder
from ..tiny import model_of, runner_of, write_checkpoint

PREFIXES = ["A list of colors: red,", "Monday,", "Once upon a time there was a fox. " * 12]
ENDINGS = [[" orange, yellow", " pink", " seven and a half"], [" Tuesday", " 3"], [" The owl", " The", " Q"]]


@pytest.fixture(scope="module", params=[pytest.param("numpy", marks=pytest.mark.slow), "cpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(backend=request.param) as engine:
        yield engine


def assert_scores(engine: Engine, scores: list, prefix: list[int], endings: list[list[int]], **fields: object) -> None:
    assert [score.token_ids for score in scores] == endings
    for score in scores:
        whole = engine.score([*prefix, *score.token_ids], **fields).logprobs[len(prefix) :]
        np.testing.assert_allclose(score.logprobs, whole, atol=2e-4)
        assert score.total == pytest.approx(sum(whole), abs=1e-3)
        best = engine.forward([*prefix, *score.token_ids], **fields)[len(prefix) - 1 : -1].argmax(-1)
        assert score.greedy == (best.tolist() == score.token_ids)


@pytest.mark.parametrize(
    ("budget", "chunk", "positions"),
    [(7, 3, 16384), (50, 128, 1), pytest.param(512, 128, 16384, marks=pytest.mark.slow)],
)
def test_each_score_is_that_of_the_whole_text(
    engine: Engine, budget: int, chunk: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuations, "BATCH", budget)
    monkeypatch.setattr(continuations, "CHUNK", chunk)
    monkeypatch.setattr(continuations, "POSITIONS", positions)
    together = engine.score_continuations(PREFIXES, ENDINGS)
    for prefix, endings, scores in zip(PREFIXES, ENDINGS, together, strict=True):
        ids = engine.tokenizer.encode(prefix)
        wholes = [engine.tokenizer.encode(prefix + ending)[len(ids) :] for ending in endings]
        assert_scores(engine, scores, ids, wholes)
    assert together[0][0].greedy and not together[0][2].greedy
    assert engine.score_continuations(PREFIXES[1], ENDINGS[1])[0].token_ids == together[1][0].token_ids


def test_the_prefix_is_computed_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    forward = type(engine.runner).forward

    def counting(self: object, sequences: object, counts: list[int], **more: object) -> object:
        passes.append(sum(counts))
        return forward(self, sequences, counts, **more)

    monkeypatch.setattr(type(engine.runner), "forward", counting)
    prefix, endings = [*range(5, 105)], [[7, 8], [9], [10, 11, 12]]
    engine.score_continuations(prefix, endings)
    assert sum(passes) == 99 + 2 + 1 + 3


def test_many_continuations_of_one_prefix_take_bounded_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Counted(continuations.PagedCache):
        def __init__(self, config: object, backend: object, pages: int, **more: object) -> None:
            sizes.append(pages * engine.runner.backend.memory.page_size)
            super().__init__(config, backend, pages, **more)

    rng = np.random.default_rng(4)
    cases = [([5, 6], rng.integers(5, 200, (9, 3)).tolist()), ([7], []), ([8], rng.integers(5, 200, (2, 3)).tolist())]
    expected = [engine.score_continuations(*case) for case in cases]
    monkeypatch.setattr(continuations, "POSITIONS", 4 * engine.runner.backend.memory.page_size)
    monkeypatch.setattr(continuations, "PagedCache", Counted)
    scores = engine.score_continuations([prefix for prefix, _ in cases], [endings for _, endings in cases])
    assert len(sizes) > 3 and max(sizes) <= continuations.POSITIONS
    for ours, theirs in zip(scores, expected, strict=True):
        assert [score.token_ids for score in ours] == [score.token_ids for score in theirs]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_token_ids_one_token_and_nothing(engine: Engine) -> None:
    for prefix, endings in (([5], [[7, 8], [9]]), ([5, 6, 7], [[7]]), ([5, 6], [])):
        assert_scores(engine, engine.score_continuations(prefix, endings), prefix, endings)
    assert engine.score_continuations([], []) == []


@pytest.mark.parametrize("case", [("phi3", "longrope"), ("qwen2", "yarn"), ("mistral", "window")], ids="-".join)
def test_keys_that_change_with_the_length_are_not_shared(case: tuple[str, str]) -> None:
    family, name = case
    runner = runner_of(model_of(CONFIGS[family][name]), pages=64)
    turning = runner.model.config.keys_change_beyond or 30
    prefix = np.random.default_rng(2).integers(3, 96, turning - 2).tolist()
    endings = [[5, 6], [7, 8, 9, 10, 11, 12], [13]]
    [scores] = continuations.score_continuations(runner, [(prefix, endings)], nullcontext)
    for score, ending in zip(scores, endings, strict=True):
        whole = score_tokens(runner, [*prefix, *ending])[len(prefix) :]
        np.testing.assert_allclose(score.logprobs, whole, atol=1e-4)


@pytest.mark.longer
def test_the_last_token_needs_no_place_in_the_context(engine: Engine) -> None:
    ids = np.random.default_rng(3).integers(3, 2000, 513).tolist()
    [score] = engine.score_continuations(ids[:500], [ids[500:]])
    logs = log_softmax(engine.forward(ids[:512])[499:], np)
    np.testing.assert_allclose(score.logprobs, logs[np.arange(13), ids[500:]], atol=1e-3)
    with pytest.raises(PromptError, match="513 tokens; the context holds 512"):
        engine.score_continuations(ids[:500], [[*ids[500:], 7]])


def test_an_adapter_computes_prefix_and_continuations(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", seed=2)
    with Engine(base, adapters={"one": write_adapter(tmp_path / "one", seed=1)}) as engine:
        prefix, endings = [40, 41, 42, 43, 44], [[45, 46], [47]]
        scores = engine.score_continuations(prefix, endings, lora="one")
        assert_scores(engine, scores, prefix, endings, lora="one")
        assert scores != engine.score_continuations(prefix, endings)


def test_mistakes_are_named(engine: Engine, tmp_path: Path) -> None:
    for prefixes, endings, message in (
        ("A", " b", "continuations should be a list for the prefix"),
        (["A", "B"], [[" b"]], "continuations should be a list for each of the 2 prefixes"),
        (["A"], [" b"], "continuations should be a list for each of the 1 prefixes"),
    ):
        with pytest.raises(ParameterError, match=message):
            engine.score_continuations(prefixes, endings)
    for prefix, ending, message in (("", " b", "empty"), ([5], [10**6], "vocabulary"), ("A", "", "empty")):
        with pytest.raises(PromptError, match=message):
            engine.score_continuations(prefix, [ending])
    with pytest.raises(PromptError, match="512"):
        engine.score_continuations([5] * 500, [[6] * 20])
    with Engine(write_encoder_decoder(tmp_path)) as other, pytest.raises(ParameterError, match="encoder-decoder"):
        other.score_continuations("A", [" b"])
