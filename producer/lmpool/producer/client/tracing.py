"""Spans of a producer's requests, by OpenTelemetry: what they cost where tracing is off is one look at None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any

from lmpool.metrics import opentelemetry
from lmpool.producer.client.requests import PendingRequest
from lmpool.protocol.job import with_traceparent


class _Call:
    """One call of a program that is traced.

    Attributes:
        span: its span, of OpenTelemetry.
        traceparent: names it for others; "" where there is nothing to be named.
        requests: what it waits for, and whether it was the first to ask for that.
    """

    __slots__ = ("requests", "span", "traceparent")

    def __init__(self, span: Any, traceparent: str) -> None:
        self.span = span
        self.traceparent = traceparent
        self.requests: list[tuple[PendingRequest, bool]] = []


_call: ContextVar[_Call | None] = ContextVar("lmpool_call", default=None)


class Traces:
    """Makes the spans of one producer, with the tracer provider that the program has set up.

    Args:
        model: the model's name as the program has it; None where it has none.

    Raises:
        SettingsError: OpenTelemetry's API is not installed.
    """

    def __init__(self, model: str | None) -> None:
        self._api = opentelemetry()
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator = TraceContextTextMapPropagator()
        self._tracer = self._api.get_tracer("lmpool.producer", version("lmpool"))
        self._attributes = {"messaging.system": "lmpool", **({"messaging.destination.name": model} if model else {})}
        # Digest -> the call whose request is under way.
        self._calls: dict[bytes, _Call] = {}

    @contextmanager
    def span(self, operation: str) -> Iterator[None]:
        """Trace one call; the requests that it makes meanwhile carry its context.

        Args:
            operation: the method of `Producer` that is called.
        """
        attributes = {**self._attributes, "messaging.operation.name": operation}
        kind = self._api.SpanKind.CLIENT
        # The SDK would record the text of an exception, which may quote the prompt.
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(f"lmpool.{operation}", None, kind, attributes, **quiet) as span:
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier)
            call = _Call(span, carrier.get("traceparent", ""))
            token = _call.set(call)
            try:
                yield
            except Exception as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(self._api.StatusCode.ERROR)
                raise
            finally:
                _call.reset(token)
                self._end(call)

    def _end(self, call: _Call) -> None:
        origins = Counter((request.origin or "failed") if is_first else "joined" for request, is_first in call.requests)
        for origin, count in origins.items():
            call.span.set_attribute(f"lmpool.requests.{origin}", count)
        for request, _ in call.requests:
            if self._calls.get(request.prompt.digest) is call:
                del self._calls[request.prompt.digest]

    def note(self, request: PendingRequest, is_new: bool) -> None:
        """Note that the present call waits for a request; one that joins another's is linked to that."""
        call, digest = _call.get(), request.prompt.digest
        if call is None:
            return
        call.requests.append((request, is_new))
        if is_new:
            self._calls[digest] = call
        elif (other := self._calls.get(digest)) is not None and other is not call:
            call.span.add_link(other.span.get_span_context())

    def mark(self, requests: Sequence[PendingRequest], jobs: Sequence[bytes]) -> list[bytes]:
        """The packed jobs of requests, those of calls that are traced with their context."""
        calls = [self._calls.get(request.prompt.digest) for request in requests]
        return [
            with_traceparent(job, call.traceparent) if call is not None and call.traceparent else job
            for job, call in zip(jobs, calls, strict=True)
        ]
