"""Memory that is given back to the system: whole pages of it, of what nobody uses, and nothing else."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.backends.stored_vectors import StoredVectors, reserve, trim
from minillm.batch import TokenSequence
from minillm.cache import PrefixCache
from minillm.runner.runner import Runner

from ..tiny import logits_of, tiny_model
from .books import check_books

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="Linux gives memory back")

LINE = np.random.default_rng(0).integers(3, 96, 500).tolist()
WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 1, "word_embed_proj_dim": 64}
"""A page of 16 positions takes a page of the system, in each layer: 16 * 64 * 4 bytes"""


def resident_bytes(array: Any) -> int:
    """Bytes that the system provides for an array of `reserve`, by its own books: an entry of 64 bits for each page."""
    first, count = array.ctypes.data // mmap.PAGESIZE, -(-array.nbytes // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * count), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(62))) * mmap.PAGESIZE  # in memory, or swapped


@pytest.mark.parametrize("size", [1024, 1000, 100])
def test_what_is_not_named_keeps_its_numbers(size: int) -> None:
    """Pages that are no whole pages of the system, too: neighbours that are named go together."""
    array = reserve((3, 40, size), np.float32)
    array[...] = numbers = np.random.default_rng(0).random(array.shape, np.float32)
    before = resident_bytes(array)
    named = [*range(3, 30), 31, 39]
    assert trim(array, named[::-1])
    others = [page for page in range(40) if page not in named]
    np.testing.assert_array_equal(array[:, others], numbers[:, others])
    gone = before - resident_bytes(array)
    assert 3 * (27 * size * 4 - 2 * mmap.PAGESIZE) <= gone <= 3 * len(named) * size * 4
    assert np.count_nonzero(array[:, named] == 0) * 4 >= gone
    array[...] = numbers
    np.testing.assert_array_equal(array, numbers)


def test_memory_that_reserve_has_not_made_is_kept() -> None:
    array = np.ones((2, 40, 1024), np.float32)
    assert not trim(array, range(40)) and array.all()
    whole = reserve((4, 40, 1024), np.float32)
    whole[...] = 1
    assert not trim(whole[:2], range(40)) and whole.all()
    assert trim(whole, []) and whole.all()


@pytest.mark.parametrize(("cache", "within"), [("float32", 1e-4), ("bfloat16", 0.1), ("int8", 0.3)])
def test_a_cache_gives_back_all_but_what_texts_and_prompts_use(
    cache: str, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.cache.prefix.KEPT_POSITIONS", 128)
    backend = NumpyBackend(cache=cache)
    model = tiny_model(backend=backend, max_position_embeddings=512, **WIDE)
    runner = Runner(model, backend, PrefixCache(model.config, backend, 64, 64, frugal=True))
    arrays = runner.cache.storage.arrays.values()
    running, ended, failed = (TokenSequence(LINE[at : at + 200]) for at in (0, 200, 300))
    for text in (running, failed, ended):
        runner.prefill(text)
    runner.cache.discard(failed)
    runner.cache.retire(ended)
    before = sum(map(resident_bytes, arrays))
    assert runner.cache.backed_pages == 12
    runner.cache.trim()
    check_books(runner.cache, [running])
    page = runner.cache.max_bytes // 64
    assert runner.cache.backed_pages == 4 + 4, "what runs, and as many of the ended text's as twice that"
    assert runner.cache.backed_bytes == 8 * page
    assert before - sum(map(resident_bytes, arrays)) >= 4 * page * 0.75  # scales take less than a page of the system
    again = TokenSequence([*LINE[200:390], 5])
    assert runner.cache.match(again) == 190
    running.token_ids += [7]
    for text in (running, again):
        np.testing.assert_allclose(
            runner.prefill(text).logits[0], logits_of(runner, text.token_ids)[-1], rtol=0, atol=within
        )
        runner.cache.free(text)
    check_books(runner.cache, [])
    runner.cache.trim()
    assert runner.cache.backed_pages == 2 == runner.cache.pages_for(128), "when nothing runs, what a new cache keeps"
    assert isinstance(runner.cache.storage.keys, np.ndarray | StoredVectors)
    runner.cache.clear()
    runner.cache.trim()
    assert runner.cache.backed_bytes == 0 and not sum(map(resident_bytes, arrays))


def test_a_cache_of_a_given_size_keeps_what_prompts_may_find() -> None:
    backend = NumpyBackend()
    model = tiny_model(backend=backend, max_position_embeddings=512, **WIDE)
    runner = Runner(model, backend, PrefixCache(model.config, backend, 16, 64))
    text = TokenSequence(LINE[:200])
    runner.prefill(text)
    runner.cache.retire(text)
    runner.cache.trim()
    assert runner.cache.backed_pages == runner.cache.cached_pages == 4
