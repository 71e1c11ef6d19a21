"""The HTTP route with the demand for a model, from which an autoscaler starts the first worker."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from lmpool.broker.server import Server
from lmpool.errors import NoWorker, UnknownModel
from lmpool.protocol.keys import Keys
from lmpool.synthetic import synthetic_row
from lmpool.web.app import NEVER_S, WebSettings, demand_route, read_demand, web_service
from tests.support.fleet import INFO as FLEET
from tests.support.fleet import write_fleet
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, V, WorkerProcess, until, until_async

NOTHING = {"queued": 0, "oldest_s": 0.0, "workers": 0, "loading": 0, "wanted": 0, "drain_seconds": 0.0}


class Service:
    """A server in a thread for the route with the demand.

    Args:
        url: URL of the pool's Redis server.
        prefix: prefix of the pool's keys.
        app: application to serve, or None to serve only the route with the demand.
    """

    def __init__(self, url: str, prefix: str, app: ASGIApp | None = None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        app = app or Starlette(routes=[demand_route(Server(url), Keys(prefix))])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()

    def get(self, model: str, **headers: str) -> tuple[int, dict[str, Any]]:
        """Request the demand for a model; return the HTTP status and the JSON object."""
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/api/demand/{quote(model)}"
        try:
            with urlopen(Request(url, headers=headers), timeout=DEADLINE_S) as reply:
                return reply.status, json.load(reply)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)

    def of(self, model: str) -> dict[str, Any]:
        """Return the demand for a model."""
        status, response = self.get(model)
        assert status == 200
        assert response.pop("model") == model
        return response

    def stop(self) -> None:
        """End the server's thread."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture
def service(pool: Pool) -> Iterator[Service]:
    """A server for the route with the demand of a pool."""
    running = Service(pool.url, pool.prefix)
    yield running
    running.stop()


@asynccontextmanager
async def scaled(pool: Pool, service: Service, pods: list[WorkerProcess]) -> AsyncIterator[None]:
    """Start a worker process whenever the demand wants a worker and no process runs, as KEDA starts pods."""

    async def scale() -> None:
        while True:
            response = await asyncio.to_thread(service.of, "syn")
            # Count a process that starts as a running worker, as KEDA counts a pod.
            if response["wanted"] and not any(pod.is_running for pod in pods):
                pods.append(await asyncio.to_thread(pool.start, wait=False))
            await asyncio.sleep(0.05)

    scaling = asyncio.create_task(scale())
    try:
        yield
    finally:
        scaling.cancel()
        await asyncio.wait([scaling])


async def test_a_prompt_to_a_model_without_workers_starts_one_and_gets_its_row(pool: Pool, service: Service) -> None:
    assert service.of("syn") == NOTHING
    pods: list[WorkerProcess] = []
    async with scaled(pool, service, pods), pool.producer("syn", when_absent="wait") as first:
        # This prompt starts the first worker of the model.
        assert np.array_equal(await first.logprobs([1, 2]), synthetic_row([1, 2], vocab_size=V))
        assert len(pods) == 1
        # Let the worker drain and exit, as an autoscaler does that scales to zero.
        pods[0].signal(signal.SIGTERM)
        assert await asyncio.to_thread(pods[0].wait) == 0
        # A client that has the model info queues its prompt; a new client must wait for the info.
        async with pool.producer("syn", when_absent="wait") as second:
            rows = await asyncio.gather(first.logprobs([3]), second.logprobs([4]))
        assert np.array_equal(rows[0], synthetic_row([3], vocab_size=V))
        assert np.array_equal(rows[1], synthetic_row([4], vocab_size=V))
        assert len(pods) == 2
    # When the worker has nothing to do, the demand is zero.
    until(lambda: service.of("syn") == {**NOTHING, "workers": 1}, "the worker has nothing to do")


async def test_clients_that_wait_for_a_model_are_demand(pool: Pool, service: Service) -> None:
    with pytest.raises(UnknownModel):
        await pool.producer("syn").open()
    assert service.of("syn") == NOTHING
    with pytest.raises(NoWorker):
        await pool.producer("syn", when_absent="wait").open(timeout=3)
    assert service.of("syn") == {**NOTHING, "wanted": 1, "drain_seconds": NEVER_S}
    # The key `wanted` expires, but lives longer than half a minute, the interval of an autoscaler's polls.
    assert 0 < pool.redis.pttl(pool.keys.model("syn").wanted) <= 60_000


async def test_the_drain_time_follows_from_the_speed_of_the_workers(
    pool: Pool, service: Service, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open()
    # A worker that is blocked for a lease has no heartbeat, and so no speed.
    pool.start("--lease-s", 8, "--max-batch", 1, "--step-ms", 50, command=gate.command)
    async with pool.producer("syn") as producer:
        await producer.logprobs([1])

        def speed() -> float:
            (worker,) = pool.names("worker:*")
            return float(pool.redis.hget(worker, "speed") or 0)

        until(lambda: speed() > 0, "the worker has reported its speed")
        gate.shut()
        requests = [asyncio.create_task(producer.logprobs([7, i])) for i in range(40)]

        async def are_queued() -> bool:
            return bool((await asyncio.to_thread(service.of, "syn"))["queued"] == 40)

        await until_async(are_queued, "all prompts are queued")
        response = service.of("syn")
        # The 40 queued prompts take 40 steps of at least 50 ms, so at least 2 s.
        assert response["drain_seconds"] == pytest.approx(40 / speed())
        assert response["drain_seconds"] > 2
        gate.open()
        await asyncio.gather(*requests)


def test_errors_of_bad_requests_name_the_reason(pool: Pool, service: Service) -> None:
    for name in ("a{b}c", "x" * 201, "a\x1bb", ""):
        status, response = service.get(name)
        assert status == 400
        assert "1 to 200 characters" in response["error"]
    # A model's name may contain slashes.
    assert service.of("meta-llama/Llama-3.2-1B") == NOTHING
    # Store a string in the key of a queue, which must be a stream.
    pool.redis.set(pool.keys.model("junk").jobs, "x")
    assert service.get("junk")[0] == 503
    unreachable = Service("redis://127.0.0.1:1", pool.prefix)
    try:
        status, response = unreachable.get("syn")
    finally:
        unreachable.stop()
    assert status == 503
    assert "127.0.0.1:1" in response["error"]


def test_invalid_speeds_are_ignored(pool: Pool, service: Service) -> None:
    pool.start()
    (worker,) = pool.names("worker:*")
    for junk in ("nan", "inf", "-1", "1e400", "\x1b[2J", ""):
        pool.redis.hset(worker, "speed", junk)
        pool.redis.xadd(pool.keys.model("syn").jobs, {"x": "y"})
        assert service.of("syn")["drain_seconds"] >= 0


def test_lmpool_web_serves_the_demand_to_programs_with_the_token(pool: Pool) -> None:
    settings = WebSettings(pool.url, pool.prefix, token="0123456789abcdef")
    service = Service(pool.url, pool.prefix, web_service(settings)[0])
    try:
        # In a Kubernetes cluster, the service may have any host name.
        named = {"Host": "web.lmpool.svc", "Authorization": f"Bearer {settings.token}"}
        assert service.get("syn", **named) == (200, {"model": "syn", **NOTHING})
        with pytest.raises(json.JSONDecodeError):  # The response to a wrong token is plain text.
            service.get("syn", **{**named, "Authorization": "Bearer wrong"})
    finally:
        service.stop()


async def test_the_speed_of_many_workers_is_estimated_from_workers_of_all_hosts(pool: Pool) -> None:
    client = Server(pool.url).client()
    try:
        # The workers of a host have similar names and speeds.
        await write_fleet(client, pool.keys, 64, lambda number: {"speed": number + 1})
        demand = await read_demand(client, pool.keys, FLEET.name)
    finally:
        await client.aclose()
    assert (demand.workers, demand.queued) == (64, 8)
    assert demand.drain_seconds == pytest.approx(8 / (64 * 32.5), rel=0.1)
