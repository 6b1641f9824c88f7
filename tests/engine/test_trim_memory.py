"""Memory that an idle engine gives back to the system, and the answers of those that go on."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cpu.memory import CpuMemory
from minillm.errors import EngineStateError
from minillm.parallel import Parallel

from ..async_engines import running, until
from ..distributed.ranks import on_ranks
from ..task_models import BERT, write_task_model
from ..tiny import write_checkpoint

PROMPTS = [np.random.default_rng(i).integers(3, 500, 250).tolist() for i in range(6)]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}
WIDE: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "ffn_dim": 16, "num_hidden_layers": 6}
"""A position takes 12 KiB in the cache, and six texts of 250 tokens 27 MiB, in pages of 128"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = WIDE | {"word_embed_proj_dim": 256, "max_position_embeddings": 512}
    return write_checkpoint(tmp_path_factory.mktemp("wide"), **fields)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, backend="cpu", max_batch_size=8) as engine:
        yield engine


def resident_bytes() -> int:
    """Bytes of this process's own memory that are not of files."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("Anonymous:")]
    return 1024 * int(kib)


def tokens_of(engine: Engine) -> list[list[int]]:
    return [answer.token_ids for answer in engine.generate(PROMPTS, **GREEDY)]


@pytest.mark.longer
def test_pages_and_workspace_go_to_the_system_and_come_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, cache = tokens_of(engine), engine.runner.cache
    assert engine.summary()["cache_bytes"] == cache.backed_bytes == 18 * 128 * 12 << 10
    memory = engine.runner.backend.memory
    assert isinstance(memory, CpuMemory) and memory._steps and memory.arena.nbytes
    engine.trim_memory()
    assert not memory._steps and not memory.arena.nbytes
    assert cache.cached_pages == cache.backed_pages == 6 * 3, "what a new engine would keep, too"
    assert tokens_of(engine) == expected
    assert engine.generate(PROMPTS[0], **GREEDY).cached_tokens == 249
    monkeypatch.setattr("minillm.cache.prefix.KEPT_POSITIONS", 512)
    full = resident_bytes()
    engine.trim_memory()
    assert cache.backed_pages == 4
    assert full - resident_bytes() > 14 << 20  # 14 pages of 1.5 MiB, less what else has begun meanwhile
    assert tokens_of(engine) == expected


@pytest.mark.longer
def test_an_engine_that_runs_keeps_its_workspace_and_is_not_entered_by_itself(engine: Engine) -> None:
    expected = engine.generate(PROMPTS[0], **GREEDY).token_ids
    request = engine.add(PROMPTS[0], **GREEDY)
    tokens = [*engine.step()]
    engine.trim_memory()
    assert engine.runner.backend.memory.arena.nbytes
    while engine.busy:
        tokens += engine.step()
        engine.trim_memory()
    assert [token for event in tokens if event.request_id == request for token in event.token_ids] == expected

    def inside(array: Any, place: Any) -> Any:
        with pytest.raises(EngineStateError, match="from inside one of its own steps"):
            engine.trim_memory()
        return array

    assert engine.generate(PROMPTS[0], **GREEDY, hooks={"blocks.0.mlp.out": inside}).token_ids == expected
    engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        engine.trim_memory()


def test_texts_that_are_embedded_take_their_memory_anew(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "how are you ?"]
    with Engine(write_task_model(tmp_path, BERT), backend="cpu") as engine:
        vectors = engine.embed(texts)
        assert engine._text_passes is not None and engine._text_passes._runners
        engine.trim_memory()
        assert not engine._text_passes._runners
        np.testing.assert_array_equal(engine.embed(texts), vectors)


@pytest.fixture
def trims(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trims of the engine's thread are counted, which has short pauses."""
    counts, trim = [0], engine.trim_memory

    def counted() -> None:
        trim()
        counts[0] += 1

    monkeypatch.setattr(engine, "trim_memory", counted)
    monkeypatch.setattr("minillm.engine.engine_thread.IDLE_SECONDS", 0.01)
    return counts


@pytest.mark.longer
def test_an_idle_engine_trims_once_until_it_is_used_again(engine: Engine, trims: list[int]) -> None:
    async def use() -> None:
        async with running(engine) as aio:
            for count, call in enumerate((aio.generate, aio.run), 1):
                await (call([5, 6], max_new_tokens=1) if call == aio.generate else call(engine.forward, [5, 6]))
                await until(lambda count=count: trims[0] == count)
                await asyncio.sleep(0.1)
                assert trims[0] == count

    asyncio.run(use())


@pytest.mark.slow
def test_whatever_runs_beside_it_answers_the_same(
    engine: Engine, trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bursts of requests, pauses in which the engine's thread trims, and another thread that trims all the time."""
    monkeypatch.setattr("minillm.cache.prefix.KEPT_POSITIONS", 256)
    monkeypatch.setattr("minillm.engine.lifecycle.trim_heap", lambda: None)  # it walks all objects of the test process
    expected, ended, paused = tokens_of(engine), threading.Event(), threading.Event()
    trim = Engine.trim_memory

    def trim_always() -> None:
        while not ended.wait(0.003):
            with contextlib.suppress(EngineStateError):
                if not paused.is_set():  # each call is a use of the engine, which is then not idle
                    trim(engine)

    async def use() -> None:
        async with running(engine) as aio:
            for burst in range(6):
                before = trims[0]
                chosen = [(burst + i) % len(PROMPTS) for i in range(1 + burst % 3)]
                answers = await asyncio.gather(*(aio.generate(PROMPTS[i], **GREEDY) for i in chosen))
                assert [answer.token_ids for answer in answers] == [expected[i] for i in chosen]
                if burst % 2:
                    paused.set()
                    await until(lambda before=before: trims[0] > before)
                    paused.clear()

    thread = threading.Thread(target=trim_always)
    thread.start()
    try:
        asyncio.run(use())
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(pipeline=2)], ids=["tensor", "pipeline"])
def test_rank_0_of_several_gives_pages_back_and_all_go_on(tmp_path: Path, parallel: Parallel) -> None:
    folder = write_checkpoint(tmp_path / "opt", num_hidden_layers=4, max_position_embeddings=512)

    def call(engine: Engine) -> None:
        expected = tokens_of(engine)
        for kept in (18, 0):
            engine.trim_memory()
            assert engine.runner.cache.backed_pages == kept
            assert tokens_of(engine) == expected
            engine.runner.cache.clear()

    on_ranks(parallel, call, folder, backend="cpu", threads=1, max_batch_size=6)
