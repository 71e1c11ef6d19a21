"""The backlog of prompts behind the streams: clients take turns, however many prompts each has queued."""

from __future__ import annotations

import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.protocol.keys import GROUP, LIFETIME_FIELD
from tests.shared.broker.scripts.script_calls import (
    DEAD,
    JOBS,
    LIFETIME_MS,
    MODEL,
    ROWS,
    A,
    B,
    C,
    cancel,
    compute_one,
    count_queued,
    digest,
    entries_of,
    find_work,
    finish,
    finish_args,
    in_stream,
    register,
    registered,
    submit,
    take,
    told,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import nobody_asks_alone, script_redis, script_server  # noqa: F401
from tests.support.pool import until_async

IN_STREAM = 3
"""Max prompts in the stream for a worker that computes one prompt at a time."""
IN_STREAM_WITHOUT_WORKERS = 128
"""Max prompts in the stream of a model without workers."""


@pytest.fixture(autouse=True)
async def _one_worker(redis: redis_async.Redis) -> None:
    await register(redis)


async def compute_all(redis: redis_async.Redis) -> list[int]:
    return [await compute_one(redis) for _ in range(await redis.xlen(JOBS) + await redis.zcard(MODEL.backlog))]


async def nothing_is_left(redis: redis_async.Redis) -> bool:
    return not await redis.exists(MODEL.backlog, MODEL.backlog_jobs, MODEL.virtual_time)


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_the_stream_holds_a_few_batches_and_the_rest_moves_up_in_order(redis: redis_async.Redis) -> None:
    assert await submit(redis, *range(10)) == "Q" * 10
    assert await in_stream(redis) == [0, 1, 2]
    assert await redis.zcard(MODEL.backlog) == 10 - IN_STREAM
    assert await compute_all(redis) == list(range(10))
    assert await nothing_is_left(redis)


@pytest.mark.usefixtures("nobody_asks_alone")
@pytest.mark.parametrize("check_rows", [False, True])
async def test_a_lone_job_that_ends_has_the_next_one_move_up(redis: redis_async.Redis, check_rows: bool) -> None:
    await submit(redis, *range(IN_STREAM + 1))
    (entry,) = await take(redis, count=1)
    await redis.set(ROWS + digest(0), b"row")
    keys = [JOBS, DEAD, waiting(0), *[ROWS + digest(0)] * check_rows]
    assert await scripts.FINISH(redis, keys, finish_args((entry, b"", False))) == b"1"
    assert await in_stream(redis) == [1, 2, 3]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_single_prompt_does_not_wait_for_all_prompts_of_another_client(redis: redis_async.Redis) -> None:
    await submit(redis, *range(50))
    await submit(redis, 60, reply=B)
    assert (await compute_all(redis)).index(60) <= IN_STREAM + 1


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_clients_move_up_in_rotation(redis: redis_async.Redis) -> None:
    await submit(redis, *range(20))
    await submit(redis, *range(100, 110), reply=B)
    await submit(redis, *range(200, 205), reply=C)
    order = (await compute_all(redis))[IN_STREAM:]
    assert [sorted(number // 100 for number in order[at : at + 3]) for at in range(0, 15, 3)] == [[0, 1, 2]] * 5
    assert [[number for number in order if number // 100 == client] for client in (1, 2)] == [
        list(range(100, 110)),
        list(range(200, 205)),
    ]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_client_that_submits_later_has_no_turns_to_catch_up(redis: redis_async.Redis) -> None:
    await submit(redis, *range(20))
    for _ in range(10):
        await compute_one(redis)
    await submit(redis, *range(100, 110), reply=B)
    order = (await compute_all(redis))[IN_STREAM : IN_STREAM + 8]
    assert sorted(number // 100 for number in order) == [0] * 4 + [1] * 4


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_client_that_joins_a_late_prompt_gets_it_at_its_own_turn(redis: redis_async.Redis) -> None:
    await submit(redis, *range(50))
    assert await submit(redis, 49, reply=B) == "J"
    assert (await compute_all(redis)).index(49) <= IN_STREAM + 1
    assert [message[b"d"] for message in await told(redis, B)] == [digest(49)]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_cancelled_prompt_leaves_the_backlog_and_its_turn(redis: redis_async.Redis) -> None:
    await submit(redis, *range(20))
    assert await cancel(redis, *range(5, 20)) == 15
    assert await redis.zcard(MODEL.backlog) == await redis.hlen(MODEL.backlog_jobs) == 2
    assert await cancel(redis, *range(5)) == 5
    assert await compute_all(redis) == []
    assert not [number for number in range(20) if await redis.exists(waiting(number))]
    # The cancelled prompts must not have used up turns of their client.
    await submit(redis, *range(30, 40), reply=B)
    await submit(redis, 50)
    assert (await compute_all(redis)).index(50) <= IN_STREAM + 1


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_prompts_that_no_client_waits_for_are_not_moved_up(redis: redis_async.Redis) -> None:
    await submit(redis, 0, 1, 2)
    await submit(redis, 3, 4, 6, lifetime=1)
    await submit(redis, 5, 7)

    async def expired() -> bool:
        return not await redis.exists(waiting(3), waiting(4), waiting(6))

    await until_async(expired, "those who wait for them are gone")
    assert await compute_all_until_empty(redis) == [0, 1, 2, 5, 7]
    assert await nothing_is_left(redis)


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_job_whose_waiting_key_was_evicted_is_computed_until_its_deadline(redis: redis_async.Redis) -> None:
    await submit(redis, *range(8))
    for number in range(8):
        await redis.delete(waiting(number))
    assert await compute_all_until_empty(redis) == list(range(8))
    await submit(redis, 1)
    (entry,) = await take(redis)
    await redis.delete(waiting(1))
    ((_, fields),) = await entries_of(redis, with_lifetimes=True)
    until = int(entry.partition(b"-")[0]) + int(fields[LIFETIME_FIELD])
    assert await scripts.DROP_UNWANTED(redis, [JOBS, waiting(1)], [entry, until]) == []
    assert await scripts.DROP_UNWANTED(redis, [JOBS, waiting(1)], [entry, 1]) == [1]


async def compute_all_until_empty(redis: redis_async.Redis) -> list[int]:
    done = []
    while await redis.xlen(JOBS):
        done.append(await compute_one(redis))
    return done


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_an_idle_worker_has_the_backlog_move_up(redis: redis_async.Redis) -> None:
    await submit(redis, *range(5))
    await redis.delete(JOBS)  # The server loses the job stream.
    assert await find_work(redis) == (2, 0, 0)
    assert await find_work(redis) == (0, 0, 0)
    assert await in_stream(redis) == [3, 4]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_client_that_submits_again_keeps_its_prompt_in_the_backlog(redis: redis_async.Redis) -> None:
    await submit(redis, *range(5))
    assert await submit(redis, 4, again=True) == "J"
    await redis.zrem(MODEL.backlog, digest(4))
    assert await submit(redis, 4, again=True) == "Q", "it was lost"
    assert await compute_all(redis) == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_one_client_leaves_capacity_in_the_queue_for_others(redis: redis_async.Redis) -> None:
    outcome = await submit(redis, *range(120), limit=100)
    assert outcome == "Q" * outcome.count("Q") + "F" * outcome.count("F")
    assert 85 <= outcome.count("Q") < 100
    assert await submit(redis, 200, reply=B, limit=100) == "Q"
    assert await redis.xlen(JOBS) + await redis.zcard(MODEL.backlog) < 100


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_the_limit_counts_the_backlog_too(redis: redis_async.Redis) -> None:
    for client, reply in enumerate((A, B, C)):
        await submit(redis, *range(60 * client, 60 * client + 60), reply=reply, limit=20)
    assert await redis.xlen(JOBS) + await redis.zcard(MODEL.backlog) <= 20


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_each_worker_has_batches_in_the_stream(redis: redis_async.Redis) -> None:
    await register(redis, "w2", 4)
    await submit(redis, *range(50))
    # In addition to the prompts of the stream, the lanes may have two batches, held jobs included.
    assert await count_queued(redis, "w1", "w2") == 5 * (IN_STREAM + 2)
    await take(redis, count=5)
    await submit(redis, 60, reply=B)
    assert await count_queued(redis, "w1", "w2") == 5 * (IN_STREAM + 2)


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_an_entry_that_moved_up_has_the_time_of_its_queueing(redis: redis_async.Redis) -> None:
    await submit(redis, *range(5))
    before = (await entries_of(redis))[-1][0]
    await compute_one(redis)
    _, fields = (await entries_of(redis))[-1]
    assert abs(int(fields[b"t"]) - int(before.partition(b"-")[0])) < 5000
    assert fields[b"m"] == b"job-3"


async def test_a_retried_job_without_clients_is_wanted(redis: redis_async.Redis) -> None:
    """`lmpool dead retry` queues a job with the field "keep" in place of a client; workers do not drop this job."""
    await redis.xadd(JOBS, {"m": b"job-1"})
    (entry,) = await take(redis)
    await redis.hset(waiting(1), mapping={"job": entry, "keep": ""})
    assert await scripts.DROP_UNWANTED(redis, [JOBS, waiting(1)], [entry, 1]) == []
    assert await finish(redis, (entry, 1, b"", False)) == 0
    assert not await redis.exists(b"keep", waiting(1))


async def test_held_jobs_that_no_client_waits_for_are_removed(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    entries = await take(redis)
    await cancel(redis, 1)
    await redis.delete(waiting(3))
    keys = [JOBS, *(waiting(number) for number in (1, 2, 3))]
    assert await scripts.DROP_UNWANTED(redis, keys, [arg for entry in entries for arg in (entry, 1)]) == [1, 3]
    assert [entry for entry, _ in await entries_of(redis)] == entries[1:2]
    assert (await redis.xpending(JOBS, GROUP))["pending"] == 1


async def test_unwanted_jobs_for_one_prompt_are_removed_together(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    await redis.xadd(JOBS, {"m": b"job-1"})
    entries = await take(redis, count=2)
    await cancel(redis, 1)
    args = [arg for entry in entries for arg in (entry, 10**15)]
    assert await scripts.DROP_UNWANTED(redis, [JOBS, waiting(1), waiting(1)], args) == [1, 2]
    assert await nothing_is_left(redis)


async def test_if_rows_are_on_other_masters_a_mark_shows_that_a_row_was_stored(redis: redis_async.Redis) -> None:
    async def ask(look: str, again: int = 0) -> bytes:
        outcome: bytes = await scripts.SUBMIT(
            redis, [JOBS, A, waiting(1)], [100, LIFETIME_MS, look, again, 1, b"job-1"]
        )
        return outcome

    assert await ask("marks") == b"Q"
    (entry,) = await take(redis)
    args = finish_args((entry, b"", False), mark_ms=5000)
    assert await scripts.FINISH(redis, [JOBS, DEAD, waiting(1)], args) == b"1"
    assert await registered(redis, 1) == {b"job": b"done"}
    assert 0 < await redis.pttl(waiting(1)) <= 5000
    assert await ask("marks") == b"R"
    assert await ask("marks", again=1) == b"Q", "the row is gone by now"


async def test_a_mark_does_not_prevent_replacing_a_damaged_row(redis: redis_async.Redis) -> None:
    await redis.hset(waiting(1), "job", "done")
    assert await submit(redis, 1, check_rows=False) == "Q"


# A client that is alone in the queue


async def test_a_client_that_asks_alone_passes_the_backlog(redis: redis_async.Redis) -> None:
    assert await submit(redis, *range(100)) == "Q" * 100
    assert await in_stream(redis) == list(range(100))
    assert not await redis.exists(MODEL.backlog)
    assert await compute_all(redis) == list(range(100))
    assert await nothing_is_left(redis)


async def test_jobs_beyond_the_capacity_go_back_when_another_client_submits(redis: redis_async.Redis) -> None:
    await submit(redis, *range(40))
    (first,) = await take(redis, count=1)
    assert await submit(redis, 60, 61, 62, reply=B) == "QQQ"
    assert await in_stream(redis) == [0, 1, 2, 3]
    assert await redis.zcard(MODEL.backlog) == 36 + 3
    await finish(redis, (first, 0, b"", False))
    order = await compute_all(redis)
    assert [order.index(number) for number in (60, 61, 62)] <= [4, 6, 8]
    assert [number for number in order if number < 60] == list(range(1, 40)), "in the order in which they were asked"
    assert [message[b"d"] for message in await told(redis, B)] == [digest(60), digest(61), digest(62)]


async def test_prompts_stay_in_the_backlog_while_no_worker_takes_jobs(redis: redis_async.Redis) -> None:
    await submit(redis, *range(40))
    await submit(redis, 60, reply=B)
    assert await redis.zcard(MODEL.backlog) == 41 - IN_STREAM
    await scripts.CLOSE_LANE(redis, [JOBS], ["w1"])
    await cancel(redis, 39)
    (first,) = await take(redis, count=1)
    await finish(redis, (first, 0, b"", False))
    assert (await find_work(redis, "w2", 1))[0] == 0
    assert await redis.zcard(MODEL.backlog) == 40 - IN_STREAM
    await register(redis, "w2")
    await submit(redis, 61, reply=C)
    assert (await compute_all(redis)).index(61) <= 2 * IN_STREAM


async def test_a_worker_whose_capacity_was_lost_checks_the_backlog_again_within_a_second(
    redis: redis_async.Redis,
) -> None:
    await submit(redis, *range(40))
    await submit(redis, 60, reply=B)
    await take(redis)
    await redis.delete(MODEL.capacity)  # As an eviction does.
    moved_up, _, check_again_ms = await find_work(redis, "w1", 1)
    assert (moved_up, check_again_ms) == (0, 1000)
    await register(redis)
    assert (await find_work(redis, "w1", 1))[0] > 0


async def test_prompts_that_went_back_can_be_cancelled_and_joined(redis: redis_async.Redis) -> None:
    await submit(redis, *range(20))
    await submit(redis, 60, reply=B)
    assert await cancel(redis, *range(10, 20)) == 10
    assert await submit(redis, 5, reply=B) == "J"
    assert sorted(await compute_all(redis)) == [*range(10), 60]
    assert sorted(message[b"d"] for message in await told(redis, B)) == sorted([digest(5), digest(60)])
    assert await nothing_is_left(redis)


async def test_prompts_for_a_model_that_has_lost_its_workers_expire_with_its_queue(redis: redis_async.Redis) -> None:
    await redis.delete(MODEL.capacity)
    await redis.pexpire(JOBS, 60_000)
    await submit(redis, *range(IN_STREAM_WITHOUT_WORKERS + 1), limit=1000)
    assert await redis.zcard(MODEL.backlog) == 1
    for key in (JOBS, MODEL.backlog, MODEL.backlog_jobs, MODEL.virtual_time):
        assert 0 < await redis.pttl(key) <= 60_000, key


async def test_the_key_of_a_client_that_asks_alone_is_renewed(redis: redis_async.Redis) -> None:
    await submit(redis, *range(20))
    await redis.pexpire(MODEL.sole_client, 1000)
    await submit(redis, *range(20, 40))
    assert await redis.pttl(MODEL.sole_client) > 1000
    assert await redis.get(MODEL.sole_client) == A


@pytest.mark.parametrize("kind", ["lost", "spoilt"])
async def test_other_clients_have_turns_although_the_name_of_the_sole_client_is_lost(
    redis: redis_async.Redis, kind: str
) -> None:
    await submit(redis, *range(40))
    await redis.delete(MODEL.sole_client)
    if kind == "spoilt":
        await redis.rpush(MODEL.sole_client, b"a list")
    await submit(redis, 60, reply=B)
    order = await compute_all(redis)
    assert order.index(60) <= IN_STREAM + 1
    assert [number for number in order if number != 60] == list(range(40))


async def test_jobs_that_go_back_do_not_change_the_later_turns_of_the_client(redis: redis_async.Redis) -> None:
    await submit(redis, *range(40))
    await redis.zadd(MODEL.virtual_time, {A: 100})
    await submit(redis, 60, reply=B)
    assert await redis.zscore(MODEL.virtual_time, A) == 100
