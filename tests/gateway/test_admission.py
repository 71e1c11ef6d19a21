"""The gateway admits requests within its limits, and ends the work of clients that hang up."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.http.app import GatewaySettings, gateway
from lmpool.http.limits import Gateway, Limits
from lmpool.synthetic import synthetic_row
from tests.gateway.service import GatewayService
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, V, deadline_ms, run_lmpool, until
from tests.web.service import TOKEN

IN_FLIGHT = "lmpool_http_requests_in_flight"
HUNG_UP = 'lmpool_http_requests_total{path="/v1/rows",status="499"}'


@pytest.fixture
def gate(pool: Pool, tmp_path: Path) -> Iterator[Gate]:
    """A gate at which the steps of a pool's worker wait."""
    gate = Gate(tmp_path / "open")
    pool.start("--max-batch", 1, "--queue-limit", 8, command=gate.command)
    yield gate
    gate.open()


def begin(service: GatewayService, token: int, more: int = 0, headers: str = "") -> socket.socket:
    """Send a request for a row whose body lacks `more` bytes at its end, and return its connection."""
    connection = socket.create_connection(("127.0.0.1", service.port), DEADLINE_S)
    body = json.dumps({"ids": [token]}).encode()
    head = f"POST /v1/rows HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body) + more}\r\n{headers}\r\n"
    connection.sendall(head.encode() + body)
    return connection


def end(connection: socket.socket) -> bytes:
    """Read the response of a connection; return its body."""
    connection.settimeout(DEADLINE_S)
    with connection, connection.makefile("rb") as file:
        length = 0
        while line := file.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return file.read(length)


def test_clients_that_hang_up_cancel_their_requests_and_no_others(pool: Pool, gate: Gate) -> None:
    service = GatewayService(pool)
    kept, gone = begin(service, 1), [begin(service, token) for token in (1, 2, 3)]
    until(lambda: service.metric(IN_FLIGHT) == 4, "the requests are in flight")
    until(lambda: pool.jobs() == 3, "the prompts are queued")
    for connection in gone:
        connection.close()
    until(lambda: service.metric(HUNG_UP) == 3, "the gateway notices that the clients have hung up")
    assert service.metric(IN_FLIGHT) == 1
    gate.open()
    assert np.array_equal(np.load(io.BytesIO(end(kept))), synthetic_row([1], vocab_size=V))
    until(lambda: service.metric("lmpool_http_held_bytes") == 0, "the requests hold no memory")
    until(lambda: pool.jobs() == 0, "no prompts are left")
    # A stream whose client hangs up ends before its last token.
    request = {"prompt": [1], "max_tokens": 100_000, "stream": True, "temperature": 0}
    connection = socket.create_connection(("127.0.0.1", service.port), DEADLINE_S)
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    until(lambda: service.metric(HUNG_UP.replace("/v1/rows", "/v1/completions")) == 1, "the stream ends")
    assert service.metric(IN_FLIGHT) == 0


def test_too_many_requests_get_status_429_and_are_served_later(pool: Pool, gate: Gate) -> None:
    service = GatewayService(pool, "--max-inflight", "2")
    with ExitStack() as stack:
        # A request is in flight when its body is complete, so slow uploads keep no other client away.
        for _ in range(2):
            stack.enter_context(begin(service, 1, more=1))
        until(lambda: service.metric("lmpool_http_held_bytes") > 0, "the gateway reads the bodies")
        waiting = [stack.enter_context(begin(service, token)) for token in (1, 2)]
        until(lambda: service.metric(IN_FLIGHT) == 2, "the requests are in flight")
        refused = service.post("/v1/completions", {"prompt": [3]})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["error"]["message"].startswith("2 requests are in flight, the limit of this gateway")
        # Another gateway has its own limit, but the model's queue is one.
        other = GatewayService(pool)
        waiting += [stack.enter_context(begin(other, token)) for token in range(3, 9)]
        until(lambda: pool.jobs() == 8, "the queue is full")
        full = other.post("/v1/rows", {"ids": [9]})
        assert (full.status, full.headers["retry-after"], full.json["error"]["type"]) == (429, "1", "QueueFull")
        gate.open()
        for token, connection in enumerate(waiting, 1):
            assert np.array_equal(np.load(io.BytesIO(end(connection))), synthetic_row([token], vocab_size=V))
    assert service.post("/v1/rows", {"ids": [9]}).status == 200


def test_requests_have_a_deadline_and_bounded_sizes(pool: Pool, gate: Gate) -> None:
    service = GatewayService(pool)
    late = service.post("/v1/rows", {"ids": [1]}, X_Lmpool_Timeout="0.1")
    assert (late.status, late.json["error"]["type"]) == (504, "DeadlineExceeded")
    late = service.post("/v1/rows", {"ids": [1], "timeout": 0.9})
    assert late.json["error"]["message"].startswith("no row within 0.")
    wrong = service.post("/v1/rows", {"ids": [1]}, X_Lmpool_Timeout="soon")
    assert (wrong.status, "x-lmpool-timeout: 'soon'" in wrong.json["error"]["message"]) == (400, True)
    with begin(service, 1, more=1, headers="X-Lmpool-Timeout: 0.1\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 504 "), "the deadline includes the time to send the body"
    many = service.post("/v1/completions", {"prompt": [[1]] * 1000, "n": 5})
    assert (many.status, many.json["error"]["message"][:36]) == (400, "the request has 5000 continuations; ")
    with socket.create_connection(("127.0.0.1", service.port), DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/rows HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_gateway_needs_its_token_and_refuses_web_pages_without_one(pool: Pool) -> None:
    guarded, open_ = GatewayService(pool, token=TOKEN), GatewayService(pool)
    for token, text in ((None, "the token is missing"), ("x", "the token is wrong")):
        refused = guarded.request("/v1/rows", {"ids": [1]}, token=token)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json["error"]["message"].startswith(text)
        assert guarded.request("/metrics", token=token).status == 401
    assert guarded.request("/v1/models", token=TOKEN).json == {"object": "list", "data": []}
    for path in ("/health", "/healthz", "/readyz"):
        assert guarded.request(path, token=None).status == 200
    assert open_.post("/v1/rows", {"ids": [1]}).status == 404, "no model is served"
    assert open_.post("/v1/rows", {"ids": [1]}, Host="evil.example").status == 403
    assert open_.post("/v1/rows", {"ids": [1]}, Origin="http://evil.example").status == 403
    refused_start = run_lmpool("http", "--host", "0.0.0.0", "--port", "0")
    assert refused_start.returncode == 2
    assert refused_start.stderr.startswith("lmpool: token: other machines could use the pool through 0.0.0.0: ")
    assert TOKEN not in guarded.process.text


async def test_several_models_are_served_behind_one_gateway(pool: Pool) -> None:
    await asyncio.to_thread(pool.start, "--seed", 1, model="one")
    await asyncio.to_thread(pool.start, "--seed", 2, model="two:b")
    service = GatewayService(pool)

    def row(model: str, **headers: str) -> list[float]:
        answer = service.post("/v1/rows", {"model": model, "ids": [5]}, **headers)
        assert answer.status == 200, answer
        found: list[float] = np.load(io.BytesIO(answer.body)).tolist()
        return found

    one, two = (synthetic_row([5], vocab_size=V, seed=seed).tolist() for seed in (1, 2))
    found = await asyncio.gather(*[asyncio.to_thread(row, model) for model in ("one", "two:b") * 8])
    assert found == [one, two] * 8
    assert row("", X_Lmpool_Model="two:b") == two
    assert service.post("/v1/rows", {"ids": [5]}).json["error"]["type"] == "AmbiguousModel"


def test_a_model_that_a_worker_is_loading_gets_status_503(pool: Pool) -> None:
    service = GatewayService(pool)

    def answer(**body: str) -> tuple[int, str | None]:
        answer = service.post("/v1/rows", {"ids": [1], **body})
        assert answer.json["error"]["type"] == "UnknownModel"
        return answer.status, answer.headers.get("retry-after")

    for model in ("syn:b", "syn"):
        assert answer(model=model) == (404, None)
        pool.redis.zadd(pool.keys.model(model).loading, {"w": deadline_ms()})
        assert answer(model=model) == (503, "1")
    assert answer() == (404, None)
    pool.redis.hset(pool.keys.loading(), "w", "syn")
    assert answer() == (503, "1")


def test_a_request_without_a_model_is_for_the_model_that_the_pool_has_now(pool: Pool) -> None:
    service = GatewayService(pool)

    def row(**body: str) -> list[float]:
        answer = service.post("/v1/rows", {"ids": [5], **body})
        assert answer.status == 200, answer
        found: list[float] = np.load(io.BytesIO(answer.body)).tolist()
        return found

    for seed, model in enumerate(("one", "two")):
        worker = pool.start("--seed", seed, model=model)
        expected = synthetic_row([5], vocab_size=V, seed=seed).tolist()
        assert [row(), row(model=model)] == [expected, expected]
        page = service.request("/metrics").body.decode()
        counts = re.findall(rf'^lmpool_producer_requests_total{{model="{model}",.*}} (\d)', page, re.MULTILINE)
        assert sum(map(int, counts)) == 2, "requests with and without the name are counted together"
        worker.signal(signal.SIGTERM)
        worker.wait()
    # While the pool has no model, requests wait for a worker of the model that the pool had last.
    absent = [service.post("/v1/rows", {"ids": [6], "timeout": 0.1, **named}) for named in ({}, {"model": "two"})]
    assert [answer.status for answer in absent] == [504, 504]


async def status_of(app: Gateway, path: str, body: dict[str, Any]) -> int:
    """The status of the response of an application without a socket."""
    statuses: list[int] = []
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()  # The client stays connected.
        return messages.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"host", b"localhost")]
    await app({"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}, receive, send)
    (status,) = statuses
    return status


async def test_responses_that_repeat_a_prompt_or_pad_arrays_count_all_their_bytes(pool: Pool) -> None:
    await asyncio.to_thread(pool.start)
    app = gateway(GatewaySettings(pool.url, pool.prefix, limits=Limits(max_held_bytes=4 << 20)))
    fields: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "syn", "prompt": [7] * 16, "max_tokens": 0},
        # The arrays of the binary format have 101 * 500 * 10 entries; the lists have 600 * 10.
        "/get_sequence_logprobs/": {
            "model": "syn", "sequences": [[7] * 501, *[[7, 7]] * 100], "prompt_lengths": [1] * 101, "top_logprobs": 10,
        },
    }  # fmt: skip
    small: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt_logprobs": 20, "n": 2}),
        ("/v1/completions", {"echo": True, "logprobs": 20, "n": 2}),
        ("/get_sequence_logprobs/", {"response_format": "json"}),
    ]
    large: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt_logprobs": 20, "n": 500}),
        ("/v1/completions", {"echo": True, "logprobs": 20, "n": 500}),
        ("/get_sequence_logprobs/", {"response_format": "binary"}),
    ]
    inner: Any = app._app
    async with inner.router.lifespan_context(inner):
        assert [await status_of(app, path, fields[path] | more) for path, more in small] == [200] * 3
        assert [await status_of(app, path, fields[path] | more) for path, more in large] == [413] * 3
    assert app.counters.held_bytes == 0
