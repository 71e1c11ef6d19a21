"""How long a model's queue is and who reads it: read in one place, for workers and for those who look on."""

from __future__ import annotations

from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool import scripts
from lmpool.keys import GROUP, ModelKeys

# What a server says where there is no stream, no group of it, or something else: nobody has served the model yet.
_NO_QUEUE = ("no such key", "NOGROUP", "WRONGTYPE")


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


async def read_consumers(redis: Redis, keys: ModelKeys) -> list[str]:
    """The workers that have joined a model's queue, gone or not; what is no UTF-8 names no worker.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    try:
        found = await redis.xinfo_consumers(keys.jobs, GROUP)
    except ResponseError as error:
        if not str(error).removeprefix("ERR ").startswith(_NO_QUEUE):
            raise
        return []
    return [consumer["name"].decode("utf-8", "replace") for consumer in found]
