"""How long a model's queue is: read in one place, for workers and for those who look on."""

from __future__ import annotations

from typing import NamedTuple

from redis.asyncio import Redis

from lmpool import scripts
from lmpool.keys import ModelKeys


class QueueState(NamedTuple):
    """A model's queue at one moment.

    Attributes:
        depth: prompts that wait or are being computed.
        age_s: seconds since the oldest of them was queued; 0 when there is none.
        dead: jobs that were given up.
        server_time: seconds since the epoch by the server's clock.
    """

    depth: int
    age_s: float
    dead: int
    server_time: float


async def read_queue(redis: Redis, keys: ModelKeys) -> QueueState:
    """Look at the queue of a model; one that nobody has ever served is empty.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    depth, age_ms, dead, now_ms = await scripts.SURVEY(redis, [keys.jobs, keys.dead], [])
    return QueueState(int(depth), int(age_ms) / 1000, int(dead), int(now_ms) / 1000)
