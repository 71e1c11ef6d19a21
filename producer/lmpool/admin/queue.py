"""The queue of a model: count its prompts and clients, and clear it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.admin.dead_letters import read_letter
from lmpool.broker import scripts
from lmpool.broker.scripts import MAX_WORKERS, read_lanes, read_queue
from lmpool.errors import QueueCleared
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import BULK, BULK_TIME, CONTINUED, CONTINUED_TIME, GROUP, REPLY_CAP, REPLY_TTL_MS, ModelKeys

_LATER = b"later"
_PAGE = 8  # Stream entries per read: a job may have 16 MB.
_SCAN_COUNT = 1000  # Digests of the backlog per ZSCAN.
_REMOVED_PER_CALL = 50  # Prompts per script call: removing a prompt takes several times as long as adding a prompt.
_MAX_ROUNDS = 3  # Max passes over the queue, so that clearing ends even if clients keep submitting.
_MAX_CLIENTS = 50  # Max clients listed per priority.


class Cleared(NamedTuple):
    """The result of clearing a queue.

    Attributes:
        removed: prompts that were removed.
        held: prompts that workers hold; they will be computed.
        queued: prompts that clients submitted during the call and that remain.
    """

    removed: int
    held: int
    queued: int


async def count_queue(redis: Redis, discovery: Discovery, keys: ModelKeys, model: str) -> dict[str, Any]:
    """Count the prompts of a queue, as `lmpool queue show --json` prints them.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    state = await discovery.queue(model)
    return {
        "queued": state.depth,
        "held": sum([await _held(redis, stream) for stream, _ in await _streams(redis, keys)]),
        "backlog": int(await redis.zcard(keys.backlog)),
        "bulk": int(await redis.zcount(keys.backlog, BULK_TIME, "+inf")),
        "lanes": await read_lanes(redis, keys),
        "age_s": state.age_s,
        "clients": await _clients(redis, keys),
    }


async def clear_queue(redis: Redis, keys: ModelKeys, model: str, *, lease_s: float) -> Cleared:
    """Remove the waiting prompts from a queue and notify their clients.

    Args:
        redis: a client for control messages.
        keys: the model's keys.
        model: the model's name, for the error that clients get.
        lease_s: a job of a worker that has been silent for this many seconds counts as waiting.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    text = f"an operator has cleared the queue of {model!r} (`lmpool queue clear`): submit the request again if needed"
    failure, lease_ms = Failure(QueueCleared.__name__, text).pack(), int(lease_s * 1000)
    removed = queued = 0
    for _ in range(_MAX_ROUNDS):
        gone = held = 0
        prompts = await _list_prompts(redis, keys)
        for at in range(0, len(prompts), _REMOVED_PER_CALL):
            portion = prompts[at : at + _REMOVED_PER_CALL]
            while portion:
                names = [keys.jobs, keys.waiting, *(keys.waiting + digest for _, digest in portion)]
                head = [GROUP, failure, REPLY_CAP, REPLY_TTL_MS, lease_ms]
                args = [*head, *(entry for entry, _ in portion)]
                now_gone, now_held, again = await scripts.CLEAR(redis, names, args)
                gone, held = gone + now_gone, held + now_held
                portion = [portion[number - 1] for number in again]
        removed += gone
        if not gone:
            break
    else:
        queued = (await read_queue(redis, keys)).depth - held
    return Cleared(removed, held, max(0, queued))


async def _list_prompts(redis: Redis, keys: ModelKeys) -> list[tuple[bytes, bytes]]:
    """Return (entry id, digest) of each prompt: the id is b"later" in the backlog; an invalid job's digest is b"".

    The backlog is read first: a prompt that moves from the backlog to a stream during the call is found in the stream.
    """
    later = {digest async for digest, _ in redis.zscan_iter(keys.backlog, count=_SCAN_COUNT)}
    prompts = [(_LATER, digest) for digest in later]
    for stream, suffix in await _streams(redis, keys):
        first, newest = "-", cast(Any, await redis.xrevrange(stream, count=1))
        while newest and (page := cast(Any, await redis.xrange(stream, first, newest[0][0], _PAGE))):
            prompts += [(entry + suffix, read_letter(entry, fields).digest) for entry, fields in page]
            first = f"({page[-1][0].decode('ascii')}"
    return prompts


async def _streams(redis: Redis, keys: ModelKeys) -> list[tuple[bytes, bytes]]:
    """Return the streams of a queue, lanes first, each with the suffix that follows its entry ids."""
    lanes: Any = await redis.zrange(keys.lanes, 0, MAX_WORKERS, desc=True)
    return [*((keys.lane(worker), b" " + worker) for worker in lanes if worker), (keys.jobs, b"")]


async def _held(redis: Redis, stream: bytes) -> int:
    try:
        groups: Iterable[Any] = await redis.xinfo_groups(stream)
    except RedisError as error:
        if "no such key" in str(error):
            return 0  # No worker has served the model yet.
        raise
    return sum(int(group["pending"]) for group in groups if group["name"] == GROUP.encode())


async def _clients(redis: Redis, keys: ModelKeys) -> dict[str, int]:
    """Return how far each client of the backlog is behind: its last start time minus the current virtual time.

    Continuations count as the tokens that they may generate; an interactive client has the entry "ID:tokens" for them.
    """
    behind: dict[str, int] = {}
    # Each priority has its own virtual time and its own range of start times (docs/design/queue.md).
    ranges = (("", -math.inf, CONTINUED_TIME), (CONTINUED, CONTINUED_TIME, BULK_TIME), (BULK, BULK_TIME, math.inf))
    for time, first, last in ranges:
        now = max(first, 0.0, float(await redis.zscore(keys.virtual_time, time) or 0))
        starts: Any = await redis.zrevrangebyscore(
            keys.virtual_time, last, first, start=0, num=_MAX_CLIENTS, withscores=True
        )
        prefix = keys.reply("").decode()
        counts = {name.decode("utf-8", "replace").removeprefix(prefix): int(start - now) for name, start in starts}
        behind |= {name: count for name, count in counts.items() if count > 0 and not name.startswith("owed")}
    return behind
