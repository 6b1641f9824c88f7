"""Prometheus metrics at /metrics. A metric that means the same as one of vLLM's has its name, after the colon.

Source: vLLM's documentation, "Production metrics"; the text format is Prometheus'. A histogram here is a list of
counts, converted when it is asked for: an observation happens for each token, in the event loop.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ..decoding.event import Event
from .served_model import ServedModel

PREFIX = "minillm:"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
"""Upper bounds of the buckets."""


class Histogram:
    """Counts of values by bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def mean(self) -> float:
        """Mean of the values; 0 if there are none."""
        return self.sum / max(1, sum(self.counts))

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Upper bound and number of values up to it, as Prometheus' format has them."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield ("+Inf" if bound == float("inf") else str(float(bound))), total


HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (SECONDS, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (STEPS, "Between two tokens of a sequence."),
    "e2e_request_latency_seconds": (SECONDS, "From a request's arrival to its end."),
    "request_queue_time_seconds": (SECONDS, "In the queue."),
    "request_prefill_time_seconds": (SECONDS, "From the queue to the first token."),
    "request_decode_time_seconds": (SECONDS, "From the first token to the last."),
    "request_prompt_tokens": (TOKENS, "Tokens of a request's prompt."),
    "request_generation_tokens": (TOKENS, "Tokens generated for a request."),
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
}


class ModelMetrics:
    """The counts of one model."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.finished: Counter[str] = Counter()
        """Finished sequences by reason"""
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}


class Phase(NamedTuple):
    """A part of a request's time."""

    name: str
    began: float
    """In seconds of `time.monotonic`"""
    seconds: float


class RequestMetrics:
    """Counts one prompt's events."""

    def __init__(self, metrics: ModelMetrics, prompt_tokens: int, arrived: float) -> None:
        """Args:
        metrics: its model's
        prompt_tokens: length of the prompt
        arrived: when the request came, in seconds of `time.monotonic`
        """
        self._metrics, self._arrived = metrics, arrived
        self._latency = metrics.histograms["inter_token_latency_seconds"]
        self._last: dict[int, float] = {}
        self.prompt_tokens = prompt_tokens
        self.generated = 0
        self.cached = 0
        self._ended = False
        self.phases: list[Phase] = []
        """Queue, prefill and decode, once the prompt's answers have ended"""

    def see(self, event: Event, now: float) -> None:
        """Count an event. `now`: in seconds of `time.monotonic`."""
        count = len(event.token_ids)
        if count:
            self.generated += count
            last = self._last.get(event.index)
            if last is not None:
                self._latency.observe((now - last) / count, count)
            elif not self._last:
                self._metrics.histograms["time_to_first_token_seconds"].observe(now - self._arrived)
            self._last[event.index] = now
        if event.finish_reason is not None:
            self._metrics.finished[event.finish_reason] += 1
            self.cached = event.cached_tokens
        if event.request_finished:
            self._end()
            histograms = self._metrics.histograms
            histograms["e2e_request_latency_seconds"].observe(now - self._arrived)
            histograms["request_prompt_tokens"].observe(self.prompt_tokens)
            histograms["request_generation_tokens"].observe(self.generated)
            if event.queued_seconds is not None:  # else it ends with its first call, and the engine goes on for a step
                histograms["request_queue_time_seconds"].observe(event.queued_seconds)
                histograms["request_prefill_time_seconds"].observe(event.prefill_seconds or 0.0)
                histograms["request_decode_time_seconds"].observe(event.decode_seconds or 0.0)
                self._set_phases(event, now)

    def _set_phases(self, event: Event, now: float) -> None:
        """Note the phases; the last one ends now."""
        seconds = {"queue": event.queued_seconds, "prefill": event.prefill_seconds, "decode": event.decode_seconds}
        began = now - sum(length or 0.0 for length in seconds.values())
        for name, length in seconds.items():
            self.phases.append(Phase(name, began, length or 0.0))
            began += length or 0.0

    def cut_off(self, reason: str) -> None:
        """Count the end of a request whose last event was not seen, if it was not."""
        if not self._ended:
            self._metrics.finished[reason] += 1
            self._end()

    def _end(self) -> None:
        self._ended = True
        counters = self._metrics.counters
        counters["prompt_tokens"] += self.prompt_tokens
        counters["generation_tokens"] += self.generated
        counters["prefix_cache_queries"] += self.prompt_tokens
        counters["prefix_cache_hits"] += self.cached


class Metrics(Collector):
    """The counts of a server, as Prometheus collects them."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        """Take a function that returns the server's models, without their adapters."""
        self._models = models
        self.of: dict[str, ModelMetrics] = {}
        self.responses: Counter[tuple[str, str]] = Counter()
        """Responses by path and status"""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes and its like

    def model(self, model: ServedModel) -> ModelMetrics:
        """The counts of a model; an adapter's are under its own name."""
        if model.name not in self.of:
            self.of[model.name] = ModelMetrics()
        return self.of[model.name]

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        """The metrics of this moment."""
        for model in self._models():
            self.model(model)  # those without a request yet begin at 0
        yield from self._gauges()
        for name, words in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, words, labels=["model_name"])
            for model_name, counts in self.of.items():
                counter.add_metric([model_name], counts.counters[name])
            yield counter
        finished = CounterMetricFamily(
            f"{PREFIX}request_success", "Finished sequences.", labels=["model_name", "finished_reason"]
        )
        for model_name, counts in self.of.items():
            for reason, count in counts.finished.items():
                finished.add_metric([model_name, reason], count)
        yield finished
        for name, (_, words) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, words, labels=["model_name"])
            for model_name, counts in self.of.items():
                histogram = counts.histograms[name]
                family.add_metric([model_name], buckets=list(histogram.buckets()), sum_value=histogram.sum)
            yield family
        responses = CounterMetricFamily(f"{PREFIX}http_requests", "Responses.", labels=["path", "status"])
        for (path, status), count in self.responses.items():
            responses.add_metric([path, status], count)
        yield responses

    def _gauges(self) -> Iterator[Any]:
        running = GaugeMetricFamily(f"{PREFIX}num_requests_running", "Requests that run.", labels=["model_name"])
        waiting = GaugeMetricFamily(f"{PREFIX}num_requests_waiting", "Requests that wait.", labels=["model_name"])
        usage = GaugeMetricFamily(
            f"{PREFIX}kv_cache_usage_perc", "Pages of the K/V cache in use; 1 is all.", labels=["model_name"]
        )
        most = GaugeMetricFamily(
            f"{PREFIX}kv_cache_max_bytes", "Memory that the K/V cache may take.", labels=["model_name"]
        )
        taken = GaugeMetricFamily(f"{PREFIX}kv_cache_bytes", "Memory that the K/V cache takes.", labels=["model_name"])
        preemptions = CounterMetricFamily(
            f"{PREFIX}num_preemptions", "Requests that gave back their pages to others.", labels=["model_name"]
        )
        made = GaugeMetricFamily(
            f"{PREFIX}cache_config_info",
            "Always 1: the dtype of the K/V cache, positions of a page, number of pages.",
            labels=["model_name", "cache_dtype", "block_size", "num_gpu_blocks"],
        )
        for model in self._models():
            load = model.aio.load()
            running.add_metric([model.name], load.running)
            waiting.add_metric([model.name], load.waiting)
            usage.add_metric([model.name], 1 - load.free_pages / max(1, load.total_pages))
            preemptions.add_metric([model.name], load.preemptions)
            cache = model.engine.runner.cache
            most.add_metric([model.name], cache.max_bytes)
            taken.add_metric([model.name], cache.backed_bytes)
            form = model.engine.runner.backend.memory.cache.name
            made.add_metric([model.name, form, str(cache.page_size), str(cache.num_pages)], 1)
        yield from (running, waiting, usage, most, taken, made, preemptions)
