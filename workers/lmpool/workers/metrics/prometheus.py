"""A worker's metrics for Prometheus, made from plain numbers when they are collected; its health; both over HTTP."""

from __future__ import annotations

import asyncio
import errno
import logging
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from socket import AF_INET, AF_INET6
from types import ModuleType
from typing import Any, NamedTuple

from lmpool.errors import SettingsError
from lmpool.metrics import prometheus
from lmpool.workers.backend.contract import BackendStats
from lmpool.workers.metrics.counters import OUTCOMES, Counters
from lmpool.workers.settings import WorkerSettings

_log = logging.getLogger("lmpool.worker")

Clock = Callable[[], float]

_TICKS_A_LEASE = 10
_TIMEOUT_S = 10.0
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
    # A daemon, and so are those of its requests: nobody who watches may keep a worker from ending.
    thread = threading.Thread(target=server.serve_forever, name="lmpool-monitor", daemon=True)
    thread.start()
    _log.info("metrics and health on port %d of %s", settings.metrics_port, settings.metrics_host)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
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


class _Server(ThreadingHTTPServer):
    """Serves pages, a thread for each request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], pages: dict[str, _Render]) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self.pages = pages
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is not worth a line, and nothing is ever printed beside the log."""
        error = sys.exc_info()[1]
        is_gone = isinstance(error, (ConnectionError, TimeoutError))
        _log.log(
            logging.DEBUG if is_gone else logging.ERROR, "monitor: a request failed: %s", error, exc_info=not is_gone
        )

    def server_bind(self) -> None:
        """Bind, without asking the network for this machine's name as the base class does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    timeout = _TIMEOUT_S
    server_version = "lmpool"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, or 404."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """As GET, without the page."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        render = self.server.pages.get(self.path.partition("?")[0])
        known = ", ".join(self.server.pages)
        page = render(self.headers.get("Accept", "")) if render else _Page(404, _TEXT, f"there are {known}\n".encode())
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  named so by the base class
        """Requests are not worth a line."""
        _log.debug("monitor: " + format, *args)
