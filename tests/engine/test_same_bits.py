"""`deterministic=True`: a text's logits are the same bits in any company, and in whatever pieces it is computed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cpu import launching
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.low_rank import LowRankWeight
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.cache import PrefixCache, new_cache
from minillm.cache.states import StateCache
from minillm.decoding.strategy import Request
from minillm.engine.loop import StepLoop
from minillm.engine.scheduler import Limits
from minillm.runner.runner import Runner

from ..families import CONFIGS, in_turn
from ..tiny import model_of, request_for, tiny_config, write_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "opt": tiny_config(hidden_size=72, word_embed_proj_dim=72, ffn_dim=1601, max_position_embeddings=128),
    "llama": CONFIGS["llama"]["grouped"],
    "mistral": CONFIGS["mistral"]["window"],
    "mixtral": CONFIGS["mixtral"]["two of six, window"],
    "lfm2": CONFIGS["lfm2"]["grouped"] | {"max_position_embeddings": 128},
    "qwen3_5_text": CONFIGS["qwen3_5_text"]["grouped"] | {"max_position_embeddings": 128},
    "youtu": CONFIGS["youtu"]["tied"] | {"max_position_embeddings": 128},
    "granitemoehybrid": CONFIGS["granitemoehybrid"]["two groups"] | {"max_position_embeddings": 128},
    "falcon_h1": CONFIGS["falcon_h1"]["all factors"] | {"max_position_embeddings": 128},
}
"""Widths that are multiples of a vector and of a block of inputs, and others"""
FORMS = ["float32", "float16", "bfloat16", "int8", "int4"]
ALL_FORMS = "opt", "mixtral"
PAIRS = [
    pytest.param(*pair.values, marks=[] if pair.values[0] in ALL_FORMS else pair.marks)
    for pair in in_turn([*MODELS], FORMS)
]
"""Kernels of products know a form, those of the other operations a model: matrices, and those of experts, have each
form, and each other model has one"""
WAYS: list[dict[str, Any]] = [
    {},
    {},
    {"do_sample": True, "temperature": 2.0},
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 3},
    {"penalty_alpha": 0.4, "top_k": 3},
    {"prompt_lookup_num_tokens": 3},
    {"num_assistant_tokens": 3, "models": ("draft",)},
    {"lookahead_window": 3},
    {"use_cache": False},
]
"""Fields of requests"""


def context_of(sequence: TokenSequence, place: int) -> tuple[int, ...]:
    """Tokens from which the logits at a place follow: those up to it, or the whole tree of guesses that it is in."""
    if place < len(sequence.token_ids) - len(sequence.tree):
        return tuple(sequence.token_ids[: place + 1])
    return (*sequence.token_ids, -1, *sequence.tree, place)


@dataclass
class Logits:
    """The bits of each context's logits as they were first computed, and the contexts whose bits have differed."""

    bits: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    different: set[tuple[int, ...]] = field(default_factory=set)
    compared: int = 0
    batches: int = 0

    def take(self, context: tuple[int, ...], logits: np.ndarray) -> None:
        self.compared += context in self.bits
        bits = logits.tobytes()
        if self.bits.setdefault(context, bits) != bits:
            self.different.add(context)

    def watch(self, runner: Runner) -> Runner:
        """Take all logits that the runner computes from now on."""
        forward = runner.forward

        def forward_and_take(sequences: Any, counts: Any, rows: Any = None, *more: Any, **named: Any) -> Any:
            contexts = [
                context_of(sequence, sequence.cached + i)
                for sequence, count in zip(sequences, counts, strict=True)
                for i in range(count)
            ]
            output = forward(sequences, counts, rows, *more, **named)
            self.batches += 1
            for row, logits in zip(np.cumsum(counts) - 1 if rows is None else rows, output.logits, strict=True):
                self.take(contexts[row], logits)
            return output

        runner.forward = forward_and_take  # type: ignore[method-assign]
        return runner


class Bench:
    """A model, and requests to it; all logits of its loops are compared, first those of each request alone."""

    def __init__(self, model: str, *, deterministic: bool = True, **options: Any) -> None:
        self.backend = CpuBackend(deterministic=deterministic, **options)
        self.models = {
            name: model_of(MODELS[model], seed=seed, backend=self.backend)
            for name, seed in (("target", 0), ("draft", 1))
        }
        self.logits, rng = Logits(), Random(0)
        stem = [rng.randrange(3, 96) for _ in range(30)]
        self.requests = [self._draw_request(rng, stem) for _ in range(12)]
        for request in self.requests:
            self._run(self._loop(16, 512), [request], rng)

    @staticmethod
    def _draw_request(rng: Random, stem: list[int]) -> Request:
        """One whose prompt may begin like those of others."""
        prompt = stem[: rng.choice([0, 0, 7, 16, 30])] + [
            rng.randrange(3, 96) for _ in range(rng.choice([1, 2, 5, 19]))
        ]
        fields = rng.choice(WAYS)
        seed = {"seed": rng.randrange(99)} if "do_sample" in fields else {}
        return request_for(prompt, max_new_tokens=rng.choice([1, 3, 8]), **fields, **seed)

    def _loop(
        self, size: int, chunk: int, pages: int = 96, page_size: int = 64, prefix_cache: bool = False
    ) -> StepLoop:
        options: dict[str, Any] = {"prefix_cache": prefix_cache}
        runners = {
            name: Runner(model, self.backend, self._cache(model, pages, page_size, **options))
            for name, model in self.models.items()
        }
        self.logits.watch(runners["target"])
        return StepLoop(runners, Limits(size, chunk, chunk, 4))

    def _cache(self, model: Any, pages: int, page_size: int, **options: Any) -> PrefixCache:
        cache = new_cache(PrefixCache, model.config, self.backend, pages, page_size, sequences=40, **options)
        if isinstance(cache, StateCache):
            cache.whole_positions = page_size
        return cache

    def _run(self, loop: StepLoop, requests: list[Request], rng: Random, preempted: float = 0.0) -> None:
        """Run requests that come by and by; before a share of the steps one of them is preempted."""
        waiting = list(requests)
        while waiting or loop.busy:
            for _ in range(min(len(waiting), rng.choice([1, 2, 30]))):
                loop.add(waiting.pop())
            loop.step_or_raise()
            if rng.random() < preempted and loop.scheduler.running:
                loop.scheduler.preempt(rng.choice(loop.scheduler.running))

    def mix(self, rng: Random) -> None:
        """Run some of the requests side by side: chunks, pages, prefix cache, preemption and threads at random."""
        launching.set_threads(rng.choice([1, 2, 3]))
        size, (pages, page_size) = rng.choice([3, 8, 24, 40]), rng.choice([(96, 4), (60, 16), (64, 64)])
        loop = self._loop(size, max(size, rng.choice([5, 18, 70, 512])), pages, page_size, rng.random() < 0.5)
        self._run(loop, rng.choices(self.requests, k=rng.randrange(2, 30)), rng, rng.choice([0, 0.2]))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = launching.num_threads()
    yield
    launching.set_threads(before)


def compare(bench: Bench, mixes: int, at_least: int, seed: int = 1) -> None:
    rng = Random(seed)
    for _ in range(mixes):
        bench.mix(rng)
    assert not bench.logits.different
    assert bench.logits.compared > at_least


@pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param("opt", "float32", marks=pytest.mark.slow),
        ("mixtral", "float16"),
        ("lfm2", "float32"),
        pytest.param("qwen3_5_text", "float32", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", "float32", marks=pytest.mark.slow),
        pytest.param("falcon_h1", "float32", marks=pytest.mark.exhaustive),
        pytest.param("mistral", "bfloat16", marks=pytest.mark.slow),
        pytest.param("llama", "int4", marks=pytest.mark.slow),
    ],
)
def test_logits_have_the_same_bits_in_any_mix_of_requests(model: str, form: str) -> None:
    compare(Bench(model, weights=form), 3, 100)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "form"), PAIRS)
def test_logits_have_the_same_bits_in_many_mixes(model: str, form: str) -> None:
    compare(Bench(model, weights=form), 8, 400)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_have_the_same_bits_in_100_000_batches(model: str, form: str) -> None:
    """All cases together: each batch is a random mix of rows of random requests, of at least 2,250 here."""
    bench = Bench(model, weights=form)
    seed = 2
    while bench.logits.batches < 2250:
        compare(bench, 10, 400, seed)
        seed += 1
    assert bench.logits.compared > 5000


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cache"), in_turn([*MODELS], ["bfloat16", "int8"]))
def test_logits_have_the_same_bits_with_a_narrower_cache(model: str, cache: str) -> None:
    compare(Bench(model, weights="float32", cache=cache), 4, 150)


@pytest.mark.longer
def test_another_order_of_summation_in_many_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = CpuBackend.linear

    def by_halves(self: CpuBackend, x: Any, weight: Weight, **more: Any) -> Any:
        if len(x) <= 16 or weight.data.shape[1] < 1000:
            return linear(self, x, weight, **more)
        launching.not_recorded()
        first, second = (
            Weight(weight.name, np.ascontiguousarray(weight.data[:, half]), bias)
            for half, bias in ((slice(600), None), (slice(600, None), weight.bias))
        )
        sums = linear(self, np.ascontiguousarray(x[:, :600]), first, residual=more.pop("residual", None)).copy()
        return linear(self, np.ascontiguousarray(x[:, 600:]), second, residual=sums, **more)

    monkeypatch.setattr(CpuBackend, "linear", by_halves)
    bench, rng = Bench("opt", weights="float32"), Random(1)
    for _ in range(2):
        bench.mix(rng)
    assert len(bench.logits.different) > 20


def test_an_engine_gives_a_text_the_bits_of_its_beginnings(tmp_path: Path) -> None:
    """The logits of 50 tokens, and of the first 3 and 20 of them."""
    line = list(range(40, 90))
    with Engine(write_checkpoint(tmp_path), backend="cpu", deterministic=True) as engine:
        whole = engine.forward(line)
        for count in (3, 20):
            np.testing.assert_array_equal(engine.forward(line[:count]), whole[:count])


@pytest.mark.parametrize("count", [3, 40])
def test_rows_without_an_adapter_keep_their_bits_beside_those_with_one(count: int) -> None:
    backend, rng = CpuBackend(deterministic=True), np.random.default_rng(0)
    x, residual = rng.standard_normal((count, 100), np.float32), rng.standard_normal((count, 37), np.float32)
    weight = Weight("w", *(rng.standard_normal(shape, np.float32) for shape in ((37, 100), 37)))
    change = LowRankWeight(*(Weight("", rng.standard_normal(shape, np.float32)) for shape in ((5, 100), (37, 5))))
    last: dict[str, Any] = {"activation": "gelu", "residual": residual}
    plain = backend.linear(x, weight, **last).copy()
    mixed = backend.add_low_rank(backend.linear(x, weight), x, [(np.array([1]), change)], **last).copy()
    np.testing.assert_array_equal(np.delete(mixed, 1, 0), np.delete(plain, 1, 0))
    row, own = slice(1, 2), last | {"residual": residual[1:2]}
    alone = backend.add_low_rank(backend.linear(x[row], weight), x[row], [(np.array([0]), change)], **own)
    np.testing.assert_array_equal(mixed[row], alone)
    assert (mixed[1] != plain[1]).any()
