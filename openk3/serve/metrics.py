"""What a Prometheus server can scrape at ``/metrics``.

Counts of HTTP requests and latencies are kept here; everything about the engine (requests running and waiting,
tokens, pages, prefix cache, preemptions, how requests ended) is read from its own statistics at the moment of the
scrape, so there is one truth. Each application has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from openk3.engine.engine import EngineStats
    from openk3.llm import LLM
    from openk3.serve.queue import RequestQueue

# Seconds. The first token waits for queue and prefill, up to minutes for a very long prompt on a CPU.
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The server's metrics. `content_type` is that of `exposition`, the text format of Prometheus."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "openk3_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=self._registry
        )
        self.time_to_first_token = Histogram(
            "openk3_time_to_first_token_seconds",
            "From a request's arrival to the first token of each of its choices.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.time_per_token = Histogram(
            "openk3_time_per_output_token_seconds",
            "Time between tokens of a choice, after its first.",
            buckets=_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def watch(self, model: Callable[[], LLM | None], queue: RequestQueue) -> None:
        """Add the engine's statistics, from whatever `model` returns at the time of a scrape, and the queue's."""
        self._registry.register(_EngineCollector(model, queue))

    def requests_by_endpoint(self) -> list[tuple[str, str, int]]:
        """Endpoint, status and count of the HTTP requests that were answered."""
        samples = [sample for metric in self.requests.collect() for sample in metric.samples]
        return sorted(
            (sample.labels["endpoint"], sample.labels["status"], int(sample.value))
            for sample in samples
            if sample.name.endswith("_total")
        )

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, model: Callable[[], LLM | None], queue: RequestQueue) -> None:
        self._model = model
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        llm = self._model()
        yield GaugeMetricFamily("openk3_model_ready", "1 when the model is loaded.", value=float(llm is not None))
        yield GaugeMetricFamily("openk3_queue_limit", "Choices that may wait.", value=self._queue.max_waiting)
        yield CounterMetricFamily("openk3_queue_refused", "Requests refused with 503.", value=self._queue.refused)
        if llm is not None:
            yield from _engine_metrics(llm.stats())


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    requests = GaugeMetricFamily("openk3_requests", "Requests in the engine, one per choice.", labels=("state",))
    requests.add_metric(("running",), stats.running)
    requests.add_metric(("waiting",), stats.waiting)
    yield requests

    tokens = CounterMetricFamily("openk3_tokens", "Tokens of prompts and of replies.", labels=("kind",))
    tokens.add_metric(("prompt",), stats.prompt_tokens)
    tokens.add_metric(("completion",), stats.generated_tokens)
    yield tokens

    yield CounterMetricFamily(
        "openk3_prefix_cache_query_tokens", "Prompt tokens looked up.", value=stats.prefix_query_tokens
    )
    yield CounterMetricFamily("openk3_prefix_cache_hit_tokens", "Prompt tokens found.", value=stats.prefix_hit_tokens)
    yield CounterMetricFamily(
        "openk3_prefix_cache_evicted_pages", "Cached pages forgotten for their memory.", value=stats.prefix_evictions
    )
    yield CounterMetricFamily(
        "openk3_preemptions", "Requests put back to make room for others.", value=stats.preemptions
    )

    finished = CounterMetricFamily("openk3_requests_finished", "Requests by how they ended.", labels=("reason",))
    for reason, count in stats.finished.items():
        finished.add_metric((reason,), count)
    yield finished

    pages = GaugeMetricFamily("openk3_kv_pages", "Pages of the KV cache.", labels=("state",))
    for state in ("free", "cached", "used"):
        pages.add_metric((state,), getattr(stats, f"pages_{state}"))
    yield pages
    yield GaugeMetricFamily(
        "openk3_kv_pages_pinned", "Used pages that belong to pinned prefixes.", value=stats.pages_pinned
    )
