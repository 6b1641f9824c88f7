"""Requests of every kind on small caches, and the books that must be in order after every step."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.cache import Concurrency, PrefixCache
from minillm.decoding.strategy import Request
from minillm.engine.loop import StepLoop
from minillm.engine.run import Run
from minillm.engine.scheduler import MAX_PASSES, Limits
from minillm.runner.runner import Runner

from .adapters import write_adapter
from .cache.books import check_loop
from .tiny import request_for, write_checkpoint

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.2, "logprobs": True},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "beams that sample": {"num_beams": 3, "do_sample": True},
    "constrained": {"num_beams": 3, "force_words_ids": [[7], [[8], [9]]]},
    "particles": {"do_sample": True, "num_particles": 4, "potential": lambda ids: sum(ids) / 9},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 3},
    "guidance": {"guidance_scale": 2.0, "negative_prompt": (7, 8, 9), "do_sample": True, "num_return_sequences": 2},
    "guidance beams": {"guidance_scale": 2.0, "num_beams": 2},
    "dola": {"dola_layers": (0, 1), "num_return_sequences": 2, "do_sample": True},
    "lookup": {"prompt_lookup_num_tokens": 3, "num_return_sequences": 2, "do_sample": True},
    "lookahead": {"lookahead_window": 3, "lookahead_guesses": 2},
    "draft": {"num_assistant_tokens": 3},
    "draft samples": {"num_assistant_tokens": 3, "do_sample": True, "num_return_sequences": 2},
    "mirostat": {"do_sample": True, "mirostat": 2},
    "naive": {"use_cache": False},
    "naive beams": {"use_cache": False, "num_beams": 2},
    "guided": {"guided_regex": "[a-z ]{3,30}"},
    "guided particles": {"guided_regex": "[a-z ]{3,30}", "do_sample": True, "num_particles": 2, "top_k": 0},
    "guided beams": {"guided_regex": "[a-z ]{3,30}", "num_beams": 2},
    "adapter": {"lora": "one"},
    "adapter beams": {"lora": "one", "num_beams": 2},
}
"""Fields of a request, by a name"""


def engine_with_helpers(backend: str, at: Path) -> Engine:
    """An engine with a draft and an adapter, which makes requests of every kind."""

    def loosen(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed_tokens.weight"] += 0.02 * np.random.default_rng(0).standard_normal((512, 32), np.float32)

    base, draft = write_checkpoint(at / "base", seed=2), write_checkpoint(at / "draft", seed=2, change=loosen)
    adapters = {"one": write_adapter(at / "one", seed=1)}
    return Engine(base, backend=backend, draft=draft, adapters=adapters, max_batch_size=1)


def run_of(name: int, width: int, pages: int, priority: int) -> Run:
    request = request_for([5])
    return Run(name, replace(request, priority=priority), width, name, pages, pages)


def requests_of(engine: Engine, kind: str, prompt: list[int], **fields: Any) -> Request:
    chosen = {"eos_token_id": [], "num_assistant_tokens": 0} | STRATEGIES[kind] | fields
    if "do_sample" not in chosen:
        chosen.pop("seed", None)
    if "guided_regex" in chosen:
        pytest.importorskip("llguidance", reason="needs the extra `guided`")
        chosen.pop("eos_token_id")
    return engine.request(prompt, **chosen)


def loop_on(
    engine: Engine,
    pages: int,
    *,
    size: int = 8,
    page_size: int = 4,
    budget: int = 512,
    headroom: int | None = 4,
    prefix_cache: bool = False,
    concurrency: Concurrency | None = None,
) -> StepLoop:
    """A step loop over the engine's models, each with its own cache of small pages."""
    options = {"prefix_cache": prefix_cache, "concurrency": concurrency}
    runners = {
        name: Runner(
            runner.model,
            runner.backend,
            PrefixCache(runner.model.config, runner.backend, pages, page_size, **options),
            adapters=runner.adapters,
        )
        for name, runner in engine._driver.loop.runners.items()
    }
    return StepLoop(runners, Limits(size, budget, budget, headroom))


@dataclass
class Outcome:
    """All that a request's event has told."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)

    def add(self, event: Any) -> None:
        index = event.index
        assert index not in self.reasons, "it had ended"
        assert event.error is None, event.error
        self.tokens.setdefault(index, []).extend(event.token_ids)
        self.texts[index] = self.texts.get(index, "") + event.text
        if event.finish_reason is not None:
            self.reasons[index] = event.finish_reason
        if event.score is not None:
            self.scores[index] = round(event.score, 3)


def alone(engine: Engine, request: Request) -> tuple[Outcome, int]:
    """A request that has the engine and a large cache for itself, and its number of steps."""
    loop, outcome = loop_on(engine, 40, size=16, page_size=64), Outcome()
    loop.add(request)
    while loop.busy:
        for event in loop.step():
            outcome.add(event)
    return outcome, loop.stats.steps


def check_books(loop: StepLoop) -> None:
    """The books of every cache (`cache/books.py`); slots and queue are in order."""
    check_loop(loop)
    scheduler = loop.scheduler
    for run in scheduler.waiting:
        assert not any(sequence.pages or sequence.cached for live in run.live.values() for sequence in live)
    assert sum(run.max_sequences for run in scheduler.running) <= scheduler.limits.max_batch_size
    for queue in (scheduler.running, scheduler.waiting):
        assert [run.request.priority for run in queue] == sorted(run.request.priority for run in queue)
    assert not {*scheduler.running} & {*scheduler.waiting}
    assert max((run.times_passed_over for run in scheduler.waiting), default=0) <= MAX_PASSES
    load = loop.load()
    assert load.running + load.waiting == len(loop._runs)
    assert load.free_pages == min(runner.cache.free_pages for runner in loop.runners.values())


def counted(runner: Runner) -> list[list[int]]:
    """The tokens of each sequence of every forward pass from now on."""
    passes: list[list[int]] = []
    forward = runner.forward

    def counting(sequences: Any, counts: Any, *more: Any, **others: Any) -> Any:
        passes.append(list(counts))
        return forward(sequences, counts, *more, **others)

    runner.forward = counting  # type: ignore[method-assign]
    return passes
