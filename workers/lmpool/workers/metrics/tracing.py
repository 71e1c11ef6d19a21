"""OpenTelemetry spans of a worker's jobs, made when a job has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from lmpool.errors import SettingsError
from lmpool.metrics import opentelemetry
from lmpool.protocol.job import Job, TracedJob
from lmpool.workers.execution.in_flight import JobTrace, StreamEntry

_log = logging.getLogger("lmpool.worker")

_MAX_TRACEPARENT = 512  # Max characters of a trace context; usual contexts have 55.
_MAX_LINKS = 128  # Max links of a span, the SDK's default limit.
_FLUSH_S = 5.0  # Max seconds to send the last spans when the worker ends: the collector may not answer.


class JobTraces:
    """Makes the spans of one worker, with the tracer provider of its process.

    A job that names a trace has three spans below its client's span: `lmpool.queue`, `lmpool.step` (the last step if
    there were several) and `lmpool.publish`. `lmpool.batch` is the span of the step, in its own trace; links connect
    this span and the spans of all jobs that the step has computed.
    """

    def __init__(self, model: str, worker_id: str) -> None:
        self._api = opentelemetry()
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._new_context: Callable[[], Any] = Context
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = self._api.get_tracer("lmpool.worker", version("lmpool"))
        names = {"messaging.destination.name": model, "messaging.client.id": worker_id}
        self._attributes = {"messaging.system": "lmpool", **names}

    def taken(self, message: Job, queued_ms: float) -> JobTrace | None:
        """Begin to trace a job that was queued at `queued_ms`, in ms since 1970 by the local clock; None: untraced."""
        if not isinstance(message, TracedJob) or not 0 < len(message.traceparent) <= _MAX_TRACEPARENT:
            return None
        context = self._propagator.extract({"traceparent": message.traceparent}, context=self._new_context())
        if not self._api.get_current_span(context).get_span_context().is_valid:
            return None
        now = time.time_ns()
        # The queueing time must not lie in the future: clocks differ, and a hostile client may have written any time.
        return JobTrace(context, min(now, max(0, int(queued_ms * 1e6))), now)

    def stepped(self, traces: Sequence[JobTrace], step: tuple[float, float], prompts: int) -> None:
        """Trace a step of the backend that computed `prompts` prompts; `step`: monotonic times of its start and end."""
        since, now = time.monotonic(), time.time_ns()
        began, ended = (now - int((since - at) * 1e9) for at in step)
        clients = [self._api.get_current_span(trace.context).get_span_context() for trace in traces]
        batch, context = None, self._new_context()
        if any(client.trace_flags.sampled for client in clients):
            links = [self._api.Link(client) for client in clients[:_MAX_LINKS]]
            facts = {**self._attributes, "messaging.batch.message_count": prompts}
            span = self._tracer.start_span("lmpool.batch", context, attributes=facts, links=links, start_time=began)
            span.end(ended)
            batch = span.get_span_context()
        for trace in traces:
            trace.stepped, trace.batch = (max(began, trace.taken), ended), batch

    def ended(self, entries: Iterable[StreamEntry]) -> None:
        """Make the spans of jobs that have just ended."""
        now = time.time_ns()
        for entry in entries:
            if (trace := entry.trace) is None:
                continue
            spans = [("queue", "receive", trace.queued, trace.taken)]
            if trace.stepped is not None:
                spans.append(("step", "process", *trace.stepped))
            for name, operation, began, ended in [*spans, ("publish", "settle", spans[-1][3], now)]:
                links = [self._api.Link(trace.batch)] if name == "step" and trace.batch is not None else []
                kind = self._api.SpanKind.CONSUMER if name == "queue" else self._api.SpanKind.INTERNAL
                attributes = {**self._attributes, "messaging.operation.type": operation}
                failure = entry.failure if name == "publish" else None
                if failure is not None:
                    attributes["error.type"] = failure.kind
                span = self._tracer.start_span(f"lmpool.{name}", trace.context, kind, attributes, links, began)
                if failure is not None:
                    span.set_status(self._api.StatusCode.ERROR)
                span.end(max(began, ended))


@contextmanager
def exporting(model: str, worker_id: str) -> Iterator[None]:
    """Export the spans of this process by OTLP over HTTP, as configured by the variables `OTEL_...`.

    An existing tracer provider, for example of `opentelemetry-instrument`, stays in use.
    """
    api = opentelemetry()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"tracing needs more packages ({error}): pip install 'lmpool[tracing]'") from error
    if not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        yield
        return
    ours = {SERVICE_NAME: "lmpool-worker", SERVICE_INSTANCE_ID: worker_id, "lmpool.model": model}
    # Environment variables override the attributes that lmpool sets.
    resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    api.set_tracer_provider(provider)
    _log.info("tracing: spans go where OTEL_EXPORTER_OTLP_ENDPOINT says")
    try:
        yield
    finally:
        flush = threading.Thread(target=provider.shutdown, name="lmpool-traces", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
