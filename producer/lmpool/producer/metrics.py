"""A producer's metrics for a registry of prometheus_client; needs `lmpool[metrics]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmpool.metrics import Metric, Samples, families, prometheus
from lmpool.producer.figures import OUTCOMES, Figures
from lmpool.producer.producer import Producer
from lmpool.producer.sync import SyncProducer

_OUTCOMES = {"local_hits": "local_hit", "cache_hits": "cache_hit"}
"""Counters of `ProducerStats` that have another name as the value of a label."""

METRICS = (
    Metric("lmpool_producer_requests_total", "counter", "Requests that ended, each by how it ended.", ("outcome",)),
    Metric(
        "lmpool_producer_failures_total", "counter", "Requests that failed or were cancelled, by exception.", ("kind",)
    ),
    Metric("lmpool_producer_requests_under_way", "gauge", "Requests that wait for an answer."),
    Metric("lmpool_producer_fetched_bytes_total", "counter", "Bytes of rows and answers fetched from the server."),
    Metric("lmpool_producer_cache_bytes", "gauge", "Bytes of rows in the producer's own memory."),
    Metric("lmpool_producer_cache_rows", "gauge", "Rows in the producer's own memory."),
    Metric("lmpool_producer_request_seconds", "histogram", "Seconds of requests that used the server.", ("outcome",)),
)


class ProducerCollector:
    """Gives a registry of prometheus_client the metrics of producers: `registry.register(ProducerCollector(producer))`.

    A registry takes one such collector; a process that has producers of several models names them all in it.

    Args:
        producers: whose; each with a model of its own.

    Raises:
        SettingsError: prometheus_client is not installed.
    """

    def __init__(self, *producers: Producer | SyncProducer) -> None:
        self._library = prometheus("metrics")
        self._figures = [figures_of(producer) for producer in producers]

    def collect(self) -> Iterator[Any]:
        """The metric families now. Before a producer has connected, its model is ""."""
        samples: dict[str, dict[tuple[str, ...], Any]] = {}
        for figures in self._figures:
            for name, values in _samples(figures).items():
                samples.setdefault(name, {}).update(values)
        return families(METRICS, samples, ("model",), self._library)


def figures_of(producer: Producer | SyncProducer) -> Figures:
    """What a producer counts."""
    return (producer._producer if isinstance(producer, SyncProducer) else producer)._figures


def _samples(figures: Figures) -> dict[str, Samples]:
    """Name of a metric -> its values."""
    model = figures.model
    outcomes = {name: sum(figures.seconds[name].counts) for name in OUTCOMES}
    outcomes["local_hits"] = figures.stats.local_hits
    return {
        "lmpool_producer_requests_total": {(model, _OUTCOMES.get(name, name)): n for name, n in outcomes.items()},
        "lmpool_producer_failures_total": {(model, kind): n for kind, n in figures.failures.copy().items()},
        "lmpool_producer_requests_under_way": {(model,): figures.under_way},
        "lmpool_producer_fetched_bytes_total": {(model,): figures.fetched_bytes},
        "lmpool_producer_cache_bytes": {(model,): figures.cache.size},
        "lmpool_producer_cache_rows": {(model,): len(figures.cache)},
        "lmpool_producer_request_seconds": {
            (model, _OUTCOMES.get(name, name)): histogram for name, histogram in figures.seconds.items()
        },
    }
