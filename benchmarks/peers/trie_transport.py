"""A process that moves the bytes of trie jobs (weights and values) through Redis, in both directions at once.

`python -m benchmarks.peers.trie_transport URL` uses redis-py's asyncio client with hiredis on uvloop.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import uvloop
from redis.asyncio import Redis

from benchmarks.harness.line_protocol import serve

_PIPELINE_BYTES = 4 * 2**20  # Bytes per pipeline; pipelines of this size were the fastest.
_KEYS = 64  # Distinct keys, which are overwritten in rotation.
_TTL_S = 600  # Lifetime of values in seconds: longer than a measure takes.


class TrieTransport:
    """One of two processes that measure plain redis-py: each fetches the values that the other stores."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def prime(self, there: int, back: int) -> None:
        """Store values of `there` and of `back` bytes, which the first requests fetch."""
        await self._put("there", _KEYS, there)
        await self._put("back", _KEYS, back)

    async def client(self, requests: int, there: int, back: int) -> None:
        """Act as the client: SET values of `there` bytes, and GET the same number of values of `back` bytes."""
        await asyncio.gather(self._put("there", requests, there), self._get("back", requests, back))

    async def worker(self, requests: int, there: int, back: int) -> None:
        """Act as the worker: GET values of `there` bytes, and SET the same number of values of `back` bytes."""
        await asyncio.gather(self._get("there", requests, there), self._put("back", requests, back))

    async def _put(self, name: str, number: int, size: int) -> None:
        value = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        for keys in _portions(name, number, size):
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.set(key, value.tobytes(), ex=_TTL_S)
            await pipe.execute()

    async def _get(self, name: str, number: int, size: int) -> None:
        missing = 0
        for keys in _portions(name, number, size):
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.get(key)
            values = await pipe.execute()
            arrays = [np.frombuffer(value, np.uint8) for value in values if value is not None]
            missing += len(values) - len(arrays)
            if any(array.nbytes != size for array in arrays):
                raise RuntimeError(f"a value does not have {size} bytes")
        # Tolerate a few missing values: a full server evicts random samples of its keys.
        if missing > max(1, number / 100):
            raise RuntimeError(f"{missing} of {number} values were missing")


def _portions(name: str, number: int, size: int) -> list[list[str]]:
    """The keys of the values, split into pipelines of about `_PIPELINE_BYTES`."""
    keys = [f"{name}:{index % _KEYS}" for index in range(number)]
    count = max(1, _PIPELINE_BYTES // size)
    return [keys[at : at + count] for at in range(0, number, count)]


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    async with Redis.from_url(sys.argv[1]) as redis:
        await redis.ping()
        end = TrieTransport(redis)
        await serve({handler.__name__: handler for handler in (end.prime, end.client, end.worker)})


if __name__ == "__main__":
    uvloop.run(main())
