"""A worker and a client of the job queue arq, written like the examples in arq's documentation.

The program runs in the environment of the compared projects (peers), so it does not import lmpool:

    arq benchmarks.peers.arq_peer.WorkerSettings      the worker
    python -m benchmarks.peers.arq_peer               the client
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from numpy.typing import NDArray

from benchmarks.harness.line_protocol import serve

_REDIS = RedisSettings(unix_socket_path=os.environ["BENCH_ARQ_SOCKET"])
_QUEUE = os.environ["BENCH_ARQ_QUEUE"]
_VOCAB_SIZE = 49_152  # Number of entries of a row, as in the pool's rows.
_PROMPT_TOKENS = 32  # Tokens per random prompt.
_BASE = np.tile(np.random.default_rng(0).standard_normal(_VOCAB_SIZE, dtype=np.float32), 2)


async def row(ctx: dict[str, Any], ids: list[int]) -> NDArray[np.float32]:
    """A row that depends on the prompt and costs one copy, like a row of the synthetic backend."""
    shift = sum(ids) % _VOCAB_SIZE
    return _BASE[shift : shift + _VOCAB_SIZE].copy()


class WorkerSettings:
    """Settings of the arq worker. All other settings, and a `max_jobs` of 10, are arq's defaults."""

    functions: ClassVar[list[Any]] = [row]
    redis_settings = _REDIS
    queue_name = _QUEUE
    max_jobs = int(os.environ["BENCH_ARQ_MAX_JOBS"])


class Client:
    """Handlers of the benchmark's requests, which return timings."""

    def __init__(self, redis: ArqRedis) -> None:
        self._redis = redis

    async def new(self, rows: int, concurrency: int) -> float:
        """Seconds for jobs with new prompts, with `concurrency` jobs in flight; discards the rows."""
        drawn = np.random.default_rng(secrets.randbits(64)).integers(0, _VOCAB_SIZE, (rows, _PROMPT_TOKENS))
        waiting = iter(drawn.tolist())
        start = time.perf_counter()
        await asyncio.gather(*[self._consume(waiting) for _ in range(concurrency)])
        return time.perf_counter() - start

    async def _consume(self, waiting: Iterator[list[int]]) -> None:
        for ids in waiting:
            job = await self._redis.enqueue_job("row", ids)
            got = await job.result()
            if got.shape != (_VOCAB_SIZE,):
                raise RuntimeError(f"a row has the shape {got.shape}")


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    client = Client(await create_pool(_REDIS, default_queue_name=_QUEUE))
    await serve({"new": client.new})


if __name__ == "__main__":
    asyncio.run(main())
