"""A process that moves values with plain redis-py, to which the benchmark compares the pool's transport.

`python -m benchmarks.peers.plain_redis URL` uses redis-py's asyncio client with hiredis on uvloop, with default
settings. This program does not import lmpool.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import uvloop
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from benchmarks.harness.line_protocol import serve

_PIPELINE = 32  # Commands per pipeline.
_KEYS = 256  # Distinct keys, which are overwritten in rotation.
_TTL_S = 600  # Lifetime of values in seconds: longer than a measure takes.
_JOBS, _ANSWERS, _GROUP = "plain:jobs", "plain:answers", "workers"


class PlainRedis:
    """Handlers that store values in Redis or fetch them; some return the seconds that this took."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(self, rows: int, row_bytes: int) -> None:
        """SET values in pipelines, under rotating keys; each value is converted from an array."""
        row = np.random.default_rng(0).integers(0, 256, row_bytes, np.uint8)
        for start in range(0, rows, _PIPELINE):
            pipe = self._redis.pipeline(transaction=False)
            for key in _keys(start):
                pipe.set(key, row.tobytes(), ex=_TTL_S)
            await pipe.execute()

    async def fill(self, keys: list[str], row_bytes: int) -> None:
        """SET values under the given keys (hexadecimal)."""
        row = np.random.default_rng(0).integers(0, 256, row_bytes, np.uint8).tobytes()
        for key in keys:
            await self._redis.set(bytes.fromhex(key), row, ex=_TTL_S)

    async def get(self, rows: int, row_bytes: int) -> None:
        """MGET the values that `put` stores, in calls of equal size, and view each value as an array."""
        missing = 0
        for start in range(0, rows, _PIPELINE):
            values: list[Any] = await self._redis.mget(_keys(start))
            arrays = [np.frombuffer(value, np.uint16) for value in values if value is not None]
            missing += len(values) - len(arrays)
            if any(array.nbytes != row_bytes for array in arrays):
                raise RuntimeError(f"a value does not have {row_bytes} bytes")
        # Tolerate a few missing values: a full server evicts random samples of its keys.
        if missing > rows / 100:
            raise RuntimeError(f"{missing} of {rows} values were missing")

    async def get_keys(self, keys: list[str], times: int) -> float:
        """Seconds to MGET the values of the given keys (hexadecimal) `times` times, each viewed as an array."""
        names = [bytes.fromhex(key) for key in keys]
        start = time.perf_counter()
        for _ in range(times):
            for at in range(0, len(names), _PIPELINE):
                values: list[Any] = await self._redis.mget(names[at : at + _PIPELINE])
                [np.frombuffer(value, np.float32) for value in values]
        return time.perf_counter() - start

    async def round_trip(self, requests: int) -> float:
        """Median seconds of a GET of a small value."""
        await self._redis.set("small", b"value", ex=_TTL_S)
        taken = []
        for _ in range(requests):
            start = time.perf_counter()
            await self._redis.get("small")
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    async def take_jobs(self, row_bytes: int) -> None:
        """Run the worker of a plain queue forever: read jobs, create values in a thread, store and send the values."""
        loop = asyncio.get_running_loop()
        to_make: queue.SimpleQueue[asyncio.Future[bytes]] = queue.SimpleQueue()

        def make() -> None:
            while True:
                made = to_make.get()
                loop.call_soon_threadsafe(made.set_result, bytes(row_bytes))

        threading.Thread(target=make, daemon=True).start()
        with suppress(ResponseError):  # The worker of an earlier measure has created the group.
            await self._redis.xgroup_create(_JOBS, _GROUP, id="0", mkstream=True)
        while True:
            taken: Any = await self._redis.xreadgroup(_GROUP, "worker", {_JOBS: ">"}, count=_PIPELINE, block=500)
            for entry, fields in _entries(taken):
                made = loop.create_future()
                to_make.put(made)
                row, name = await made, fields[b"name"]
                pipe = self._redis.pipeline(transaction=False)
                pipe.set(b"plain:" + name, row, ex=_TTL_S)
                pipe.xadd(_ANSWERS, {"name": name, "row": row}, maxlen=1000)
                pipe.xack(_JOBS, _GROUP, entry)
                pipe.xdel(_JOBS, entry)
                await pipe.execute()

    async def through_queue(self, requests: int, job_bytes: int) -> float:
        """Median seconds of one job: add the job for a process that runs `take_jobs`, and receive its value."""
        taken, last = [], "0"
        await self._redis.delete(_ANSWERS)
        async with Redis.from_url(sys.argv[1]) as sender:
            for number in range(requests):
                start = time.perf_counter()
                answered = asyncio.ensure_future(self._redis.xread({_ANSWERS: last}, block=5000))
                await sender.xadd(_JOBS, {"name": number.to_bytes(16), "job": bytes(job_bytes)})
                ((last, fields),) = _entries(await answered)
                taken.append(time.perf_counter() - start)
                if fields[b"name"] != number.to_bytes(16):
                    raise RuntimeError("the response belongs to another job")
        return statistics.median(taken)


def _entries(reply: Any) -> list[tuple[Any, dict[bytes, bytes]]]:
    """The entries of the only stream in a reply; replies of RESP2 and RESP3 have different formats."""
    if not reply:
        return []
    entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
    return [(entry, fields) for entry, fields in entries]


def _keys(start: int) -> list[str]:
    return [f"plain:{index % _KEYS}" for index in range(start, start + _PIPELINE)]


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    async with Redis.from_url(sys.argv[1]) as redis:
        await redis.ping()
        plain = PlainRedis(redis)
        queued = (plain.take_jobs, plain.through_queue)
        handlers = (plain.put, plain.fill, plain.get, plain.get_keys, plain.round_trip, *queued)
        await serve({handler.__name__: handler for handler in handlers})


if __name__ == "__main__":
    uvloop.run(main())
