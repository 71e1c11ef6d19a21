"""How long a model's queue is and who reads it: read in one place, for workers and for those who look on."""

from __future__ import annotations

from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.protocol.keys import GROUP, ModelKeys
from lmpool.protocol.model_info import LIMITS

# What a server says where there is no stream, no group of it, or something else: nobody has served the model yet.
_NO_QUEUE = ("no such key", "NOGROUP", "WRONGTYPE")

MOST_WORKERS = 4000
"""Most workers of a model that are told apart; more are counted."""

_LONGEST_LEASE_MS = int(LIMITS["lease_s"][1] * 1000)


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


class Alive(NamedTuple):
    """The workers of a model that are alive at one moment.

    Attributes:
        serving: how many serve it.
        loading: how many load it.
        names: the ids of those that serve it, `MOST_WORKERS` at most; none where they were not asked for.
    """

    serving: int
    loading: int
    names: tuple[str, ...]


async def read_alive(redis: Redis, keys: ModelKeys, *, names: bool = False) -> Alive:
    """Count the workers of a model, in a time that does not depend on how many there are.

    Args:
        redis: a client for control messages.
        keys: the model's keys.
        names: tell their ids too.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    args = [_LONGEST_LEASE_MS, MOST_WORKERS if names else 0]
    serving, loading, found = await scripts.ALIVE(redis, [keys.workers, keys.loading], args)
    return Alive(int(serving), int(loading), tuple(sorted(name.decode("utf-8", "replace") for name in found)))


async def read_consumers(redis: Redis, keys: ModelKeys) -> list[bytes]:
    """The consumers of a model's queue, whether they are alive or not.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    try:
        found = await redis.xinfo_consumers(keys.jobs, GROUP)
    except ResponseError as error:
        if not str(error).removeprefix("ERR ").startswith(_NO_QUEUE):
            raise
        return []
    return [consumer["name"] for consumer in found]
