"""Requests side by side: each comes to what it comes to alone, whatever becomes of the others."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from minillm import Engine
from minillm.backends.memory import Memory
from minillm.errors import CacheFullError, MinillmError, ParameterError

from ..tiny import write_checkpoint
from .outcome import COUNTS, PlantedError, attempt, check_message, expect

PAGE = 8
"""Positions in a page of the cache, so that short requests take several"""
PAGE_BYTES = 4096
"""Of one model"""

VOCABULARY = 512
CUT = {"abort", "error"}
"""Reasons why a result ends before its time"""


class Failing:
    """A processor that fails after some tokens: it raises, is interrupted by Ctrl-C, or returns nonsense."""

    def __init__(self, after: int, kind: str) -> None:
        self.left, self.kind = after, kind

    def __call__(self, history: Any, logits: Any, xp: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            return logits
        match self.kind:
            case "raise":
                raise PlantedError("as planted")
            case "interrupt":
                raise KeyboardInterrupt
            case "shape":
                return logits[:, :5]
        return None


def strategy(rng: Random, kind: str) -> dict[str, Any]:
    """Fields of a way to find tokens."""
    ways: list[dict[str, Any]] = [
        {},
        {},
        {
            "do_sample": True,
            "seed": rng.randrange(1000),
            "temperature": rng.choice([0.5, 1.5]),
            "top_k": rng.choice([0, 5]),
        },
        {"do_sample": True, "seed": 1, "num_return_sequences": rng.choice([2, 3])},
        {
            "num_beams": rng.choice([2, 3]),
            "num_return_sequences": rng.choice([1, 2]),
            "early_stopping": rng.choice([True, False]),
        },
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 3, "force_words_ids": [[5, 6], [[7], [8]]], "max_new_tokens": 6},
        {"do_sample": True, "seed": 7, "num_particles": 3, "potential": lambda ids: len(set(ids)) / 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"use_cache": False},
    ]
    if kind != "amateur":
        ways += [
            {"penalty_alpha": 0.4, "top_k": 3},
            {"dola_layers": [0, 1]},
            {"guidance_scale": 2.5, "negative_prompt": [7, 8, 9, 7, 8]},
            {"guidance_scale": 0.5, "do_sample": True, "seed": 5, "num_return_sequences": 2},
            {"prompt_lookup_num_tokens": 3},
            {"lookahead_window": 3},
            {"do_sample": True, "seed": 3, "prompt_lookup_num_tokens": 2},
        ]
    said = rng.choice(ways)
    exclusive = {
        "num_beams",
        "num_particles",
        "guidance_scale",
        "dola_layers",
        "penalty_alpha",
        "prompt_lookup_num_tokens",
        "lookahead_window",
    }
    if kind == "draft" and exclusive & said.keys():
        said = said | {"num_assistant_tokens": 0}
    return {} if kind == "amateur" and exclusive & said.keys() else said


@dataclass
class Work:
    """A request, and when it comes, goes and fails."""

    prompt: list[int]
    fields: dict[str, Any]
    at: int
    """The step before which it is added"""
    abort: int | None
    """The step before which it is dropped, if it still runs"""
    fails: bool
    """One of its functions fails, or what it asks for cannot be fulfilled"""
    expected: Any = None
    """What it comes to alone"""
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, str] = field(default_factory=dict)

    def take(self, event: Any) -> None:
        self.tokens[event.index] += event.token_ids
        if event.finish_reason is not None:
            expect(event.index not in self.reasons, f"result {event.index} ends twice")
            self.reasons[event.index] = event.finish_reason


def draw_work(rng: Random, kind: str) -> Work:
    """A request at random."""
    fields: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 5, 8, 12]), **strategy(rng, kind)}
    if rng.random() < 0.1:
        fields |= {"guided_regex": rng.choice(["[a-z ]+", "(red|green){1,3}"])}
    if rng.random() < 0.1:
        fields |= {"stop_strings": [rng.choice("aeiou ")]}
    if rng.random() < 0.2:
        fields |= {"eos_token_id": [rng.randrange(VOCABULARY) for _ in range(30)]}
    fails = rng.random() < 0.1
    if fails:
        failure = rng.choice(["raise", "raise", "interrupt", "shape", "nothing"])
        fields |= {"logits_processor": [Failing(rng.randrange(6), failure)]}
    prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 2, 7, 15, 16, 17, 40]))]
    return Work(prompt, fields, rng.choice([0, 0, 1, 3, 8]), rng.choice([None, None, None, 0, 1, 2, 5, 9]), fails)


class Bench:
    """Engines of every kind: with much room, where requests run alone, and with little."""

    def __init__(self, folder: Path) -> None:
        Memory.page_size = PAGE  # in this process
        model = write_checkpoint(folder / "model", seed=2)
        helper = write_checkpoint(folder / "helper", seed=3)
        options = {"backend": "numpy", "threads": 1}
        kinds: dict[str, dict[str, Any]] = {"plain": {}, "draft": {"draft": helper}, "amateur": {"amateur": helper}}
        self.alone = {
            kind: Engine(model, **options, cache_bytes=500 * PAGE_BYTES, **more) for kind, more in kinds.items()
        }
        kinds["prefix"] = {"prefix_cache": True}
        self.tight = {
            (kind, pages): Engine(model, **options, cache_bytes=pages * PAGE_BYTES, max_batch_size=4, **more)
            for kind, more in kinds.items()
            for pages in (16, 40)
        }


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    bench = Bench(folder)

    def run(number: int, rng: Random) -> None:
        kind, pages = rng.choice(list(bench.tight))
        engine, alone = bench.tight[kind, pages], bench.alone["plain" if kind == "prefix" else kind]
        works = [draw_work(rng, kind) for _ in range(rng.randrange(1, 6))]
        for work in works:
            _run_alone(alone, work)
        if rng.random() < 0.2:
            works = [work for work in works if not work.fails]
            _together(engine, works)
        else:
            _step_by_step(engine, works)
        _check_books(engine, kind)

    return run


def _run_alone(engine: Engine, work: Work) -> None:
    """Find out what a request comes to without others, unless it is made to fail."""
    if not work.fails:
        work.expected = attempt(lambda: engine.generate(work.prompt, **work.fields))
        work.fails = work.expected is None


def _step_by_step(engine: Engine, works: list[Work]) -> None:
    """All requests on one step loop."""
    known: dict[int, Work] = {}
    interrupted = False
    for step in range(1000):
        _come_and_go(engine, works, known, step)
        try:
            events = engine.step()
        except KeyboardInterrupt:  # whoever ran may be dropped
            events, interrupted = [], True
        except (PlantedError, MinillmError) as error:
            events = []
            expect(any(work.fails for work in works), f"nothing was planted, and a step raised {error!r}")
        _take(known, events)
        if step > 10 and not engine.busy:
            break
    expect(not engine.busy, "requests run for ever")
    _take(known, engine.step())
    for work in known.values():
        _check_work(work, interrupted)


def _come_and_go(engine: Engine, works: list[Work], known: dict[int, Work], step: int) -> None:
    """Add and drop the requests whose time it is."""
    for work in works:
        if work.at == step:
            request_id = _add(engine, work)
            if request_id is not None:
                known[request_id] = work
        if work.abort is not None and work.at + work.abort == step:
            for request_id in [i for i, other in known.items() if other is work]:
                engine.abort(request_id)


def _take(known: dict[int, Work], events: list[Any]) -> None:
    for event in events:
        expect(event.request_id in known, f"an event of the unknown request {event.request_id}")
        known[event.request_id].take(event)


def _add(engine: Engine, work: Work) -> int | None:
    try:
        request_id = engine.add(work.prompt, **work.fields)
    except (CacheFullError, ParameterError) as error:
        check_message(error)
        COUNTS["refused"] += 1
        return None
    COUNTS["answered"] += 1
    return request_id


def _check_work(work: Work, interrupted: bool) -> None:
    """The tokens of a request are those that it comes to alone, or the first of them if it was dropped."""
    expect(work.reasons, f"a request never ended: {work.fields}")
    failed, cut = work.fails or interrupted, CUT & set(work.reasons.values())
    expect(failed or not cut or (cut == {"abort"} and work.abort is not None), f"ended by {cut}: {work.fields}")
    if work.fails:
        return
    for index, completion in enumerate(work.expected.completions):
        found, reason = work.tokens[index], work.reasons.get(index)
        if reason in CUT:
            same = "num_beams" in work.fields or found == completion.token_ids[: len(found)]
            expect(same, _differs(work, index, completion))
        elif not cut or index in work.reasons:
            expect(found == completion.token_ids, _differs(work, index, completion))
            expect(reason == completion.finish_reason, f"{work.reasons} of {work.fields}")


def _differs(work: Work, index: int, expected: Any) -> str:
    return f"result {index} is {work.tokens[index]}, alone {expected.token_ids}: {work.fields}, prompt {work.prompt}"


def _together(engine: Engine, works: list[Work]) -> None:
    """One thread for each request; they take turns."""
    faults: list[BaseException] = []

    def generate(work: Work) -> None:
        try:
            found = engine.generate(work.prompt, **work.fields)
            same = [c.token_ids for c in found.completions] == [c.token_ids for c in work.expected.completions]
            expect(same, f"in a thread {found.token_ids}, alone {work.expected.token_ids}: {work.fields}")
            COUNTS["answered"] += 1
        except (CacheFullError, ParameterError) as error:
            check_message(error)
            COUNTS["refused"] += 1
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=generate, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def _check_books(engine: Engine, kind: str) -> None:
    """Nothing is left of the requests."""
    expect(
        not engine.busy and not engine._driver._mail and not engine._driver._unclaimed,
        "a request is left behind",
    )
    for name, runner in engine._driver.loop.runners.items():
        lost = runner.cache.num_pages - runner.cache.free_pages
        expect(kind == "prefix" or not lost, f"{lost} pages of {name} are not free")
