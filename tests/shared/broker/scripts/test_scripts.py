"""The Lua scripts that change the queue: every test runs on fakeredis and on a real server.

Tests do not wait for leases to end: XCLAIM sets how long an entry has been idle.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio as redis_async
from redis.exceptions import NoScriptError

from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection
from lmpool.broker.server import Server
from lmpool.errors import ServerError
from lmpool.protocol.keys import GROUP, JOB_FIELD, Keys
from lmpool.rows.cache import RowConnection
from lmpool.rows.shared_memory import Reference, place_of
from tests.shared.broker.scripts.script_calls import (
    DEAD,
    FAILURE,
    JOBS,
    LIFETIME_MS,
    MODEL,
    ROWS,
    A,
    B,
    C,
    cancel,
    digest,
    entries_of,
    finish,
    finish_args,
    finish_storing,
    pending,
    register,
    registered,
    submit,
    take,
    told,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import script_redis, script_server  # noqa: F401
from tests.support.pool import PATIENCE

# The script submit.lua


async def test_the_first_client_queues_the_job_and_the_second_joins_it(redis: redis_async.Redis) -> None:
    assert await submit(redis, 1) == "Q"
    assert await submit(redis, 1, reply=B) == "J"
    assert await submit(redis, 1) == "J"
    ((entry, fields),) = await entries_of(redis)
    assert fields == {JOB_FIELD: b"job-1"}
    assert await registered(redis, 1) == {b"job": entry, A: b"", B: b""}


async def test_a_batch_gets_one_outcome_per_prompt_in_order(redis: redis_async.Redis) -> None:
    await submit(redis, 2, reply=B)
    await redis.set(ROWS + digest(3), b"row")
    assert await submit(redis, 1, 2, 3, 4) == "QJRQ"
    assert [fields[JOB_FIELD] for _, fields in await entries_of(redis)] == [b"job-2", b"job-1", b"job-4"]


async def test_one_prompt_twice_in_a_call_is_queued_once(redis: redis_async.Redis) -> None:
    assert await submit(redis, 1, 1) == "QJ"
    assert len(await entries_of(redis)) == 1


async def test_a_full_queue_refuses_new_jobs_but_lets_others_join(redis: redis_async.Redis) -> None:
    assert await submit(redis, 1, 2, 3, 4, limit=3) == "QQQF"
    assert await submit(redis, 5, 2, 6, reply=B, limit=3) == "FJF"
    assert len(await entries_of(redis)) == 3
    assert not await redis.exists(waiting(4), waiting(5), waiting(6))


async def test_a_full_queue_takes_jobs_again_when_one_has_ended(redis: redis_async.Redis) -> None:
    await submit(redis, 1, limit=1)
    (entry,) = await take(redis)
    assert await submit(redis, 2, limit=1) == "F"
    await finish(redis, (entry, 1, b"", False))
    assert await submit(redis, 2, limit=1) == "Q"


async def test_a_row_that_was_stored_before_the_submission_is_reported_and_no_client_registered(
    redis: redis_async.Redis,
) -> None:
    await redis.set(ROWS + digest(1), b"row")
    assert await submit(redis, 1) == "R"
    assert await entries_of(redis) == []
    assert not await redis.exists(waiting(1))


async def test_a_submission_that_reports_damage_ignores_the_stored_row(redis: redis_async.Redis) -> None:
    await redis.set(ROWS + digest(1), b"damaged")
    assert await submit(redis, 1, check_rows=False) == "Q"


async def test_a_stored_row_is_reported_even_when_the_queue_is_full(redis: redis_async.Redis) -> None:
    await redis.set(ROWS + digest(1), b"row")
    assert await submit(redis, 1, 2, limit=0) == "RF"


@pytest.mark.parametrize("is_delivered", [False, True])
async def test_asking_again_leaves_a_job_that_still_exists(redis: redis_async.Redis, is_delivered: bool) -> None:
    await submit(redis, 1)
    if is_delivered:
        await take(redis)
    assert await submit(redis, 1, again=True) == "J"
    assert len(await entries_of(redis)) == 1


async def test_asking_again_queues_a_job_that_was_lost(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    await submit(redis, 1, reply=B)
    ((lost, _),) = await entries_of(redis)
    await redis.xdel(JOBS, lost)
    assert await submit(redis, 1) == "J"
    assert await submit(redis, 1, again=True) == "Q"
    ((entry, fields),) = await entries_of(redis)
    assert fields == {JOB_FIELD: b"job-1"}
    assert await registered(redis, 1) == {b"job": entry, A: b"", B: b""}


@pytest.mark.parametrize("asks", [A, B])
async def test_a_lost_job_for_which_one_client_waits_is_queued_again_for_all(
    redis: redis_async.Redis, asks: bytes
) -> None:
    await submit(redis, 1)
    ((lost, _),) = await entries_of(redis)
    await redis.xdel(JOBS, lost)
    assert await submit(redis, 1, reply=asks, again=True) == "Q"
    ((entry, _),) = await entries_of(redis)
    assert await registered(redis, 1) == {b"job": entry, A: b"", asks: b""}
    assert await take(redis) == [entry]
    assert await finish(redis, (entry, 1, b"", False)) == len({A, asks})
    assert not await redis.exists(waiting(1))


async def test_a_client_that_submits_twice_is_notified_once(redis: redis_async.Redis) -> None:
    assert await submit(redis, 1) + await submit(redis, 1) == "QJ"
    (entry,) = await take(redis)
    assert await finish(redis, (entry, 1, b"", False)) == 1
    assert len(await told(redis, A)) == 1


@pytest.mark.parametrize("what", [b"", b"no client", b"a\nb", b"a\ndone", b"\n" * 9])
@pytest.mark.parametrize("lifetime", [None, 60_000])
async def test_a_waiting_key_that_names_no_client_is_replaced(
    redis: redis_async.Redis, what: bytes, lifetime: int | None
) -> None:
    await redis.set(waiting(1), what, px=lifetime)
    assert await cancel(redis, 1) == 0
    assert await submit(redis, 1, again=True) == "Q"
    (entry,) = await take(redis)
    assert A in await registered(redis, 1)
    assert await finish(redis, (entry, 1, b"", False)) == 1
    await assert_queue_is_empty(redis)


async def test_a_waiting_key_without_a_lifetime_keeps_its_clients(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    for number in (1, 2):
        await redis.persist(waiting(number))
    assert await submit(redis, 1, reply=B) == "J"
    assert await cancel(redis, 2) == 0
    assert await registered(redis, 1) == {b"job": first, A: b"", B: b""}
    assert await registered(redis, 2) == {b"job": second}
    assert min([await redis.pttl(waiting(number)) for number in (1, 2)]) > 0


async def test_asking_again_after_the_server_has_lost_everything_queues_the_job(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    await redis.flushdb()
    assert await submit(redis, 1, again=True) == "Q"
    assert len(await entries_of(redis)) == 1


async def test_a_lost_job_is_refused_when_the_queue_is_full(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    ((lost, _),) = await entries_of(redis)
    await redis.xdel(JOBS, lost)
    await submit(redis, 2, limit=1)
    assert await submit(redis, 1, again=True, limit=1) == "F"


async def test_a_waiting_key_expires_and_joining_prolongs_it(redis: redis_async.Redis) -> None:
    await submit(redis, 1, lifetime=10_000)
    assert 0 < await redis.pttl(waiting(1)) <= 10_000
    await submit(redis, 1, reply=B, lifetime=90_000)
    assert 10_000 < await redis.pttl(waiting(1)) <= 90_000
    assert await redis.pttl(JOBS) == -1


async def test_joining_for_a_short_time_does_not_shorten_the_lifetime_for_others(redis: redis_async.Redis) -> None:
    await submit(redis, 1, lifetime=90_000)
    await submit(redis, 1, reply=B, lifetime=10_000)
    assert 10_000 < await redis.pttl(waiting(1)) <= 90_000


# The script cancel.lua


async def test_the_last_client_to_leave_removes_a_job_that_no_worker_has(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    await submit(redis, 1, reply=B)
    assert await cancel(redis, 1) == 0
    assert len(await entries_of(redis)) == 1
    assert B in await registered(redis, 1)
    assert await cancel(redis, 1, reply=B) == 1
    assert await entries_of(redis) == []
    assert not await redis.exists(waiting(1))


async def test_a_job_that_a_worker_holds_stays_and_can_be_joined(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    assert await cancel(redis, 1) == 0
    assert [kept for kept, _ in await entries_of(redis)] == [entry]
    assert await submit(redis, 1, reply=B) == "J"
    assert await registered(redis, 1) == {b"job": entry, B: b""}


async def test_only_the_prompts_that_were_left_are_removed(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    await submit(redis, 2, reply=B)
    assert await cancel(redis, 1, 2) == 1
    assert [fields[JOB_FIELD] for _, fields in await entries_of(redis)] == [b"job-2", b"job-3"]
    assert A in await registered(redis, 3)


async def test_a_client_that_never_submitted_removes_nothing(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    assert await cancel(redis, 1, 2, reply=C) == 0
    assert len(await entries_of(redis)) == 1
    assert not await redis.exists(waiting(2))


async def test_cancelling_twice_is_harmless(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    assert [await cancel(redis, 1), await cancel(redis, 1)] == [1, 0]


async def test_a_job_is_removed_before_any_worker_has_joined(redis: redis_async.Redis) -> None:
    await redis.xgroup_destroy(JOBS, GROUP)
    await submit(redis, 1)
    assert await cancel(redis, 1) == 1
    assert await entries_of(redis) == []


# The script finish.lua


async def assert_queue_is_empty(redis: redis_async.Redis) -> None:
    assert await redis.xlen(JOBS) == 0
    assert await pending(redis) == {}


async def test_each_client_gets_one_message_with_all_its_digests(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    await submit(redis, 2, 3, 4, reply=B)
    entries = await take(redis)
    endings = [(entry, number, b"", False) for entry, number in zip(entries, (1, 2, 3, 4), strict=True)]
    assert await finish(redis, *endings) == 2
    assert await told(redis, A) == [{b"d": digest(1) + digest(2) + digest(3), b"f": b"fp", b"w": b"w1"}]
    assert await told(redis, B) == [{b"d": digest(2) + digest(3) + digest(4), b"f": b"fp", b"w": b"w1"}]
    await assert_queue_is_empty(redis)
    assert not await redis.exists(*(waiting(number) for number in (1, 2, 3, 4)))


async def test_a_reply_stream_expires(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    await finish(redis, (entry, 1, b"", False))
    assert 0 < await redis.pttl(A) <= LIFETIME_MS


async def test_a_reply_stream_is_capped(redis: redis_async.Redis) -> None:
    # XADD with "MAXLEN ~" trims a stream only by whole nodes of 100 entries.
    for _ in range(260):
        await submit(redis, 1)
        (entry,) = await take(redis)
        args = finish_args((entry, b"", False), cap=10)
        assert await scripts.FINISH(redis, [JOBS, DEAD, waiting(1)], args) == b"1"
    assert await redis.xlen(A) <= 110


async def test_a_failure_is_sent_to_every_client(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    await submit(redis, 1, reply=B)
    first, second = await take(redis)
    assert await finish(redis, (first, 1, FAILURE, False), (second, 2, b"", False)) == 2
    assert sorted(await told(redis, A), key=len) == sorted(
        [{b"d": digest(1), b"e": FAILURE}, {b"d": digest(2), b"f": b"fp", b"w": b"w1"}], key=len
    )
    assert {frozenset(fields) for fields in await told(redis, A)} == {
        frozenset({b"d", b"e"}),
        frozenset({b"d", b"f", b"w"}),
    }
    assert await told(redis, B) == [{b"d": digest(1), b"e": FAILURE}]
    await assert_queue_is_empty(redis)
    assert not await redis.exists(DEAD)


async def test_a_dead_letter_keeps_the_job_and_the_reason(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    assert await finish(redis, (entry, 1, FAILURE, True)) == 1
    assert await told(redis, DEAD) == [{b"e": FAILURE, JOB_FIELD: b"job-1"}]
    assert await told(redis, A) == [{b"d": digest(1), b"e": FAILURE}]
    await assert_queue_is_empty(redis)


async def finish_checked(redis: redis_async.Redis, *endings: tuple[bytes, int, bytes, bool]) -> bytes:
    """End jobs as `finish` does, but let the script check whether the rows exist."""
    keys = [JOBS, DEAD, *(waiting(number) for _, number, _, _ in endings)]
    keys += [ROWS + digest(number) for _, number, _, _ in endings]
    args = finish_args(*((entry, failure, dead) for entry, _, failure, dead in endings))
    outcome: bytes = await scripts.FINISH(redis, keys, args)
    return outcome


async def test_a_job_without_a_stored_row_is_left_to_its_worker(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    entries = await take(redis)
    await redis.set(ROWS + digest(1), b"row")
    await redis.set(ROWS + digest(3), b"row")
    endings = [(entry, number, b"", False) for entry, number in zip(entries, (1, 2, 3), strict=True)]
    assert await finish_checked(redis, *endings) == b"1 2"
    assert await told(redis, A) == [{b"d": digest(1) + digest(3), b"f": b"fp", b"w": b"w1"}]
    assert await redis.xlen(JOBS) == 1
    assert await redis.exists(waiting(2))
    await redis.set(ROWS + digest(2), b"row")
    assert await finish_checked(redis, endings[1]) == b"1"
    assert (await told(redis, A))[-1] == {b"d": digest(2), b"f": b"fp", b"w": b"w1"}
    await assert_queue_is_empty(redis)


async def test_notifications_carry_small_rows_to_each_waiting_client(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    await submit(redis, 2, 3, reply=B)
    assert await finish_storing(redis, await take(redis), [b"row1", b"row two", b"row3"]) == b"2"
    assert await told(redis, A) == [{b"d": digest(1) + digest(2), b"v": b"row1row two", b"f": b"fp", b"w": b"w1"}]
    assert await told(redis, B) == [{b"d": digest(2) + digest(3), b"v": b"row tworow3", b"f": b"fp", b"w": b"w1"}]
    await assert_queue_is_empty(redis)


@pytest.mark.parametrize("count", [1, 2])
async def test_small_rows_are_stored_by_the_script_that_ends_their_jobs(redis: redis_async.Redis, count: int) -> None:
    await submit(redis, *range(1, count + 1))
    entries, rows = await take(redis), [b"row%d" % number for number in range(1, count + 1)]
    assert await finish_storing(redis, entries, rows) == b"1"
    assert [fields[b"v"] for fields in await told(redis, A)] == [b"".join(rows)]
    for number, row in enumerate(rows, 1):
        assert await redis.get(ROWS + digest(number)) == row
        assert 0 < await redis.pttl(ROWS + digest(number)) <= 60_000
    await assert_queue_is_empty(redis)


HOST = b"0123456789abcdef"
HERE, ELSEWHERE = MODEL.reply(f"here.{HOST.decode()}"), MODEL.reply(f"elsewhere.{'f' * 16}")


def references(count: int) -> list[bytes]:
    return [Reference(HOST, b"a nonce.", number, b"w1").pack() for number in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("before", [b"", b"before"])
async def test_references_are_stored_by_that_script_too_and_notifications_carry_the_places_that_they_name(
    redis: redis_async.Redis, count: int, before: bytes
) -> None:
    await submit(redis, *range(1, count + 1), reply=HERE)
    if before:
        await redis.set(ROWS + digest(count), before)
    assert await finish_storing(redis, await take(redis), references(count), HOST) == b"1"
    # If a row is stored already, the client gets a notification without the row, and fetches the row.
    kept = count - 1 if before else count
    parts = [b"".join(map(place_of, references(kept)))] * bool(kept) + [None] * bool(before)
    assert sorted([fields.get(b"s") for fields in await told(redis, HERE)], key=str) == sorted(parts, key=str)
    assert not any(b"v" in fields for fields in await told(redis, HERE))
    told_digests = b"".join(sorted(fields[b"d"] for fields in await told(redis, HERE)))
    assert told_digests == b"".join(map(digest, range(1, count + 1)))
    assert await redis.get(ROWS + digest(count)) == (before or references(count)[-1])
    if kept:
        assert 0 < await redis.pttl(ROWS + digest(1)) <= 60_000
    await assert_queue_is_empty(redis)


@pytest.mark.parametrize("count", [1, 2])
async def test_jobs_whose_references_a_client_elsewhere_cannot_read_are_left_to_the_worker(
    redis: redis_async.Redis, count: int
) -> None:
    await submit(redis, *range(1, count + 1), reply=HERE)
    await submit(redis, count, reply=ELSEWHERE)
    outcome = await finish_storing(redis, await take(redis), references(count), HOST)
    assert outcome.split()[1:] == [b"@%d" % count]
    assert await redis.xlen(ELSEWHERE) == 0
    assert [fields[b"d"] for fields in await told(redis, HERE)] == [digest(1)][: count - 1]
    assert await redis.xlen(JOBS) == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_if_a_row_is_stored_already_all_clients_get_it(redis: redis_async.Redis, count: int) -> None:
    await submit(redis, *range(1, count + 1))
    await redis.set(ROWS + digest(count), b"before")
    rows = [b"row%d" % number for number in range(1, count + 1)]
    assert await finish_storing(redis, await take(redis), rows) == b"1"
    assert await redis.get(ROWS + digest(count)) == b"before"
    carried = [(fields[b"d"], fields.get(b"v")) for fields in await told(redis, A)]
    assert sorted(carried, key=str) == sorted([(digest(count), None), (digest(1), b"row1")][:count], key=str)


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("host", [b"", HOST])
async def test_rows_that_the_server_has_no_memory_for_are_left_to_the_worker(
    redis: redis_async.Redis, count: int, host: bytes
) -> None:
    await submit(redis, *range(1, count + 1), reply=HERE)
    entries = await take(redis)
    rows = references(count) if host else [b"row1", b"row2"][:count]
    policy: Any = (await redis.config_get("maxmemory-policy"))["maxmemory-policy"]
    try:
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.config_set("maxmemory", 1)
        outcome = await finish_storing(redis, entries, rows, host)
    finally:
        await redis.config_set("maxmemory", 0)
        await redis.config_set("maxmemory-policy", policy)
    assert outcome.split()[1:] == [b"%d" % number for number in range(1, count + 1)]
    assert not await redis.exists(HERE, ROWS + digest(1), ROWS + digest(2))
    assert await redis.xlen(JOBS) == count
    assert await finish_storing(redis, entries, rows, host) == b"1"


@pytest.mark.parametrize("count", [1, 2])
async def test_notifications_to_a_client_that_does_not_read_carry_no_rows(redis: redis_async.Redis, count: int) -> None:
    for _ in range(64):
        await redis.xadd(A, {"d": "unread"})
    await submit(redis, *range(1, count + 1))
    assert await finish_storing(redis, await take(redis), [b"row1", b"row2"][:count]) == b"1"
    digests = b"".join(map(digest, range(1, count + 1)))
    assert (await told(redis, A))[-1] == {b"d": digests, b"f": b"fp", b"w": b"w1"}


async def test_a_message_carries_no_more_than_64_kib_of_rows(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    assert await finish_storing(redis, await take(redis), [b"x" * 40_000] * 2) == b"1"
    assert [sorted(fields) for fields in await told(redis, A)] == [[b"d", b"f", b"w"]]


async def test_a_key_that_is_no_reply_stream_is_skipped_for_a_single_job_too(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    foreign = b"elsewhere"
    await redis.set(waiting(1), foreign + b"\n" + entry)
    await redis.set(ROWS + digest(1), b"row")
    assert await finish_checked(redis, (entry, 1, b"", False)) == b"0"
    assert not await redis.exists(foreign, waiting(1))
    await assert_queue_is_empty(redis)


async def test_a_job_that_failed_keeps_its_own_reason(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    await redis.set(ROWS + digest(2), b"row")
    assert await finish_checked(redis, (first, 1, FAILURE, True), (second, 2, FAILURE, False)) == b"1"
    assert await told(redis, A) == [{b"d": digest(1), b"e": FAILURE}, {b"d": digest(2), b"e": FAILURE}]
    assert await told(redis, DEAD) == [{b"e": FAILURE, JOB_FIELD: b"job-1"}]
    await assert_queue_is_empty(redis)


async def test_a_removed_entry_is_no_dead_letter_and_its_clients_are_notified(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    await redis.xdel(JOBS, entry)
    assert await finish(redis, (entry, 1, FAILURE, True)) == 1
    assert not await redis.exists(DEAD)
    assert await told(redis, A) == [{b"d": digest(1), b"e": FAILURE}]
    assert await pending(redis) == {}


async def test_finishing_twice_notifies_each_client_once(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    assert await finish(redis, (entry, 1, b"", False)) == 1
    assert await finish(redis, (entry, 1, b"", False)) == 0
    assert len(await told(redis, A)) == 1


async def test_two_entries_of_one_prompt_end_together(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    await redis.delete(waiting(1))
    await submit(redis, 1, reply=B)
    first, second = await take(redis)
    assert await finish(redis, (first, 1, b"", False), (second, 1, b"", False)) == 1
    assert await told(redis, B) == [{b"d": digest(1), b"f": b"fp", b"w": b"w1"}]
    await assert_queue_is_empty(redis)


async def test_a_job_without_a_client_ends_too(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    await cancel(redis, 1)
    assert await finish(redis, (entry, 1, b"", False)) == 0
    await assert_queue_is_empty(redis)
    assert not await redis.exists(waiting(1), A)


async def test_jobs_that_are_not_finished_stay(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    await finish(redis, (first, 1, b"", False))
    assert [entry for entry, _ in await entries_of(redis)] == [second]
    assert set(await pending(redis)) == {second}
    assert A in await registered(redis, 2)


async def test_as_many_jobs_as_one_call_carries_pass_through_all_scripts(redis: redis_async.Redis) -> None:
    numbers = list(range(scripts.MAX_AT_ONCE))
    digests = [number.to_bytes(16, "big") for number in numbers]
    await register(redis, size=len(numbers))
    keys = [JOBS, A, *(MODEL.waiting + digest for digest in digests), *(ROWS + digest for digest in digests)]
    assert await scripts.SUBMIT(
        redis, keys, [1000, LIFETIME_MS, "rows", 0, len(numbers), *[b"job"] * len(numbers)]
    ) == b"Q" * len(numbers)
    entries = await take(redis, count=1000)
    assert await scripts.RENEW(redis, [JOBS], [GROUP, "w1", *entries]) == []
    args = finish_args(*((entry, b"", False) for entry in entries))
    assert await scripts.FINISH(redis, [JOBS, DEAD, *(MODEL.waiting + digest for digest in digests)], args) == b"1"
    assert await told(redis, A) == [{b"d": b"".join(digests), b"f": b"fp", b"w": b"w1"}]
    await assert_queue_is_empty(redis)


# The script swap.lua


@pytest.mark.parametrize(
    ("stored", "expected", "new", "outcome", "after"),
    [
        (None, b"", b"x", 1, b"x"),
        (None, b"y", b"x", 0, None),
        (b"a", b"a", b"b", 1, b"b"),
        (b"a", b"", b"b", 0, b"a"),
        (b"a", b"z", b"b", 0, b"a"),
        (b"a", b"a", b"", 1, None),
        (b"a", b"b", b"", 0, b"a"),
        (None, b"", b"", 1, None),
        (b"\xff\x00\r\n", b"\xff\x00\r\n", b"\x00", 1, b"\x00"),
    ],
)
async def test_swap_changes_a_field_only_from_the_value_that_was_seen(
    redis: redis_async.Redis, stored: bytes | None, expected: bytes, new: bytes, outcome: int, after: bytes | None
) -> None:
    key = Keys("test").models()
    await redis.hset(key, "other", b"kept")
    if stored is not None:
        await redis.hset(key, "m", stored)
    assert await scripts.SWAP(redis, [key], ["m", expected, new]) == outcome
    assert await redis.hget(key, "m") == after
    assert await redis.hget(key, "other") == b"kept"


# The class Script


async def test_the_text_of_a_script_is_sent_only_if_the_server_does_not_have_it(redis: redis_async.Redis) -> None:
    await redis.script_flush()
    with pytest.raises(NoScriptError):
        await redis.evalsha(scripts.SWAP.sha, 1, b"h", b"f", b"", b"x")
    assert await scripts.SWAP(redis, [b"h"], [b"f", b"", b"x"]) == 1
    assert await redis.evalsha(scripts.SWAP.sha, 1, b"h", b"f", b"x", b"y") == 1
    assert await redis.hget("h", "f") == b"y"


@pytest.mark.parametrize("kind", ["commands", "rows"])
async def test_a_script_runs_on_the_lines_of_the_path_of_a_request_too(server: str, kind: str) -> None:
    control = redis_async.Redis.from_url(server, **PATIENCE)
    await control.flushall()
    await control.script_flush()
    connection = CommandConnection(Server(server)) if kind == "commands" else RowConnection(Server(server), 10.0)
    keys = [JOBS, A, waiting(1), waiting(2)]
    try:
        for outcome in (b"QQ", b"JJ"):  # The script is first sent as text, then by its digest.
            args: list[bytes | str | int] = [100, LIFETIME_MS, "", 0, 2, b"job-1", b"job-2"]
            assert await scripts.SUBMIT.on(connection.call, keys, args) == outcome
        assert await control.script_exists(scripts.SUBMIT.sha) == [True]
        assert await scripts.CANCEL.on(connection.call, [JOBS, A, waiting(1)], [GROUP]) == 1
        with pytest.raises(ServerError, match="WRONGTYPE"):
            await scripts.SUBMIT.on(
                connection.call, [waiting(2), A, waiting(1)], [100, LIFETIME_MS, "", 0, 1, b"job-1"]
            )
    finally:
        connection.close()
        await control.aclose()
