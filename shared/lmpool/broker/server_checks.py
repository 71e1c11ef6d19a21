"""Checks of a server: whether its memory suits a pool, and whether its version is safe against hostile scripts."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError

from lmpool.broker.connection import CommandConnection
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError

Version = tuple[int, int, int]

# First version of each branch without CVE-2025-49844 and CVE-2025-46817, and so without the older CVE-2024-46981.
# Branches newer than these never had the three vulnerabilities.
_FIXED: dict[str, tuple[Version, ...]] = {
    "redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
    "valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
}
_VERSION = re.compile(r"(\d{1,5})\.(\d{1,5})\.(\d{1,5})([-+.][\w.-]*)?", re.ASCII)
_MAX_TEXT = 64  # Max bytes of a field in the reply to HELLO; names and versions are shorter.


class ServerMemory(NamedTuple):
    """The memory of a server, or of the fullest master of a cluster, with the evictions of all masters."""

    used_bytes: int
    limit_bytes: int  # `maxmemory`; 0 for no limit.
    policy: str  # `maxmemory-policy`.
    evicted_keys: int  # Keys evicted since the server started.

    def __str__(self) -> str:
        limit = f"of {self.limit_bytes / 1e6:.1f} MB" if self.limit_bytes else "without a limit"
        evicted = f"{self.evicted_keys} keys evicted since its start"
        return f"{self.used_bytes / 1e6:.1f} MB used {limit} (maxmemory), {self.policy}, {evicted}"

    def doubt(self) -> str | None:
        """A warning about settings that do not suit a pool, without a full stop; None if the settings suit it."""
        wrong = []
        if not self.limit_bytes:
            wrong.append("maxmemory is 0, so cached rows may fill the machine")
        if self.policy == "noeviction":
            wrong.append("maxmemory-policy is noeviction, so a server that is full refuses rows and heartbeats")
        elif self.policy.startswith("allkeys-"):
            wrong.append(f"maxmemory-policy is {self.policy}, so a server that is full may drop queues")
        text = f"the server's memory is not set up for a pool: {'; '.join(wrong)}: set maxmemory, and volatile-lru"
        return text if wrong else None


async def _info(redis: Redis, section: str) -> dict[str, dict[str, Any]]:
    """A section of the reply to INFO, for each master."""
    if not isinstance(redis, RedisCluster):
        return {"": dict(await redis.info(section))}
    replies: Any = await cast(Any, redis).info(section, target_nodes=RedisCluster.PRIMARIES)
    return replies if all(isinstance(reply, dict) for reply in replies.values()) else {"": replies}


async def read_memory(redis: Redis) -> ServerMemory | None:
    """The memory of a server; None if the server does not report it, for example to users without the right to INFO."""
    figures: dict[str, dict[str, Any]] = {}
    try:
        for section in ("memory", "stats"):
            for node, reply in (await _info(redis, section)).items():
                figures.setdefault(node, {}).update(reply)
    except ResponseError:
        return None
    masters = []
    for info in figures.values():
        with suppress(KeyError, TypeError, ValueError):
            used, limit, evicted = (int(info[name]) for name in ("used_memory", "maxmemory", "evicted_keys"))
            masters.append(ServerMemory(used, limit, str(info["maxmemory_policy"]), evicted))
    if not masters:
        return None
    fullest = max(masters, key=lambda memory: memory.used_bytes / (memory.limit_bytes or float("inf")))
    return fullest._replace(evicted_keys=sum(memory.evicted_keys for memory in masters))


def doubt_of(product: str, version: str) -> str | None:
    """A warning about a version of Redis or Valkey, without a full stop; None if the version is safe or unknown."""
    numbers, fixed = _VERSION.fullmatch(version), _FIXED.get(product)
    if numbers is None or fixed is None:
        return None
    major, minor, patch = map(int, numbers.groups()[:3])
    if (major, minor) > fixed[-1][:2] or any((major, minor) == least[:2] and patch >= least[2] for least in fixed):
        return None
    levels = ", ".join(".".join(map(str, least)) for least in fixed)
    lacks = "may lack the fixes of CVE-2025-49844, CVE-2025-46817 and CVE-2024-46981"
    why = "which let any user that may run scripts take it over"
    advice = f"run {levels} or newer, unless your distribution has fixed this version"
    return f"the server is {product.capitalize()} {version} and {lacks}, {why}: {advice}"


async def read_version(server: Server) -> tuple[str, str]:
    """The name and version of a server, or of one master of a cluster; "" for a value that the server does not report.

    Every user may run HELLO, and it reports Valkey's own version. INFO would need a right that allows much more.
    """
    connection = CommandConnection(server)
    try:
        return _product(await connection.call(b"HELLO"))
    except LMPoolError:
        return "", ""  # A proxy may lack HELLO. If the server cannot be used, the next command fails.
    finally:
        connection.close()


def _product(reply: Any) -> tuple[str, str]:
    """Name and version in a reply to HELLO; RESP2 and RESP3 nest the reply differently."""
    words = list(chain.from_iterable(reply.items())) if isinstance(reply, dict) else reply
    listed = words if isinstance(words, list) else []
    texts = [word[:_MAX_TEXT].decode("latin-1") if isinstance(word, bytes) else "" for word in listed]
    fields = dict(zip(texts[::2], texts[1::2], strict=False))
    return fields.get("server", ""), fields.get("version", "")


async def check_server(server: Server) -> tuple[ServerMemory | None, list[str]]:
    """Check that a server can be used; returns its memory, and the warnings about its version and its memory."""
    # Open a new client: an idle connection may be cut while the model loads.
    async with server.connected() as redis:
        await redis.ping()
        memory = await read_memory(redis)
    doubts = (doubt_of(*await read_version(server)), memory and memory.doubt())
    return memory, [doubt for doubt in doubts if doubt]
