"""The thinking budget: by definition, token by token, and in requests of every strategy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.decoding.thinking import MARKERS, ThinkingBudget, markers_of
from minillm.errors import ParameterError
from minillm.text.tokenizer import Tokenizer

from ..conversations import write_tokenizer
from ..tiny import write_checkpoint

BEGIN, END, TURN = 7, (8, 9), 11
FIELDS: dict[str, Any] = {"max_thinking_tokens": 5, "thinking_tokens": [BEGIN, END], "max_new_tokens": 14}
FIELDS["eos_token_id"] = []
OPEN = [40, 41, BEGIN, 42]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "top_k": 0, "num_return_sequences": 2},
    "order": {"do_sample": True, "seed": 3, "samplers": "llama.cpp"},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "seed": 2},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "mirostat": {"do_sample": True, "mirostat": 2, "seed": 1},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 4},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookahead": {"lookahead_window": 3},
}


def by_definition(line: list[int], most: int, begin: list[int], end: list[int], turn_ends: list[int]) -> int | None:
    """Reads the line from its beginning, as a machine with two states."""
    start, place = None, 0  # of the thoughts, if they are open
    while place < len(line):
        if start is None and line[place : place + len(begin)] == begin:
            start = place = place + len(begin)
        elif line[place : place + len(end)] == end:
            start, place = None, place + len(end)
        else:
            start = None if line[place] in turn_ends else start
            place += 1
    if start is None or len(line) - start < most:
        return None
    thoughts = line[start:]
    return end[max(n for n in range(len(end)) if n <= len(thoughts) and thoughts[len(thoughts) - n :] == end[:n])]


@pytest.mark.longer
def test_what_is_forced_is_what_the_definition_says() -> None:
    rng, forced = np.random.default_rng(6), 0
    for _ in range(4000):
        line = rng.integers(5, size=rng.integers(0, 14)).tolist()
        begin, end = [0], [[1], [1, 2], [1, 1, 2]][rng.integers(3)]
        most = int(rng.integers(0, 5))
        expected = by_definition(line, most, begin, end, [4])
        assert ThinkingBudget(most, (0,), tuple(end), (4,)).forced(np.asarray(line, np.int64)) == expected
        forced += expected is not None
    assert forced > 600


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("model"), seed=3), max_batch_size=8, prefix_cache=False)


@pytest.mark.parametrize("way", WAYS)
def test_thoughts_that_the_prompt_opened_end_after_the_budget(engine: Engine, way: str) -> None:
    for completion in engine.generate(OPEN, **FIELDS | WAYS[way]).completions:
        thoughts, rest = completion.token_ids[:4], completion.token_ids[4:]
        assert tuple(rest[:2]) == END  # token 42 of the prompt was the first of the five
        assert {*END}.isdisjoint(thoughts)
        assert len(rest) == 10


def test_thoughts_that_the_model_opens_end_too(engine: Engine) -> None:
    [plain] = engine.generate(OPEN[:2], max_new_tokens=14, eos_token_id=[]).completions
    begin = next(i for i, token in enumerate(plain.token_ids) if i > 1 and token not in plain.token_ids[:i])
    markers = [plain.token_ids[begin], END]
    fields = FIELDS | {"thinking_tokens": markers, "max_thinking_tokens": 3}
    [limited] = engine.generate(OPEN[:2], **fields).completions
    assert limited.token_ids[: begin + 4] == plain.token_ids[: begin + 4]
    assert tuple(limited.token_ids[begin + 4 : begin + 6]) == END
    [none] = engine.generate(OPEN[:2], **fields | {"max_thinking_tokens": 0}).completions
    assert tuple(none.token_ids[begin + 1 : begin + 3]) == END


def test_requests_of_a_batch_have_budgets_of_their_own_and_strangers_none(engine: Engine) -> None:
    fields = [FIELDS, FIELDS | {"max_thinking_tokens": 2}, {"max_new_tokens": 14, "eos_token_id": []}]
    fields.append(FIELDS | {"do_sample": True, "seed": 1})
    ids = [engine.add(OPEN, **each) for each in fields]
    tokens: dict[Any, list[int]] = {request_id: [] for request_id in ids}
    while engine.busy:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert [*tokens.values()] == [engine.generate(OPEN, **each).token_ids for each in fields]
    assert tuple(tokens[ids[1]][1:3]) == END
    assert BEGIN not in tokens[ids[2]]


def test_the_markers_of_a_vocabulary_are_known(tmp_path: Path) -> None:
    plain = Tokenizer.from_folder(write_tokenizer(tmp_path, ""))
    assert markers_of(plain) is markers_of(None) is None
    for begin, end in MARKERS:
        plain.added_ids = {begin: 500, end: 501}
        assert markers_of(plain) == ((500,), (501,))


def test_markers_that_cannot_be_are_refused(engine: Engine) -> None:
    for fields, words in (
        ({}, "max_thinking_tokens=5 needs thinking_tokens=.*<think> and </think>"),
        ({"thinking_tokens": [5, 512]}, "512 is not in the vocabulary of 512 tokens"),
        ({"thinking_tokens": ["ab", "ab"]}, "the same tokens"),
    ):
        with pytest.raises(ParameterError, match=words):
            engine.generate(OPEN, max_thinking_tokens=5, **fields)


def test_texts_are_markers_too(engine: Engine) -> None:
    assert engine.tokenizer is not None
    begin, end = (engine.tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
    fields = FIELDS | {"thinking_tokens": ["<think>", "</think>"], "max_thinking_tokens": 2, "max_new_tokens": 20}
    got = engine.generate([40, *begin, 41], **fields).token_ids
    assert got[1 : 1 + len(end)] == end
