"""Metrics of the HTTP endpoint for Prometheus. Names and meanings are vLLM's, under this package's prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from lightning_swarm.serving.texts import ServedText, TextWriter

_PREFIX: Final = "lightning_swarm:"
# Upper bounds of the histograms' buckets, in seconds.
_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)


class EndpointMetrics:
    """Counts requests, texts and tokens since the endpoint began."""

    def __init__(self, served: Sequence[ServedText]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        models = [model.name for model in served]

        def new_metric(metric_type: Callable[..., Any], name: str, text: str, **options: Any) -> Any:
            metric = metric_type(f"{_PREFIX}{name}", text, ["model_name"], registry=self._registry, **options)
            for model in models:  # so that values are reported from the beginning, not from their first change
                metric.labels(model)
            return metric

        new_histogram = partial(new_metric, Histogram, buckets=_BUCKETS_S)
        self.running = new_metric(Gauge, "num_requests_running", "Texts that are written.")
        self.waiting = new_metric(Gauge, "num_requests_waiting", "Texts that wait for a place.")
        self.prompt_tokens = new_metric(Counter, "prompt_tokens", "Tokens of prompts, of each text.")
        self.cached_tokens = new_metric(Counter, "prefix_cache_hits", "Tokens of prompts that were computed before.")
        self.generation_tokens = new_metric(Counter, "generation_tokens", "Tokens that were written.")
        self.queued = new_histogram("request_queue_time_seconds", "Time in the queue.")
        self.first_token = new_histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.next_token = new_histogram("inter_token_latency_seconds", "Between two tokens of a text.")
        self.whole = new_histogram("e2e_request_latency_seconds", "From the request to its last token.")
        labels = ["model_name", "finished_reason"]
        help_text = "Texts that ended by themselves."
        self.ended = Counter(f"{_PREFIX}request_success", help_text, labels, registry=self._registry)
        help_text = "Requests by path and status. A stream that fails after its beginning has the status of its error."
        self.requests = Counter(f"{_PREFIX}http_requests", help_text, ["handler", "status"], registry=self._registry)
        self._registry.register(_ReplacedServers(served))

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()


class _ReplacedServers:
    """Reports how many servers were replaced during texts, as each model's connection counts them."""

    def __init__(self, served: Sequence[ServedText]) -> None:
        self._served = [model for model in served if model.parent is None and hasattr(model.model, "swarm")]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        text = "Stages of texts that another server continued."
        family = CounterMetricFamily(f"{_PREFIX}replaced_servers", text, labels=["model_name"])
        for served in self._served:
            family.add_metric([served.name], served.model.swarm.routes.num_replaced)
        yield family


class TextMeter:
    """Counts one text's tokens, and the time between them."""

    def __init__(self, metrics: EndpointMetrics, model: str, arrived_s: float) -> None:
        self._metrics, self._model = metrics, model
        self._arrived_s = self._last_s = arrived_s  # times of the request and of the newest token
        self._num_counted = self._num_timed = 0  # tokens

    def begin(self, writer: TextWriter) -> None:
        """Count a text that begins."""
        self._metrics.running.labels(self._model).inc()
        self._metrics.prompt_tokens.labels(self._model).inc(writer.num_prompt)

    def take(self, writer: TextWriter, reason: str | None) -> None:
        """Count and time the tokens of a new piece; `reason` is the text's finish reason, if it has ended."""
        self._count(writer)
        now_s, new = time.monotonic(), self._num_counted - self._num_timed
        num_pauses = new
        if new and not self._num_timed:
            self._metrics.first_token.labels(self._model).observe(now_s - self._arrived_s)
            num_pauses -= 1
        for _ in range(num_pauses):  # the tokens of a piece share the time since the piece before
            self._metrics.next_token.labels(self._model).observe((now_s - self._last_s) / new)
        if new:
            self._num_timed, self._last_s = self._num_counted, now_s
        if reason is not None:
            self._metrics.whole.labels(self._model).observe(now_s - self._arrived_s)
            self._metrics.ended.labels(self._model, reason).inc()

    def end(self, writer: TextWriter) -> None:
        """Count a text that has ended, perhaps before its last pieces were read."""
        self._count(writer)
        self._metrics.cached_tokens.labels(self._model).inc(writer.num_cached)
        self._metrics.running.labels(self._model).dec()

    def _count(self, writer: TextWriter) -> None:
        new = writer.num_tokens - self._num_counted
        self._num_counted += new
        self._metrics.generation_tokens.labels(self._model).inc(new)
