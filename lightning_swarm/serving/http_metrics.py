"""Metrics of the HTTP endpoint for Prometheus. Names and meanings are vLLM's, under this package's prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from lightning_swarm.serving.texts import ServedText, TextWriter

_PREFIX: Final = "lightning_swarm:"
# Upper bounds of the histograms' buckets, in seconds.
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)


class EndpointMetrics:
    """Counts requests, texts and tokens since the endpoint began."""

    def __init__(self, served: Sequence[ServedText]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        models = [one.name for one in served]

        def made(kind: Callable[..., Any], name: str, text: str, **options: Any) -> Any:
            metric = kind(f"{_PREFIX}{name}", text, ["model_name"], registry=self._registry, **options)
            for model in models:  # values are shown from the beginning, not from their first change
                metric.labels(model)
            return metric

        timed = partial(made, Histogram, buckets=_SECONDS)
        self.running = made(Gauge, "num_requests_running", "Texts that are written.")
        self.waiting = made(Gauge, "num_requests_waiting", "Texts that wait for a place.")
        self.prompt_tokens = made(Counter, "prompt_tokens", "Tokens of prompts, of each text.")
        self.cached_tokens = made(Counter, "prefix_cache_hits", "Tokens of prompts that were computed before.")
        self.generation_tokens = made(Counter, "generation_tokens", "Tokens that were written.")
        self.queued = timed("request_queue_time_seconds", "Time in the queue.")
        self.first_token = timed("time_to_first_token_seconds", "From the request to its first token.")
        self.next_token = timed("inter_token_latency_seconds", "Between two tokens of a text.")
        self.whole = timed("e2e_request_latency_seconds", "From the request to its last token.")
        labels = ["model_name", "finished_reason"]
        ended = "Texts that ended by themselves."
        self.ended = Counter(f"{_PREFIX}request_success", ended, labels, registry=self._registry)
        answered = "Requests by path and status, also of streams that failed after their beginning."
        self.requests = Counter(f"{_PREFIX}http_requests", answered, ["handler", "status"], registry=self._registry)
        self._registry.register(_Replaced(served))

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()


class _Replaced:
    """Collects the number of servers that were replaced during texts, which each model's connection counts."""

    def __init__(self, served: Sequence[ServedText]) -> None:
        self._served = [one for one in served if one.parent is None and hasattr(one.model, "swarm")]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        text = "Stages of texts that another server continued."
        found = CounterMetricFamily(f"{_PREFIX}replaced_servers", text, labels=["model_name"])
        for one in self._served:
            found.add_metric([one.name], one.model.swarm.routes.num_replaced)
        yield found


class TextMeter:
    """Counts one text's tokens, and the time between them."""

    def __init__(self, metrics: EndpointMetrics, model: str, arrived_s: float) -> None:
        self._metrics, self._model = metrics, model
        self._arrived_s = self._last_s = arrived_s  # of the request; of the last token so far
        self._num_counted = self._num_timed = 0  # tokens

    def begin(self, writer: TextWriter) -> None:
        """Count a text that begins now."""
        self._metrics.running.labels(self._model).inc()
        self._metrics.prompt_tokens.labels(self._model).inc(writer.num_prompt)

    def take(self, writer: TextWriter, reason: str | None) -> None:
        """Count the tokens of a piece that has come; `reason` is the text's finish reason."""
        self._count(writer)
        now_s, new = time.monotonic(), self._num_counted - self._num_timed
        between = new
        if new and not self._num_timed:
            self._metrics.first_token.labels(self._model).observe(now_s - self._arrived_s)
            between -= 1
        for _ in range(between):  # tokens without text of their own share the time of the piece
            self._metrics.next_token.labels(self._model).observe((now_s - self._last_s) / new)
        if new:
            self._num_timed, self._last_s = self._num_counted, now_s
        if reason is not None:
            self._metrics.whole.labels(self._model).observe(now_s - self._arrived_s)
            self._metrics.ended.labels(self._model, reason).inc()

    def end(self, writer: TextWriter) -> None:
        """Count a text that has ended. Its last pieces may not have been taken yet."""
        self._count(writer)
        self._metrics.cached_tokens.labels(self._model).inc(writer.num_cached)
        self._metrics.running.labels(self._model).dec()

    def _count(self, writer: TextWriter) -> None:
        new = writer.num_tokens - self._num_counted
        self._num_counted += new
        self._metrics.generation_tokens.labels(self._model).inc(new)
