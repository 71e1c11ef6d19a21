"""The queue of a model: count its prompts and clients, and clear it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker import scripts
from lmpool.broker.scripts import MAX_WORKERS, read_lanes, read_queue
from lmpool.errors import ProtocolError, QueueCleared
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.job import Failure, digest_of, query_digest, unpack_job
from lmpool.protocol.keys import (
    BULK,
    BULK_TIME,
    CONTINUED,
    CONTINUED_TIME,
    GROUP,
    JOB_FIELD,
    REPLY_CAP,
    REPLY_TTL_MS,
    ModelKeys,
)

_LATER = b"later"
_PAGE = 8  # Entries per read: a job may have 16 MB.
_SCAN_COUNT = 1000  # Digests of the backlog per ZSCAN.
_REMOVED_PER_CALL = 50  # Prompts per script call: removing one takes the server several times as long as adding one.
_MAX_ROUNDS = 3  # Passes over the queue: clients that keep submitting must not make clearing endless.
_MAX_CLIENTS = 50  # Max clients listed per priority.


class Queued(NamedTuple):
    """A prompt in a queue: its entry or "later", and its digest (b"" if the job cannot be decoded)."""

    entry: bytes
    digest: bytes


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
    head: list[bytes | str | int] = [
        GROUP, Failure(QueueCleared.__name__, text).pack(), REPLY_CAP, REPLY_TTL_MS, int(lease_s * 1000),
    ]  # fmt: skip
    removed = queued = 0
    for _ in range(_MAX_ROUNDS):
        gone = held = 0
        # Clear the backlog first: prompts that leave it during the call are then found in a stream.
        streams = await _streams(redis, keys)
        for source in (_backlog(redis, keys), *(_stream(redis, *stream) for stream in streams)):
            async for portion in _portions(source):
                while portion:
                    names = [keys.jobs, keys.waiting, *(keys.waiting + prompt.digest for prompt in portion)]
                    counts = await scripts.CLEAR(redis, names, [*head, *(prompt.entry for prompt in portion)])
                    gone, held = gone + counts[0], held + counts[1]
                    portion = [portion[number - 1] for number in counts[2]]
        removed += gone
        if not gone:
            break
    else:
        queued = (await read_queue(redis, keys)).depth - held
    return Cleared(removed, held, max(0, queued))


async def _portions(prompts: AsyncIterator[Queued]) -> AsyncIterator[list[Queued]]:
    portion: list[Queued] = []
    async for prompt in prompts:
        portion.append(prompt)
        if len(portion) == _REMOVED_PER_CALL:
            yield portion
            portion = []
    if portion:
        yield portion


async def _backlog(redis: Redis, keys: ModelKeys) -> AsyncIterator[Queued]:
    digests: set[bytes] = set()  # ZSCAN may return a member twice.
    async for digest, _ in redis.zscan_iter(keys.backlog, count=_SCAN_COUNT):
        digests.add(digest)
    for digest in digests:
        yield Queued(_LATER, digest)


async def _streams(redis: Redis, keys: ModelKeys) -> list[tuple[bytes, bytes]]:
    """Return the streams of a queue, lanes first, each with the suffix that follows its entry ids."""
    lanes: Any = await redis.zrange(keys.lanes, 0, MAX_WORKERS, desc=True)
    return [*((keys.lane(worker), b" " + worker) for worker in lanes if worker), (keys.jobs, b"")]


async def _stream(redis: Redis, stream: bytes, suffix: bytes) -> AsyncIterator[Queued]:
    """Iterate over the current prompts of a stream with a few jobs in memory at a time."""
    first = "-"
    newest: Any = await redis.xrevrange(stream, count=1)
    while newest:
        page: Any = await redis.xrange(stream, first, newest[0][0], _PAGE)
        for entry, fields in page:
            yield Queued(entry + suffix, _digest(fields.get(JOB_FIELD, b"")))
        if not page:
            break
        first = f"({page[-1][0].decode('ascii')}"


def _digest(data: bytes) -> bytes:
    try:
        job = unpack_job(data)
        prompt = digest_of(job.ids, job.adapter)
        return query_digest(prompt, job.query) if job.query else prompt
    except ProtocolError:
        return b""


async def _held(redis: Redis, stream: bytes) -> int:
    try:
        groups: Iterable[Any] = await redis.xinfo_groups(stream)
    except RedisError as error:
        if "no such key" in str(error):
            return 0  # No worker has served the model yet.
        raise
    return sum(int(group["pending"]) for group in groups if group["name"] == GROUP.encode())


async def _clients(redis: Redis, keys: ModelKeys) -> dict[str, int]:
    """Return the clients with the most prompts in the backlog: the distance of their last start time from now.

    Continuations count as the tokens that they may generate; those of interactive clients are listed as "ID:tokens".
    """
    behind: dict[str, int] = {}
    # Each priority has its own virtual time and its own range of start times (docs/design/queue.md).
    for first, last, time, start_of_range in (
        (-math.inf, CONTINUED_TIME, "", 0.0),
        (CONTINUED_TIME, BULK_TIME, CONTINUED, CONTINUED_TIME),
        (BULK_TIME, math.inf, BULK, BULK_TIME),
    ):
        now = max(start_of_range, float(await redis.zscore(keys.virtual_time, time) or 0))
        starts: Any = await redis.zrevrangebyscore(
            keys.virtual_time, last, first, start=0, num=_MAX_CLIENTS, withscores=True
        )
        prefix = keys.reply("").decode()
        counts = {name.decode("utf-8", "replace").removeprefix(prefix): int(start - now) for name, start in starts}
        behind |= {name: count for name, count in counts.items() if count > 0 and not name.startswith("owed")}
    return behind
