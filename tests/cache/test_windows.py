"""Layers with a window keep the pages that a query can see: the same results, and every page's users counted."""

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.batch import TokenSequence
from minillm.cache import Concurrency, PagedCache, new_cache
from minillm.cache.prefix_files import PrefixPages, read_file, read_pages, to_file
from minillm.cache.windows import WindowPages
from minillm.engine.loading import affordable_pages
from minillm.engine.prefixes import put
from minillm.errors import CacheFullError
from minillm.models import config_of
from minillm.runner.runner import Runner

from ..models import test_gemma3_text, test_mistral
from ..tiny import generate, logits_of, model_of, runner_of
from .books import check_books

P = 4
SOME: dict[str, Any] = test_gemma3_text.CONFIG | {"sliding_window": 6, "num_hidden_layers": 3}
"""Two of three layers have a window"""
ALL: dict[str, Any] = test_mistral.CONFIG | {"sliding_window": 5}
"""All layers have one: the pages of the others take no memory"""
LINE = np.random.default_rng(0).integers(3, 96, 60).tolist()


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A margin that short texts outgrow."""
    for module in ("windows", "paged", "prefix"):
        monkeypatch.setattr(f"minillm.cache.{module}.MARGIN", 2)
    return


def windowed(
    raw: dict[str, Any],
    backend: Backend | None = None,
    *,
    pages: int = 60,
    prefix_cache: bool = False,
    frugal: bool = False,
) -> Runner:
    backend = backend or NumpyBackend()
    runner = runner_of(
        model_of(raw, seed=3, backend=backend), pages=pages, page_size=P, backend=backend, concurrency=Concurrency(3, 8)
    )
    runner.cache.prefix_cache = prefix_cache
    for window in runner.cache.windows:
        window.frugal = frugal
    return runner


def whole(runner: Runner) -> Runner:
    """A runner of the same model that keeps all positions."""
    return runner_of(runner.model, pages=60, page_size=P, backend=runner.backend)


def poison(cache: PagedCache) -> None:
    """Write NaN to all that no query may read: parts and pages that are free, and what precedes the windows."""
    free = [*cache._free, *cache._unbacked]
    cache.storage.keys[:, free] = cache.storage.values[:, free] = np.nan
    for window in cache.windows:
        taken = {part for part in window.parts if part >= 0}
        free = [part for part in range(window.num_parts) if part not in taken]
        window.storage.keys[:, free] = window.storage.values[:, free] = np.nan


def limit_parts(window: WindowPages, count: int) -> None:
    """Let a group of layers have so many parts, which are not used yet."""
    window.num_parts, window._unbacked = count, window._unbacked[-count:]


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("raw", "layers"), [(SOME, (1, 2)), (ALL, (0, 2))])
def test_a_long_text_takes_the_pages_of_its_window(raw: dict[str, Any], layers: tuple[int, int]) -> None:
    runner = windowed(raw)
    [window] = runner.cache.windows
    assert (len(runner.cache.storage.keys), len(window.storage.keys)) == layers
    sequence = TokenSequence(LINE[:8])
    for token in LINE[8:50]:
        runner.prefill(sequence)
        sequence.token_ids.append(token)
        poison(runner.cache)
        check_books(runner.cache, [sequence])
        assert window.num_parts - window.free_parts <= 3  # 6 positions and 2 before them
    np.testing.assert_allclose(
        runner.prefill(sequence).logits[0], logits_of(runner, sequence.token_ids)[-1], rtol=0, atol=1e-4
    )
    assert (len(sequence.pages), window.backed) == (13, 3)
    runner.cache.free(sequence)
    check_books(runner.cache, [])


def test_a_cache_of_several_groups_goes_with_its_last_reference() -> None:
    """Its memory need not wait for the collector of circles, which a device's memory does not set off."""
    config = config_of(SOME)
    gc.disable()
    try:
        cache = new_cache(PagedCache, config, NumpyBackend(), 4, 16)
        pages = [weakref.ref(group) for group in cache.storage.groups]
        del cache
        assert len(pages) == 2 and not any(reference() for reference in pages)
    finally:
        gc.enable()


def test_a_prompt_in_chunks_leaves_what_is_behind_it() -> None:
    runner = windowed(SOME)
    sequence, rows = TokenSequence(LINE[:50]), []
    while sequence.pending:
        rows.append(runner.forward([sequence], [10], rows=range(10)).logits.copy())
        poison(runner.cache)
    np.testing.assert_allclose(np.concatenate(rows), logits_of(runner, LINE[:50]), rtol=0, atol=1e-4)
    assert runner.cache.windows[0].backed < 8


def test_the_same_bits_as_with_all_positions() -> None:
    """On the C kernels: a prompt in chunks, then forks that go on by one token, in recorded steps."""
    for raw in (SOME, ALL):
        runner = windowed(raw, CpuBackend())
        results = []
        for each in (runner, whole(runner)):
            sequence = TokenSequence(LINE[:30])
            rows = [each.forward([sequence], [count]).logits.copy() for count in (13, 17)]
            live = [sequence, each.cache.fork(sequence)]
            for token in LINE[30:45]:
                for i, member in enumerate(live):
                    member.token_ids.append(token + i)
                rows.append(each.decode(live).logits.copy())
                poison(each.cache)
            results.append(np.concatenate(rows))
        np.testing.assert_array_equal(*results)
        assert all(step.complete for step in runner.backend.memory._steps[runner].values())
        assert runner.cache.windows[0].backed < 12 <= len(sequence.pages)


# --- going back -------------------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.parametrize("raw", [SOME, ALL])
def test_going_back_within_the_margin_keeps_and_beyond_computes_again(raw: dict[str, Any]) -> None:
    runner = windowed(raw)
    for back in (0, 2, 3, 27):
        sequence = TokenSequence(LINE[:40])
        while sequence.pending:
            runner.forward([sequence], [min(2, sequence.pending)])
        fork = runner.cache.fork(sequence, 40 - back)
        runner.cache.truncate(sequence, 40 - back)
        for member in (sequence, fork):
            assert member.token_ids == LINE[: 40 - back]
            assert member.cached == (40 - back if back <= 2 else member.cached)
            assert member.cached in (0, 40 - back)
            member.token_ids += [7, 8]
            logits = runner.prefill(member).logits[0]
            np.testing.assert_allclose(logits, logits_of(runner, [*LINE[: 40 - back], 7, 8])[-1], rtol=0, atol=1e-4)
        check_books(runner.cache, [sequence, fork])
        runner.cache.free(sequence)
        runner.cache.free(fork)


# --- prompts with the same beginning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [SOME, ALL])
def test_a_prompt_takes_over_only_what_is_whole(raw: dict[str, Any]) -> None:
    runner = windowed(raw, prefix_cache=True)
    first = TokenSequence(LINE[:40])
    while first.pending:
        runner.forward([first], [1])
    runner.cache.retire(first)
    for common, least in ((40, 40), (39, 36), (24, 0)):  # its last pages are kept longest
        prompt = TokenSequence([*LINE[:common], 5, 6])
        reused = runner.cache.match(prompt)
        assert least <= reused <= common
        logits = runner.prefill(prompt).logits[0]
        np.testing.assert_allclose(logits, logits_of(runner, [*LINE[:common], 5, 6])[-1], rtol=0, atol=1e-4)
        check_books(runner.cache, [prompt])
        runner.cache.free(prompt)


def test_a_part_that_a_copy_needs_is_not_given_away_for_the_copy() -> None:
    """The prompt goes on in the middle of a page that nobody uses, when no other part is free."""
    runner = windowed(ALL, prefix_cache=True)
    window = runner.cache.windows[0]
    window._planned = 3
    limit_parts(window, 3)
    text, other = TokenSequence(LINE[:7]), TokenSequence([3])
    runner.prefill(text)
    runner.cache.retire(text)
    runner.prefill(other)
    prompt = TokenSequence([*LINE[:6], 9])
    assert (runner.cache.match(prompt), window.free_parts) == (6, 0)
    check_books(runner.cache, [prompt, other])
    logits = runner.prefill(prompt).logits[0]
    np.testing.assert_allclose(logits, logits_of(runner, prompt.token_ids)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("raw", [SOME, ALL])
def test_a_prefix_in_a_file_has_its_last_window(raw: dict[str, Any], tmp_path: Path) -> None:
    origin = dict.fromkeys(("backend", "weights", "cache", "page_size", "deterministic", "model", "adapter"), "")
    runner = windowed(raw, prefix_cache=True, frugal=True)
    text = TokenSequence(LINE[:38])
    while text.pending:
        runner.forward([text], [1])
    pages = PrefixPages(LINE[:38], read_pages(runner.cache, text.pages))
    assert pages.arrays["keys"].shape[1] == 10
    assert 3 <= pages.arrays["keys.1"].shape[1] <= 6
    path = tmp_path / "prefix.safetensors"
    path.write_bytes(to_file(pages, origin, {}))
    other = windowed(raw, prefix_cache=True)
    loaded, _, _ = read_file(path, other.cache, lambda _: origin)
    put(other.cache, loaded, None)
    check_books(other.cache, [])
    poison(other.cache)
    prompt = TokenSequence([*LINE[:38], 5])
    assert other.cache.match(prompt) == 38
    np.testing.assert_allclose(
        other.prefill(prompt).logits[0], logits_of(other, prompt.token_ids)[-1], rtol=0, atol=1e-4
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def test_parts_run_out_after_pages() -> None:
    """A cache for two sequences, three that run: the third says what is full, and what there was goes on."""
    runner = runner_of(model_of(ALL, seed=3), pages=60, page_size=P, concurrency=Concurrency(2, 4))
    limit_parts(runner.cache.windows[0], 9)  # as on a device, whose memory is reserved at once
    texts = [TokenSequence(LINE[:8]) for _ in range(4)]
    for text in texts:
        runner.prefill(text)
    texts[0].token_ids += LINE[8:20]
    with pytest.raises(CacheFullError, match="9 pages of layers with a window are all in use"):
        runner.prefill(texts[0])
    check_books(runner.cache, texts)
    runner.cache.free(texts.pop())
    texts[0].token_ids = texts[0].token_ids[:9]
    np.testing.assert_allclose(
        runner.prefill(texts[0]).logits[0], logits_of(runner, texts[0].token_ids)[-1], rtol=0, atol=1e-4
    )


def test_a_budget_buys_more_positions_where_windows_are_kept() -> None:
    backend = NumpyBackend()
    config = model_of(SOME | {"max_position_embeddings": 4096}).config
    page = affordable_bytes(config, backend, 1)
    kept = affordable_pages(config, backend, 1, 20 * page, tokens=128)
    assert affordable_pages(config, backend, 1, 20 * page) == 20
    assert kept == 33 == 4096 // 128 + 1  # a full context: 33 pages of one layer in three, and 4 of the others


def affordable_bytes(config: Any, backend: Backend, pages: int) -> int:
    return pages * config.num_layers * backend.memory.position_bytes(config.num_kv_heads, config.head_dim) * 128


# --- anything at all --------------------------------------------------------------------------------------------------


class Player:
    """Random texts that begin alike, forked, cut, freed and retired; every result as without a cache."""

    ACTIONS = ("begin", "compute", "compute", "compute", "fork", "cut", "end", "end", "forget", "trim")

    def __init__(self, runner: Runner, seed: int) -> None:
        self.rng, self.runner, self.cache = random.Random(seed), runner, runner.cache
        self.live: list[TokenSequence] = []

    def play(self, steps: int) -> None:
        for _ in range(steps):
            action = self.rng.choice(self.ACTIONS)
            getattr(self, action if self.live else "begin")()
            self.live = [text for text in self.live if text.token_ids]
            check_books(self.cache, self.live)
            poison(self.cache)

    def begin(self) -> None:
        if len(self.live) < 5:
            words = [self.rng.choice(((5, 6), (7, 8, 9))) for _ in range(self.rng.randint(1, 12))]
            self.live.append(TokenSequence([token for word in words for token in word]))
            self.cache.match(self.live[-1])

    def compute(self) -> None:
        for text in self.live:
            if not text.pending and len(text.token_ids) < 50:
                text.token_ids += [self.rng.choice((5, 7)) for _ in range(self.rng.randint(1, 3))]
        due = [text for text in self.live if text.pending and self.rng.random() < 0.7]
        if due:
            logits = self.runner.forward(due, [self.rng.randint(1, text.pending) for text in due]).logits
            for text, row in zip(due, logits, strict=True):
                expected = logits_of(self.runner, text.token_ids[: text.cached])[-1]
                np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4)

    def _place(self, text: TokenSequence) -> int:
        """A position near the end, or anywhere."""
        return self.rng.randint(max(0, text.cached - self.rng.choice((3, 30))), text.cached)

    def fork(self) -> None:
        text = self.rng.choice(self.live)
        spares = [other for other in self.live if other is not text and self.rng.random() < 0.3]
        self.live.append(self.cache.fork(text, self._place(text), spares))
        self.live[-1].token_ids.append(self.rng.choice((5, 7)))
        for spare in spares:
            self.live.remove(spare)
            self.cache.free(spare)

    def cut(self) -> None:
        text = self.rng.choice(self.live)
        self.cache.truncate(text, self._place(text))

    def forget(self) -> None:
        self.cache.forget(self.rng.choice(self.live))

    def trim(self) -> None:
        self.cache.trim()
        assert not self.cache._free

    def end(self) -> None:
        text = self.live.pop(self.rng.randrange(len(self.live)))
        self.rng.choice((self.cache.free, self.cache.retire))(text)


@pytest.mark.parametrize("prefix_cache", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("raw", [SOME, ALL])
@pytest.mark.parametrize(
    "seed",
    [1, *(pytest.param(n, marks=pytest.mark.slow if n < 5 else pytest.mark.exhaustive) for n in range(2, 12))],
)
def test_random_forks_and_cuts_keep_the_books_and_the_results(
    raw: dict[str, Any], seed: int, prefix_cache: bool
) -> None:
    Player(windowed(raw, prefix_cache=prefix_cache, frugal=seed % 2 == 1), seed).play(120)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [SOME, ALL])
@pytest.mark.parametrize("seed", range(1, 6))
def test_random_forks_and_cuts_on_the_kernels(raw: dict[str, Any], seed: int) -> None:
    Player(windowed(raw, CpuBackend(), prefix_cache=True), seed).play(120)


@pytest.mark.parametrize("raw", [SOME, pytest.param(ALL, marks=pytest.mark.slow)])
def test_strategies_that_fork_and_go_back_find_the_same(raw: dict[str, Any]) -> None:
    kinds: list[dict[str, Any]] = [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"penalty_alpha": 0.5, "top_k": 3},
    ]
    runner, prompts = windowed(raw), [LINE[:20], LINE[5:9] * 4]
    for fields in kinds:
        kept, expected = (generate(each, prompts, max_new_tokens=12, **fields) for each in (runner, whole(runner)))
        assert kept == expected
