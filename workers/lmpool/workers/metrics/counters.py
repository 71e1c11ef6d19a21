"""A worker's counters, and its HTTP port, which serves Prometheus metrics and the worker's health."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, NamedTuple

from lmpool.broker.scripts import QueueState, drain_seconds
from lmpool.broker.server_checks import ServerMemory
from lmpool.errors import AdapterChanged, SettingsError, SourceMissing, UnknownTokenSet, UnknownVocabulary
from lmpool.metrics import PROMPTS, Histogram, pack_counts, prometheus, quantile
from lmpool.protocol.job import Failure
from lmpool.workers.execution.contract import BackendStats
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

# Failures after which clients send the missing data and the job again, so that no row is lost.
SENT_AGAIN = tuple(kind.__name__ for kind in (SourceMissing, UnknownVocabulary, UnknownTokenSet, AdapterChanged))
OUTCOMES = ("row", "answer", "sent_again", "failed", "dead")
# Max open connections to the HTTP port: each takes a file descriptor of the worker, and any client may connect.
MAX_CONNECTIONS = 64
REQUEST_S = 10.0  # Max seconds for an HTTP request and its response; a scrape takes milliseconds.
_CHECKS_PER_LEASE = 10  # Number of times per lease that the event loop records that it runs.
_MAX_HEAD_BYTES = 16 * 1024  # Max bytes of a request without its body, far more than clients send.
_TEXT = "text/plain; charset=utf-8"


def _metric(name: str, text: str) -> int:
    """Declare a counter with the name and the help text of its metric."""
    return field(default=0, metadata={"metric": (name, text)})


@dataclass(slots=True, eq=False)
class WorkerCounters:
    """Counters of one worker. One thread writes each counter, and any thread may read it."""

    step_s: Histogram = field(default_factory=Histogram)  # The backend's thread writes this histogram and `batch`.
    batch: Histogram = field(default_factory=lambda: Histogram(PROMPTS))
    publish_s: Histogram = field(default_factory=Histogram)
    job_s: Histogram = field(default_factory=Histogram)
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))  # Outcome -> jobs.
    claimed: int = _metric("worker_claimed_jobs_total", "Jobs taken over from workers whose leases expired.")
    homed: int = _metric("worker_homed_jobs_total", "Jobs that extend prompts which the worker has computed.")
    stolen: int = _metric("worker_stolen_jobs_total", "Jobs taken from other workers' lanes.")
    lane: int = _metric("worker_lane_jobs", "Jobs in the worker's lane, waiting and held, at the last heartbeat.")
    refused: int = _metric("worker_refused_rows_total", "Rows that the server refused, for example for lack of memory.")
    evicted: int = _metric("worker_evicted_rows_total", "Rows that were evicted as soon as they were stored.")
    shared: int = _metric("worker_shared_rows_total", "Rows written to shared memory.")
    shared_bytes: int = _metric("worker_shared_memory_bytes", "Size of the worker's shared memory.")
    exported: int = _metric("worker_exported_rows_total", "Rows stored whole for clients on other hosts.")
    published_bytes: int = _metric("worker_published_bytes_total", "Bytes of rows and answers sent to the server.")
    fetched_bytes: int = _metric("worker_fetched_bytes_total", "Bytes of rows and weights fetched to answer queries.")
    server_errors: int = _metric("worker_server_errors_total", "Failed attempts to use the server.")
    # Id of an entry in flight that was in the backlog -> when it was queued, in ms since 1970.
    queued_ms: dict[bytes, bytes] = field(default_factory=dict)
    queue: QueueState | None = None  # The model's queue at the last heartbeat; None before the first.
    serving: int = 1  # Workers that took jobs of the model at the last heartbeat, this worker included.
    speed: float = 0.0  # Results per second of computing, in the last heartbeat interval with steps.
    memory: ServerMemory | None = None  # The server's memory at the last heartbeat; None if it was not read.
    clock_ahead_s: float = 0.0  # Server clock minus local clock, in seconds.
    # Values at the last heartbeat: the backend's counters and the monotonic time; then the counts of `job_s`.
    _at_heartbeat: tuple[BackendStats, float] = field(default_factory=lambda: (BackendStats(), time.monotonic()))
    _job_counts: list[int] = field(default_factory=list)
    _computed: tuple[float, float] = 0.0, 0.0  # Number of answers and busy seconds when the speed was last measured.
    # Values at the last log line: the backend's counters and the monotonic time; then the counts `homed` and `stolen`.
    _at_log: tuple[BackendStats, float] = field(default_factory=lambda: (BackendStats(), time.monotonic()))
    _moved: tuple[int, int] = 0, 0

    def note_clock(self, server_time: float, sent_at: float) -> None:
        """Record the server's time, which was requested at the local time `sent_at`.

        Jobs carry the server's time, and a wrong local clock would look like a slow pool. The server has read its clock
        between the request and now. Keep a difference that this range permits: a slow reply has a wide range.
        """
        self.clock_ahead_s = min(max(self.clock_ahead_s, server_time - time.time()), server_time - sent_at)

    @property
    def drain_s(self) -> float | None:
        """Seconds to drain the queue, if all live workers are as fast as this worker; None before the first heartbeat.

        Before the worker's first result, return the age of the oldest job.
        """
        return None if self.queue is None else drain_seconds(self.queue, self.speed * self.serving)

    def stepped(self, seconds: float, answers: int) -> None:
        """Count a step of the backend; called in the backend's thread."""
        self.step_s.observe(seconds)
        self.batch.observe(answers)

    def published(self, outcome: str, entry_ids: Collection[bytes], seconds: float) -> None:
        """Count jobs that ended with a "row" or "answer", which took `seconds` to publish.

        The id of an entry begins with the time in ms when the entry was queued.
        """
        now_ms = (time.time() + self.clock_ahead_s) * 1000
        self.publish_s.observe(seconds)
        self.ended[outcome] += len(entry_ids)
        begun = [entry_id.partition(b"-")[0] for entry_id in entry_ids]
        if since := self.queued_ms:
            begun = [since.pop(entry_id, b"") or ms for entry_id, ms in zip(entry_ids, begun, strict=True)]
        # Jobs of one step were mostly queued together, so they have few different queueing times.
        for queued_ms, count in Counter(begun).items():
            self.job_s.observe(max(0.0, now_ms - int(queued_ms)) / 1000, count)

    def failed(self, failures: Iterable[tuple[Failure | None, bool]]) -> None:
        """Count failed jobs, given as the failure of each job and whether the job became a dead letter."""
        for failure, is_dead in failures:
            is_sent_again = failure is not None and failure.kind in SENT_AGAIN
            self.ended["dead" if is_dead else "sent_again" if is_sent_again else "failed"] += 1

    def since_heartbeat(self, now: BackendStats) -> dict[str, str | float]:
        """The rates since the last call as fields of the heartbeat; "" for an unknown rate."""
        (before, at), self._at_heartbeat = self._at_heartbeat, (now, time.monotonic())
        counts, self._job_counts = self.job_s.since(self._job_counts), list(self.job_s.counts)
        p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
        rows, steps = now.rows - before.rows, now.steps - before.steps
        answers, busy_s = self.batch.total, self.step_s.total
        if answers > self._computed[0] and busy_s > self._computed[1]:
            self.speed = (answers - self._computed[0]) / (busy_s - self._computed[1])
            self._computed = answers, busy_s
        return {
            "speed": round(self.speed, 3),
            "rows_per_s": round(rows / max(1e-3, self._at_heartbeat[1] - at), 1),
            "batch": round(rows / steps, 1) if steps else "",
            "p50_s": "" if p50 is None else round(p50, 6),
            "p99_s": "" if p99 is None else round(p99, 6),
            # Quantiles of several workers cannot be combined, but counts can.
            "job_counts": pack_counts(counts),
        }

    def describe_since_log(self, now: BackendStats) -> str:
        """The rates since the last call as text; "" if no step has ended."""
        (before, at), self._at_log = self._at_log, (now, time.monotonic())
        rows, steps, tokens = now.rows - before.rows, now.steps - before.steps, now.tokens - before.tokens
        if not steps:
            return ""
        reused = (now.reused - before.reused) / max(1, tokens)
        (homed, stolen), self._moved = self._moved, (self.homed, self.stolen)
        return (
            f"{rows / max(1e-3, self._at_log[1] - at):.1f} rows/s, {rows / steps:.1f} prompts a batch, "
            f"{100 * reused:.0f} % of tokens from the prefix cache, {self._moved[0] - homed} prompts homed, "
            f"{self._moved[1] - stolen} stolen"
        )


class Snapshot(NamedTuple):
    """The state of a worker at one moment."""

    model: str
    worker_id: str
    is_ready: bool  # Whether the worker takes jobs.
    in_flight: int  # Prompts that the worker holds.
    silent_s: float  # Seconds since the server last answered a heartbeat.
    stats: BackendStats
    counters: WorkerCounters
    ranks: int = 1  # Processes that the worker's model is spread over.
    devices: int = 1  # Devices that hold parts of the model; `ranks` until the model is loaded.


# Metrics not declared by `_metric`: name, attribute of `Snapshot`, and help text. Names of counters end in "_total".
_METRICS = (
    ("worker_ready", "is_ready", "1 while the worker takes jobs, else 0."),
    ("worker_ranks", "ranks", "Processes that the worker's model is spread over."),
    ("worker_devices", "devices", "Devices that hold parts of the worker's model."),
    ("worker_steps_total", "stats.steps", "Forwards that the backend has run."),
    ("worker_rows_total", "stats.rows", "Rows that the backend has computed."),
    ("worker_tokens_total", "stats.tokens", "Tokens of the computed prompts."),
    ("worker_reused_tokens_total", "stats.reused", "Tokens among them that a prefix cache already held."),
    ("worker_held_prompts", "in_flight", "Prompts in flight in the worker."),
    ("worker_heartbeat_age_seconds", "silent_s", "Seconds since the server last answered a heartbeat."),
    ("worker_batch_prompts", "counters.batch", "Prompts that a step finished."),
    ("worker_step_seconds", "counters.step_s", "Seconds of a step of the backend."),
    ("worker_publish_seconds", "counters.publish_s", "Seconds from rows being ready to their jobs' end."),
    ("worker_job_seconds", "counters.job_s", "Seconds from a job's queueing to its row or answer."),
    ("queue_jobs", "counters.queue.depth", "Prompts of the model that wait or are computed, at the last heartbeat."),
    ("queue_oldest_job_seconds", "counters.queue.age_s", "Age of the oldest of them, at the last heartbeat."),
    ("queue_drain_seconds", "counters.drain_s", "Seconds that the live workers need for the queue."),
    ("queue_dead_letters", "counters.queue.dead", "Jobs that were given up, kept until retried or dropped."),
    ("server_memory_bytes", "counters.memory.used_bytes", "Memory that the server uses, at the last heartbeat."),
    ("server_memory_limit_bytes", "counters.memory.limit_bytes", "Limit of that memory (maxmemory); 0 for no limit."),
    ("server_evicted_keys_total", "counters.memory.evicted_keys", "Keys that the server has evicted."),
)


@dataclass(eq=False)
class WorkerCollector:
    """Provides the metrics of one worker to a registry of prometheus_client, in whose thread `take_snapshot` runs."""

    take_snapshot: Callable[[], Snapshot]

    def collect(self) -> Iterator[Any]:
        """The metric families with their present values."""
        snapshot, core = self.take_snapshot(), prometheus("worker")
        labels = ("model", "worker", "version")
        info = core.GaugeMetricFamily("lmpool_worker_info", "Always 1; identifies this worker.", labels=labels)
        info.add_metric((snapshot.model, snapshot.worker_id, version("lmpool")), 1)
        yield info
        text = "Jobs that ended, by their outcome."
        jobs = core.CounterMetricFamily("lmpool_worker_jobs_total", text, labels=("model", "outcome"))
        for outcome in OUTCOMES:
            jobs.add_metric((snapshot.model, outcome), snapshot.counters.ended[outcome])
        yield jobs
        counted = [(f"counters.{each.name}", each.metadata.get("metric")) for each in fields(WorkerCounters)]
        for name, path, text in [*((named[0], path, named[1]) for path, named in counted if named), *_METRICS]:
            value: Any = snapshot
            for attribute in path.split("."):
                value = None if value is None else getattr(value, attribute)
            is_histogram = isinstance(value, Histogram)
            kind = "Histogram" if is_histogram else "Counter" if name.endswith("_total") else "Gauge"
            family = getattr(core, f"{kind}MetricFamily")(f"lmpool_{name}", text, labels=("model",))
            if value is not None:  # None: the value is not measured yet, so leave it out.
                family.add_metric((snapshot.model,), *(value.cumulative() if is_histogram else (value,)))
            yield family


class Health:
    """The state of one worker: its event loop writes it, other threads read it.

    `lease_s`: max seconds of silence of the event loop and of the server; `clock` returns monotonic seconds.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._ticked_at = self._answered_at = clock()
        self.state = "loading"  # The worker is "loading", "ready" or "draining".
        self.broken = ""  # Why the backend cannot be used any more; "" while it works.
        self.trouble = ""  # Why the last heartbeat failed; "" if it arrived.

    def start(self) -> None:
        """Record regularly, from now on, that the event loop runs."""
        self._ticked_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(self._lease_s / _CHECKS_PER_LEASE, self.start)

    def end(self) -> None:
        """Stop recording that the event loop runs."""
        self._timer.cancel()

    def answered(self) -> None:
        """Record that the server has answered a heartbeat."""
        self._answered_at, self.trouble = self._clock(), ""

    @property
    def silent_s(self) -> float:
        """Seconds since the server last answered a heartbeat."""
        return self._clock() - self._answered_at

    def why_dead(self) -> str:
        """Why the process must be replaced; "" while it is alive."""
        silent_s = self._clock() - self._ticked_at
        if silent_s > self._lease_s:
            return f"the event loop has not run for {silent_s:.1f} s; a lease is {self._lease_s:g} s"
        return f"the backend broke: {self.broken}" if self.broken else ""

    def why_not_ready(self) -> str:
        """Why the worker takes no jobs; "" while it takes jobs."""
        if why := self.why_dead():
            return why
        if self.state != "ready":
            return "the model is loading" if self.state == "loading" else f"the worker is {self.state}"
        if self.trouble:
            return f"the last heartbeat failed: {self.trouble}"
        if self.silent_s > self._lease_s:
            return f"the server has not answered a heartbeat for {self.silent_s:.1f} s"
        return ""


@contextmanager
def monitoring(settings: WorkerSettings, take_snapshot: Callable[[], Snapshot], health: Health) -> Iterator[None]:
    """Serve `/metrics`, `/healthz` and `/readyz` of a worker from a thread, if the settings name a port.

    The thread of the HTTP port calls `take_snapshot`.

    Raises:
        SettingsError: the port cannot be used, or prometheus_client is not installed.
    """
    if not settings.metrics_port:
        yield
        return
    prometheus("worker")  # Fail before the port is opened if prometheus_client is missing.
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(WorkerCollector(take_snapshot))
    ProcessCollector(registry=registry)

    def render(path: str, accept: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return 200, content_type, encode(registry)
        if path not in ("/healthz", "/readyz"):
            return 404, _TEXT, b"the pages are /metrics, /healthz and /readyz\n"
        why_not = health.why_dead() if path == "/healthz" else health.why_not_ready()
        return 503 if why_not else 200, _TEXT, f"{why_not or 'ok'}\n".encode()

    host, port = settings.metrics_host, settings.metrics_port
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise SettingsError(f"metrics_host: {host} is no address of this machine: {why}") from error
        advice = "every worker of a machine needs a port of its own"
        raise SettingsError(f"metrics_port: port {port} of {host} cannot be used: {why}; {advice}") from error
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()
    # Use a daemon thread: an open connection must not keep the worker from ending.
    serving = _serve(render, listening, stopped)
    thread = threading.Thread(target=loop.run_until_complete, args=[serving], name="lmpool-monitor", daemon=True)
    thread.start()
    _log.info("metrics and health on port %d of %s", port, host)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


async def _serve(
    render: Callable[[str, str], tuple[int, str, bytes]], listening: socket.socket, stopped: asyncio.Event
) -> None:
    """Send pages over HTTP, one per connection. `render`: path and Accept header -> status, content type, and body."""
    connections: list[asyncio.Task[Any]] = []  # Open connections, the oldest first.

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        if len(connections) > MAX_CONNECTIONS:
            connections.pop(0).cancel()
        try:
            async with asyncio.timeout(REQUEST_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, _, rest = head.partition("\r\n")[0].partition(" ")
                accept = re.search(r"^accept:(.*)$", head, re.IGNORECASE | re.MULTILINE)
                status, kind, body = 405, _TEXT, b"GET and HEAD are allowed\n"
                if method in ("GET", "HEAD"):
                    path = rest.partition(" ")[0].partition("?")[0]
                    status, kind, body = render(path, accept[1].strip() if accept else "")
                headers = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
                writer.write(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{headers}\r\n\r\n".encode())
                writer.write(b"" if method == "HEAD" else body)
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError) as error:
            _log.debug("monitor: a request failed: %r", error)
        finally:
            if task in connections:
                connections.remove(task)
            writer.close()

    async with await asyncio.start_server(respond, sock=listening, limit=_MAX_HEAD_BYTES):
        await stopped.wait()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
