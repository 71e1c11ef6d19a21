"""The memory of a pool's server: whether its settings suit a pool, and how much of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError

_SECTIONS = ("memory", "stats")
_NEARLY = 0.75


class ServerMemory(NamedTuple):
    """The memory of a server, or of the fullest master of a cluster; evictions are those of all masters.

    Attributes:
        used_bytes: what the server uses.
        limit_bytes: how much that may be (`maxmemory`); 0 for no limit.
        policy: what the server does at the limit (`maxmemory-policy`).
        evicted_keys: keys that were removed there since the start.
    """

    used_bytes: int
    limit_bytes: int
    policy: str
    evicted_keys: int

    def __str__(self) -> str:
        limit = f"of {_megabytes(self.limit_bytes)}" if self.limit_bytes else "without a limit"
        evicted = f"{self.evicted_keys} keys evicted since its start"
        return f"{_megabytes(self.used_bytes)} used {limit} (maxmemory), {self.policy}, {evicted}"

    @property
    def is_nearly_full(self) -> bool:
        """Whether a value more may cost another: behind an eviction there is room for a while."""
        return self.used_bytes > _NEARLY * self.limit_bytes > 0

    def doubt(self) -> str | None:
        """What is to be said of these settings: a sentence without an end, or None when they suit a pool."""
        wrong = []
        if not self.limit_bytes:
            wrong.append("maxmemory is 0, so cached rows may fill the machine")
        if self.policy == "noeviction":
            wrong.append("maxmemory-policy is noeviction, so a server that is full refuses rows and heartbeats")
        elif self.policy.startswith("allkeys-"):
            wrong.append(f"maxmemory-policy is {self.policy}, so a server that is full may drop queues")
        if not wrong:
            return None
        return f"the server's memory is not set up for a pool: {'; '.join(wrong)}: set maxmemory, and volatile-lru"


async def read_memory(redis: Redis) -> ServerMemory | None:
    """Ask a server for its memory; None where it does not tell, as to users without that right.

    Args:
        redis: a client for control messages.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        for section in _SECTIONS:
            for node, told in (await _info(redis, section)).items():
                found.setdefault(node, {}).update(told)
    except ResponseError:
        return None
    masters = [memory for told in found.values() if (memory := _read(told)) is not None]
    if not masters:
        return None
    # Another one may have evicted: what is lost on one master is lost.
    fullest = max(masters, key=lambda one: one.used_bytes / (one.limit_bytes or float("inf")))
    return fullest._replace(evicted_keys=sum(one.evicted_keys for one in masters))


async def _info(redis: Redis, section: str) -> dict[str, dict[str, Any]]:
    """What each master tells."""
    if not isinstance(redis, RedisCluster):
        return {"": dict(await redis.info(section))}
    told: Any = await cast(Any, redis).info(section, target_nodes=RedisCluster.PRIMARIES)
    return told if all(isinstance(one, dict) for one in told.values()) else {"": told}


def _read(told: Mapping[str, Any]) -> ServerMemory | None:
    try:
        numbers = [int(told[name]) for name in ("used_memory", "maxmemory", "evicted_keys")]
        return ServerMemory(numbers[0], numbers[1], str(told["maxmemory_policy"]), numbers[2])
    except (KeyError, TypeError, ValueError):
        return None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
