"""OpenTelemetry: one trace leads from a client's call to the end of its job; without tracing there is none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lmpool import testing
from lmpool.errors import InvalidPrompt, SettingsError
from lmpool.producer import Producer, SyncProducer
from lmpool.protocol.job import Job, TracedJob, pack_jobs, unpack_job, with_traceparent
from lmpool.protocol.keys import JOB_FIELD
from lmpool.workers.metrics.tracing import JobTraces
from tests.support.otlp import Collector, Span, collector
from tests.support.pool import DEADLINE_S, Pool, until, until_async

# A program that uses OpenTelemetry: it configures a provider, and has its own span around the call.
PROGRAM = """
import asyncio, sys
from contextlib import suppress
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from lmpool.producer import Producer, SyncProducer

url, prefix = sys.argv[1:]
trace.set_tracer_provider(provider := TracerProvider())
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = trace.get_tracer("program")

async def ask(producer, name, ids):
    with tracer.start_as_current_span(name):
        await producer.logprobs(ids)

async def main():
    async with Producer(redis=url, prefix=prefix, tracing=True) as producer:
        await ask(producer, "alone", [1, 2])
        await asyncio.gather(ask(producer, "first", [3]), ask(producer, "second", [3]))
        await ask(producer, "again", [1, 2])
        with tracer.start_as_current_span("batch"):
            await producer.batch_logprobs([[5], [6], [7]])
        with suppress(Exception), tracer.start_as_current_span("failing"):
            await producer.topk([300], 3)

asyncio.run(main())
with SyncProducer(redis=url, prefix=prefix, tracing=True) as producer, tracer.start_as_current_span("sync"):
    producer.sample([8])
provider.shutdown()
"""
# Hides the package opentelemetry, of which redis-py would import a part even without tracing.
WITHOUT_OPENTELEMETRY = """
import sys
sys.modules["opentelemetry"] = None
"""
UNTRACED = f"""{WITHOUT_OPENTELEMETRY}
from lmpool.producer import SyncProducer

with SyncProducer(redis=sys.argv[1], prefix=sys.argv[2]) as producer:
    producer.logprobs([1, 2])
    assert producer.stats().computed == 1
"""
COMMAND = f"""{WITHOUT_OPENTELEMETRY}
from lmpool.cli import main
main()
"""
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def run(program: str, pool: Pool, **environment: str) -> None:
    """Run a program to its end."""
    command = [sys.executable, "-c", program, pool.url, pool.prefix]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=DEADLINE_S)


def below(collected: Collector, parent: Span) -> list[Span]:
    """Return the child spans of a span, in the order of their ends."""
    return sorted((span for span in collected.spans if span.parent == parent.id), key=lambda span: span.ended)


def child(collected: Collector, parent: str) -> Span:
    """Return the only child of the only span with this name."""
    (root,) = collected.named(parent)
    (span,) = below(collected, root)
    return span


PARTS = ["lmpool.queue", "lmpool.step", "lmpool.publish"]


def test_one_trace_leads_from_the_program_to_the_end_of_the_job(pool: Pool) -> None:
    with collector() as collected:
        settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": collected.url, "OTEL_SERVICE_NAME": "pool"}
        worker = pool.start("--tracing", "--fail-token", 300, environment=settings)
        run(PROGRAM, pool, OTEL_EXPORTER_OTLP_ENDPOINT=collected.url)
        worker.process.terminate()
        assert worker.wait() == 0  # A worker exports its last spans before it ends.

    call = child(collected, "alone")
    assert (call.name, call.parent) == ("lmpool.logprobs", collected.named("alone")[0].id)
    assert call.attributes["lmpool.requests.computed"] == 1
    parts = queue, step, publish = below(collected, call)
    assert [part.name for part in parts] == PARTS
    assert {part.trace for part in parts} == {call.trace}
    assert {part.service for part in parts} == {"pool"}
    assert {part.attributes["messaging.destination.name"] for part in parts} == {"syn"}
    # Allow 2 ms, because the server reports the time of queueing in whole milliseconds.
    assert call.began - 2_000_000 < queue.began <= queue.ended <= step.began < step.ended == publish.began
    assert step.links == {(batch.trace, batch.id) for batch in collected.named("lmpool.batch") if call_of(call, batch)}

    # A prompt of two clients is computed once; the second client's span links to the first client's.
    first, second = child(collected, "first"), child(collected, "second")
    assert second.links == {(first.trace, first.id)}
    assert second.attributes["lmpool.requests.joined"] == 1
    assert below(collected, second) == []

    # The producer's own cache returned the row of the span `again`, so no other process took part.
    assert below(collected, child(collected, "again")) == []

    batched = child(collected, "batch")
    assert batched.name == "lmpool.batch_logprobs"
    assert sorted(span.name for span in below(collected, batched)) == sorted(3 * PARTS)

    failing = child(collected, "failing")
    assert (failing.name, failing.is_error, failing.attributes["error.type"]) == (
        "lmpool.topk",
        True,
        "WorkerError",
    )
    assert [span.is_error for span in below(collected, failing)] == [False, False, True]

    assert [span.name for span in below(collected, child(collected, "sync"))] == PARTS


async def test_no_span_contains_text_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    async with (
        testing.pool(testing.SyntheticModel(vocab_size=4)) as pool,
        Producer(redis=pool.url, tracing=True) as producer,
    ):
        for bad in ([1, "a secret"], [1, 31337]):
            with pytest.raises(InvalidPrompt, match="secret|31337"):
                await producer.logprobs(bad)
    spans = exporter.get_finished_spans()
    assert [(span.attributes or {})["error.type"] for span in spans] == ["NotTokenIds", "TokenOutOfRange"]
    assert all(span.status.status_code is trace.StatusCode.ERROR for span in spans)
    assert not [said for span in spans for said in ("secret", "31337") if said in span.to_json()]


def call_of(call: Span, batch: Span) -> bool:
    """Return whether a batch's span, which begins its own trace, links to the span of a call."""
    assert batch.parent == ""
    assert batch.trace != call.trace
    return (call.trace, call.id) in batch.links


# Trace contexts of jobs


def held_jobs(pool: Pool) -> list[Job]:
    """Return the jobs that the worker holds."""
    entries = [entry for stream in pool.streams() for entry in cast(Any, pool.redis.xrange(stream))]
    return [unpack_job(fields[JOB_FIELD]) for _, fields in entries]


async def test_a_job_carries_a_trace_context_only_with_tracing(pool: Pool) -> None:
    """A program without OpenTelemetry's SDK still passes the trace context of an incoming request to workers."""
    await asyncio.to_thread(pool.start, "--step-ms", 600_000, "--max-batch", 1)
    span = TraceContextTextMapPropagator().extract({"traceparent": TRACEPARENT})
    token = context.attach(span)
    try:
        async with pool.producer() as off, pool.producer(tracing=True) as on:
            asked = [asyncio.create_task(producer.logprobs([1, i])) for i, producer in enumerate((off, on))]
            jobs = await until_async(lambda: _both(pool), "both are queued")
            for task in asked:
                task.cancel()
    finally:
        context.detach(token)
    by_prompt = {job.ids[4]: job for job in jobs}
    assert type(by_prompt[0]) is Job
    traced = by_prompt[1]
    assert isinstance(traced, TracedJob)
    assert traced.traceparent == TRACEPARENT


async def _both(pool: Pool) -> list[Job]:
    jobs = await asyncio.to_thread(held_jobs, pool)
    return jobs if len(jobs) == 2 else []


def test_without_tracing_opentelemetry_is_not_needed(pool: Pool) -> None:
    pool.start(command=lambda: [sys.executable, "-c", COMMAND])
    run(UNTRACED, pool)
    worker = pool.start("--tracing", command=lambda: [sys.executable, "-c", COMMAND], wait=False)
    assert worker.wait() == 2
    assert "pip install 'lmpool[tracing]'" in worker.text
    assert "Traceback" not in worker.text


def test_a_worker_without_tracing_serves_traced_clients(pool: Pool) -> None:
    pool.start()
    with collector() as collected:
        run(PROGRAM.replace("[300]", "[30]"), pool, OTEL_EXPORTER_OTLP_ENDPOINT=collected.url)
    assert child(collected, "alone").attributes["lmpool.requests.computed"] == 1
    assert not collected.named("lmpool.queue")


HOSTILE = {
    "empty": "",
    "long": TRACEPARENT + "0" * 1_000_000,
    "no ids": f"00-{'0' * 32}-{'0' * 16}-01",
    "a version that is none": TRACEPARENT.replace("00-", "ff-", 1),
    "no hexadecimal numbers": TRACEPARENT.replace("a", "g"),
    "control characters": f"{TRACEPARENT}\x1b[2J\r\n",
    "a part too few": TRACEPARENT[:-3],
    "another format": "b3: 80f198ee56343ba864fe8b2a57d3eff7-e457b5a2e4d86bd1-1",
}


def test_hostile_trace_contexts_are_harmless_and_unsampled_ones_are_not_exported(pool: Pool) -> None:
    contexts = [*HOSTILE.values(), TRACEPARENT]
    unsampled = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-00"
    with collector() as collected:
        worker = pool.start("--tracing", environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collected.url})
        with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
            fingerprint = producer.model.fingerprint
            for number, traceparent in enumerate([*contexts, unsampled]):
                if traceparent == unsampled:  # Wait, so that this job gets its own batch.
                    until(lambda: not pool.jobs(), "the others are computed")
                (job,) = pack_jobs([Job(np.array([1, number], "<u4").tobytes(), "", fingerprint)])
                pool.redis.xadd(pool.keys.model("syn").jobs, {JOB_FIELD: with_traceparent(job, traceparent)})
            until(lambda: not pool.jobs(), "all are computed")
            for number in range(len(contexts) + 1):
                producer.logprobs([1, number])
            assert producer.stats().computed == 0
        worker.process.terminate()
        assert worker.wait() == 0
    assert "Traceback" not in worker.text
    parts = [span for span in collected.spans if span.name != "lmpool.batch"]
    assert sorted(span.name for span in parts) == sorted(PARTS)
    assert {(span.trace, span.parent) for span in parts} == {tuple(TRACEPARENT.split("-")[1:3])}
    (batch,) = collected.named("lmpool.batch")
    assert batch.links == {(parts[0].trace, parts[0].parent)}


@pytest.mark.parametrize("traceparent", HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_trace_context_is_ignored(traceparent: str) -> None:
    job = unpack_job(with_traceparent(Job(b"\0\0\0\0", "", "f").pack(), traceparent))
    assert isinstance(job, TracedJob)
    assert JobTraces("m", "w").taken(job, 0) is None
    assert JobTraces("m", "w").taken(Job(b"\0\0\0\0", "", "f"), 0) is None


# Settings


def test_the_tracing_setting_is_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="tracing: 'yes' must be True, False or None"):
        Producer(tracing="yes")  # type: ignore[arg-type]
    monkeypatch.setenv("LMPOOL_TRACING", "yes")
    with pytest.raises(SettingsError, match="LMPOOL_TRACING: 'yes' is not one of 0, 1"):
        Producer()
    monkeypatch.setenv("LMPOOL_TRACING", "1")
    assert Producer()._traces is not None
    assert Producer(tracing=False)._traces is None
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(SettingsError, match=r"pip install 'lmpool\[tracing\]'"):
        Producer()
