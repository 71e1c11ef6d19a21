"""A producer's metrics for a registry of prometheus_client; needs `lmpool[metrics]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmpool.metrics import prometheus
from lmpool.producer.client.requests import Counters
from lmpool.producer.producer import Producer
from lmpool.producer.sync import SyncProducer

_OUTCOMES = {"cache_hits": "cache_hit"}
"""Outcomes that have another name as the value of a label."""


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
        self._counters = [counters_of(producer) for producer in producers]

    def collect(self) -> Iterator[Any]:
        """The metric families now. Before a producer has connected, its model is ""."""
        counter, gauge = self._library.CounterMetricFamily, self._library.GaugeMetricFamily
        each, by_outcome = ("model",), ("model", "outcome")
        requests = counter(
            "lmpool_producer_requests_total", "Requests that ended, each by how it ended.", labels=by_outcome
        )
        failures = counter(
            "lmpool_producer_failures_total",
            "Requests that failed or were cancelled, by exception.",
            labels=("model", "kind"),
        )
        under_way = gauge("lmpool_producer_requests_under_way", "Requests that wait for an answer.", labels=each)
        fetched = counter(
            "lmpool_producer_fetched_bytes_total", "Bytes of rows and answers fetched from the server.", labels=each
        )
        shared = counter("lmpool_producer_shared_rows_total", "Rows read from shared memory.", labels=each)
        lost = counter("lmpool_producer_lost_rows_total", "Rows gone from shared memory when wanted.", labels=each)
        cache_bytes = gauge("lmpool_producer_cache_bytes", "Bytes of rows in the producer's own memory.", labels=each)
        cache_rows = gauge("lmpool_producer_cache_rows", "Rows in the producer's own memory.", labels=each)
        seconds = self._library.HistogramMetricFamily(
            "lmpool_producer_request_seconds", "Seconds of requests that used the server.", labels=by_outcome
        )
        # One of each model: Prometheus takes nothing from a page that has the same labels twice.
        for model, counters in {counters.model: counters for counters in self._counters}.items():
            for name, histogram in counters.seconds.items():
                outcome = _OUTCOMES.get(name, name)
                requests.add_metric((model, outcome), sum(histogram.counts))
                seconds.add_metric((model, outcome), *histogram.cumulative())
            requests.add_metric((model, "local_hit"), counters.stats.local_hits)
            for kind, count in counters.failures.copy().items():
                failures.add_metric((model, kind), count)
            under_way.add_metric((model,), counters.under_way)
            fetched.add_metric((model,), counters.fetched_bytes)
            shared.add_metric((model,), counters.shared.rows)
            lost.add_metric((model,), counters.shared.lost)
            cache_bytes.add_metric((model,), counters.cache.size)
            cache_rows.add_metric((model,), len(counters.cache))
        yield from (requests, failures, under_way, fetched, shared, lost, cache_bytes, cache_rows, seconds)


def counters_of(producer: Producer | SyncProducer) -> Counters:
    """What a producer counts."""
    return (producer._producer if isinstance(producer, SyncProducer) else producer)._counters
