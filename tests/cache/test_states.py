"""States beside pages: whatever happens to a sequence, it goes on as a text that is computed in one go."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minillm.backends.states import SLOTS_PER_SEQUENCE, state_bytes
from minillm.batch import TokenSequence
from minillm.cache import PrefixCache, new_cache
from minillm.cache.prefix_files import PrefixPages, read_file, read_pages, to_file
from minillm.cache.states import StateCache, StatePrefixCache
from minillm.decoding.strategy import Feed
from minillm.engine.prefixes import put
from minillm.errors import CacheFullError, NumericalError
from minillm.runner.runner import Runner

from ..families import CONFIGS
from ..tiny import logits_of, loop_of, model_of, request_for, run, runner_of
from .books import check_books

P = 4
RAW = CONFIGS["lfm2"]["grouped"] | {"max_position_embeddings": 128}
DELTA_NETS = CONFIGS["qwen3_5_text"]["grouped"] | {"max_position_embeddings": 128}
MAMBAS = CONFIGS["granitemoehybrid"]["two groups"] | {"max_position_embeddings": 128}
BESIDE_ATTENTION = CONFIGS["falcon_h1"]["all factors"] | {"max_position_embeddings": 128}
"""All three have layers that keep two arrays each; the last one's keep keys and values too"""
LINE = np.random.default_rng(0).integers(3, 96, 60).tolist()


def state_runner(pages: int = 24, slots: int | None = None, raw: dict[str, Any] = RAW, **fields: Any) -> Runner:
    """Pages of four positions, and a snapshot at each border."""
    runner = runner_of(model_of(raw | fields, seed=2), pages=pages, page_size=P)
    cache = StatePrefixCache(runner.model.config, runner.backend, pages, P, slots=slots)
    cache.whole_positions = P
    runner.cache = cache
    return runner


def cache_of(runner: Runner) -> StatePrefixCache:
    assert isinstance(runner.cache, StatePrefixCache)
    return runner.cache


def check(runner: Runner, sequences: Iterable[TokenSequence]) -> None:
    """Pages as in any cache; each slot is free, or has as many references as sequences and snapshots have to it."""
    sequences, cache = list(sequences), cache_of(runner)
    check_books(cache, sequences)
    slots = cache.slots
    owned = Counter(slots.of_page.values())
    for sequence in sequences:
        state = sequence.state
        if state is None:
            assert not sequence.cached
            continue
        assert not state.planned
        assert len(state.known) <= 2
        assert not sequence.cached or sequence.tree or state.known[-1][0] == sequence.cached
        owned.update(slot for _, slot in state.known)
    assert [owned[slot] for slot in range(slots.count)] == [slots.references(slot) for slot in range(slots.count)]
    assert sorted(slots._free) == [slot for slot in range(slots.count) if not owned[slot]]


def computed(runner: Runner, sequence: TokenSequence) -> TokenSequence:
    """A sequence whose tokens are computed; the last one's logits are those of the text alone."""
    expected = logits_of(runner, sequence.token_ids)[-1]
    np.testing.assert_allclose(runner.prefill(sequence).logits[0], expected, rtol=0, atol=1e-4)
    return sequence


def found(runner: Runner, tokens: list[int]) -> int:
    """Number of tokens that a prompt finds; its next logits are right."""
    sequence = TokenSequence(list(tokens))
    count = runner.cache.match(sequence)
    assert count == sequence.cached == sequence.reused
    runner.cache.free(computed(runner, sequence))
    return count


# --- truncation, forks ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 12, 13, 14])
@pytest.mark.parametrize("last", [1, 2, 6])
def test_a_truncated_sequence_goes_on_from_the_last_state_that_it_has(keep: int, last: int) -> None:
    """A chunk, then a pass of some tokens more; the snapshots at 4, 8 and 12 are of the borders between."""
    runner = state_runner()
    sequence = computed(runner, TokenSequence(LINE[: 14 - last]))
    sequence.token_ids += LINE[14 - last : 14]
    computed(runner, sequence)
    runner.cache.truncate(sequence, keep)
    states = {0, 4, 8, 12, 14, 14 - last}
    assert sequence.cached == max(state for state in states if state <= keep)
    assert sequence.token_ids == LINE[:keep]
    sequence.token_ids += [5, 6]
    check(runner, [computed(runner, sequence)])


@pytest.mark.longer
def test_rejected_guesses_cost_the_accepted_ones_and_no_more() -> None:
    """Three guesses at a time, of which none or one is right: the text is never computed again from further back."""
    runner = state_runner(pages=64)
    cache_of(runner).whole_positions = 1 << 20
    [sequence] = runner.place([], [Feed(tuple(LINE[:10]))])
    computed(runner, sequence)
    for step in range(20):
        keep = len(sequence.token_ids) - (0 if not step else 2 + step % 2)
        [sequence] = runner.place([sequence], [Feed((7, 1, 2, 3), parent=0, keep=keep)])
        assert sequence.pending <= 4 + (2 - step % 2 if step else 0)
        computed(runner, sequence)
        check(runner, [sequence])


def test_forks_share_slots_and_copy_none() -> None:
    runner = state_runner()
    trunk = computed(runner, TokenSequence(LINE[:10]))
    in_use = cache_of(runner).slots.in_use
    twins = [runner.cache.fork(trunk) for _ in range(3)]
    assert cache_of(runner).slots.in_use == in_use
    for i, twin in enumerate(twins):
        twin.token_ids.append(20 + i)
        computed(runner, twin)
    shorter = runner.cache.fork(trunk, 7)
    assert (shorter.cached, shorter.token_ids) == (4, LINE[:7])
    shorter.token_ids.append(9)
    check(runner, [trunk, *twins, computed(runner, shorter)])


def test_a_pass_that_fails_leaves_the_state_as_it_was() -> None:
    runner = state_runner()
    sequence = computed(runner, TokenSequence(LINE[:10]))
    sequence.token_ids += LINE[10:15]
    weight = runner.model.layers[-1].mlp.down.data  # type: ignore[attr-defined]
    before = weight.copy()
    weight[...] = np.nan
    for _ in range(2):
        with pytest.raises(NumericalError, match=r"in layer 2, made by linear"):
            runner.prefill(sequence)
    weight[...] = before
    check(runner, [computed(runner, sequence)])


def test_a_tree_of_guesses_leaves_the_state_before_it() -> None:
    runner = state_runner()
    sequence = TokenSequence([*LINE[:10], 4, 9, 8, 5], tree=(-1, 0, 0, -1))
    runner.forward([sequence], [sequence.pending], rows=range(13, 14))
    check(runner, [sequence])
    [sequence] = runner.place([sequence], [Feed((4, 8, 3), parent=0, keep=10)])
    assert sequence.cached == 10
    check(runner, [computed(runner, sequence)])


def test_the_sequences_of_an_engine_always_find_a_slot() -> None:
    """With slots for four sequences and none for snapshots."""
    runner = state_runner(pages=60, slots=4 * SLOTS_PER_SEQUENCE)
    sequences = [computed(runner, TokenSequence(LINE[: 5 + i])) for i in range(4)]
    for step in range(12):
        sequences = runner.place(sequences, [Feed((5 + i, 7 + step), parent=i if step % 3 else 0) for i in range(4)])
        runner.forward(sequences, [sequence.pending for sequence in sequences])
        check(runner, sequences)
    with pytest.raises(CacheFullError, match="all 16 slots for states are in use: lower max_batch_size"):
        for _ in range(16):
            sequences.append(TokenSequence(LINE[:3]))
            runner.prefill(sequences[-1])


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_prompt_finds_whole_pages_up_to_the_last_with_a_state() -> None:
    runner = state_runner()
    runner.cache.retire(computed(runner, TokenSequence(LINE[:14])))
    assert [found(runner, LINE[:n]) for n in (3, 4, 5, 12, 13, 20)] == [0, 0, 4, 8, 12, 12]
    slots = cache_of(runner).slots
    slots.drop(list(slots.of_page)[2])
    assert found(runner, LINE[:11]) == 8
    check(runner, [])


def test_single_tokens_leave_snapshots_too() -> None:
    runner = state_runner()
    sequence = computed(runner, TokenSequence(LINE[:3]))
    for token in LINE[3:17]:
        sequence.token_ids.append(token)
        runner.prefill(sequence)
    assert found(runner, LINE[:20]) == 16
    check(runner, [sequence])


def test_snapshots_give_way_to_sequences_and_their_texts_are_computed_again() -> None:
    runner = state_runner(slots=6)
    runner.cache.retire(computed(runner, TokenSequence(LINE[:18])))
    assert found(runner, LINE[:18]) == 16
    others = [computed(runner, TokenSequence([i, *LINE[:2]])) for i in (5, 6, 7)]
    assert [found(runner, LINE[:n]) for n in (18, 7)] == [16, 0], "the one used last is left"
    others += [computed(runner, TokenSequence([i, *LINE[:2]])) for i in (8, 9, 10)]
    assert not cache_of(runner).slots.of_page
    check(runner, others)


def test_a_prompt_waits_for_another_only_if_that_reaches_a_border() -> None:
    """At least sixteen tokens in common are worth it, and as many as a border has before it."""
    runner = state_runner()
    leader, follower = TokenSequence(LINE[:40]), TokenSequence([*LINE[:30], 1, 2])
    assert runner.cache.computes_next(leader, 20, follower)
    cache_of(runner).whole_positions = 32
    assert not runner.cache.computes_next(leader, 20, follower)
    assert not runner.cache.computes_next(leader, 40, follower), "they differ before it"
    assert runner.cache.computes_next(leader, 40, TokenSequence([*LINE[:35], 1]))


def test_a_file_has_whole_pages_and_the_state_after_them(tmp_path: Path) -> None:
    runner, other = state_runner(), state_runner()
    runner.cache.retire(computed(runner, TokenSequence(LINE[:13])))
    text = TokenSequence(LINE[:12])
    runner.cache.match(text, 12)
    path = tmp_path / "prefix"
    path.write_bytes(to_file(PrefixPages(LINE[:12], read_pages(runner.cache, text.pages)), {}, {}))
    origin = dict.fromkeys(("backend", "weights", "cache", "page_size", "deterministic", "model", "adapter"))
    pages, _, _ = read_file(path, other.cache, lambda header: {name: header.get(name) for name in origin})  # type: ignore[misc]
    shapes = runner.model.config.layer_states
    states = {f"states.{i}.{j}": shape for i, layer in enumerate(shapes) for j, shape in enumerate(layer)}
    assert {name: array.shape for name, array in pages.arrays.items() if name in states} == states
    assert set(pages.arrays) == {"keys", "values", *states}
    put(cache_of(other), pages, None)
    assert found(other, LINE[:20]) == 12
    check(other, [])


# --- in any mix -------------------------------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "num_return_sequences": 3},
    {"penalty_alpha": 0.4, "top_k": 3},
    {"prompt_lookup_num_tokens": 3},
    {"num_assistant_tokens": 3, "models": ("draft",)},
    {"lookahead_window": 3},
    {"do_sample": True, "seed": 4, "num_return_sequences": 3},
]


@pytest.mark.parametrize(
    ("prefix_cache", "raw"),
    [
        (True, RAW),
        pytest.param(False, RAW, marks=pytest.mark.slow),
        pytest.param(True, DELTA_NETS, marks=pytest.mark.slow),
        pytest.param(True, MAMBAS, marks=pytest.mark.slow),
        pytest.param(True, BESIDE_ATTENTION, marks=pytest.mark.slow),
    ],
    ids=["found", "computed", "delta nets", "Mamba-2", "Mamba-2 beside attention"],
)
def test_every_strategy_has_the_tokens_of_a_run_alone_also_when_preempted(
    prefix_cache: bool, raw: dict[str, Any]
) -> None:
    rng = Random(3)
    requests = [request_for([*LINE[: 17 + i], 5 + i], max_new_tokens=8, **way) for i, way in enumerate(WAYS)]

    def new_loop() -> Any:
        runners = {"target": state_runner(200, raw=raw), "draft": state_runner(200, raw=raw, hidden_size=40)}
        return loop_of(prefix_cache=prefix_cache, headroom=4, **runners)

    alone = [run(new_loop(), [request])[0] for request in requests]
    loop, advance = new_loop(), None
    advance = loop.advance

    def advance_and_preempt() -> None:
        advance()
        for runner in loop.runners.values():
            name = next(name for name, its in loop.runners.items() if its is runner)
            check(runner, [sequence for r in loop.scheduler.running for sequence in r.live.get(name, ())])
        if rng.random() < 0.3 and loop.scheduler.running:
            loop.scheduler.preempt(rng.choice(loop.scheduler.running))

    loop.advance = advance_and_preempt
    together = run(loop, requests)
    assert loop.stats.preemptions > 1
    for ours, expected in zip(together, alone, strict=True):
        assert [result.token_ids for result in ours] == [result.token_ids for result in expected]
    assert cache_of(loop.runners["target"]).slots.in_use == len(
        set(cache_of(loop.runners["target"]).slots.of_page.values())
    )


SOON = (*range(1, 7), 27, 28, 30, 31)
"""Seeds that run in CI, some for each kind of layers"""


def trim_sometimes(runner: Runner, rng: Random) -> None:
    """Trim the cache; nobody may read what is free then."""
    if rng.random() < 0.2:
        runner.cache.trim()
        for array in cache_of(runner).states.arrays.values():
            array[[*cache_of(runner).slots.free]] = np.nan


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(n, marks=pytest.mark.slow if n in SOON else pytest.mark.exhaustive) for n in range(1, 33))],
)
def test_random_forks_and_truncations_of_random_texts(seed: int) -> None:
    rng = Random(seed)
    runner = state_runner(60, rng.choice([40, None]), raw=RAW if seed < 27 else MAMBAS if seed < 30 else DELTA_NETS)
    live: list[TokenSequence] = []
    for _ in range(60):
        if not live or (len(live) < 6 and rng.random() < 0.2):
            live.append(TokenSequence(LINE[: rng.randrange(1, 20)]))
            runner.cache.match(live[-1])
        sequence = rng.choice(live)
        action = rng.choice(["grow", "grow", "fork", "truncate", "free", "retire", "forget"])
        if action == "grow" or sequence.pending:
            sequence.token_ids += [rng.randrange(3, 6) for _ in range(rng.randrange(1, 4))]
            if len(sequence.token_ids) < 40:
                while sequence.pending:
                    count = rng.randrange(1, sequence.pending + 1)
                    expected = logits_of(runner, sequence.token_ids[: sequence.cached + count])[-1]
                    ours = runner.forward([sequence], [count]).logits[0]
                    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
            else:
                runner.cache.free(sequence)
                live.remove(sequence)
        elif action == "fork":
            if len(live) < 6:
                live.append(runner.cache.fork(sequence, rng.randrange(1, sequence.cached + 1)))
        elif action == "truncate":
            runner.cache.truncate(sequence, rng.randrange(1, sequence.cached + 1))
        elif action == "forget":
            runner.cache.forget(sequence)
        else:
            getattr(runner.cache, action)(sequence)
            live.remove(sequence)
        check(runner, live)
        trim_sometimes(runner, rng)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_slots_are_those_of_the_sequences_and_snapshots_as_large_as_the_pages_at_most() -> None:
    runner = state_runner()
    config, backend = runner.model.config, runner.backend
    state, page = 2 * 2 * 32 * 4, 1 * 2 * 2 * 8 * 4 * backend.memory.page_size
    assert state_bytes(config.layer_states) == state < page
    cache = new_cache(PrefixCache, config, backend, 10, sequences=3)
    assert isinstance(cache, StateCache)
    assert cache.slots.count == 3 * SLOTS_PER_SEQUENCE + 10
    assert cache.storage.nbytes == 10 * page + cache.slots.count * state
