"""Loads a gateway with idle clients and with clients that hang up at random, and checks every row of other clients.

    python -m tests.faults.gateway_soak --seconds 180

Idle clients keep a connection open and send a request twice a minute. Clients that hang up send a request for rows, for
positions or for a stream, and close the connection after a random time, some of them in the middle of the request. At
the end, the program prints the numbers of requests, and lists requests that were lost or wrong, and connections, jobs
and memory that are left.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lmpool.aio import end_tasks
from lmpool.embedded import EmbeddedServer
from lmpool.synthetic import synthetic_row
from tests.gateway.service import GatewayService
from tests.support.pool import DEADLINE_S, Pool, V, until

IDLE, HANGING, STEADY = 500, 100, 16  # Clients of each kind.
_IDLE_S = 30.0  # Seconds between two requests of an idle client, less than the gateway keeps a connection.
_MAX_WAIT_S = 0.3  # Max seconds after which a client hangs up; a request takes milliseconds.
_WARM = 1 / 3  # Share of the time after which the memory is measured first: caches have filled by then.
_GROWTH = 0.05  # Max share by which the memory may grow after that: an allocator keeps freed pages.
_READ = {"ids": [[1, 2, 3], [4, 5]]}


@dataclass
class Tally:
    """The numbers of requests, and what went wrong."""

    right: int = 0
    hung_up: int = 0
    wrong: list[str] = field(default_factory=list)


class Connection:
    """A connection that sends requests one after the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, path: str, body: Any, cut: int | None = None) -> asyncio.StreamReader:
        """Send a request, of which only the first `cut` bytes if given; return the reader of the response."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write((head.encode() + data)[:cut])
        await self._writer.drain()
        return self._reader

    async def row(self, ids: list[int]) -> bytes:
        """The body of the response to a request for a row; raises OSError for a status other than 200."""
        async with asyncio.timeout(DEADLINE_S):
            reader = await self.send("/v1/rows", {"ids": ids})
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise OSError(body.decode())
            return body

    def close(self) -> None:
        """Close the connection at once, whatever has been sent or received."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


async def ask(connection: Connection, tally: Tally) -> None:
    """Request a random row and check it."""
    ids = [random.randrange(V) for _ in range(random.randint(1, 20))]
    try:
        found = np.load(io.BytesIO(await connection.row(ids)))
        if np.array_equal(found, synthetic_row(ids, vocab_size=V)):
            tally.right += 1
        else:
            tally.wrong.append(f"a wrong row of {ids}")
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        tally.wrong.append(f"a lost row of {ids}: {error!r}")
        connection.close()


async def be_idle(port: int, tally: Tally) -> None:
    """Keep a connection open, and send a request from time to time."""
    connection = Connection(port)
    await asyncio.sleep(random.uniform(0, _IDLE_S))
    while True:
        await ask(connection, tally)
        await asyncio.sleep(_IDLE_S)


async def be_steady(port: int, tally: Tally) -> None:
    """Send one request after the other."""
    connection = Connection(port)
    while True:
        await ask(connection, tally)


async def hang_up(port: int, tally: Tally) -> None:
    """Send requests, and close each connection after a random time."""
    while True:
        connection, ids = Connection(port), [random.randrange(V) for _ in range(9)]
        path, body = random.choice([
            ("/v1/rows", {"ids": [ids] * 8}),
            ("/v1/positions", {"ids": ids, "top": 5, "next_token": True}),
            ("/v1/completions", {"prompt": ids, "max_tokens": 500, "n": 2, "stream": True}),
            ("/v1/completions", {"prompt": ids, "prompt_logprobs": 32, "max_tokens": 100}),
        ])  # fmt: skip
        with suppress(OSError):
            await connection.send(path, body, random.choice([None, None, None, 30, 120]))
            await asyncio.sleep(random.uniform(0, _MAX_WAIT_S))
        connection.close()
        tally.hung_up += 1


def memory_of(pid: int) -> int:
    """The bytes of memory that a process uses."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def has_none(service: GatewayService, metric: str) -> bool:
    """Whether a metric of the gateway is 0."""
    return service.metric(metric) == 0


async def load(service: GatewayService, seconds: float, tally: Tally) -> tuple[int, int]:
    """Run all clients; return the gateway's memory after the caches have filled, and at the end."""
    kinds: list[tuple[int, Callable[[int, Tally], Coroutine[Any, Any, None]]]]
    kinds = [(IDLE, be_idle), (HANGING, hang_up), (STEADY, be_steady)]
    tasks = [asyncio.create_task(run(service.port, tally)) for count, run in kinds for _ in range(count)]
    await asyncio.sleep(seconds * _WARM)
    first = memory_of(service.process.process.pid)
    await asyncio.sleep(seconds * (1 - _WARM))
    last = memory_of(service.process.process.pid)
    failed = [task for task in tasks if task.done()]
    tally.wrong += [f"a client ended: {task.exception()!r}" for task in failed]
    await end_tasks(tasks)
    return first, last


def run(seconds: float, folder: Path) -> list[str]:
    """Run the load on a pool of two workers; return what is lost, wrong or left."""
    tally = Tally()
    with EmbeddedServer(memory_bytes=1 << 29, folder=folder / "s") as server:
        pool = Pool(server.url, "soak", folder)
        try:
            for _ in range(2):
                pool.start()
            # Without a cache of rows, which would fill during the run.
            service = GatewayService(pool, "--cache-bytes", "0")
            pid = service.process.process.pid
            service.post("/v1/rows", _READ)  # The gateway opens its producer.
            before, began = descriptors_of(pid), time.monotonic()
            first, last = asyncio.run(load(service, seconds, tally))
            took_s = time.monotonic() - began
            print(f"{tally.right} right rows and {tally.hung_up} clients that hung up in {took_s:.0f} s;")
            print(
                f"memory of the gateway {first / 1e6:.0f} MB at {_WARM:.0%} of the time, {last / 1e6:.0f} MB at the end"
            )
            for name in ("lmpool_http_requests_in_flight", "lmpool_http_held_bytes"):
                until(partial(has_none, service, name), f"{name} becomes 0")
            until(lambda: descriptors_of(pid) <= before + 2, "the gateway closes the connections")
            until(lambda: pool.jobs() == 0, "the workers end the jobs")
            answer = service.post("/v1/rows", _READ)
            found = [] if answer.status == 200 else [f"no row at the end: {answer}"]
            if last > first * (1 + _GROWTH):
                found.append(f"the memory of the gateway grows: {first} to {last} bytes")
            if "Traceback" in service.process.text or "ERROR" in service.process.text:
                found.append(f"the gateway's log has errors:\n{service.process.text[-2000:]}")
            return [*tally.wrong[:20], *found]
        finally:
            pool.end()


def main() -> int:
    """Run the load that the command line describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.gateway_soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="(default: %(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmp") as folder:
        found = run(given.seconds, Path(folder))
    print("\n".join(found) if found else "nothing lost, wrong or left; memory flat")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
