"""Pages in a folder: what prompts find there, what is written and removed, and whom the folder is trusted to."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.batch import TokenSequence
from minillm.cache import prefix_store
from minillm.cache.prefix_store import PrefixStore, StoringPrefixCache, trusted_folder
from minillm.engine.origins import origins_of
from minillm.errors import ParameterError
from minillm.runner.runner import Runner

from ..adapters import write_adapter
from ..tiny import NO_REPEATS, runner_of, tiny_model, write_checkpoint
from .books import check_books, check_contents

P = 4
LINE = np.random.default_rng(0).integers(3, 96, 40).tolist()
MODEL = tiny_model(seed=2)
LONG = np.random.default_rng(1).integers(3, 500, 400).tolist()
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": [], "top_logprobs": 3, **NO_REPEATS}


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Texts of the tiny model are worth storing."""
    if "folder" not in request.fixturenames:
        monkeypatch.setattr(prefix_store, "WORTH_STORING", 2 * P)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("opt"), seed=2, max_position_embeddings=512)


def runner_with(folder: Path, *, pages: int = 30, max_bytes: int = 2**30, seed: int = 2) -> Runner:
    """A runner whose cache stores pages of four positions in a folder."""
    model = MODEL if seed == 2 else tiny_model(seed=seed)
    runner = runner_of(model, pages=pages, page_size=P)
    runner.cache = StoringPrefixCache(model.config, runner.backend, pages, P)
    runner.cache.store = PrefixStore(trusted_folder(str(folder)), max_bytes, origins_of(runner), 2 * 2 * 32 * P * 4)
    return runner


def computed(runner: Runner, tokens: Sequence[int]) -> int:
    """Compute a text but for what the cache and the store have, end it, and wait for the files. Returns what it had."""
    sequence = TokenSequence(list(tokens))
    count = runner.cache.match(sequence)
    runner.prefill(sequence)
    check_books(runner.cache, [sequence])
    runner.cache.retire(sequence)
    runner.cache.store.close()
    check_books(runner.cache, [])
    return count


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is found ----------------------------------------------------------------------------------------------------


def test_a_prompt_takes_the_pages_that_another_process_has_computed(tmp_path: Path) -> None:
    assert computed(runner_with(tmp_path), LINE) == 0
    assert len(files(tmp_path)) == 10
    again = runner_with(tmp_path)
    assert computed(again, [*LINE[:18], 95, 94]) == 16
    assert computed(again, LINE) == 39  # of the last page all but the token that is computed in any case
    check_contents(again)


def test_pages_that_the_cache_has_lost_come_back(tmp_path: Path) -> None:
    runner = runner_with(tmp_path, pages=11)
    computed(runner, LINE)
    for first in range(3, 9):
        computed(runner, [first] * 6)
        computed(runner, [first, *LINE[:30]])
    assert computed(runner, LINE) == 39
    check_contents(runner)


def test_of_a_text_that_grows_only_new_pages_are_written(tmp_path: Path) -> None:
    runner = runner_with(tmp_path)
    computed(runner, LINE[:17])
    before = {name: (tmp_path / name).stat().st_ino for name in files(tmp_path)}
    assert len(before) == 4
    assert computed(runner, LINE[:30]) == 17
    after = {name: (tmp_path / name).stat().st_ino for name in files(tmp_path)}
    assert len(after) == 7 and before.items() <= after.items()


@pytest.mark.longer
def test_random_texts_of_two_processes_on_one_folder(tmp_path: Path) -> None:
    """The longest stored beginning, in whole pages, is what a process finds that has computed nothing of it."""
    rng, texts = random.Random(2), list[list[int]]()
    runners = [runner_with(tmp_path, pages=60) for _ in range(2)]
    for _ in range(10):
        text = [
            *(rng.choice(texts)[: rng.randint(0, 30)] if texts else []),
            *rng.choices((5, 6, 7), k=rng.randint(8, 20)),
        ]
        fresh = runner_with(tmp_path)
        stored = {tuple(other[:stop]) for other in texts for stop in range(P, len(other) + 1, P)}
        longest = max((stop for stop in range(P, len(text) + 1, P) if tuple(text[:stop]) in stored), default=0)
        assert computed(fresh, text) == min(longest, len(text) - 1)
        check_contents(fresh)
        computed(rng.choice(runners), text)
        texts.append(text)
    for runner in runners:
        check_contents(runner)


def test_short_texts_and_failed_ones_are_not_stored(tmp_path: Path) -> None:
    runner = runner_with(tmp_path)
    computed(runner, LINE[: 2 * P - 1])
    sequence = TokenSequence(list(LINE))
    runner.prefill(sequence)
    runner.cache.discard(sequence)
    sequence = TokenSequence(list(LINE), private=True)
    runner.prefill(sequence)
    runner.cache.retire(sequence)
    runner.cache.store.close()
    assert not files(tmp_path)


def test_a_full_cache_takes_what_fits(tmp_path: Path) -> None:
    computed(runner_with(tmp_path), LINE)
    runner = runner_with(tmp_path, pages=12)
    other = TokenSequence([50, *LINE[:30]])
    runner.prefill(other)  # 8 of the pages
    sequence = TokenSequence(list(LINE))
    assert runner.cache.match(sequence) == 16
    check_books(runner.cache, [other, sequence])
    check_contents(runner)


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    computed(runner_with(tmp_path), LINE)
    assert computed(runner_with(tmp_path, seed=3), LINE) == 0
    assert len(files(tmp_path)) == 20


# --- damage and limits ------------------------------------------------------------------------------------------------


def test_a_damaged_page_is_removed_and_computed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    computed(runner_with(tmp_path), LINE)
    by_time = sorted(tmp_path.iterdir(), key=lambda path: -path.stat().st_mtime_ns)
    content = bytearray(by_time[3].read_bytes())
    content[-5] ^= 1
    by_time[3].write_bytes(content)
    by_time[6].write_bytes(b"")
    runner = runner_with(tmp_path)
    assert computed(runner, LINE) == 12
    check_contents(runner)
    [record] = caplog.records
    assert record.getMessage().startswith("a stored prefix is removed: ") and "is damaged" in record.getMessage()
    assert computed(runner_with(tmp_path), LINE) == 24
    assert computed(runner_with(tmp_path), LINE) == 39


def test_a_page_under_another_ones_name_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner, texts = runner_with(tmp_path), (LINE[:12], [*LINE[:4], 9, 9, 9, 9, *LINE[8:12]])
    for text in texts:
        computed(runner, text)
    one, other = ([tmp_path / page.name for page in runner.cache.store.pages_of(text, None, P)] for text in texts)
    whole = {path: path.read_bytes() for path in (*one, *other)}
    for number, cached in ((1, 4), (2, 8)):  # other tokens after the same ones, and the same after others
        one[number].write_bytes(whole[other[number]])
        assert computed(runner_with(tmp_path), texts[0]) == cached
        assert caplog.text.count("it holds another text") == number
        one[number].write_bytes(whole[one[number]])


def test_the_least_recently_used_pages_are_removed_the_last_of_a_text_first(tmp_path: Path) -> None:
    runner = runner_with(tmp_path)
    computed(runner, LINE[:20])
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    texts = [[first, *LINE[:19]] for first in range(50, 54)]
    small = runner_with(tmp_path, max_bytes=size * 12)
    computed(small, texts[0])
    computed(small, LINE[:20])
    computed(small, texts[1])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size * 12
    counts = [computed(runner_with(tmp_path, max_bytes=size * 100), text) for text in (LINE[:20], texts[1], texts[0])]
    assert counts == [19, 19, 8]


def test_what_others_have_in_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    (tmp_path / f".minillm-1-{'0' * 8}").write_bytes(b"half")
    (tmp_path / f".minillm-1-{'1' * 8}").write_bytes(b"half")
    os.utime(tmp_path / f".minillm-1-{'0' * 8}", (0, 0))  # left behind long ago
    computed(runner_with(tmp_path, max_bytes=10**4), LINE)
    names = [name for name in files(tmp_path) if not name.startswith("prefix-")]
    assert names == [f".minillm-1-{'1' * 8}", "model.safetensors"]
    assert 0 < len(files(tmp_path)) - 2 < 10


def test_more_than_may_wait_is_stored_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "WAITING_BYTES", 1)
    for stored in (1, 2, 3):
        computed(runner_with(tmp_path), LINE)
        assert len(files(tmp_path)) == stored


@pytest.mark.longer
def test_pages_that_are_given_away_before_they_are_copied_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, rng, copied = runner_with(tmp_path, pages=12), random.Random(3), []
    read = runner.cache.storage.read

    def slow_read(pages: Sequence[int]) -> dict[str, Any]:
        time.sleep(0.003)
        copied.append(pages)
        return read(pages)

    monkeypatch.setattr(runner.cache.storage, "read", slow_read)
    texts = [[*LINE[: rng.randint(0, 20)], *rng.choices(range(3, 96), k=20)] for _ in range(30)]
    for text in texts:
        sequence = TokenSequence(list(text))
        runner.cache.match(sequence)
        runner.prefill(sequence)
        runner.cache.retire(sequence)
    runner.cache.store.close()
    assert 0 < len(files(tmp_path)) < len(copied), "some were given away"
    fresh = runner_with(tmp_path, pages=400)
    for text in texts:
        computed(fresh, text)
    check_contents(fresh)


def test_pages_of_a_device_are_copied_before_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_with(tmp_path)
    runner.cache.storage.threads_may_read = False
    sequence = TokenSequence(list(LINE))
    runner.prefill(sequence)
    runner.cache.retire(sequence)

    def refuse(pages: Sequence[int]) -> dict[str, Any]:
        raise AssertionError("read in the store's thread")

    monkeypatch.setattr(runner.cache.storage, "read", refuse)
    runner.cache.clear()
    runner.cache.store.close()
    assert len(files(tmp_path)) == 10
    check_contents(runner)
    assert computed(runner_with(tmp_path), LINE) == 39


def test_a_disk_that_takes_nothing_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_store, "replace_file", full)
    runner = runner_with(tmp_path)
    computed(runner, LINE)
    computed(runner, [*LINE[::-1]])
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == f"prefixes cannot be stored in {tmp_path}: No space left on device"
    assert len(messages) <= 4 and not files(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(prefix_store, "WORTH_STORING", 2 * P)
    computed(runner, LINE)
    assert len(files(tmp_path)) == 10


@pytest.mark.longer
def test_a_process_that_is_killed_leaves_only_whole_pages(folder: Path, tmp_path: Path) -> None:
    program = f"""
import os, threading
from minillm import Engine
from minillm.cache import prefix_store
def half(path, data, mode):
    if len(os.listdir({str(tmp_path)!r})) == 1:
        with open(path.parent / f".minillm-{{os.getpid()}}-00000000", "wb") as file:
            file.write(data[:1000])
        os._exit(9)
    write(path, data, mode=mode)
write, prefix_store.replace_file = prefix_store.replace_file, half
Engine({str(folder)!r}, backend="numpy", prefix_store={str(tmp_path)!r}).generate({LONG!r}, max_new_tokens=1)
threading.Event().wait(60)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 9
    assert len(files(tmp_path)) == 2
    with Engine(folder, backend="numpy", prefix_store=tmp_path) as engine:
        engine.generate([*LONG, 5], **GREEDY)
        assert engine.stats.cached_tokens == 128
    assert len([name for name in files(tmp_path) if name.startswith("prefix-")]) == 3


# --- the folder -------------------------------------------------------------------------------------------------------


def test_the_folder_and_its_files_are_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    computed(runner_with(folder), LINE)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with pytest.raises(ParameterError, match=r"prefix_store: other users may write to .*shared: name a folder of your"):
        Engine(prefix_store=shared)
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match=r"prefix_store: .*file"):
        Engine(prefix_store=tmp_path / "file")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(ParameterError, match="theirs belongs to another user"):
        Engine(prefix_store=theirs)


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_an_engine_goes_on_after_a_restart_with_the_same_bits(folder: Path, tmp_path: Path, backend: str) -> None:
    prompts = [[*LONG, 7], LONG[:300], [9, *LONG[:280]], [40, 41]]
    with Engine(folder, backend=backend, max_batch_size=4) as engine:
        expected = [(r.token_ids, r.completions[0].top_logprobs) for r in engine.generate(prompts, **GREEDY)]
    for cached in (0, 384 + 256 + 256):
        with Engine(folder, backend=backend, prefix_store=tmp_path, max_batch_size=4) as engine:
            results = engine.generate(prompts, **GREEDY)
            assert [result.token_ids for result in results] == [token_ids for token_ids, _ in expected]
            assert engine.stats.cached_tokens >= cached
            if not cached and backend == "cpu":  # NumPy's sums depend on addresses
                assert [result.completions[0].top_logprobs for result in results] == [rows for _, rows in expected]


@pytest.mark.longer
def test_adapters_and_helper_models_have_pages_of_their_own(folder: Path, tmp_path: Path) -> None:
    one, store = write_adapter(tmp_path / "one"), tmp_path / "store"
    options: dict[str, Any] = {"backend": "numpy", "adapters": {"one": one}, "prefix_store": store}
    with Engine(folder, **options) as engine:
        plain, tuned = (engine.generate(LONG, **GREEDY, **lora).token_ids for lora in ({}, {"lora": "one"}))
        assert engine.stats.cached_tokens == 0
    with Engine(folder, **options) as engine:
        assert engine.generate(LONG, **GREEDY, lora="one").token_ids == tuned
        assert engine.stats.cached_tokens == 384
        assert engine.generate(LONG, **GREEDY).token_ids == plain
        assert engine.stats.cached_tokens == 2 * 384
    with Engine(folder, backend="numpy", draft=folder, prefix_store=store) as engine:
        assert engine.generate(LONG, **GREEDY).token_ids == plain
        assert engine.stats.cached_tokens == 384


def test_what_hooks_see_is_neither_stored_nor_read(folder: Path, tmp_path: Path) -> None:
    with Engine(folder, backend="numpy", prefix_store=tmp_path) as engine:
        engine.generate(LONG, max_new_tokens=1, watch=["blocks.0.residual"])
        with engine.hooks({"blocks.0.mlp.out": lambda array, place: array * 0}):
            engine.generate(LONG, max_new_tokens=1)
        assert not engine._driver.loop.runners["target"].cache.store._writer.waiting
    assert not files(tmp_path)


def test_the_thread_ends_with_the_engine(folder: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Engine(folder, backend="numpy", prefix_store=tmp_path) as engine:
        engine.generate(LONG, max_new_tokens=1)
    assert len(files(tmp_path)) == 3 and set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"prefix_cache": False},
            "prefix_store keeps what the prefix cache has, and prefix_cache is off",
        ),
        ({"prefix_store_bytes": 10}, r"prefix_store_bytes should be at least 131072 \(two pages\), found 10"),
        ({"prefix_store_bytes": 0}, "prefix_store_bytes should be a whole number"),
        ({"prefix_store": None, "prefix_store_bytes": 10}, "prefix_store_bytes is for prefix_store: name its folder"),
        ({"prefix_store": 3}, "prefix_store should be a folder, found 3"),
    ],
)
def test_options_that_do_not_go_together(folder: Path, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        Engine(folder, backend="numpy", **{"prefix_store": tmp_path} | options)


LEFT_OPEN = """
import gc, sys, threading, time
from minillm import Engine
for number in range(2):
    engine = Engine(sys.argv[1], backend="numpy", prefix_store=sys.argv[2])
    engine.generate([(7 * j + number) % 400 + 5 for j in range(400)], max_new_tokens=1)
    if not number:
        del engine
        while any("store" in thread.name for thread in threading.enumerate()):  # it writes what it has first
            gc.collect()
            time.sleep(0.05)
"""


@pytest.mark.longer
def test_an_engine_that_is_dropped_or_left_open_writes_its_pages(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEFT_OPEN, str(folder), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert len(files(tmp_path / "store")) == 2 * (400 // 128)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a\0b", "x" * 300])
def test_a_name_of_no_folder_is_one_line(name: str) -> None:
    with pytest.raises(ParameterError, match=r"^prefix_store: .*folder"):
        trusted_folder(name)
