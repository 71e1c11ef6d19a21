"""A process that does with redis-py what the pool's transport is compared with.

`python -m benchmarks.peers.plain_redis`: redis-py's asyncio client with hiredis on uvloop, as it comes; nothing of
lmpool.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import uvloop
from redis.asyncio import Redis

from benchmarks.harness.lines import serve

_PIPELINE = 32
_KEYS = 256
_TTL_S = 600


class PlainRedis:
    """Answers the benchmark's requests with timings.

    Args:
        redis: a client.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(self, rows: int, row_bytes: int) -> None:
        """SET values of that size, each made from an array, over and over under the same keys, in pipelines."""
        row = np.random.default_rng(0).integers(0, 256, row_bytes, np.uint8)
        for start in range(0, rows, _PIPELINE):
            pipe = self._redis.pipeline(transaction=False)
            for key in _keys(start):
                pipe.set(key, row.tobytes(), ex=_TTL_S)
            await pipe.execute()

    async def fill(self, keys: list[str], row_bytes: int) -> None:
        """SET values of that size under these keys (hexadecimal)."""
        row = np.random.default_rng(0).integers(0, 256, row_bytes, np.uint8).tobytes()
        for key in keys:
            await self._redis.set(bytes.fromhex(key), row, ex=_TTL_S)

    async def get(self, rows: int, row_bytes: int) -> None:
        """MGET values that `put` stores, as many at a time, each read as an array."""
        missing = 0
        for start in range(0, rows, _PIPELINE):
            values: list[Any] = await self._redis.mget(_keys(start))
            arrays = [np.frombuffer(value, np.uint16) for value in values if value is not None]
            missing += len(values) - len(arrays)
            if any(array.nbytes != row_bytes for array in arrays):
                raise RuntimeError("a value has another size")
        # A full server evicts by samples, and now and then takes one of these.
        if missing > rows / 100:
            raise RuntimeError(f"{missing} of {rows} values were missing")

    async def get_keys(self, keys: list[str], times: int) -> float:
        """Seconds to MGET the values of these keys (hexadecimal) this many times over, each read as an array."""
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


def _keys(start: int) -> list[str]:
    return [f"plain:{index % _KEYS}" for index in range(start, start + _PIPELINE)]


async def main() -> None:
    """Serve until stdin ends."""
    async with Redis.from_url(sys.argv[1]) as redis:
        await redis.ping()
        plain = PlainRedis(redis)
        handlers = (plain.put, plain.fill, plain.get, plain.get_keys, plain.round_trip)
        await serve({handler.__name__: handler for handler in handlers})


if __name__ == "__main__":
    uvloop.run(main())
