"""A worker's Prometheus metrics and its health, both over HTTP."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, NamedTuple

from lmpool.errors import SettingsError
from lmpool.metrics import Histogram, prometheus
from lmpool.workers.execution.contract import BackendStats
from lmpool.workers.metrics.counters import OUTCOMES, WorkerCounters
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

# Max open connections to the port: a client needs no token, and each takes a file descriptor of the worker.
MAX_CONNECTIONS = 64
REQUEST_S = 10.0  # Max seconds for a request and its response; a scrape takes milliseconds.
_CHECKS_PER_LEASE = 10  # The event loop runs this many checks per lease.
_MAX_HEAD_BYTES = 16 * 1024  # Max bytes of a request without its body, far more than clients send.
_TEXT = "text/plain; charset=utf-8"


class Snapshot(NamedTuple):
    """The state of a worker at one moment."""

    model: str
    worker_id: str
    is_ready: bool  # Whether the worker takes jobs.
    in_flight: int  # Prompts that the worker holds.
    silent_s: float  # Seconds since the server last answered a heartbeat.
    stats: BackendStats
    counters: WorkerCounters


# Metrics: name, attribute of `Snapshot`, and help text. Names of counters end in "_total".
_METRICS = (
    ("worker_ready", "is_ready", "1 while the worker takes jobs, else 0."),
    ("worker_claimed_jobs_total", "counters.claimed", "Jobs taken over from workers whose leases expired."),
    ("worker_homed_jobs_total", "counters.homed", "Jobs that extend prompts which the worker has computed."),
    ("worker_stolen_jobs_total", "counters.stolen", "Jobs taken from other workers' lanes."),
    ("worker_steps_total", "stats.steps", "Forwards that the backend has run."),
    ("worker_rows_total", "stats.rows", "Rows that the backend has computed."),
    ("worker_tokens_total", "stats.tokens", "Tokens of the computed prompts."),
    ("worker_reused_tokens_total", "stats.reused", "Tokens among them that a prefix cache already held."),
    ("worker_shared_rows_total", "counters.shared", "Rows written to shared memory."),
    ("worker_exported_rows_total", "counters.exported", "Rows stored whole for clients on other hosts."),
    ("worker_shared_memory_bytes", "counters.shared_bytes", "Size of the worker's shared memory."),
    ("worker_published_bytes_total", "counters.published_bytes", "Bytes of rows and answers sent to the server."),
    ("worker_fetched_bytes_total", "counters.fetched_bytes", "Bytes of rows and weights fetched to answer queries."),
    ("worker_refused_rows_total", "counters.refused", "Rows that the server refused, for example for lack of memory."),
    ("worker_evicted_rows_total", "counters.evicted", "Rows that were evicted as soon as they were stored."),
    ("worker_server_errors_total", "counters.server_errors", "Failed attempts to use the server."),
    ("worker_held_prompts", "in_flight", "Prompts in flight in the worker."),
    ("worker_lane_jobs", "counters.lane", "Jobs in the worker's lane, waiting and held, at the last heartbeat."),
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


class WorkerCollector:
    """Provides the metrics of one worker to a registry of prometheus_client, in whose thread `take_snapshot` runs.

    Raises:
        SettingsError: prometheus_client is not installed.
    """

    def __init__(self, take_snapshot: Callable[[], Snapshot]) -> None:
        self._library = prometheus("worker")
        self._take_snapshot = take_snapshot

    def collect(self) -> Iterator[Any]:
        """The metric families with their present values."""
        snapshot, core = self._take_snapshot(), self._library
        labels = ("model", "worker", "version")
        info = core.GaugeMetricFamily("lmpool_worker_info", "Always 1; identifies this worker.", labels=labels)
        info.add_metric((snapshot.model, snapshot.worker_id, version("lmpool")), 1)
        yield info
        text = "Jobs that ended, by their outcome."
        jobs = core.CounterMetricFamily("lmpool_worker_jobs_total", text, labels=("model", "outcome"))
        for outcome in OUTCOMES:
            jobs.add_metric((snapshot.model, outcome), snapshot.counters.ended[outcome])
        yield jobs
        for name, path, text in _METRICS:
            value: Any = snapshot
            for attribute in path.split("."):
                value = None if value is None else getattr(value, attribute)
            is_histogram = isinstance(value, Histogram)
            kind = "Histogram" if is_histogram else "Counter" if name.endswith("_total") else "Gauge"
            family = getattr(core, f"{kind}MetricFamily")(f"lmpool_{name}", text, labels=("model",))
            if value is not None:  # A value of None is not measured yet.
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
        self.state = "loading"  # One of "loading", "ready" and "draining".
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
        if self.state == "loading":
            return "the model is loading"
        if self.state != "ready":
            return f"the worker is {self.state}"
        if self.trouble:
            return f"the last heartbeat failed: {self.trouble}"
        if self.silent_s > self._lease_s:
            return f"the server has not answered a heartbeat for {self.silent_s:.1f} s"
        return ""


_Pages = Mapping[str, Callable[[str], tuple[int, str, bytes]]]
"""Path -> function that makes status, content type and body from the request's Accept header."""


@contextmanager
def monitoring(settings: WorkerSettings, take_snapshot: Callable[[], Snapshot], health: Health) -> Iterator[None]:
    """Serve `/metrics`, `/healthz` and `/readyz` of a worker from a thread, if the settings name a port.

    `take_snapshot` is called from that thread.

    Raises:
        SettingsError: the port cannot be used, or prometheus_client is not installed.
    """
    if not settings.metrics_port:
        yield
        return
    collector = WorkerCollector(take_snapshot)  # Fails before the port is opened if prometheus_client is missing.
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    def metrics(accept: str) -> tuple[int, str, bytes]:
        encode, content_type = choose_encoder(accept)
        return 200, content_type, encode(registry)

    def verdict(why_not: str) -> tuple[int, str, bytes]:
        return 503 if why_not else 200, _TEXT, f"{why_not or 'ok'}\n".encode()

    pages: _Pages = {
        "/metrics": metrics,
        "/healthz": lambda _: verdict(health.why_dead()),
        "/readyz": lambda _: verdict(health.why_not_ready()),
    }
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
    # A daemon thread: an open connection must not keep the worker from ending.
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(pages, listening, stopped)), name="lmpool-monitor", daemon=True
    )
    thread.start()
    _log.info("metrics and health on port %d of %s", port, host)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


async def _serve(pages: _Pages, listening: socket.socket, stopped: asyncio.Event) -> None:
    """Send pages over HTTP, one per connection."""
    connections: list[asyncio.Task[Any]] = []  # Open connections, the oldest first.

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        if len(connections) > MAX_CONNECTIONS:
            connections.pop(0).cancel()
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(_response(pages, await reader.readuntil(b"\r\n\r\n")))
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


def _response(pages: _Pages, head: bytes) -> bytes:
    """The response to a request without a body."""
    line, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = line.partition(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    render = pages.get(rest.partition(" ")[0].partition("?")[0])
    if method not in ("GET", "HEAD"):
        status, content_type, body = 405, _TEXT, b"GET and HEAD are allowed\n"
    elif render is None:
        status, content_type, body = 404, _TEXT, f"the pages are {', '.join(pages)}\n".encode()
    else:
        status, content_type, body = render(headers.get("accept", ""))
    start = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return start.encode() + (b"" if method == "HEAD" else body)
