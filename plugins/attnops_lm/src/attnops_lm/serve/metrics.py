"""The metrics of a server for Prometheus; a name that vLLM has too, after ``vllm:``, means the same here."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from attnops_lm.serve.engine import Engine
    from attnops_lm.serve.request import Delta, Request

# vLLM's buckets, in seconds.
_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

REFUSALS = ("queue_full", "answers_at_a_time", "calls_per_minute", "tokens_per_minute")


class Metrics(Collector):
    """The metrics of one engine, in a registry of their own.

    Counters and gauges are read from the engine when they are asked for. Times are observed with a request's first and
    last `Delta`: a cancelled request, or one that ends with an error, has no time per token and no latency. An
    embedding has no times.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.registry = engine, name, CollectorRegistry()
        self.refused: collections.Counter[str] = collections.Counter()
        self.registry.register(self)
        self._first = self._histogram("time_to_first_token", "until a request's first token.", _FIRST)
        self._token = self._histogram(
            "request_time_per_output_token", "per token of a request's answer after its first.", _TOKEN
        )
        self._whole = self._histogram("e2e_request_latency", "until a request's last token.", _WHOLE)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        kind = Histogram(
            f"attnops:{name}_seconds", f"Seconds {text}", ["model_name"], registry=self.registry, buckets=buckets
        )
        return kind.labels(self.name)

    def observe(self, request: Request, delta: Delta) -> None:
        """Observe the times of a request when it emits a delta; called in the engine's thread."""
        if request.first is None or delta.finish_reason == "error":
            return
        if request.count == 1:
            self._first.observe(request.first - request.arrived)
        if delta.finish_reason is not None:
            now = time.monotonic()
            self._whole.observe(now - request.arrived)
            if request.count > 1:
                self._token.observe((now - request.first) / (request.count - 1))

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers now."""
        engine, pages = self.engine, self.engine.pages
        used = pages.count - pages.available
        gauges = {
            "num_requests_running": ("Requests that have a row.", len(engine.running)),
            "num_requests_waiting": ("Requests that wait for a row.", len(engine.waiting)),
            "kv_cache_usage_perc": ("Share of the pages that requests hold; 1 is all.", used / pages.count),
            "kv_cache_pages": ("Pages of keys and values.", pages.count),
            "kv_cache_pages_used": ("Pages that requests hold.", used),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts, shared ones included.", "prompt_tokens"),
            "generation_tokens": ("Tokens that were generated.", "generation_tokens"),
            "num_preemptions": ("Requests that lost their pages and were computed again.", "preempted"),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"attnops:{name}", text, labels=["model_name"])
            gauge.add_metric([self.name], value)
            yield gauge
        for name, (text, key) in counters.items():
            counter = CounterMetricFamily(f"attnops:{name}", text, labels=["model_name"])
            counter.add_metric([self.name], engine.counts[key])
            yield counter
        ended = CounterMetricFamily(
            "attnops:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, key in (
            ("stop", "finished_stop"), ("length", "finished_length"), ("error", "finished_error"),
            ("abort", "cancelled"),
        ):  # fmt: skip
            ended.add_metric([self.name, reason], engine.counts[key])
        yield ended
        refused = CounterMetricFamily(
            "attnops:requests_refused", "Calls that got status 429, by reason.", labels=["model_name", "reason"]
        )
        for reason in REFUSALS:
            refused.add_metric([self.name, reason], self.refused[reason])
        yield refused

    def exposition(self, accept: str | None) -> tuple[bytes, str]:
        """All metrics in the format that an ``Accept`` header asks for, and its content type; the default format if the
        header has no valid version.
        """
        try:
            encode, content_type = choose_encoder(accept or "")
        except (TypeError, ValueError):  # by prometheus-client, for a version that is no number
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type
