"""A failing request ends with its error, and leaves all other requests unaffected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.decoding.event import Event
from minillm.decoding.guided import Guide
from minillm.errors import MinillmError, NumericalError, ParameterError
from minillm.runner.runner import Runner

from ..comparing import assert_same_results
from ..tiny import write_checkpoint

BACKENDS = [pytest.param("numpy", marks=pytest.mark.slow), "cpu"]
LENGTH = {"max_new_tokens": 12, "eos_token_id": []}
BAD_POSITION = 12
"""Of the poisoned model: who gets that far reads NaN."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.2},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "mirostat": {"do_sample": True, "seed": 3, "mirostat": 2},
    "particles": {"do_sample": True, "seed": 3, "num_particles": 3, "potential": lambda ids: len(set(ids)) / 3},
    "beams": {"num_beams": 3},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained": {"num_beams": 3, "force_words_ids": [[7, 8], [[9], [10, 11]]]},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 3},
    "guidance": {"guidance_scale": 2.0},
    "dola": {"dola_layers": [0, 1]},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookahead": {"lookahead_window": 3},
    "naive": {"use_cache": False},
}
SHORT, LONG = [5, 6, 7], [9, 8, 7, 6]


@pytest.fixture(scope="module")
def poisoned_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed_positions.weight"][BAD_POSITION + 2] = np.nan

    return write_checkpoint(tmp_path_factory.mktemp("poisoned"), seed=2, change=spoil)


@pytest.fixture(params=BACKENDS)
def poisoned(request: pytest.FixtureRequest, poisoned_checkpoint: Path) -> Engine:
    return Engine(poisoned_checkpoint, backend=request.param)


def steps(engine: Engine) -> dict[int, list[Event]]:
    """All that `step` reports until nothing is left to do, by request."""
    events: dict[int, list[Event]] = {}
    for _ in range(200):
        if not engine.busy:
            break
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert not engine.busy
    assert engine.runner.cache.free_pages == engine.runner.cache.num_pages
    return events


def tokens(events: list[Event]) -> list[tuple[int, ...]]:
    return [tuple(t for e in events if e.index == i for t in e.token_ids) for i in sorted({e.index for e in events})]


def ends(events: list[Event]) -> set[str | None]:
    return {event.finish_reason for event in events if event.finish_reason}


def add_failing(engine: Engine, kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """A request that fails after a few tokens."""
    if kind == "processor":

        def raises(history: Any, logits: Any, xp: Any) -> Any:
            if history.lengths[0] >= len(SHORT) + 3:
                raise RuntimeError("no more")
            return logits

        return engine.add(SHORT, logits_processor=[raises], **LENGTH, **fields)
    pushes = []

    def push(guide: Guide, token_id: int) -> None:
        pushes.append(token_id)
        if len(pushes) > 8:
            raise ParameterError("no more")

    monkeypatch.setattr(Guide, "push", push)
    monkeypatch.setattr(Guide, "fill", lambda guide, mask: mask.fill(~np.uint32(0)))
    return engine.add(SHORT, guided_regex="[a-z ]*", max_new_tokens=12, **fields)


# --- functions of the user's, and guides ------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_processor_that_raises_ends_its_request_alone(engine: Engine, name: str, monkeypatch) -> None:
    fields = STRATEGIES[name]
    alone = engine.add(LONG, **LENGTH, **fields)
    expected = tokens(steps(engine)[alone])
    beside = [engine.add(LONG, **LENGTH, **fields)]
    failing = add_failing(engine, "processor", fields, monkeypatch)
    beside.append(engine.add(LONG, **LENGTH, **fields))
    events = steps(engine)
    assert ends(events[failing]) == {"error"}
    assert {str(event.error) for event in events[failing] if event.finish_reason} == {"no more"}
    for request_id in beside:
        assert tokens(events[request_id]) == expected
        assert ends(events[request_id]) == {"length"}
        assert all(event.error is None for event in events[request_id])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_requests_with_the_same_function_are_asked_apart(engine: Engine, name: str) -> None:
    def raises(history: Any, logits: Any, xp: Any) -> Any:
        if (history.token_ids[history.starts[:-1]] == SHORT[0]).any() and history.generated_lengths[0] == 2:
            raise RuntimeError("no more")
        return logits

    fields = STRATEGIES[name] | LENGTH
    plain = engine.add(LONG, logits_processor=[raises], **fields)
    expected = tokens(steps(engine)[plain])
    ids = [engine.add(prompt, logits_processor=[raises], **fields) for prompt in (LONG, SHORT, LONG)]
    events = steps(engine)
    assert [ends(events[i]) for i in ids] == [{"length"}, {"error"}, {"length"}]
    assert tokens(events[ids[0]]) == tokens(events[ids[2]]) == expected


@pytest.mark.parametrize("name", ["greedy", "sampling", "beams"])
def test_a_guide_that_fails_ends_its_request_alone(engine: Engine, name: str, monkeypatch) -> None:
    pytest.importorskip("llguidance")
    fields = STRATEGIES[name]
    alone = engine.add(LONG, **LENGTH, **fields)
    expected = tokens(steps(engine)[alone])
    beside = engine.add(LONG, **LENGTH, **fields)
    failing = add_failing(engine, "guide", fields, monkeypatch)
    events = steps(engine)
    assert ends(events[failing]) == {"error"}
    assert tokens(events[beside]) == expected


def test_a_guide_that_fails_leaves_other_guides_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call fills the masks of all guides; one of them fails, not the first."""
    pytest.importorskip("llguidance")
    guided = LENGTH | {"guided_regex": "[a-z ]*", "eos_token_id": 2}
    alone = [engine.add(LONG, **guided), engine.add(LONG, **LENGTH)]
    events = steps(engine)
    expected, plain = (tokens(events[request_id]) for request_id in alone)
    fill, calls = Guide.fill, []

    def fails(guide: Guide, mask: Any) -> None:
        if guide._field == "guided_json":
            calls.append(guide)
            if len(calls) > 3:  # the first is that of the compiled grammar
                raise ParameterError("no more")
        fill(guide, mask)

    monkeypatch.setattr(Guide, "fill", fails)
    first, beside = engine.add(LONG, **guided), engine.add(LONG, **LENGTH)
    failing = engine.add(SHORT, max_new_tokens=12, guided_json={"type": "string"}, eos_token_id=2)
    last = engine.add(LONG, **guided)
    events = steps(engine)
    assert str(events[failing][-1].error) == "no more"
    assert tokens(events[first]) == tokens(events[last]) == expected
    assert tokens(events[beside]) == plain


def test_generate_raises_after_the_others_are_done_and_a_stream_where_it_happens(engine: Engine) -> None:
    def raises(history: Any, logits: Any, xp: Any) -> Any:
        if history.lengths[0] >= 6:
            raise RuntimeError("no more")
        return logits

    plain = engine.generate(SHORT, **LENGTH)
    before = engine.stats.steps
    with pytest.raises(RuntimeError, match="no more"):
        engine.generate([[5], SHORT, [8]], logits_processor=[raises], **LENGTH)
    assert engine.stats.steps - before == 6  # the longest of them: one token, five more until it has six
    stream = engine.stream(SHORT, logits_processor=[raises], **LENGTH)
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="no more"):
        for event in stream:
            seen += event.token_ids
    assert seen == plain.token_ids[:3]
    assert list(stream) == []
    assert not engine.busy
    assert_same_results(engine.generate(SHORT, **LENGTH), plain)


def test_a_text_that_cannot_be_made_ends_its_request_alone(engine: Engine, monkeypatch) -> None:
    """The tokenizer fails on one request's token, while both are served by one call of a strategy."""
    assert engine.tokenizer is not None
    expected = engine.generate(LONG, **LENGTH).token_ids
    bad = engine.generate(SHORT, **LENGTH).token_ids[4]
    assert bad not in expected
    decoder = type(engine.tokenizer.stream([]))
    push = decoder.push

    def picky(self: Any, token_id: int) -> str:
        if token_id == bad:
            raise RuntimeError("not this one")
        return push(self, token_id)

    monkeypatch.setattr(decoder, "push", picky)
    failing, beside = engine.add(SHORT, **LENGTH), engine.add(LONG, **LENGTH)
    events = steps(engine)
    assert str(events[failing][-1].error) == "not this one"
    assert tokens(events[beside]) == [tuple(expected)]


def test_no_token_left_is_one_requests_affair(engine: Engine) -> None:
    """Equal settings, one strategy object: what is forbidden depends on what each has said."""
    first = engine.generate(SHORT, max_new_tokens=1).token_ids
    everything_but = [token for token in range(engine.config.vocab_size) if token not in first]
    fields = {"suppress_tokens": everything_but, "no_repeat_ngram_size": 1, "max_new_tokens": 3, "eos_token_id": []}
    fits = engine.add(SHORT, **{**fields, "max_new_tokens": 1})
    fails = engine.add(SHORT, **fields)
    events = steps(engine)
    assert tokens(events[fits]) == [tuple(first)]
    assert ends(events[fits]) == {"length"}
    assert isinstance(events[fails][-1].error, MinillmError)
    assert "forbid every token" in str(events[fails][-1].error)


# --- NaN --------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_nan_in_one_requests_rows_ends_it_alone(poisoned: Engine, name: str) -> None:
    fields = STRATEGIES[name] | {"eos_token_id": []}
    alone = poisoned.add(SHORT, max_new_tokens=6, **fields)
    expected = tokens(steps(poisoned)[alone])
    beside = poisoned.add(SHORT, max_new_tokens=6, **fields)
    failing = poisoned.add([5] * (BAD_POSITION - 3), max_new_tokens=9, **fields)
    later = poisoned.add(SHORT, max_new_tokens=6, **fields)
    events = steps(poisoned)
    assert isinstance(events[failing][-1].error, NumericalError)
    assert "embed_positions" in str(events[failing][-1].error)
    assert tokens(events[beside]) == tokens(events[later]) == expected
    again = poisoned.add(SHORT, max_new_tokens=6, **fields)  # in the pages that held NaN
    assert tokens(steps(poisoned)[again]) == expected


def test_nan_in_a_prompt_and_in_a_text_at_the_same_time(poisoned: Engine) -> None:
    expected = poisoned.generate(SHORT, max_new_tokens=8, eos_token_id=[]).token_ids
    texts = [SHORT, [5] * (BAD_POSITION - 1), [6] * (BAD_POSITION + 4), SHORT]
    ids = [poisoned.add(text, max_new_tokens=8, eos_token_id=[]) for text in texts]
    events = steps(poisoned)
    assert [ends(events[i]) for i in ids] == [{"length"}, {"error"}, {"error"}, {"length"}]
    assert tokens(events[ids[0]]) == tokens(events[ids[3]]) == [tuple(expected)]
    assert len(tokens(events[ids[1]])[0]) == 2  # at positions 11 and 12, of which the second is never fed


def test_a_pass_that_fails_for_one_is_run_again_for_the_others(engine: Engine, monkeypatch) -> None:
    """Not NaN but an exception: whose it is shows when each request runs by itself."""
    expected = engine.generate([SHORT, LONG], **LENGTH)
    forward = Runner.forward

    def fails(self: Runner, sequences: Any, *arguments: Any) -> Any:
        if any(sequence.token_ids[:2] == [42, 43] for sequence in sequences):
            raise MemoryError("42 is too large")
        return forward(self, sequences, *arguments)

    monkeypatch.setattr(Runner, "forward", fails)
    ids = [engine.add(prompt, **LENGTH) for prompt in (SHORT, [42, 43], LONG)]
    events = steps(engine)
    assert isinstance(events[ids[1]][-1].error, MemoryError)
    assert tokens(events[ids[0]]) + tokens(events[ids[2]]) == [tuple(g.token_ids) for g in expected]


# --- more sequences than places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sampling", "mirostat", "lookup"])
def test_more_samples_than_places_wait_their_turn(checkpoint: Path, name: str) -> None:
    fields = STRATEGIES[name] | {"do_sample": True, "seed": 3, "num_return_sequences": 7, "max_new_tokens": 6}
    with Engine(checkpoint, max_batch_size=7) as wide, Engine(checkpoint, max_batch_size=3) as narrow:
        expected = wide.generate("Hello", **fields)
        found = narrow.generate("Hello", **fields)
        assert [c.token_ids for c in found.completions] == [c.token_ids for c in expected.completions]
        assert [c.text for c in found.completions] == [c.text for c in expected.completions]
        request = narrow.add("Hello", **fields)
        narrow.step()
        narrow.abort(request)
        assert {(e.index, e.finish_reason) for e in narrow.step() if e.finish_reason} == {
            (i, "abort") for i in range(7)
        }
        assert narrow.runner.cache.free_pages == narrow.runner.cache.num_pages


def test_a_failure_in_one_part_of_a_request_ends_all_of_it(checkpoint: Path) -> None:
    calls: list[int] = []

    def raises(history: Any, logits: Any, xp: Any) -> Any:
        calls.append(len(logits))
        if len(calls) == 4:
            raise RuntimeError("no more")
        return logits

    check: Callable[..., Any]
    with Engine(checkpoint, max_batch_size=3) as engine:
        for check in (engine.generate, lambda *a, **k: list(engine.stream(*a, **k))):
            calls.clear()
            with pytest.raises(RuntimeError, match="no more"):
                check("Hello", do_sample=True, num_return_sequences=7, max_new_tokens=6, logits_processor=[raises])
            assert not engine.busy
            assert engine.runner.cache.free_pages == engine.runner.cache.num_pages


def test_beams_need_all_places_at_once_and_the_error_says_how_many(checkpoint: Path) -> None:
    with Engine(checkpoint, max_batch_size=3) as engine:
        with pytest.raises(ParameterError, match=r"needs 4 sequences at once, .* raise max_batch_size to at least 4"):
            engine.generate("Hello", num_beams=4)
        assert not engine.busy
