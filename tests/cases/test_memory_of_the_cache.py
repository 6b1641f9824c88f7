"""The K/V cache takes the memory that what runs needs, and one property tells the longest text that it holds."""

from pathlib import Path

import pytest

from minillm import Engine
from minillm.backends.memory import Memory
from minillm.backends.numpy import NumpyBackend
from minillm.cache import PrefixCache
from minillm.cache.prefix import KEPT_TIMES
from minillm.engine.loading import affordable_pages
from minillm.engine.loop import StepLoop
from minillm.engine.scheduler import Limits
from minillm.errors import CacheFullError
from minillm.runner.runner import Runner

from .. import seq2seq
from ..cache.books import check_loop
from ..tiny import request_for, run, tiny_model

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "sequences", "contexts"),
    [
        (10_000, 16, 16.0),  # all contexts take less than an eighth
        (64, 16, 8.0),  # an eighth of the memory
        (64, 3, 3.0),
        (6, 16, 1.0),  # a full context is more than an eighth, and less than half
        (1, 16, 0.5),  # half of the memory does not hold one
    ],
)
def test_a_default_cache_is_what_the_batch_needs_and_at_most_an_eighth_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, sequences: int, contexts: float
) -> None:
    """`free` memory and the pages of the cache are in full contexts."""
    config, backend = tiny_model(max_position_embeddings=16 * 128 - 1).config, NumpyBackend()
    context = 16 * PrefixCache(config, backend, 1).storage.nbytes
    monkeypatch.setattr(Memory, "free_bytes", lambda self: free * context)
    assert affordable_pages(config, backend, sequences, None) == 16 * contexts
    assert affordable_pages(config, backend, 16, 5 * context) == 5 * 16, "what the user gives counts alone"


def test_processes_share_the_memory_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config, backend = tiny_model(max_position_embeddings=16 * 128 - 1).config, NumpyBackend()
    context = 16 * PrefixCache(config, backend, 1).storage.nbytes
    monkeypatch.setattr(Memory, "free_bytes", lambda self: 64 * context)
    assert affordable_pages(config, backend, 16, None, processes=4) == 2 * 16
    assert affordable_pages(config, backend, 16, 5 * context, processes=4) == 5 * 16


def test_memory_of_a_gpu_is_shared_by_halves_since_it_is_taken_at_once() -> None:
    from minillm.backends.cuda.memory import CudaMemory

    assert (Memory.cache_share, CudaMemory.cache_share) == (8, 2)
    assert (Memory.committed_late, CudaMemory.committed_late) == (True, False)


def pages_begun(
    *, frugal: bool, texts: int, length: int, new: int = 1, at_once: int = 1, prefix_cache: bool = True
) -> int:
    """The pages that have ever been used, of 1,000, after so many texts."""
    model, backend = tiny_model(max_position_embeddings=1024), NumpyBackend()
    cache = PrefixCache(model.config, backend, 1000, 64, prefix_cache=prefix_cache, frugal=frugal)
    loop = StepLoop({"target": Runner(model, backend, cache)}, Limits(at_once, 2048, 2048))
    run(loop, [request_for([3 + i % 90, 3 + i // 90] * (length // 2), max_new_tokens=new) for i in range(texts)])
    check_loop(loop)
    return cache.backed_pages


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> int:
    """The pages that ended texts keep in any case."""
    monkeypatch.setattr("minillm.cache.prefix.KEPT_POSITIONS", 16 * 64)
    return 16


@pytest.mark.longer
def test_pages_of_ended_texts_are_used_again_before_memory_is_taken_for_the_first_time(kept: int) -> None:
    assert pages_begun(frugal=False, texts=40, length=100) == 80, "each text stays known"
    assert pages_begun(frugal=True, texts=40, length=100) == kept + 1
    assert pages_begun(frugal=True, texts=6, length=100) == 12, "few texts stay known"
    assert pages_begun(frugal=True, texts=40, length=100, prefix_cache=False) == 2


@pytest.mark.slow
def test_what_runs_at_once_takes_all_that_it_needs_and_ended_texts_keep_twice_as_much(kept: int) -> None:
    used = 4 * 5
    assert KEPT_TIMES * used > kept
    begun = pages_begun(frugal=True, texts=30, length=250, new=20, at_once=4)
    assert KEPT_TIMES * used < begun <= (KEPT_TIMES + 1) * used


@pytest.mark.longer
def test_a_frugal_cache_still_holds_as_many_texts_as_it_has_pages() -> None:
    """It keeps little of ended texts, and refuses none that run."""
    model, backend = tiny_model(max_position_embeddings=512), NumpyBackend()
    cache = PrefixCache(model.config, backend, 16, 64, frugal=True)
    loop = StepLoop({"target": Runner(model, backend, cache)}, Limits(8, 512, 512))
    for turn in range(4):
        requests = [request_for([3 + i, 4 + turn] * 60, max_new_tokens=3) for i in range(8)]
        results = run(loop, requests)
        assert [len(result.token_ids) for (result,) in results] == [3] * 8
    check_loop(loop)


def test_only_a_default_cache_is_frugal(monkeypatch: pytest.MonkeyPatch) -> None:
    for fields, frugal in (({}, True), ({"cache_bytes": 1 << 24}, False)):
        with Engine(max_batch_size=1, **fields) as engine:  # type: ignore[arg-type]
            assert engine.runner.cache._frugal is frugal  # type: ignore[attr-defined]
    monkeypatch.setattr(Memory, "committed_late", False)
    with Engine(max_batch_size=1, backend="numpy") as engine:
        assert engine.runner.cache._frugal is False  # type: ignore[attr-defined]


def test_a_cleared_cache_uses_the_memory_that_it_has() -> None:
    cache = PrefixCache(tiny_model().config, NumpyBackend(), 9, 4)
    pages = [cache._take() for _ in range(5)]
    cache.clear()
    assert cache.free_pages == 9
    assert {cache._take() for _ in range(5)} == set(pages)


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("pages", "context"), [(2, 256), (3, 384), (4, 512), (40, 512)])
def test_the_context_of_an_engine_is_what_fits(pages: int, context: int) -> None:
    """The demo model has 512 positions, and a page 128."""
    with Engine(max_batch_size=1) as engine:
        page = engine.runner.cache.storage.nbytes // engine.runner.cache.num_pages
    with Engine(max_batch_size=16, cache_bytes=pages * page) as engine:
        assert engine.config.max_positions == 512
        assert engine.context == engine.summary()["context"] == context
        prompt = [5] * (context - 4)
        result = engine.generate(prompt, max_new_tokens=4, eos_token_id=[])
        assert len(result.token_ids) == 4
        if context < 512:
            with pytest.raises(CacheFullError):
                engine.generate(prompt, max_new_tokens=5, eos_token_id=[])


def test_the_context_of_an_encoder_decoder_is_what_fits_beside_its_longest_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "page_size", 8)
    folder = seq2seq.write_checkpoint(tmp_path / "model")
    with Engine(folder, max_batch_size=1, backend="numpy") as engine:
        assert engine.context == engine.config.max_positions > 8
        cache, source = engine.runner.cache, engine.config.max_source_positions
        page = cache.storage.nbytes // cache.num_pages
        pages = cache.pages_for(source) + 1
    with Engine(folder, max_batch_size=1, backend="numpy", cache_bytes=pages * page) as engine:
        assert engine.context == 8
        result = engine.generate([5] * 20, max_new_tokens=7, eos_token_id=[])
        assert len(result.token_ids) == 7
