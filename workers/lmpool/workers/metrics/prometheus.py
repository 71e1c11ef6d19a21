"""A worker's metrics for Prometheus, made from plain numbers when they are collected; its health; both over HTTP."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

from lmpool.errors import SettingsError
from lmpool.metrics import prometheus
from lmpool.workers.execution.contract import BackendStats
from lmpool.workers.metrics.counters import OUTCOMES, Counters
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

Clock = Callable[[], float]

MAX_CONNECTIONS = 64
"""Connections to the port that are open at once. No token is needed for one, and each takes a descriptor of the
worker, which needs them for Redis."""

REQUEST_S = 10.0
"""Seconds for a whole request and its response; a scrape takes some ms."""

_TICKS_A_LEASE = 10
# Seconds that a connection gets at least where others wait for its place: a client sends its request at once. With
# `MAX_CONNECTIONS` it bounds how many connections a second a flood can make the worker accept.
_GRACE_S = 0.05
# Connections that the kernel keeps while all places are taken; a short queue would drop those of probes.
_BACKLOG = 4096
# Pause after the process had no descriptor left for a connection.
_PAUSE_S = 0.5
# Bytes of a request without its body, which no client needs more of.
_MAX_HEAD_BYTES = 16 * 1024
_TEXT = "text/plain; charset=utf-8"


class Snapshot(NamedTuple):
    """What a worker is and has done, at one moment.

    Attributes:
        model: its name.
        worker_id: the worker's.
        is_ready: whether it takes jobs.
        in_flight: prompts that it holds.
        silent_s: seconds since the server last answered a heartbeat.
        stats: the backend's counters.
        counters: the worker's.
    """

    model: str
    worker_id: str
    is_ready: bool
    in_flight: int
    silent_s: float
    stats: BackendStats
    counters: Counters


class WorkerCollector:
    """Gives a registry of prometheus_client the metrics of one worker.

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
        info = core.GaugeMetricFamily(
            "lmpool_worker_info", "Always 1; who this worker is.", labels=("model", "worker", "version")
        )
        info.add_metric((snapshot.model, snapshot.worker_id, version("lmpool")), 1)
        yield info
        ready = "1 while the worker takes jobs, else 0."
        yield _family(core.GaugeMetricFamily, snapshot.model, "lmpool_worker_ready", ready, int(snapshot.is_ready))
        jobs = core.CounterMetricFamily(
            "lmpool_worker_jobs_total", "Jobs that ended, by what they ended with.", labels=("model", "outcome")
        )
        for outcome in OUTCOMES:
            jobs.add_metric((snapshot.model, outcome), snapshot.counters.ended[outcome])
        yield jobs
        yield from _of_the_model(snapshot, core)


# fmt: off
def _of_the_model(snapshot: Snapshot, core: ModuleType) -> Iterator[Any]:
    """The others, which have no label but the model."""
    counters, stats, queue = snapshot.counters, snapshot.stats, snapshot.counters.queue
    memory = counters.memory
    counter = partial(_family, core.CounterMetricFamily, snapshot.model)
    gauge = partial(_family, core.GaugeMetricFamily, snapshot.model)
    histogram = partial(_family, core.HistogramMetricFamily, snapshot.model)
    yield counter("lmpool_worker_claimed_jobs_total", "Jobs taken over from workers that fell silent.",
                  counters.claimed)
    yield counter("lmpool_worker_homed_jobs_total", "Jobs taken that continue what the worker has computed.",
                  counters.homed)
    yield counter("lmpool_worker_stolen_jobs_total", "Jobs taken from other workers' lanes.", counters.stolen)
    yield counter("lmpool_worker_steps_total", "Forwards that the backend has run.", stats.steps)
    yield counter("lmpool_worker_rows_total", "Rows that the backend has computed.", stats.rows)
    yield counter("lmpool_worker_tokens_total", "Tokens of the prompts that were computed.", stats.tokens)
    yield counter("lmpool_worker_reused_tokens_total", "Tokens among them that a prefix cache already held.",
                  stats.reused)
    yield counter("lmpool_worker_shared_rows_total", "Rows written to shared memory.", counters.shared)
    yield counter("lmpool_worker_exported_rows_total", "Rows stored whole for clients on other hosts.",
                  counters.exported)
    yield gauge("lmpool_worker_shared_memory_bytes", "Size of the worker's segment of shared memory.",
                counters.shared_bytes)
    yield counter("lmpool_worker_published_bytes_total", "Bytes of rows and answers sent to the server.",
                  counters.published_bytes)
    yield counter("lmpool_worker_fetched_bytes_total", "Bytes of rows and weights fetched to answer queries.",
                  counters.fetched_bytes)
    yield counter("lmpool_worker_refused_rows_total", "Rows that the server refused, as when it is out of memory.",
                  counters.refused)
    yield counter("lmpool_worker_evicted_rows_total", "Rows that were evicted as soon as they were stored.",
                  counters.evicted)
    yield counter("lmpool_worker_server_errors_total", "Attempts to use the server that failed.",
                  counters.server_errors)
    yield gauge("lmpool_worker_held_prompts", "Prompts in flight in the worker.", snapshot.in_flight)
    yield gauge("lmpool_worker_lane_jobs", "Jobs in the worker's lane, waiting and held, at the last heartbeat.",
                counters.lane)
    yield gauge("lmpool_worker_heartbeat_age_seconds", "Seconds since the server last answered a heartbeat.",
                snapshot.silent_s)
    yield histogram("lmpool_worker_batch_prompts", "Prompts that a step finished.", *counters.batch.cumulative())
    yield histogram("lmpool_worker_step_seconds", "Seconds of a step of the backend.", *counters.step_s.cumulative())
    yield histogram("lmpool_worker_publish_seconds", "Seconds from rows being ready to their jobs' end.",
                    *counters.publish_s.cumulative())
    yield histogram("lmpool_worker_job_seconds", "Seconds from a job's queueing to its row or answer.",
                    *counters.job_s.cumulative())
    # A queue that has not been measured yet is not an empty one.
    depth, age_s, dead = ((), (), ()) if queue is None else ((queue.depth,), (queue.age_s,), (queue.dead,))
    yield gauge("lmpool_queue_jobs", "Prompts of the model that wait or are computed, at the last heartbeat.", *depth)
    yield gauge("lmpool_queue_oldest_job_seconds", "Age of the oldest of them, at the last heartbeat.", *age_s)
    drain_s = () if counters.drain_s is None else (counters.drain_s,)
    yield gauge("lmpool_queue_drain_seconds", "Seconds that the live workers take for what is in the queue.", *drain_s)
    yield gauge("lmpool_queue_dead_letters", "Jobs that were given up, kept until retried or dropped.", *dead)
    used, limit, evicted = ((), (), ()) if memory is None else (
        (memory.used_bytes,), (memory.limit_bytes,), (memory.evicted_keys,))
    yield gauge("lmpool_server_memory_bytes", "Memory that the server uses, at the last heartbeat.", *used)
    yield gauge("lmpool_server_memory_limit_bytes", "How much that may be (maxmemory); 0 for no limit.", *limit)
    yield counter("lmpool_server_evicted_keys_total", "Keys that the server has evicted.", *evicted)
# fmt: on


def _family(kind: Callable[..., Any], model: str, name: str, text: str, *value: Any) -> Any:
    """A metric family of prometheus_client with the value that its `add_metric` takes; empty without one."""
    family = kind(name, text, labels=("model",))
    if value:
        family.add_metric((model,), *value)
    return family


class Health:
    """The state of one worker: set by its event loop, read by other threads.

    Args:
        lease_s: how long the loop or the server may be silent.
        step_timeout_s: how long a step of the backend may take.
        clock: monotonic seconds.

    Attributes:
        state: "loading", "ready" or "draining".
        broken: why the backend cannot go on, or "".
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
        """_Render from now on that the running event loop runs."""
        self._ticked_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(self._lease_s / _TICKS_A_LEASE, self.start)

    def end(self) -> None:
        """The event loop ends."""
        self._timer.cancel()

    def watch(self, stepping_since: Callable[[], float | None]) -> None:
        """Watch a backend: `stepping_since` returns the monotonic time when its present step began, or None."""
        self._stepping_since = stepping_since

    def answered(self) -> None:
        """The server has answered a heartbeat."""
        self._answered_at, self.trouble = self._clock(), ""

    @property
    def silent_s(self) -> float:
        """Seconds since the server last answered a heartbeat."""
        return self._clock() - self._answered_at

    def why_dead(self) -> str:
        """Why the process is to be replaced; "" when it lives."""
        silent_s = self._clock() - self._ticked_at
        if silent_s > self._lease_s:
            return f"the event loop has not run for {silent_s:.1f} s; a lease is {self._lease_s:g} s"
        if self.broken:
            return f"the backend broke: {self.broken}"
        # Read once: the backend's thread changes it.
        since = self._stepping_since()
        # A lease more: the watchdog ends the worker by itself, with its prompts handed back.
        step_s, limit_s = 0.0 if since is None else self._clock() - since, self._step_timeout_s + self._lease_s
        if step_s > limit_s:
            return f"the backend's step has run for {step_s:.0f} s; more than {limit_s:g} s is not normal"
        return ""

    def why_not_ready(self) -> str:
        """Why the worker takes no jobs; "" when it does."""
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


class _Page(NamedTuple):
    status: int
    content_type: str
    body: bytes


_Render = Callable[[str], _Page]
"""Makes a page; called with the request's Accept header."""


@contextmanager
def monitoring(settings: WorkerSettings, take_snapshot: Callable[[], Snapshot], health: Health) -> Iterator[None]:
    """Serve `/metrics`, `/healthz` and `/readyz` of a worker from a thread, if the settings name a port.

    Args:
        settings: the worker's.
        take_snapshot: what the worker is and has done; called from that thread.
        health: whether it lives and takes jobs.

    Raises:
        SettingsError: the port cannot be used, or prometheus_client is not installed.
    """
    if not settings.metrics_port:
        yield
        return
    pages = {
        "/metrics": _metrics(take_snapshot),
        "/healthz": lambda _: _verdict(health.why_dead()),
        "/readyz": lambda _: _verdict(health.why_not_ready()),
    }
    server = _open(settings, pages)
    # A daemon: no client may keep a worker from ending.
    thread = threading.Thread(target=server.run, name="lmpool-monitor", daemon=True)
    thread.start()
    _log.info("metrics and health on port %d of %s", settings.metrics_port, settings.metrics_host)
    try:
        yield
    finally:
        server.stop()
        thread.join()


def _open(settings: WorkerSettings, pages: dict[str, _Render]) -> _Server:
    host, port = settings.metrics_host, settings.metrics_port
    try:
        return _Server((host, port), pages)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise SettingsError(f"metrics_host: {host} is no address of this machine: {why}") from error
        raise SettingsError(
            f"metrics_port: port {port} of {host} cannot be used: {why}; "
            "every worker of a machine needs a port of its own"
        ) from error


def _metrics(take_snapshot: Callable[[], Snapshot]) -> _Render:
    collector = WorkerCollector(take_snapshot)  # Says what to install when the library is not there.
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    def render(accept: str) -> _Page:
        encode, content_type = choose_encoder(accept)
        return _Page(200, content_type, encode(registry))

    return render


def _verdict(why_not: str) -> _Page:
    return _Page(503 if why_not else 200, _TEXT, f"{why_not or 'ok'}\n".encode())


class _Server:
    """Sends pages over HTTP, one a connection, by an event loop of a thread of its own.

    Args:
        address: host and port to listen at.
        pages: path -> the function that makes the page.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, address: tuple[str, int], pages: dict[str, _Render]) -> None:
        self._pages = pages
        self._listening = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.setblocking(False)
            self._listening.bind(address)
            self._listening.listen(_BACKLOG)
        except OSError:
            self._listening.close()
            raise
        # Open connections, the oldest first, and when each was accepted.
        self._open: dict[asyncio.Task[None], float] = {}
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())

    def run(self) -> None:
        """Serve until `stop`."""
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        self._loop.close()
        self._listening.close()

    def stop(self) -> None:
        """Have `run` return; called by another thread."""
        self._loop.call_soon_threadsafe(self._accepting.cancel)

    async def _accept(self) -> None:
        try:
            await self._accept_all()
        finally:
            for connection in list(self._open):
                connection.cancel()
            if self._open:
                await asyncio.wait(self._open)

    async def _accept_all(self) -> None:
        while True:
            if len(self._open) >= MAX_CONNECTIONS:
                await self._end_oldest()
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                _log.debug("monitor: cannot accept a connection: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            task = self._loop.create_task(self._serve(connection))
            self._open[task] = self._loop.time()
            task.add_done_callback(self._ended)

    async def _end_oldest(self) -> None:
        """Wait for the oldest connection as long as it may take where others wait, and close it then."""
        oldest, since = next(iter(self._open.items()))
        await asyncio.wait([oldest], timeout=max(0.0, since + _GRACE_S - self._loop.time()))
        oldest.cancel()
        await asyncio.wait([oldest])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            is_client = isinstance(error, OSError)  # It has disconnected, or was too slow.
            level = logging.DEBUG if is_client else logging.ERROR
            _log.log(level, "monitor: a request failed: %s", error, exc_info=None if is_client else error)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            async with asyncio.timeout(REQUEST_S):
                head = b""
                while b"\r\n\r\n" not in head:
                    part = await self._loop.sock_recv(connection, _MAX_HEAD_BYTES)
                    head += part
                    if not part or len(head) > _MAX_HEAD_BYTES:
                        return
                await self._loop.sock_sendall(connection, self._response(head))

    def _response(self, head: bytes) -> bytes:
        """The response to a request without a body."""
        line, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = line.partition(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        render = self._pages.get(rest.partition(" ")[0].partition("?")[0])
        if method not in ("GET", "HEAD"):
            page = _Page(405, _TEXT, b"GET and HEAD are allowed\n")
        elif render is None:
            page = _Page(404, _TEXT, f"there are {', '.join(self._pages)}\n".encode())
        else:
            page = render(headers.get("accept", ""))
        start = (
            f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\nContent-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
        )
        return start.encode() + (b"" if method == "HEAD" else page.body)
