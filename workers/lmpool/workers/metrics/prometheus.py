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
from lmpool.metrics import prometheus
from lmpool.workers.execution.contract import BackendStats
from lmpool.workers.metrics.counters import OUTCOMES, WorkerCounters
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

Clock = Callable[[], float]

MAX_CONNECTIONS = 64
"""Max open connections to the port. A connection needs no token, and takes a file descriptor that Redis may need."""

REQUEST_S = 10.0
"""Max seconds for a request and its response; a scrape takes milliseconds."""

# Checks of the event loop per lease.
_CHECKS_PER_LEASE = 10
# Max bytes of a request without its body, far more than clients send.
_MAX_HEAD_BYTES = 16 * 1024
_TEXT = "text/plain; charset=utf-8"


class Snapshot(NamedTuple):
    """The state of a worker at one moment.

    Attributes:
        model: name of the model.
        worker_id: id of the worker.
        is_ready: whether it takes jobs.
        in_flight: prompts that it holds.
        silent_s: seconds since the server last answered a heartbeat.
        stats: the backend's counters.
        counters: the worker's counters.
    """

    model: str
    worker_id: str
    is_ready: bool
    in_flight: int
    silent_s: float
    stats: BackendStats
    counters: WorkerCounters


def _if_known(value: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments of `add_metric`: none for a value that was not measured yet."""
    return () if value is None else (read(value),)


# fmt: off
_METRICS: tuple[tuple[str, str, str, Callable[[Snapshot], tuple[Any, ...]]], ...] = (
    ("Gauge", "worker_ready", "1 while the worker takes jobs, else 0.", lambda s: (int(s.is_ready),)),
    ("Counter", "worker_claimed_jobs_total", "Jobs taken over from workers whose leases expired.",
     lambda s: (s.counters.claimed,)),
    ("Counter", "worker_homed_jobs_total", "Jobs that extend prompts which the worker has computed.",
     lambda s: (s.counters.homed,)),
    ("Counter", "worker_stolen_jobs_total", "Jobs taken from other workers' lanes.", lambda s: (s.counters.stolen,)),
    ("Counter", "worker_steps_total", "Forwards that the backend has run.", lambda s: (s.stats.steps,)),
    ("Counter", "worker_rows_total", "Rows that the backend has computed.", lambda s: (s.stats.rows,)),
    ("Counter", "worker_tokens_total", "Tokens of the computed prompts.", lambda s: (s.stats.tokens,)),
    ("Counter", "worker_reused_tokens_total", "Tokens among them that a prefix cache already held.",
     lambda s: (s.stats.reused,)),
    ("Counter", "worker_shared_rows_total", "Rows written to shared memory.", lambda s: (s.counters.shared,)),
    ("Counter", "worker_exported_rows_total", "Rows stored whole for clients on other hosts.",
     lambda s: (s.counters.exported,)),
    ("Gauge", "worker_shared_memory_bytes", "Size of the worker's shared memory.",
     lambda s: (s.counters.shared_bytes,)),
    ("Counter", "worker_published_bytes_total", "Bytes of rows and answers sent to the server.",
     lambda s: (s.counters.published_bytes,)),
    ("Counter", "worker_fetched_bytes_total", "Bytes of rows and weights fetched to answer queries.",
     lambda s: (s.counters.fetched_bytes,)),
    ("Counter", "worker_refused_rows_total", "Rows that the server refused, for example for lack of memory.",
     lambda s: (s.counters.refused,)),
    ("Counter", "worker_evicted_rows_total", "Rows that were evicted as soon as they were stored.",
     lambda s: (s.counters.evicted,)),
    ("Counter", "worker_server_errors_total", "Failed attempts to use the server.",
     lambda s: (s.counters.server_errors,)),
    ("Gauge", "worker_held_prompts", "Prompts in flight in the worker.", lambda s: (s.in_flight,)),
    ("Gauge", "worker_lane_jobs", "Jobs in the worker's lane, waiting and held, at the last heartbeat.",
     lambda s: (s.counters.lane,)),
    ("Gauge", "worker_heartbeat_age_seconds", "Seconds since the server last answered a heartbeat.",
     lambda s: (s.silent_s,)),
    ("Histogram", "worker_batch_prompts", "Prompts that a step finished.", lambda s: s.counters.batch.cumulative()),
    ("Histogram", "worker_step_seconds", "Seconds of a step of the backend.", lambda s: s.counters.step_s.cumulative()),
    ("Histogram", "worker_publish_seconds", "Seconds from rows being ready to their jobs' end.",
     lambda s: s.counters.publish_s.cumulative()),
    ("Histogram", "worker_job_seconds", "Seconds from a job's queueing to its row or answer.",
     lambda s: s.counters.job_s.cumulative()),
    ("Gauge", "queue_jobs", "Prompts of the model that wait or are computed, at the last heartbeat.",
     lambda s: _if_known(s.counters.queue, lambda queue: queue.depth)),
    ("Gauge", "queue_oldest_job_seconds", "Age of the oldest of them, at the last heartbeat.",
     lambda s: _if_known(s.counters.queue, lambda queue: queue.age_s)),
    ("Gauge", "queue_drain_seconds", "Seconds that the live workers need for the queue.",
     lambda s: _if_known(s.counters.drain_s, lambda seconds: seconds)),
    ("Gauge", "queue_dead_letters", "Jobs that were given up, kept until retried or dropped.",
     lambda s: _if_known(s.counters.queue, lambda queue: queue.dead)),
    ("Gauge", "server_memory_bytes", "Memory that the server uses, at the last heartbeat.",
     lambda s: _if_known(s.counters.memory, lambda memory: memory.used_bytes)),
    ("Gauge", "server_memory_limit_bytes", "Limit of that memory (maxmemory); 0 for no limit.",
     lambda s: _if_known(s.counters.memory, lambda memory: memory.limit_bytes)),
    ("Counter", "server_evicted_keys_total", "Keys that the server has evicted.",
     lambda s: _if_known(s.counters.memory, lambda memory: memory.evicted_keys)),
)
# fmt: on


class WorkerCollector:
    """Provides the metrics of one worker to a registry of prometheus_client.

    Args:
        take_snapshot: called in the thread that collects.

    Raises:
        SettingsError: prometheus_client is not installed.
    """

    def __init__(self, take_snapshot: Callable[[], Snapshot]) -> None:
        self._library = prometheus("worker")
        self._take_snapshot = take_snapshot

    def collect(self) -> Iterator[Any]:
        """The metric families now."""
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
        for kind, name, text, read in _METRICS:
            family = getattr(core, f"{kind}MetricFamily")(f"lmpool_{name}", text, labels=("model",))
            if value := read(snapshot):
                family.add_metric((snapshot.model,), *value)
            yield family


class Health:
    """The state of one worker: its event loop writes it, other threads read it.

    Args:
        lease_s: max silence of the event loop and of the server.
        step_timeout_s: max seconds of a step.
        clock: monotonic seconds.

    Attributes:
        state: "loading", "ready" or "draining".
        broken: why the backend cannot be used any more, or "".
        trouble: why the last heartbeat failed, or "".
    """

    def __init__(self, lease_s: float, step_timeout_s: float, clock: Clock = time.monotonic) -> None:
        self._lease_s = lease_s
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._ticked_at = self._answered_at = clock()
        self._stepping_since: Callable[[], float | None] = lambda: None
        self.state = "loading"
        self.broken = ""
        self.trouble = ""

    def start(self) -> None:
        """Record from now on that the running event loop runs."""
        self._ticked_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(self._lease_s / _CHECKS_PER_LEASE, self.start)

    def end(self) -> None:
        """Stop recording."""
        self._timer.cancel()

    def watch(self, stepping_since: Callable[[], float | None]) -> None:
        """Watch a backend: `stepping_since` returns the monotonic start of its running step, or None."""
        self._stepping_since = stepping_since

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
        if self.broken:
            return f"the backend broke: {self.broken}"
        since = self._stepping_since()  # Read once: the backend's thread changes it.
        # One lease more: the watchdog ends the worker before, and releases its prompts.
        step_s, limit_s = 0.0 if since is None else self._clock() - since, self._step_timeout_s + self._lease_s
        if step_s > limit_s:
            return f"the backend's step has run for {step_s:.0f} s; more than {limit_s:g} s is not normal"
        return ""

    def why_not_ready(self) -> str:
        """Why the worker takes no jobs; "" while it does."""
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


class _HttpPage(NamedTuple):
    status: int
    content_type: str
    body: bytes


_Pages = Mapping[str, Callable[[str], _HttpPage]]
"""Path -> function that makes the page from the request's Accept header."""


@contextmanager
def monitoring(settings: WorkerSettings, take_snapshot: Callable[[], Snapshot], health: Health) -> Iterator[None]:
    """Serve `/metrics`, `/healthz` and `/readyz` of a worker from a thread, if the settings name a port.

    Args:
        settings: the worker's settings.
        take_snapshot: called from that thread.
        health: the worker's health.

    Raises:
        SettingsError: the port cannot be used, or prometheus_client is not installed.
    """
    if not settings.metrics_port:
        yield
        return
    pages: _Pages = {
        "/metrics": _metrics(take_snapshot),
        "/healthz": lambda _: _verdict(health.why_dead()),
        "/readyz": lambda _: _verdict(health.why_not_ready()),
    }
    listening = _listen(settings)
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()
    # A daemon: a client must not keep a worker from ending.
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(pages, listening, stopped)), name="lmpool-monitor", daemon=True
    )
    thread.start()
    _log.info("metrics and health on port %d of %s", settings.metrics_port, settings.metrics_host)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def _listen(settings: WorkerSettings) -> socket.socket:
    host, port = settings.metrics_host, settings.metrics_port
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise SettingsError(f"metrics_host: {host} is no address of this machine: {why}") from error
        raise SettingsError(
            f"metrics_port: port {port} of {host} cannot be used: {why}; "
            "every worker of a machine needs a port of its own"
        ) from error


def _metrics(take_snapshot: Callable[[], Snapshot]) -> Callable[[str], _HttpPage]:
    collector = WorkerCollector(take_snapshot)  # Raises first if the library is missing.
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    def render(accept: str) -> _HttpPage:
        encode, content_type = choose_encoder(accept)
        return _HttpPage(200, content_type, encode(registry))

    return render


def _verdict(why_not: str) -> _HttpPage:
    return _HttpPage(503 if why_not else 200, _TEXT, f"{why_not or 'ok'}\n".encode())


async def _serve(pages: _Pages, listening: socket.socket, stopped: asyncio.Event) -> None:
    """Send pages over HTTP, one per connection."""
    connections: list[asyncio.Task[Any]] = []  # The oldest first.

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
        page = _HttpPage(405, _TEXT, b"GET and HEAD are allowed\n")
    elif render is None:
        page = _HttpPage(404, _TEXT, f"the pages are {', '.join(pages)}\n".encode())
    else:
        page = render(headers.get("accept", ""))
    start = (
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
    )
    return start.encode() + (b"" if method == "HEAD" else page.body)
