"""Count and trace a producer's requests, for Prometheus (`lmpool[metrics]`) and OpenTelemetry.

This module imports only the shared folders, so that the modules of `client` can import this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Protocol

from lmpool.metrics import Histogram, opentelemetry, prometheus
from lmpool.protocol.job import with_traceparent
from lmpool.rows.shared_memory import ReadCounts

OUTCOMES = ("cache_hits", "joined", "computed", "failed")
"""The attributes of `ProducerStats` that count requests which the producer's own memory did not serve."""

_LABELS = {"cache_hits": "cache_hit"}
"""The attributes of `ProducerStats` that have another name as a label in Prometheus: attribute -> label."""


@dataclass(slots=True)
class ProducerStats:
    """Counts a producer's requests to the model's workers by their outcome.

    A request is for one row, or one result from a row. Calls of a trie make requests too: for a prompt's row, and for
    node values that the model's workers compute. Requests to trie workers are not counted. Calls that fail before the
    producer has connected, or because of invalid arguments, are not counted.

    Attributes:
        requests: number of all requests. A request that has ended is also counted in one of the other attributes.
        local_hits: number of requests served from the producer's own memory.
        cache_hits: number of requests served from the pool's cache, in Redis or in shared memory.
        joined: number of requests that joined an earlier request for the same prompt, from this or another process.
        computed: number of requests computed by a worker. A worker may compute one row for several queries about a
            prompt; each query is counted.
        failed: number of requests that ended with an exception or were cancelled.
    """

    requests: int = 0
    local_hits: int = 0
    cache_hits: int = 0
    joined: int = 0
    computed: int = 0
    failed: int = 0

    def add(self, name: str, count: int = 1) -> None:
        """Add `count` to the attribute `name`."""
        setattr(self, name, getattr(self, name) + count)

    def copy(self) -> ProducerStats:
        """Return a snapshot of the counts."""
        return replace(self)


@dataclass(slots=True)
class Counters:
    """Counters and histograms of one producer, which its event loop updates; any thread may read them.

    Attributes:
        cache: the row cache in the producer's own memory.
        seconds: outcome -> durations of the requests with this outcome. Each request is in one histogram.
        failures: name of the exception, or "cancelled" -> number of requests.
        fetched_bytes: bytes of encoded rows and query results received from the server.
        shared: counts of reads of rows in shared memory.
        model: name of the model, "" until the producer has connected.
    """

    stats: ProducerStats
    cache: Any
    seconds: dict[str, Histogram] = field(default_factory=lambda: {outcome: Histogram() for outcome in OUTCOMES})
    failures: Counter[str] = field(default_factory=Counter)
    fetched_bytes: int = 0
    shared: ReadCounts = field(default_factory=ReadCounts)
    model: str = ""

    def count_in(self, other: Counters) -> None:
        """Count requests and reads of shared memory in `other`, but no fetched bytes; call it before connecting."""
        self.stats, self.seconds, self.failures, self.shared = other.stats, other.seconds, other.failures, other.shared

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""
        ended = sum(sum(histogram.counts) for histogram in self.seconds.values())
        return max(0, self.stats.requests - self.stats.local_hits - ended)


class Counted(Protocol):
    """A `Producer` or a `SyncProducer`."""

    @property
    def _counters(self) -> Counters: ...


_VALUES: tuple[tuple[str, str, str, Callable[[Counters], float]], ...] = (
    ("requests_under_way", "gauge", "Requests in flight.", attrgetter("in_flight")),
    ("fetched_bytes_total", "counter", "Bytes of rows and results from the server.", attrgetter("fetched_bytes")),
    ("shared_rows_total", "counter", "Rows read from shared memory.", attrgetter("shared.rows")),
    ("direct_rows_total", "counter", "Rows read from workers on other hosts.", attrgetter("shared.direct")),
    ("lost_rows_total", "counter", "Rows missing from shared memory when they were read.", attrgetter("shared.lost")),
    ("cache_bytes", "gauge", "Bytes of rows in the producer's own memory.", attrgetter("cache.size")),
    ("cache_rows", "gauge", "Rows in the producer's own memory.", lambda counters: len(counters.cache)),
)
"""Metrics with one value per model: name without prefix, kind, help text, function that returns the value."""


class ProducerCollector:
    """Exports the metrics of producers to prometheus_client: `registry.register(ProducerCollector(producer))`.

    A registry takes only one such collector: a process with several producers passes all producers to one collector.

    Args:
        producers: `Producer` or `SyncProducer` objects, each of a different model.

    Raises:
        SettingsError: prometheus_client is not installed.
    """

    def __init__(self, *producers: Counted) -> None:
        self._library = prometheus("metrics")
        self._counters = [producer._counters for producer in producers]

    def collect(self) -> Iterator[Any]:
        """Yield the current metric families. The model label is "" until the producer has connected."""
        counter, gauge = self._library.CounterMetricFamily, self._library.GaugeMetricFamily
        each, by_outcome, by_kind = ("model",), ("model", "outcome"), ("model", "kind")
        requests = counter("lmpool_producer_requests_total", "Requests that ended, by outcome.", labels=by_outcome)
        failures = counter(
            "lmpool_producer_failures_total", "Requests that failed or were cancelled, by exception.", labels=by_kind
        )
        seconds = self._library.HistogramMetricFamily(
            "lmpool_producer_request_seconds", "Duration of requests that used the server.", labels=by_outcome
        )
        values = [
            ((gauge if kind == "gauge" else counter)(f"lmpool_producer_{name}", text, labels=each), read)
            for name, kind, text, read in _VALUES
        ]
        # Export at most one producer per model: Prometheus rejects a page that repeats labels.
        for model, counters in {counters.model: counters for counters in self._counters}.items():
            for name, histogram in counters.seconds.items():
                labels = (model, _LABELS.get(name, name))
                requests.add_metric(labels, sum(histogram.counts))
                seconds.add_metric(labels, *histogram.cumulative())
            requests.add_metric((model, "local_hit"), counters.stats.local_hits)
            for kind, count in counters.failures.copy().items():
                failures.add_metric((model, kind), count)
            for family, read in values:
                family.add_metric((model,), read(counters))
        yield from (requests, failures, *(family for family, _ in values), seconds)


@dataclass(slots=True, eq=False)
class TracedCall:
    """One traced call of a producer, with its span."""

    span: Any
    traceparent: str  # Trace context of the span, which jobs carry; "" if the span has no context.
    # The pending requests that the call waits for, each with a flag: whether this call started the request.
    requests: list[tuple[Any, bool]] = field(default_factory=list)


_current_call: ContextVar[TracedCall | None] = ContextVar("lmpool_call", default=None)


class Traces:
    """Makes the spans of one producer, with the tracer provider that the program has set up.

    Args:
        model: name of the model, or None if the program did not name a model.

    Raises:
        SettingsError: the API of OpenTelemetry is not installed.
    """

    def __init__(self, model: str | None) -> None:
        self._api = opentelemetry()
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator = TraceContextTextMapPropagator()
        self._tracer = self._api.get_tracer("lmpool.producer", version("lmpool"))
        self._attributes = {"messaging.system": "lmpool", **({"messaging.destination.name": model} if model else {})}

    @contextmanager
    def span(self, operation: str) -> Iterator[None]:
        """Trace one call of the method `operation`; the jobs of its requests carry the context of the span."""
        attributes = {**self._attributes, "messaging.operation.name": operation}
        kind = self._api.SpanKind.CLIENT
        # Do not let OpenTelemetry's SDK record the text of an exception, which may quote the prompt.
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(f"lmpool.{operation}", None, kind, attributes, **quiet) as span:
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier)
            call = TracedCall(span, carrier.get("traceparent", ""))
            token = _current_call.set(call)
            try:
                yield
            except Exception as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(self._api.StatusCode.ERROR)
                raise
            finally:
                _current_call.reset(token)
                origins = [(each.origin or "failed") if is_first else "joined" for each, is_first in call.requests]
                for origin, count in Counter(origins).items():
                    span.set_attribute(f"lmpool.requests.{origin}", count)

    @staticmethod
    def note(request: Any, is_new: bool) -> None:
        """Record that the current call waits for a request; link this call to the call that started the request."""
        call = _current_call.get()
        if call is None:
            return
        call.requests.append((request, is_new))
        if is_new:
            request.call = call
        elif request.call is not None and request.call is not call:
            call.span.add_link(request.call.span.get_span_context())

    @staticmethod
    def mark(requests: Sequence[Any], jobs: Sequence[bytes]) -> list[bytes]:
        """Add to each packed job the trace context of the call that started its request."""
        return [
            with_traceparent(job, request.call.traceparent) if request.call and request.call.traceparent else job
            for request, job in zip(requests, jobs, strict=True)
        ]
