"""Helpers that call a queue's Lua scripts as producers and workers call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import GROUP, LIFETIME_FIELD, WAKE_FIELD, Keys

MODEL = Keys("test").model("m")
ROWS = Keys("test").row("fp")
JOBS, DEAD = MODEL.jobs, MODEL.dead
LEASE_MS = 15_000
LIFETIME_MS = 100_000
ROW_MS = 60_000
FAILURE = Failure("WorkerError", "no").pack()
A, B, C = (MODEL.reply(name) for name in "abc")
X, Y = (MODEL.reply(name, is_bulk=True) for name in "xy")


def digest(number: int) -> bytes:
    """The digest of prompt `number`; it has bytes that are not valid UTF-8."""
    return bytes([number, 0, 10, 13, 58, 123, 255, 128]) * 2


def waiting(number: int) -> bytes:
    return MODEL.waiting + digest(number)


async def submit(
    redis: redis_async.Redis,
    *numbers: int,
    reply: bytes = A,
    limit: int = 100,
    check_rows: bool = True,
    again: bool = False,
    lifetime: int = LIFETIME_MS,
    homes: Sequence[str] = (),
    generated: int = 0,
) -> str:
    keys = [JOBS, reply, *map(waiting, numbers)]
    if check_rows:
        keys += [ROWS + digest(number) for number in numbers]
    head = [limit, lifetime, "rows" if check_rows else "", int(again), len(numbers)]
    args = [*head, *(b"job-%d" % number for number in numbers), *homes]
    if generated:
        args += [*([""] * (len(numbers) - len(homes))), *([generated] * len(numbers))]
    outcome: bytes = await scripts.SUBMIT(redis, keys, args)
    return outcome.decode()


async def cancel(redis: redis_async.Redis, *numbers: int, reply: bytes = A) -> int:
    return int(await scripts.CANCEL(redis, [JOBS, reply, *map(waiting, numbers)], [GROUP]))


async def register(redis: redis_async.Redis, worker: str = "w1", size: int = 1, lease_ms: int = LEASE_MS) -> None:
    """Send the heartbeat of a worker that computes `size` prompts at once."""
    keys = [MODEL.workers, MODEL.jobs, MODEL.capacity, MODEL.lanes, MODEL.lane(worker)]
    await scripts.REGISTER(redis, keys, [worker, lease_ms, LIFETIME_MS, GROUP, size])


async def take(redis: redis_async.Redis, consumer: str = "w1", count: int = 100) -> list[bytes]:
    """Read and return new entries of a worker's lane (its own stream) and of the shared stream, as a worker does."""
    lane = MODEL.lane(consumer)
    if not await redis.exists(lane) or not await redis.xinfo_groups(lane):
        await redis.xgroup_create(lane, GROUP, id="0", mkstream=True)
    reply: Any = await redis.xreadgroup(GROUP, consumer, {lane: ">", JOBS: ">"}, count=count)
    if isinstance(reply, dict):  # In RESP3, redis-py returns the entries of each stream in a list of one list.
        reply = [(key, entries) for key, (entries,) in reply.items()]
    found = [(key, *entry) for key, entries in reply for entry in entries]
    if wakes := [entry for key, entry, fields in found if key == lane and fields and WAKE_FIELD in fields]:
        await scripts.WAKE(redis, [JOBS], [consumer, *wakes])
    return [
        entry_id + (b" " + consumer.encode() if key == lane else b"")
        for key, entries in reply
        for entry_id, fields in entries
        if fields is not None and WAKE_FIELD not in fields
    ]


async def find_work(redis: redis_async.Redis, worker: str = "", most: int = 0, patience_ms: int = 0) -> tuple[int, ...]:
    """Find work for an idle worker: numbers of jobs that moved up and that were stolen, ms until the next check."""
    return tuple(await scripts.FIND_WORK(redis, [JOBS], [worker, most, patience_ms]))


async def count_queued(redis: redis_async.Redis, *workers: str) -> int:
    """The number of jobs in the shared stream and in the lanes of the named workers."""
    return sum([len(await entries_of(redis, key)) for key in (JOBS, *map(MODEL.lane, workers))])


async def fall_silent(redis: redis_async.Redis, *entries: bytes, deliveries: int, consumer: str = "w1") -> None:
    """Set how long entries have been idle, as if their worker had taken them more than a lease ago."""
    await redis.xclaim(JOBS, GROUP, consumer, 0, list(entries), idle=LEASE_MS + 1, retrycount=deliveries, justid=True)


def finish_args(
    *endings: tuple[bytes, bytes, bool],
    cap: int = 1000,
    mark_ms: int = 0,
    consumer: str = "w1",
    rows: Sequence[bytes] = (),
    row_ms: int = 0,
    host: bytes = b"",
) -> list[Any]:
    """The arguments of `finish.lua`: entries, each with its failure (b"" for none) and whether it becomes a dead
    letter; rows to store, or references to rows in the shared memory of a host."""
    args: list[Any] = [
        GROUP,
        "fp",
        cap,
        LIFETIME_MS,
        100,
        consumer,
        mark_ms,
        len(endings),
        host,
        row_ms,
        *(ending[0] for ending in endings),
        *rows,
    ]
    for number, (_, failure, dead) in enumerate(endings, 1):
        args += [number, failure, int(dead)] if failure else []
    return args


async def finish(redis: redis_async.Redis, *endings: tuple[bytes, int, bytes, bool]) -> int:
    """End jobs; each ending is (entry, number of the prompt, failure, whether the job becomes a dead letter)."""
    args = finish_args(*((entry, failure, dead) for entry, _, failure, dead in endings))
    keys = [JOBS, DEAD, *(waiting(number) for _, number, _, _ in endings)]
    notified: bytes = (await scripts.FINISH(redis, keys, args)).split()[0]
    return int(notified)


async def claim(
    redis: redis_async.Redis, *held: bytes, consumer: str = "w2", most: int = 3, want: int = 10, idle: bool = True
) -> tuple[int, list[tuple[bytes, bytes, int]]]:
    args = [GROUP, consumer, LEASE_MS, most, want, int(idle), 2**24, 2**19, LIFETIME_MS, *held]
    alone, taken, _ = await scripts.CLAIM_EXPIRED(redis, [JOBS, MODEL.claim_cursor], args)
    return alone, [(entry, job, deliveries) for entry, job, deliveries, *_ in taken]


async def claim_all(redis: redis_async.Redis) -> list[Any]:
    """Claim all jobs whose leases have ended; return the script's reply for each job."""
    args = [GROUP, "w2", LEASE_MS, 3, 10, 1, 2**24, 2**19, LIFETIME_MS]
    _, taken, _ = await scripts.CLAIM_EXPIRED(redis, [JOBS, MODEL.claim_cursor], args)
    return list(taken)


async def entries_of(
    redis: redis_async.Redis, key: bytes = JOBS, *, with_lifetimes: bool = False
) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The jobs in a stream, without the field that has a job's lifetime."""
    reply: Any = await redis.xrange(key)
    return [
        (entry, {name: value for name, value in fields.items() if with_lifetimes or name != LIFETIME_FIELD})
        for entry, fields in reply
        if WAKE_FIELD not in fields
    ]


async def told(redis: redis_async.Redis, reply: bytes) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in await entries_of(redis, reply)]


async def pending(redis: redis_async.Redis) -> dict[bytes, tuple[bytes, int]]:
    """Delivered entries: entry -> (worker that holds the entry, number of its deliveries)."""
    reply: Any = await redis.xpending_range(JOBS, GROUP, "-", "+", 1000)
    return {entry["message_id"]: (entry["consumer"], entry["times_delivered"]) for entry in reply}


async def registered(redis: redis_async.Redis, number: int) -> dict[bytes, bytes]:
    """The fields of a prompt's waiting key, a string or a hash: {"job": entry, reply key of each client: ""}."""
    key = waiting(number)
    if await redis.type(key) != b"string":  # The key is a hash or does not exist.
        return await hash_of(redis, key)
    value: Any = await redis.get(key)
    reply, _, entry = value.rpartition(b"\n")
    return {b"job": entry, reply: b""}


async def hash_of(redis: redis_async.Redis, key: bytes) -> dict[bytes, bytes]:
    reply: Any = await redis.hgetall(key)
    return dict(reply)


async def finish_storing(redis: redis_async.Redis, entries: list[bytes], rows: list[bytes], host: bytes = b"") -> bytes:
    """End the prompts 1, 2, … and store small rows, or references to rows, for them."""
    numbers = range(1, len(entries) + 1)
    keys = [JOBS, DEAD, *map(waiting, numbers), *(ROWS + digest(number) for number in numbers)]
    args = finish_args(*((entry, b"", False) for entry in entries), rows=rows, row_ms=ROW_MS, host=host)
    outcome: bytes = await scripts.FINISH(redis, keys, args)
    return outcome


async def in_stream(redis: redis_async.Redis) -> list[int]:
    """The numbers of the prompts in the shared stream, in order."""
    return [int(fields[b"m"].removeprefix(b"job-")) for _, fields in await entries_of(redis)]


async def compute_one(redis: redis_async.Redis) -> int:
    """Take the next prompt and end it with a row; return the number of the prompt."""
    (entry,) = await take(redis, count=1)
    number = (await in_stream(redis))[0]
    await finish(redis, (entry, number, b"", False))
    return number
