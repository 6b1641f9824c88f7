"""Ctrl-C twice at any line of what queues, steps and ends requests: the engine is as it was, and no end is lost."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import minillm
from minillm import Engine
from minillm.errors import EngineStateError

from ..cache.books import check_loop
from ..tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("listening")

PROMPT = [5, 6, 7, 8, 9]
LENGTH: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": []}
ROOT = Path(minillm.__file__).parent
FILES = {
    str(ROOT / name)
    for name in ("engine/driver.py", "engine/stream.py", "engine/loop.py", "engine/scheduler.py", "engine/turns.py",
                 "batch.py", "runner/runner.py", "encoder_input.py", "cache/paged.py", "cache/prefix.py",
                 "decoding/continuation.py", "decoding/sampling.py")
}  # fmt: skip


class Lines:
    """Counts the lines of the loop's files that run inside the block, and does something before one of them."""

    def __init__(self, at: int, action: Callable[[], object], inside: tuple[str, ...] = ()) -> None:
        self.count, self._at, self._action, self._inside = 0, at, action, inside

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "__del__":  # Python drops what is raised there
            return None
        return self._line if frame.f_code.co_filename in FILES and self._counts(frame) else None

    def _counts(self, frame: FrameType | None) -> bool:
        names = set()
        while frame is not None and self._inside:
            names.add(frame.f_code.co_name if frame.f_code.co_filename in FILES else None)
            frame = frame.f_back
        return names.issuperset(self._inside)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._at:
                self._action()
        return self._line

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


def press_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def raise_at_once() -> None:
    raise KeyboardInterrupt


def generated(engine: Engine) -> None:
    engine.generate([PROMPT, PROMPT[:3]], **LENGTH)


def streamed(engine: Engine) -> None:
    for _ in engine.stream(PROMPT, num_beams=2, **LENGTH):
        pass


def left(engine: Engine) -> None:
    stream = engine.stream(PROMPT, **LENGTH)
    next(stream)
    stream.close()


CLOSED, ENDS = "a stream that is closed", "raised where a request ends"
CALLS = {"generate": generated, "stream": streamed, CLOSED: left}
INTERRUPTIONS = {
    "pressed twice": (press_twice, ()),
    "raised while a request is added": (raise_at_once, ("add",)),
    "raised in a step": (raise_at_once, ("advance",)),
    ENDS: (raise_at_once, ("advance", "_end")),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_checkpoint(tmp_path_factory.mktemp("small"), seed=2)
    return Engine(folder, backend="numpy", max_batch_size=3, cache_bytes=1 << 20)


def interrupted_at(line: int, call: Callable[[Engine], None], engine: Engine, how: str) -> tuple[int, bool]:
    """Make a call that is interrupted at a line: how many lines it had, and whether it was cut short."""
    lines = Lines(line, *INTERRUPTIONS[how])
    try:
        with lines.watched():
            call(engine)
    except KeyboardInterrupt:
        return lines.count, True
    return lines.count, False


def assert_as_it_was(engine: Engine, expected: list[int]) -> None:
    driver = engine._driver
    assert not engine.busy
    assert engine.step() == []
    assert not (driver._mail or driver._arrivals or driver._leaving or driver._unclaimed)
    assert not (driver.loop._runs or driver.loop._deadlines)
    assert not (driver.loop.scheduler.running or driver.loop.scheduler.waiting)
    check_loop(driver.loop)
    assert engine.generate(PROMPT, **LENGTH).completions[0].token_ids == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def check_lines(small: Engine, name: str, how: str, every: int) -> None:
    expected = small.generate(PROMPT, **LENGTH).completions[0].token_ids
    total, _ = interrupted_at(-1, CALLS[name], small, how)
    assert total > 10
    cut_short = 0
    for line in range(1, total + 1, every):
        cut_short += interrupted_at(line, CALLS[name], small, how)[1]
        try:
            assert_as_it_was(small, expected)
        except BaseException as error:
            raise AssertionError(f"line {line} of {total}: {error!r}") from error
    assert cut_short > 0.9 * total / every  # at the very end a call may be done


ALL = [(name, how) for name in CALLS for how in INTERRUPTIONS if (name, how) != (CLOSED, ENDS)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "how"), ALL)
def test_a_call_interrupted_at_some_line_leaves_the_engine_as_it_was(small: Engine, name: str, how: str) -> None:
    check_lines(small, name, how, {"raised while a request is added": 17, ENDS: 31}.get(how, 307))


@pytest.mark.parametrize(
    ("every", "often"), [pytest.param(71, 5, marks=pytest.mark.slow), pytest.param(13, 1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("name", "how"), ALL)
def test_a_call_interrupted_at_many_lines_leaves_the_engine_as_it_was(
    small: Engine, name: str, how: str, every: int, often: int
) -> None:
    check_lines(small, name, how, {"raised while a request is added": often, ENDS: often}.get(how, every))


@pytest.mark.parametrize(
    "every", [307, pytest.param(61, marks=pytest.mark.slow), pytest.param(17, marks=pytest.mark.exhaustive)]
)
def test_every_added_request_is_told_its_end_once_wherever_a_step_was_interrupted(small: Engine, every: int) -> None:
    line = total = -1  # first without interruption, to count the lines
    while line <= total:
        ids = [small.add(PROMPT, **LENGTH), small.add(PROMPT[:2], num_beams=3, **LENGTH)]  # the second has to wait
        lines, events = Lines(line, press_twice), []
        with lines.watched():
            while True:
                with suppress(KeyboardInterrupt):
                    if not small.busy:
                        break
                    events += small.step()
        total = max(total, lines.count)
        ends = [event.request_id for event in events if event.request_finished]
        assert sorted(ends) == ids, (line, events)
        assert_as_it_was(small, small.generate(PROMPT, **LENGTH).completions[0].token_ids)
        line = line + every if line > 0 else 1


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.slow), 23])
def test_an_interrupted_add_or_abort_happens_or_not(small: Engine, every: int) -> None:
    expected = small.generate(PROMPT, **LENGTH).completions[0].token_ids
    for call in ("add", "abort"):
        line = total = -1
        while line <= total:
            lines, known = Lines(line, press_twice), [] if call == "add" else [small.add(PROMPT, **LENGTH)]
            with suppress(KeyboardInterrupt), lines.watched():
                if call == "add":
                    known.append(small.add(PROMPT, **LENGTH))
                else:
                    small.abort(known[0])
            events = [event for event in iterated(small) if event.request_finished]
            assert [event.request_id for event in events] == known
            assert_as_it_was(small, expected)
            total = max(total, lines.count)
            line = line + every if line > 0 else 1


def iterated(engine: Engine) -> Iterator[Any]:
    yield from engine.step()
    while engine.busy:
        yield from engine.step()


def test_a_stream_whose_request_another_call_interrupted_says_so(small: Engine) -> None:
    def pressed(history: Any, logits: Any, xp: Any) -> Any:
        press_twice()
        return logits

    stream = small.stream(PROMPT, **LENGTH)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        small.generate(PROMPT, logits_processor=[pressed], **LENGTH)
    with pytest.raises(EngineStateError, match="interrupted"):
        list(stream)
    assert_as_it_was(small, small.generate(PROMPT, **LENGTH).completions[0].token_ids)
