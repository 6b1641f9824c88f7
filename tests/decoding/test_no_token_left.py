"""Processors that leave few tokens or none, under every strategy: nothing forbidden comes; none left is one error."""

from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.beam import BeamSearch
from minillm.decoding.history import History
from minillm.decoding.processors import rows_without_a_token
from minillm.decoding.row_processing import FEW
from minillm.decoding.speculative import Distribution
from minillm.decoding.strategy import Rows
from minillm.errors import NumericalError, ParameterError

from ..tiny import request_for, write_checkpoint
from .histories import history

V = 512
PROMPT = [40, 41, 42, 43, 40, 41]
ALLOWED = {7, 8, 9}
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 3, "top_k": 0}
FILTERED: dict[str, Any] = {"do_sample": True, "seed": 3, "top_k": 4, "top_p": 0.9, "typical_p": 0.9, "top_h": 0.9}
FILTERED |= {"min_p": 0.01, "epsilon_cutoff": 0.001, "eta_cutoff": 0.001, "top_n_sigma": 2.0}
FILTERED |= {"xtc_probability": 0.5}
DIVERSE: dict[str, Any] = {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("plain", {}),
    "sampling": ("plain", SAMPLED),
    "filters": ("plain", FILTERED),
    "an order": ("plain", FILTERED | {"samplers": "llama.cpp", "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}),
    "ordered beams": (
        "plain",
        {"do_sample": True, "seed": 3, "num_beams": 6, "samplers": ["top_k", "penalties", "dry", "xtc"]}
        | {"repetition_penalty": 1.3, "dry_multiplier": 0.8, "xtc_probability": 0.5},
    ),
    "mirostat": ("plain", {"do_sample": True, "mirostat": 2}),
    "beams": ("plain", {"num_beams": 6}),
    "beams, renormalised": ("plain", {"num_beams": 6, "renormalize_logits": True}),
    "sampled beams": ("plain", SAMPLED | {"num_beams": 6}),
    "filtered beams": ("plain", FILTERED | {"num_beams": 6, "renormalize_logits": True}),
    "diverse beams": ("plain", DIVERSE),
    "diverse beams, renormalised": ("plain", DIVERSE | {"renormalize_logits": True}),
    "contrastive search": ("plain", {"penalty_alpha": 0.95, "top_k": 8}),
    "prompt lookup": ("plain", {"prompt_lookup_num_tokens": 3}),
    "lookahead": ("plain", {"lookahead_window": 3}),
    "draft": ("draft", {}),
    "draft, sampled": ("draft", SAMPLED),
    "draft, filtered": ("draft", FILTERED),
    "amateur": ("amateur", {"contrastive_alpha": 0.0}),
    "amateur, sampled": ("amateur", SAMPLED | {"contrastive_alpha": 0.0}),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    folders = [write_checkpoint(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(2)]
    return {
        "plain": Engine(folders[0]),
        "draft": Engine(folders[0], draft=folders[1]),
        "amateur": Engine(folders[0], amateur=folders[1]),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_none_left_is_one_clear_error(engines: dict[str, Engine], way: str) -> None:
    kind, fields = WAYS[way]
    with pytest.raises(ParameterError, match=r"^the logits processors and filters forbid every token"):
        engines[kind].generate(PROMPT, forced_eos_token_id=5, suppress_tokens=[5], max_new_tokens=3, **fields)
    assert not engines[kind].busy


@pytest.mark.parametrize("way", WAYS)
def test_of_a_few_that_are_left_no_other_comes(engines: dict[str, Engine], way: str) -> None:
    kind, fields = WAYS[way]
    forbidden = [token for token in range(V) if token not in ALLOWED]
    generation = engines[kind].generate(PROMPT, suppress_tokens=forbidden, max_new_tokens=4, **fields)
    for completion in generation.completions:
        assert len(completion.token_ids) == 4
        assert set(completion.token_ids) <= ALLOWED
        assert completion.score is None or np.isfinite(completion.score)


@pytest.mark.parametrize("way", [way for way in WAYS if "beams" in way])
def test_there_are_as_many_beams_as_lines_that_may_come(engines: dict[str, Engine], way: str) -> None:
    kind, fields = WAYS[way]
    forbidden = [token for token in range(V) if token not in {7, 8}]
    fields = fields | {"suppress_tokens": forbidden, "max_new_tokens": 2, "num_return_sequences": 6}
    if "top_k" in fields:
        fields["top_k"] = 0
    lines = [tuple(completion.token_ids) for completion in engines[kind].generate(PROMPT, **fields).completions]
    if "diverse" in way:  # groups may find the same
        assert set(lines) <= {(7, 7), (7, 8), (8, 7), (8, 8)}
        assert len(lines) == 6
    elif "filtered" in way:
        assert 0 < len(lines) == len(set(lines)) <= 4
    else:
        assert sorted(lines) == [(7, 7), (7, 8), (8, 7), (8, 8)]


def dead_after(token: int) -> Any:
    """A processor that leaves nothing in sequences that end with a token."""

    def processor(history: History, logits: np.ndarray, xp: Any) -> np.ndarray:
        logits[history.token_ids[history.starts[1:] - 1] == token] = -xp.inf
        return logits

    return processor


@pytest.mark.parametrize("fields", [{}, {"renormalize_logits": True}, SAMPLED, FILTERED], ids=str)
def test_a_beam_without_a_token_ends_and_the_others_go_on(engines: dict[str, Engine], fields: dict[str, Any]) -> None:
    engine = engines["plain"]
    fields = fields | {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 5}
    second = engine.generate(PROMPT, **fields).completions[0].token_ids[1]
    for completion in engine.generate(PROMPT, logits_processor=[dead_after(second)], **fields).completions:
        assert len(completion.token_ids) == 5
        assert second not in completion.token_ids[:-1]


@pytest.mark.parametrize("groups", [{}, {"num_beam_groups": 2, "diversity_penalty": 1.0}], ids=["beams", "diverse"])
def test_what_has_finished_counts_when_no_beam_is_left(engines: dict[str, Engine], groups: dict[str, Any]) -> None:
    """Token 8 ends the sequence, and nothing may follow token 7."""
    forbidden = [token for token in range(V) if token not in {7, 8}]
    generation = engines["plain"].generate(
        PROMPT, suppress_tokens=forbidden, eos_token_id=8, logits_processor=[dead_after(7)], num_beams=4, **groups
    )
    assert generation.token_ids == [8]
    assert generation.completions[0].finish_reason == "stop"


def test_a_draft_that_nothing_may_follow_is_only_a_guess(engines: dict[str, Engine]) -> None:
    """The draft model goes where the target does not: there the processors may leave nothing."""
    plain = engines["plain"].generate(PROMPT, max_new_tokens=12).token_ids
    said: set[int] = set()

    def spy(history: History, logits: np.ndarray, xp: Any) -> np.ndarray:
        last = history.token_ids[history.starts[1:] - 1]
        said.update(int(token) for token in last)
        logits[~xp.isin(last, xp.asarray([*plain, *PROMPT]))] = -xp.inf
        return logits

    assert engines["draft"].generate(PROMPT, max_new_tokens=12, logits_processor=[spy]).token_ids == plain
    assert said - {*plain, *PROMPT}, "the draft always guessed what the target says"


@pytest.mark.parametrize("fields", [SAMPLED, FILTERED], ids=["plain", "filtered"])
def test_such_a_draft_can_be_drawn(engines: dict[str, Engine], fields: dict[str, Any]) -> None:
    settings = (
        engines["draft"].request(PROMPT, suppress_tokens=[7], logits_processor=[dead_after(3)], **fields).settings
    )
    logits = np.random.default_rng(0).standard_normal((2, V)).astype(np.float32)
    scores = Distribution(settings)(TokenSampler(), history(([1], [3]), ([1], [2])), logits)
    assert np.isfinite(scores.max(axis=-1)).all()
    assert scores[1, 7] == -np.inf


def test_rows_whose_first_tokens_are_forbidden_have_others(engines: dict[str, Engine]) -> None:
    """Beside one that has none: a row is looked at in part before it is looked at whole."""
    engine, forbidden = engines["plain"], [*range(FEW + 100)]
    wanted = [{"suppress_tokens": forbidden}, {"forced_eos_token_id": 5, "suppress_tokens": [5]}, SAMPLED]
    ids = [engine.add(PROMPT, max_new_tokens=4, eos_token_id=[], **fields) for fields in wanted]
    tokens: dict[Any, list[int]] = {request_id: [] for request_id in ids}
    errors = {}
    while engine.busy:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            if event.error is not None:
                errors[event.request_id] = str(event.error)
    assert [len(tokens[request_id]) for request_id in ids] == [4, 3, 4]
    assert min(tokens[ids[0]]) >= FEW + 100
    assert list(errors) == [ids[1]]
    assert "forbid every token" in errors[ids[1]]


def test_a_sum_that_is_no_number_is_named() -> None:
    request = request_for([1], vocab_size=4, num_beams=2)
    for bad in (np.nan, np.inf):
        search = BeamSearch(request.settings)
        search.processors = (lambda history, logits, xp, bad=bad: np.where(logits == logits.max(), bad, logits),)
        state, _ = search.begin(request)
        with pytest.raises(NumericalError, match=f"beam search is {bad}, not a finite number"):
            search.step(TokenSampler(), [state], Rows(np.asarray([[0.0, 1.0, 2.0, 3.0]], np.float32), [0, 1]))


def test_a_row_is_empty_when_all_of_it_is_forbidden() -> None:
    rows = np.asarray([[-np.inf, -np.inf], [-np.inf, 0.0], [np.nan, -np.inf]], np.float32)
    assert rows_without_a_token(rows, np).tolist() == [True, False, False]
