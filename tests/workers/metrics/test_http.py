"""A worker's HTTP port: correct metrics, and health with reasons."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import struct
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmpool.admin.survey import survey
from lmpool.broker.scripts import QueueState
from lmpool.broker.server import Server
from lmpool.broker.server_checks import ServerMemory
from lmpool.embedded import EmbeddedServer
from lmpool.errors import SettingsError
from lmpool.producer import SyncProducer
from lmpool.protocol.job import Job
from lmpool.protocol.keys import JOB_FIELD
from lmpool.protocol.row import Encoding, encoded_size
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import BackendStats
from lmpool.workers.metrics import counters as metrics
from lmpool.workers.metrics.counters import Health, Snapshot, WorkerCollector, WorkerCounters
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, Prepared, V, WorkerProcess, open_sockets, until, until_async
from tests.support.scrape import free_port, get, scrape


def is_like(port: int, path: str, status: int, text: str) -> bool:
    page = get(port, path)
    return page is not None and page.status == status and text in page.text


# Metrics


async def test_a_scrape_counts_the_jobs_of_the_worker(pool: Pool) -> None:
    port = free_port()
    await asyncio.to_thread(pool.start, "--metrics-port", port, "--lease-s", 0.5, "--fail-token", 300)
    async with pool.producer(cache_bytes=0) as producer:
        await asyncio.gather(*(producer.logprobs([100, i]) for i in range(50)))
        await producer.topk([100, 1], 3)
        with pytest.raises(Exception, match="fail"):
            await producer.logprobs([300])
    keys = pool.keys.model("syn")
    pool.redis.xadd(keys.jobs, {JOB_FIELD: b"\xc1"})
    pool.redis.xadd(keys.jobs, {JOB_FIELD: Job((1).to_bytes(4, "little"), "", "of other weights").pack()})
    ended = {"row": 50, "answer": 1, "sent_again": 0, "failed": 2, "dead": 1}

    async def has_ended() -> bool:
        seen = await asyncio.to_thread(scrape, port)
        counted = {name: seen.value("lmpool_worker_jobs_total", model="syn", outcome=name) for name in ended}
        queue = (seen.find("lmpool_queue_dead_letters", model="syn"), seen.find("lmpool_queue_jobs", model="syn"))
        has_memory = seen.find("lmpool_server_memory_bytes", model="syn") is not None
        return counted == ended and queue == (1, 0) and has_memory

    await until_async(has_ended, "the metrics count every job")
    seen = await asyncio.to_thread(scrape, port)

    def value(name: str) -> float:
        return seen.value(f"lmpool_{name}", model="syn")

    assert value("worker_rows_total") == 50
    assert value("worker_batch_prompts_sum") == 51
    assert value("worker_batch_prompts_count") == value("worker_step_seconds_count")
    assert value("worker_job_seconds_count") == 51
    assert 0 < value("worker_job_seconds_sum") < 51 * 30
    assert value("worker_publish_seconds_count") >= 2
    rows = 50 * encoded_size(V, Encoding.F32)
    assert rows < value("worker_published_bytes_total") < rows + 1000
    assert value("worker_fetched_bytes_total") == encoded_size(V, Encoding.F32)
    assert value("worker_tokens_total") >= 100
    assert (value("queue_jobs"), value("worker_held_prompts"), value("worker_ready")) == (0, 0, 1)
    assert value("worker_heartbeat_age_seconds") < 30
    assert 0 < value("server_memory_bytes") < value("server_memory_limit_bytes")
    assert value("server_evicted_keys_total") >= 0


async def test_depth_age_and_jobs_of_dead_workers_are_counted(pool: Pool, tmp_path: Path) -> None:
    port, gate = free_port(), Gate(tmp_path / "gate")
    victim = await asyncio.to_thread(pool.start, "--lease-s", 1, "--step-ms", 600_000)
    async with pool.producer() as producer:
        requests = [asyncio.create_task(producer.logprobs([i])) for i in range(10)]
        await until_async(lambda: asyncio.to_thread(lambda: pool.held() == 10), "the worker holds the prompts")
        options = ("--lease-s", 1, "--max-batch", 5, "--metrics-port", port)
        await asyncio.to_thread(lambda: pool.start(*options, command=gate.command))
        victim.end()

        def is_counted() -> bool:
            seen = scrape(port)
            names = ("lmpool_queue_jobs", "lmpool_queue_oldest_job_seconds")
            depth, age = (seen.find(name, model="syn") or 0 for name in names)
            return depth >= 5 and age > 0.5

        await until_async(lambda: asyncio.to_thread(is_counted), "the metrics show depth and age")
        gate.open()
        await asyncio.gather(*requests)
    assert scrape(port).value("lmpool_worker_claimed_jobs_total", model="syn") >= 10


async def test_the_drain_time_depends_on_the_number_of_live_workers(pool: Pool, tmp_path: Path) -> None:
    port, gate = free_port(), Gate(tmp_path / "gate")
    gate.open()
    options = ("--lease-s", 1, "--max-batch", 1, "--step-ms", 20)

    def start(*more: str | int) -> WorkerProcess:
        return pool.start(*options, *more, command=gate.command)

    await asyncio.to_thread(start, "--metrics-port", port)
    (first,) = pool.names("worker:*")
    async with pool.producer() as producer:
        await producer.logprobs([1])
        await asyncio.to_thread(
            until, lambda: float(pool.redis.hget(first, "speed") or 0) > 0, "the heartbeat has its speed"
        )
        gate.shut()
        requests = [asyncio.create_task(producer.logprobs([2, i])) for i in range(40)]

        def drains_by(workers: int) -> bool:
            seen, speed = scrape(port), float(pool.redis.hget(first, "speed") or 0)
            if seen.find("lmpool_queue_jobs", model="syn") != 40:
                return False
            # Compare approximately, because the speed in the heartbeat is rounded.
            drain_s = seen.value("lmpool_queue_drain_seconds", model="syn")
            return drain_s == pytest.approx(40 / speed / workers, rel=1e-3)

        await until_async(lambda: asyncio.to_thread(drains_by, 1), "the drain time is that of one worker")
        second = await asyncio.to_thread(start)
        await until_async(lambda: asyncio.to_thread(drains_by, 2), "the drain time is that of two workers")
        second.end()
        await until_async(lambda: asyncio.to_thread(drains_by, 1), "the drain time is that of one worker again")
        gate.open()
        await asyncio.gather(*requests)


async def test_a_worker_of_several_devices_reports_its_ranks_and_devices(pool: Pool) -> None:
    backend: Any = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V))
    backend.devices = ["cuda:0", "cuda:1", "cuda:2"]
    settings: Any = Prepared(backend)
    settings.ranks = 3
    worker = Worker(Server(pool.url), settings, WorkerSettings(prefix=pool.prefix))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    await asyncio.to_thread(pool.start)
    (model,) = await survey(Server(pool.url), pool.keys)
    fields = {worker["id"]: (worker.get("ranks"), worker.get("devices")) for worker in model["workers"]}
    assert fields.pop(worker.worker_id) == (3, "cuda:0 cuda:1 cuda:2")
    assert list(fields.values()) == [(None, None)], "a worker with one device reports none of them"
    samples = {family.name: family.samples for family in WorkerCollector(worker.snapshot).collect()}
    assert [samples[f"lmpool_worker_{name}"][0].value for name in ("ranks", "devices")] == [3, 3]
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


def families(queue: QueueState | None = None, memory: ServerMemory | None = None) -> list[Any]:
    """The metric families of a worker without jobs."""
    counters = WorkerCounters()
    counters.queue, counters.memory = queue, memory
    return list(WorkerCollector(lambda: Snapshot("m", "w", False, 0, 0.0, BackendStats(), counters)).collect())


def test_every_metric_has_a_help_text_and_a_unique_name() -> None:
    names = [family.name for family in families()]
    assert len(set(names)) == len(names)
    for family in families():
        assert family.name.startswith(("lmpool_worker_", "lmpool_queue_", "lmpool_server_"))
        assert family.documentation.endswith(".")


def test_an_unmeasured_queue_has_no_samples() -> None:
    unseen, seen = families(), families(QueueState(0, 0.0, 0, 0.0), ServerMemory(1, 0, "noeviction", 0))
    assert [family.name for family in unseen] == [family.name for family in seen]
    without = {family.name for family in unseen if not family.samples}
    assert without == {family.name for family in seen if family.name.startswith(("lmpool_queue_", "lmpool_server_"))}
    assert all(family.samples for family in seen)


# Health


def test_readiness_follows_loading_serving_and_draining(pool: Pool, tmp_path: Path) -> None:
    port, gate = free_port(), Gate(tmp_path / "gate")

    def command() -> list[str]:
        words = (pool.url, pool.prefix, str(port), str(tmp_path / "gate"))
        return [sys.executable, "-m", "tests.support.gated_worker", *words]

    worker = pool._launch(command(), None, wait=False)
    until(lambda: is_like(port, "/readyz", 503, "the model is loading"), "the worker reports that it loads")
    assert is_like(port, "/healthz", 200, "ok")
    assert scrape(port).value("lmpool_worker_ready", model="syn") == 0
    gate.open()
    until(lambda: is_like(port, "/readyz", 200, "ok"), "the worker reports that it is ready")
    gate.shut()
    assert is_like(port, "/", 404, "/metrics")
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as producer:
        request = threading.Thread(target=producer.logprobs, args=([1],))
        request.start()
        until(lambda: pool.held() == 1, "the worker holds a prompt")
        worker.signal(signal.SIGTERM)
        until(lambda: is_like(port, "/readyz", 503, "draining"), "the worker reports that it drains")
        assert is_like(port, "/healthz", 200, "ok")
        gate.open()
        request.join()
    assert worker.wait() == 0
    assert get(port, "/healthz") is None


def test_a_worker_whose_event_loop_is_blocked_is_not_healthy(pool: Pool, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.support.gated_worker", pool.url, pool.prefix, str(port), str(tmp_path), "1"]
    worker = pool._launch(command, None, wait=True)
    until(lambda: is_like(port, "/healthz", 200, "ok"), "the worker is healthy")
    worker.signal(signal.SIGVTALRM)
    until(
        lambda: is_like(port, "/healthz", 503, "the event loop has not run for"), "the worker reports the blocked loop"
    )
    until(lambda: is_like(port, "/readyz", 503, "the event loop has not run for"), "readiness reports it too")
    worker.signal(signal.SIGUSR2)
    until(lambda: is_like(port, "/readyz", 200, "ok"), "the event loop runs again")


def test_a_worker_without_its_server_is_alive_and_not_ready(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool, port = Pool(own_server.url, "away", tmp_path), free_port()
    try:
        worker = pool.start("--metrics-port", port, "--lease-s", 1)
        until(lambda: is_like(port, "/readyz", 200, "ok"), "the worker is ready")
        own_server.stop()
        until(
            lambda: is_like(port, "/readyz", 503, "the last heartbeat failed: no Redis server"),
            "the worker is not ready",
        )
        until(lambda: is_like(port, "/healthz", 200, "ok"), "the worker is alive")

        def failed_attempts() -> float:
            return scrape(port).value("lmpool_worker_server_errors_total", model="syn")

        # Each part of the worker retries many times, but the log may have only few lines about the retries.
        until(lambda: failed_attempts() > 15, "the worker has tried to use the server many times")
        assert 1 <= worker.text.count("no Redis server answers") <= 8
        own_server.start()
        until(lambda: is_like(port, "/readyz", 200, "ok"), "the worker is ready again")
        assert worker.is_running
    finally:
        pool.end()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_worker_whose_backend_broke_is_not_healthy() -> None:
    clock = Clock()
    health = Health(0.5, clock)
    health.state = "ready"
    assert health.why_not_ready() == ""
    clock.now += 1000
    assert "the event loop has not run for 1000.0 s" in health.why_dead()
    health.start()
    health.end()
    assert health.why_dead() == ""
    assert "has not answered a heartbeat for 1000.0 s" in health.why_not_ready()
    health.answered()
    assert health.why_not_ready() == ""
    health.broken = "CUDA error"
    assert health.why_dead() == "the backend broke: CUDA error"


# Settings


def test_a_port_in_use_is_one_clear_error(pool: Pool) -> None:
    port = free_port()
    pool.start("--metrics-port", port)
    second = pool.start("--metrics-port", port, wait=False)
    assert second.wait() == 2
    (line,) = [line for line in second.text.splitlines() if line.startswith("lmpool: ")]
    assert f"--metrics-port: port {port} of 127.0.0.1 cannot be used" in line
    assert "a port of its own" in line
    assert "Traceback" not in second.text
    far = pool.start("--metrics-port", port, "--metrics-host", "192.0.2.1", wait=False)
    assert far.wait() == 2
    assert "lmpool: --metrics-host: 192.0.2.1 is no address of this machine: " in far.text


def test_an_aborted_request_leaves_no_log_line(pool: Pool) -> None:
    port = free_port()
    worker = pool.start("--metrics-port", port, "--log-format", "json")
    for path in ("/metrics", "/healthz") * 5:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
            # Close the connection with a reset (RST), as a health probe does after its timeout.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=DEADLINE_S).status == 200
    worker.end()
    assert all(json.loads(line) for line in worker.text.splitlines())


@contextlib.contextmanager
def monitored(port: int) -> Iterator[None]:
    """Serve the HTTP port of a ready worker in this process."""
    health = Health(DEADLINE_S)
    health.state = "ready"
    snapshot = Snapshot("m", "w", True, 0, 0.0, BackendStats(), WorkerCounters())
    with metrics.monitoring(WorkerSettings(metrics_port=port), lambda: snapshot, health):
        yield


def test_connections_without_a_request_take_neither_the_port_nor_the_descriptors() -> None:
    port, count, before = free_port(), 4 * metrics.MAX_CONNECTIONS, open_sockets()
    with monitored(port), contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
            connection.sendall(b"GET /me")
        assert is_like(port, "/healthz", 200, "ok")
        assert is_like(port, "/readyz", 200, "ok")
        assert "lmpool_worker_info" in scrape(port).kinds
        # Allow three more: the listening socket and the two ends of the event loop's wake-up socket pair.
        assert open_sockets() - before - count <= metrics.MAX_CONNECTIONS + 3


def test_a_request_sent_byte_by_byte_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 0.2)
    port = free_port()
    with monitored(port), socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:

        def is_cut_off() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return True
            return False

        until(is_cut_off, "the worker closes the connection")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"HEAD /healthz HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET /healthz?x=1 HTTP/1.0\r\nAccept: text/plain\r\n\r\n", b"200 OK"),
        (b"POST /healthz HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"\xff\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET\r\n:\r\nno colon\r\n\r\n", b"404 Not Found"),
    ],
)
def test_every_request_gets_a_response(request_: bytes, status: bytes) -> None:
    port = free_port()
    with monitored(port), socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.sendall(request_)
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert answer.endswith(b"\r\n\r\n") == request_.startswith(b"HEAD")


def test_an_endless_request_head_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with monitored(port), socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 2**20)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
        assert is_like(port, "/healthz", 200, "ok")
    assert caplog.records == []


def test_malformed_monitor_settings_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="metrics_port"):
        WorkerSettings(metrics_port=70_000)
    with pytest.raises(SettingsError, match="log_format"):
        WorkerSettings(log_format="xml")


def test_a_slow_reply_of_the_server_is_no_difference_of_the_clocks() -> None:
    counters, now = WorkerCounters(), time.time()
    counters.note_clock(now, now - 1)
    counters.published("row", [b"%d-0" % (now * 1000 - 5)], 0)
    assert 0.004 < counters.job_s.total < DEADLINE_S
    counters.note_clock(now + 3600, now - 1)  # The server's clock is an hour ahead, less the time of the reply.
    assert 3600 - DEADLINE_S < counters.clock_ahead_s <= 3601
