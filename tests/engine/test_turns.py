"""Ctrl-C at any time, several threads at once, and closing during a step: the engine stays consistent."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.engine.turns import Turns, interrupts
from minillm.errors import EngineStateError

from ..children import in_child
from ..comparing import assert_same_results
from ..tiny import write_checkpoint

PROMPTS = ["Hello", "one two three four", [5, 6, 7, 5, 6], [9, 8], [3], "a b c"]
LENGTH: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "seed": 1, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


pytestmark = pytest.mark.usefixtures("listening")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small"), seed=2)


def assert_in_order(engine: Engine) -> None:
    assert not engine.busy
    assert not engine._driver._mail
    assert not engine._driver._unclaimed
    assert engine.runner.cache.free_pages == engine.runner.cache.num_pages
    assert not engine._driver.loop.scheduler.running
    assert not engine._driver.loop.scheduler.waiting


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@contextmanager
def pressed_after(seconds: float) -> Iterator[None]:
    """Ctrl-C, so many seconds from now, wherever the main thread is then."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def generated(engine: Engine, **fields: Any) -> None:
    engine.generate(PROMPTS, **fields)


def streamed(engine: Engine, **fields: Any) -> None:
    for _ in engine.stream(PROMPTS[1], **fields):
        pass


def added(engine: Engine, **fields: Any) -> None:
    request = None
    try:
        request = engine.add(PROMPTS[1], **fields)
        while engine.busy:
            engine.step()
    finally:
        while request is not None and engine.busy:
            engine.abort(request)
            engine.step()


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def press_at_random(small: Path, tries: int) -> int:
    """Ctrl-C during every kind of call. Returns how many were interrupted."""
    engine = Engine(small, max_batch_size=4, prefix_cache=False, backend="numpy")
    expected = {name: engine.generate(PROMPTS[1], **LENGTH, **fields) for name, fields in KINDS.items()}
    lengths = {name: seconds(lambda f=f: generated(engine, **LENGTH, **f)) for name, f in KINDS.items()}
    interrupted, chance = 0, random.Random(0)
    for number in range(tries):
        name = chance.choice(list(KINDS))
        call: Callable[..., Any] = chance.choice([generated, generated, streamed, added])
        try:
            with pressed_after(max(1e-6, chance.random() * lengths[name])):
                call(engine, **LENGTH, **KINDS[name])
        except KeyboardInterrupt:
            interrupted += 1
        try:
            assert_in_order(engine)
        except AssertionError as error:
            raise AssertionError(f"try {number}: {name}, {call}: {error}") from error
        if number % 20 == 0:
            assert_same_results(engine.generate(PROMPTS[1], **LENGTH, **KINDS[name]), expected[name])
    return interrupted


@pytest.mark.slow
def test_after_ctrl_c_an_engine_is_as_it_was(small: Path) -> None:
    assert press_at_random(small, 100) > 30


@pytest.mark.exhaustive
def test_after_many_of_them_too(small: Path) -> None:
    assert press_at_random(small, 500) > 150


def test_ctrl_c_comes_after_the_step_that_it_hits(engine: Engine) -> None:
    """Pressed inside of a step: that one ends, no other begins, and the handler is Python's own again."""
    seen: list[int] = []

    def press(history: Any, logits: Any, xp: Any) -> Any:
        seen.append(int(history.lengths[0]))
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)
            seen.append(-1)  # still here
        return logits

    with pytest.raises(KeyboardInterrupt):
        engine.generate([5, 6], logits_processor=[press], **LENGTH)
    assert seen == [2, 3, 4, -1]
    assert_in_order(engine)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait(engine: Engine) -> None:
    """Something hangs within a step. The books are made right again; what waits goes on."""
    expected = engine.generate([7, 8], **LENGTH).token_ids

    def hang(history: Any, logits: Any, xp: Any) -> Any:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    waits = [engine.add([7, 8], **LENGTH) for _ in range(20)][-1]
    runs = engine.add([5, 6], logits_processor=[hang], num_beams=2, **LENGTH)
    with pytest.raises(KeyboardInterrupt):
        while engine.busy:
            ends = {e.request_id: e for e in engine.step() if e.finish_reason}
    events = []
    while engine.busy:
        events += engine.step()
    assert [e.finish_reason for e in events if e.request_id == runs][-1] in ("error", None)
    told = [e for e in events if e.request_id == waits] or [ends[waits]]
    assert told
    assert_in_order(engine)
    assert engine.generate([7, 8], **LENGTH).token_ids == expected


def test_a_program_that_ignores_ctrl_c_is_left_alone(engine: Engine) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pressed_after(0.005):
            assert len(engine.generate([5, 6], **LENGTH).token_ids) == 12
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_programs_own_handler_is_called_in_its_time(engine: Engine) -> None:
    steps: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: steps.append(engine.stats.steps))

    def press(history: Any, logits: Any, xp: Any) -> Any:
        if history.lengths[0] == 4:
            signal.raise_signal(signal.SIGINT)
        return logits

    try:
        assert len(engine.generate([5, 6], logits_processor=[press], **LENGTH).token_ids) == 12
        assert steps == [3]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_another_thread_has_its_turn() -> None:
    turns, inside, leave = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns.take():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    with pytest.raises(KeyboardInterrupt), pressed_after(0.05), turns.take():
        raise AssertionError("not reached")
    leave.set()
    thread.join()
    with turns.take():
        pass


@pytest.mark.longer
def test_ctrl_c_in_a_process_ends_it_within_a_step(small: Path) -> None:
    program = (
        "import signal, minillm\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"engine = minillm.Engine({str(small)!r}, backend='numpy')\n"
        "print('ready', flush=True)\n"
        "try:\n"
        "    while True: engine.generate([5, 6], num_beams=4, max_new_tokens=40, eos_token_id=[])\n"
        "except KeyboardInterrupt:\n"
        "    print(engine.busy, engine.runner.cache.free_pages == engine.runner.cache.num_pages)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        try:
            assert process.communicate(timeout=30)[0] == "False True\n"
        finally:
            process.kill()


# --- threads ----------------------------------------------------------------------------------------------------------


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results or errors of calls that all begin at the same time."""
    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_calls_of_several_threads_run_as_one_batch(engine: Engine) -> None:
    alone = [engine.generate(prompt, **LENGTH) for prompt in PROMPTS]
    before = engine.stats.steps
    gate = threading.Event()

    def hold(history: Any, logits: Any, xp: Any) -> Any:
        gate.wait(30)
        return logits

    first = threading.Thread(target=lambda: engine.generate([5], max_new_tokens=1, logits_processor=[hold]))
    first.start()
    while not engine.stats.steps > before and not engine._driver._turns._owner:
        time.sleep(0.001)
    threads = [threading.Thread(target=lambda p=p: results.append((p, engine.generate(p, **LENGTH)))) for p in PROMPTS]
    results: list[Any] = []
    for thread in threads:
        thread.start()
    while len(engine._driver._turns._queue) < len(PROMPTS):
        time.sleep(0.001)
    gate.set()
    for thread in [first, *threads]:
        thread.join(60)
    for prompt, result in results:
        assert_same_results(result, alone[PROMPTS.index(prompt)])
    assert len(results) == len(PROMPTS)
    assert engine.stats.steps - before <= 1 + 12 + len(PROMPTS)  # side by side: one after the other it takes 73
    assert_in_order(engine)


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind_of_call_from_several_threads(engine: Engine, times: int) -> None:
    text = engine.generate(PROMPTS[1], **LENGTH).text
    score = engine.score(PROMPTS[1])
    logits = engine.forward([5, 6, 7])

    def added() -> set[str | None]:
        request = engine.add(PROMPTS[0], **LENGTH)
        reasons = {event.finish_reason for event in engine.step() if event.request_id == request}
        engine.abort(request)
        return reasons

    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(PROMPTS[1], **LENGTH).text,
        lambda: "".join(event.text for event in engine.stream(PROMPTS[1], **LENGTH)),
        lambda: assert_same_results(engine.score(PROMPTS[1]), score),
        lambda: assert_same_results(engine.forward([5, 6, 7]), logits),
        lambda: next(engine.stream(PROMPTS[0], **LENGTH)).text,  # forgotten at once
        lambda: len(engine.generate(PROMPTS, num_beams=2, **LENGTH)),
    ]
    for _ in range(times):
        results = in_threads(calls * 2)
        assert results[:4] == results[6:10] == [text, text, None, None]
        assert results[5] == results[11] == len(PROMPTS)
    in_threads([added] * 4)
    assert not engine.busy
    engine.step()  # reports how the requests of `added` ended
    assert_in_order(engine)


def test_coroutines_use_an_engine_through_threads(engine: Engine) -> None:
    expected = engine.generate("Hello", **LENGTH)

    async def several() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(engine.generate, "Hello", **LENGTH) for _ in range(5)))

    assert asyncio.run(several()) == [expected] * 5


def test_a_failure_in_one_thread_stays_there(engine: Engine) -> None:
    def raises(history: Any, logits: Any, xp: Any) -> Any:
        if history.lengths[0] > 4:
            raise RuntimeError("no more")
        return logits

    good = lambda: engine.generate([5, 6], **LENGTH).token_ids  # noqa: E731
    expected = good()
    bad = lambda: engine.generate([5, 6], logits_processor=[raises], **LENGTH)  # noqa: E731
    results = in_threads([good, bad, good, bad])
    assert results[0] == results[2] == expected
    assert [str(result) for result in results[1::2]] == ["no more", "no more"]
    assert_in_order(engine)


def test_turns_are_given_in_the_order_of_asking() -> None:
    turns, order = Turns(), []
    with turns.take():
        threads = []
        for i in range(5):
            thread = threading.Thread(target=lambda i=i: _note(turns, order, i))
            thread.start()
            while len(turns._queue) <= i:
                time.sleep(0.001)
            threads.append(thread)
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4]


def _note(turns: Turns, order: list[int], i: int) -> None:
    with turns.take():
        order.append(i)


@pytest.mark.longer
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_is_forked_in_the_middle_says_so(engine: Engine) -> None:
    """Another thread has the turn, which nobody gives back in the child. The parent goes on."""
    inside, leave = threading.Event(), threading.Event()

    def hold(history: Any, logits: Any, xp: Any) -> Any:
        inside.set()
        leave.wait(30)
        return logits

    thread = threading.Thread(target=lambda: engine.generate([5], max_new_tokens=1, logits_processor=[hold]))
    thread.start()
    inside.wait(30)

    def says_so() -> bool:
        with pytest.raises(EngineStateError, match="forked while another thread used this engine"):
            engine.generate([5, 6], **LENGTH)
        return True

    assert in_child(says_so)
    leave.set()
    thread.join()
    assert in_child(lambda: len(engine.generate([5, 6], **LENGTH).token_ids) == 12)
    assert_in_order(engine)


def test_an_engine_called_from_inside_its_own_step_says_so(engine: Engine) -> None:
    def calls(history: Any, logits: Any, xp: Any) -> Any:
        engine.generate("again")
        return logits

    with pytest.raises(EngineStateError, match="called from inside one of its own steps"):
        engine.generate("Hello", logits_processor=[calls])
    assert_in_order(engine)


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 2])
def test_closing_the_engine_ends_a_stream_with_an_error(small: Path, taken: int) -> None:
    engine = Engine(small)
    stream = engine.stream([5, 6], **LENGTH)
    for _ in range(taken):
        next(stream)
    engine.close()
    with pytest.raises(EngineStateError, match="the engine is closed"):
        list(stream)
    stream.close()


def test_a_stream_at_its_end_does_not_mind(small: Path) -> None:
    engine = Engine(small)
    stream = engine.stream([5, 6], **LENGTH)
    events = [next(stream) for _ in range(12)]
    assert events[-1].finish_reason == "length"
    engine.close()
    assert list(stream) == []


@pytest.mark.longer
def test_closing_while_other_threads_generate(small: Path) -> None:
    for delay in (0.0, 0.002, 0.01, 0.03):
        engine = Engine(small)
        call = lambda engine=engine: engine.generate([5, 6], num_beams=3, max_new_tokens=50, eos_token_id=[])  # noqa: E731

        def close(engine: Engine = engine, delay: float = delay) -> None:
            time.sleep(delay)
            engine.close()

        results = in_threads([call, call, lambda e=engine: list(e.stream([5, 6], max_new_tokens=50)), close])
        for result in results[:3]:
            if isinstance(result, Exception):
                assert isinstance(result, EngineStateError)
                assert str(result) == "the engine is closed"
        assert results[3] is None


def test_deferred_blocks_may_be_nested() -> None:
    order = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            order.append("inner")
        order.append("outer")
        interrupts.check()
        order.append("not reached")
    assert order == ["inner", "outer"]
