"""Scripts that release jobs, retry dead letters, and fail only jobs that the worker holds."""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.protocol.keys import BULK, GROUP, JOB_FIELD, PRIORITY_FIELD
from tests.shared.broker.scripts.script_calls import (
    DEAD,
    FAILURE,
    JOBS,
    LIFETIME_MS,
    MODEL,
    A,
    B,
    X,
    cancel,
    claim,
    digest,
    entries_of,
    fall_silent,
    finish,
    hash_of,
    pending,
    registered,
    submit,
    take,
    told,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import script_redis, script_server  # noqa: F401

HOUR_MS = 3_600_000


async def release(
    redis: redis_async.Redis,
    *,
    consumer: str = "w1",
    at_once: int = 100,
    begin: bytes = b"-",
    deliveries: int = 3,
    reason: str = "",
    most_reasons: int = 10,
) -> tuple[int, bytes]:
    """Call the release script once; return the number of released jobs, and the id at which the next call begins."""
    args = [GROUP, consumer, HOUR_MS, at_once, begin, deliveries, reason, LIFETIME_MS, most_reasons, ""]
    count, after = await scripts.RELEASE(redis, [JOBS, MODEL.reasons], args)
    return count, after


async def retry(redis: redis_async.Redis, entry: bytes, number: int = 1, limit: int = 100) -> str:
    args = [entry, b"job-%d" % number, limit, LIFETIME_MS]
    outcome: bytes = await scripts.RETRY(redis, [JOBS, DEAD, waiting(number)], args)
    return outcome.decode()


async def bury(redis: redis_async.Redis, number: int = 1, reply: bytes = B) -> bytes:
    """Let a job become a dead letter; return the id of this dead letter."""
    await submit(redis, number, reply=reply)
    entries = await take(redis)
    await finish(redis, (entries[-1], number, FAILURE, True))
    return (await entries_of(redis, DEAD))[-1][0]


# The script that releases jobs


async def test_released_jobs_can_be_claimed_at_once_and_keep_their_deliveries(
    redis: redis_async.Redis,
) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    await fall_silent(redis, second, deliveries=2)
    assert await release(redis) == (2, b"")
    assert await pending(redis) == {first: (b"w1", 1), second: (b"w1", 2)}
    assert await claim(redis) == (0, [(first, b"job-1", 1)])
    assert await claim(redis) == (1, [(second, b"job-2", 2)])


async def test_a_worker_releases_only_jobs_that_it_still_holds(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3, 4)
    mine, taken, ended, _ = await take(redis)
    await redis.xclaim(JOBS, GROUP, "w2", 0, [taken])
    await finish(redis, (ended, 3, b"", False))
    await redis.xadd(JOBS, {JOB_FIELD: b"new"})
    assert (await release(redis))[0] == 2
    _, claimed = await claim(redis, consumer="w3")
    assert [job for _, job, _ in claimed] == [b"job-1", b"job-4"]
    assert (await pending(redis))[taken] == (b"w2", 2)
    assert mine in await pending(redis)


async def test_many_jobs_are_released_in_parts(redis: redis_async.Redis) -> None:
    await submit(redis, *range(1, 8))
    await take(redis, count=5)
    await take(redis, "w2")
    begin, counts = b"-", []
    while begin:
        count, begin = await release(redis, at_once=2, begin=begin)
        counts.append(count)
    assert counts == [2, 2, 1]
    _, claimed = await claim(redis, consumer="w3")
    assert len(claimed) == 5


async def test_the_reason_is_stored_for_the_worker_that_gives_the_job_up(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    innocent, guilty = await take(redis)
    await fall_silent(redis, guilty, deliveries=3)
    await release(redis, reason="no memory")
    assert await hash_of(redis, MODEL.reasons) == {guilty: b"no memory"}
    assert 0 < await redis.pttl(MODEL.reasons) <= LIFETIME_MS
    assert innocent in await pending(redis)


async def test_the_number_of_reasons_is_limited(redis: redis_async.Redis) -> None:
    await submit(redis, *range(1, 8))
    await take(redis)
    await release(redis, deliveries=1, reason="no memory", most_reasons=3)
    assert 0 < await redis.hlen(MODEL.reasons) <= 3


async def test_a_worker_that_ends_without_a_reason_writes_none(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    await take(redis)
    await release(redis, deliveries=1)
    assert not await redis.exists(MODEL.reasons)


async def test_no_job_is_released_after_the_server_lost_the_queue(redis: redis_async.Redis) -> None:
    assert await release(redis, consumer="nobody") == (0, b"")
    await redis.delete(JOBS)
    assert await release(redis) == (0, b"")
    assert not await redis.exists(JOBS)


# The script that ends jobs, called by a worker whose leases have ended


async def test_a_job_that_another_worker_claimed_does_not_fail(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    lost, mine = await take(redis)
    await redis.xclaim(JOBS, GROUP, "w2", 0, [lost])
    assert await finish(redis, (lost, 1, FAILURE, True), (mine, 2, FAILURE, False)) == 1
    assert await told(redis, A) == [{b"d": digest(2), b"e": FAILURE}]
    assert await pending(redis) == {lost: (b"w2", 2)}
    assert A in await registered(redis, 1)
    assert not await redis.exists(DEAD)


async def test_a_late_failure_does_not_end_a_new_request(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (late,) = await take(redis)
    await redis.xclaim(JOBS, GROUP, "w2", 0, [late])
    await finish(redis, (late, 1, b"", False))
    await submit(redis, 1, reply=B)
    assert await finish(redis, (late, 1, FAILURE, False)) == 0
    assert await told(redis, B) == []
    assert B in await registered(redis, 1)


async def test_a_late_row_ends_the_job(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    await redis.xclaim(JOBS, GROUP, "w2", 0, [entry])
    assert await finish(redis, (entry, 1, b"", False)) == 1
    assert await told(redis, A) == [{b"d": digest(1), b"f": b"fp", b"w": b"w1"}]
    assert await pending(redis) == {}


# The script that retries a dead letter


async def test_a_dead_letter_is_queued_again_and_is_wanted_without_clients(
    redis: redis_async.Redis,
) -> None:
    letter = await bury(redis)
    assert await retry(redis, letter) == "Q"
    ((entry, fields),) = await entries_of(redis)
    assert fields == {JOB_FIELD: b"job-1"}
    assert await registered(redis, 1) == {b"job": entry, b"keep": b""}
    assert 0 < await redis.pttl(waiting(1)) <= LIFETIME_MS
    assert await entries_of(redis, DEAD) == []
    assert await take(redis, "w2") == [entry]
    assert await pending(redis) == {entry: (b"w2", 1)}


@pytest.mark.parametrize("reply", [B, X])
async def test_only_a_dead_letter_of_a_bulk_client_yields_when_it_is_retried(
    redis: redis_async.Redis, reply: bytes
) -> None:
    await submit(redis, 9)  # Client A waits for another prompt.
    letter = await bury(redis, reply=reply)
    assert await retry(redis, letter) == "Q"
    _, fields = (await entries_of(redis))[-1]
    assert (fields[JOB_FIELD], fields.get(PRIORITY_FIELD)) == (b"job-1", BULK if reply == X else None)


async def test_clients_join_and_leave_a_job_that_was_queued_again(redis: redis_async.Redis) -> None:
    await retry(redis, await bury(redis))
    assert await submit(redis, 1) == "J"
    assert await cancel(redis, 1) == 0
    assert await submit(redis, 1) == "J"
    (entry,) = await take(redis)
    assert await finish(redis, (entry, 1, b"", False)) == 1
    assert await told(redis, A) == [{b"d": digest(1), b"f": b"fp", b"w": b"w1"}]
    assert not await redis.exists("keep", waiting(1))


async def test_a_letter_whose_prompt_is_in_flight_is_only_removed(redis: redis_async.Redis) -> None:
    letter = await bury(redis)
    await submit(redis, 1)
    before = await registered(redis, 1)
    assert await retry(redis, letter) == "J"
    assert len(await entries_of(redis)) == 1
    assert await registered(redis, 1) == {**before, b"keep": b""}, "the client that waits may give up"
    assert await entries_of(redis, DEAD) == []


@pytest.mark.parametrize("is_string", [True, False])
async def test_junk_in_a_waiting_key_does_not_prevent_a_retry(redis: redis_async.Redis, is_string: bool) -> None:
    letter = await bury(redis)
    if is_string:
        await redis.set(waiting(1), b"junk")
    else:
        await redis.rpush(waiting(1), b"junk")
    assert await retry(redis, letter) == "Q"
    ((entry, _),) = await entries_of(redis)
    assert await registered(redis, 1) == {b"job": entry, b"keep": b""}


async def test_a_dead_letter_whose_prompt_has_lost_its_job_is_queued(redis: redis_async.Redis) -> None:
    letter = await bury(redis)
    await submit(redis, 1)
    ((lost, _),) = await entries_of(redis)
    await redis.xdel(JOBS, lost)
    assert await retry(redis, letter) == "Q"
    ((entry, _),) = await entries_of(redis)
    assert await registered(redis, 1) == {b"job": entry, b"keep": b"", A: b""}


async def test_a_full_queue_refuses_a_retry(redis: redis_async.Redis) -> None:
    letter = await bury(redis)
    await submit(redis, 2, 3)
    assert await retry(redis, letter, limit=2) == "F"
    assert len(await entries_of(redis)) == 2
    assert [entry for entry, _ in await entries_of(redis, DEAD)] == [letter]


@pytest.mark.parametrize("change", ["gone", "another", "not a job"])
async def test_a_letter_that_has_changed_stays(redis: redis_async.Redis, change: str) -> None:
    letter = await bury(redis)
    await redis.xdel(DEAD, letter)
    if change != "gone":
        fields: Any = {"e": FAILURE, "m": b"job-2"} if change == "another" else {"other": b"field"}
        added: Any = await redis.xadd(DEAD, fields)
        letter = added
    assert await retry(redis, letter) == "G"
    assert await entries_of(redis) == []
    assert len(await entries_of(redis, DEAD)) == (change != "gone")
