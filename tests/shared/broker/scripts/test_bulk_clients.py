"""Bulk clients: prompts of interactive clients go first, bulk prompts fill free capacity and never starve."""

from __future__ import annotations

import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.protocol.keys import BULK, BULK_TIME, PRIORITY_FIELD
from tests.shared.broker.scripts.script_calls import (
    JOBS,
    LIFETIME_MS,
    MODEL,
    A,
    B,
    X,
    Y,
    cancel,
    claim_all,
    compute_one,
    digest,
    entries_of,
    fall_silent,
    finish,
    in_stream,
    register,
    registered,
    submit,
    take,
    told,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import nobody_asks_alone, script_redis, script_server  # noqa: F401

IN_STREAM, OF_BULK = 3, 2
"""Max prompts in the stream for a worker that computes one prompt at a time, and how many may be bulk prompts."""
TURNS = 16
"""After this many ended jobs, one bulk prompt moves to the stream, however many interactive prompts wait."""


@pytest.fixture(autouse=True)
async def _one_worker(redis: redis_async.Redis) -> None:
    await register(redis)


async def compute(redis: redis_async.Redis, count: int = 1000) -> list[int]:
    """Compute up to `count` prompts one by one; return the numbers of these prompts in order."""
    done: list[int] = []
    while len(done) < count and (await redis.xlen(JOBS) or await redis.zcard(MODEL.backlog)):
        done.append(await compute_one(redis))
    return done


async def bulk_in(redis: redis_async.Redis, stream: bytes = JOBS) -> list[int]:
    """The numbers of the prompts in a stream that have the priority of bulk clients."""
    return [
        int(fields[b"m"].removeprefix(b"job-"))
        for _, fields in await entries_of(redis, stream)
        if fields.get(PRIORITY_FIELD) == BULK
    ]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_bulk_clients_fill_a_part_of_the_streams_and_others_go_first(redis: redis_async.Redis) -> None:
    assert await submit(redis, *range(10), reply=X) == "Q" * 10
    assert await in_stream(redis) == await bulk_in(redis) == [0, 1]
    assert await submit(redis, 60, 61, 62) == "QQQ"
    assert await in_stream(redis) == [0, 1, 60]
    assert await compute(redis) == [0, 1, 60, 61, 62, *range(2, 10)]
    assert not await redis.exists(MODEL.backlog, MODEL.backlog_jobs, MODEL.virtual_time)


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_prompts_that_move_up_keep_their_priority(redis: redis_async.Redis) -> None:
    await submit(redis, *range(4))
    await submit(redis, 60, 61, reply=X)
    assert await compute(redis, 4) == [0, 1, 2, 3]
    assert await in_stream(redis) == await bulk_in(redis) == [60, 61]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_bulk_client_gets_turns_next_to_many_other_clients(redis: redis_async.Redis) -> None:
    await submit(redis, *range(90))
    await submit(redis, *range(100, 105), reply=X)
    order = await compute(redis)
    turns = [at for at, number in enumerate(order) if number >= 100]
    assert [order[at] for at in turns] == list(range(100, 105))
    assert turns == [TURNS + IN_STREAM - 1 + TURNS * number for number in range(5)]
    assert [number for number in order if number < 100] == list(range(90))


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_sweep_of_the_queue_keeps_turns(redis: redis_async.Redis) -> None:
    await submit(redis, *range(90))
    await submit(redis, 100, 101, reply=X)
    order: list[int] = []
    for _ in range(TURNS + IN_STREAM):
        order += await compute(redis, 1)
        keys = [JOBS, MODEL.workers, MODEL.capacity, MODEL.virtual_time]
        await scripts.REMOVE_GONE(redis, keys, ["workers", 100, LIFETIME_MS, 0])
    assert order[-1] == 100


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_bulk_clients_move_up_in_rotation(redis: redis_async.Redis) -> None:
    await submit(redis, *range(20), reply=X)
    await submit(redis, *range(100, 105), reply=Y)
    order = (await compute(redis))[OF_BULK : OF_BULK + 10]
    assert [sorted(number // 100 for number in order[at : at + 2]) for at in range(0, 10, 2)] == [[0, 1]] * 5


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_bulk_prompt_in_the_backlog_that_another_client_joins_yields_no_more(redis: redis_async.Redis) -> None:
    await submit(redis, *range(50), reply=X)
    assert await submit(redis, 49) == "J"
    assert await in_stream(redis) == [0, 1, 49], "there is room for it at once"
    assert await bulk_in(redis) == [0, 1]
    await compute(redis, 3)
    assert [message[b"d"] for message in await told(redis, A)] == [digest(49)]
    assert digest(49) in [message[b"d"] for message in await told(redis, X)]


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_prompt_that_a_bulk_client_joins_does_not_yield(redis: redis_async.Redis) -> None:
    await submit(redis, *range(10))
    assert await submit(redis, 9, reply=X) == "J"
    assert await compute(redis) == list(range(10))


async def test_a_bulk_prompt_in_a_stream_that_another_client_joins_yields_no_more_unless_held(
    redis: redis_async.Redis,
) -> None:
    await submit(redis, *range(3), reply=X)
    (held,) = await take(redis, count=1)
    assert await submit(redis, 0, 1, 2) == "JJJ"
    assert await in_stream(redis) == [0, 1, 2]
    assert await bulk_in(redis) == [0]
    for number, (entry, _) in enumerate(await entries_of(redis)):
        assert await registered(redis, number) == {b"job": entry, X: b"", A: b""}
    await finish(redis, (held, 0, b"", False))
    assert await compute(redis) == [1, 2]
    assert len(await told(redis, A)) == len(await told(redis, X)) == 3


async def test_a_claimed_job_keeps_its_priority(redis: redis_async.Redis) -> None:
    await submit(redis, 0, 1)
    await submit(redis, 2, reply=X)
    await fall_silent(redis, *await take(redis), deliveries=1)
    assert [priority for *_, priority in await claim_all(redis)] == [b"", b"", BULK]


async def test_a_claimed_bulk_prompt_that_another_client_joined_at_the_dead_worker_yields_no_more(
    redis: redis_async.Redis,
) -> None:
    await submit(redis, *range(5), reply=X)
    entries = await take(redis)
    # Client A joins prompts 0 and 3, bulk client Y joins 1, client X cancels 3, and the server evicts the key of 4.
    assert await submit(redis, 0, reply=A) == "J"
    assert await submit(redis, 1, reply=Y) == "J"
    assert await submit(redis, 3, reply=A) == "J"
    await cancel(redis, 3, reply=X)
    await redis.delete(waiting(4))
    assert await bulk_in(redis) == list(range(5)), "a worker has them"
    await fall_silent(redis, *entries, deliveries=1)
    priorities = {job: priority for _, job, *_, priority in await claim_all(redis)}
    assert priorities == {b"job-0": b"", b"job-1": BULK, b"job-2": BULK, b"job-3": b"", b"job-4": BULK}


@pytest.mark.parametrize("key", ["junk", "hash", "list"])
async def test_junk_in_a_waiting_key_does_not_prevent_a_claim(redis: redis_async.Redis, key: str) -> None:
    await submit(redis, 0, 1, reply=X)
    await redis.delete(waiting(0))
    if key == "hash":
        await redis.hset(waiting(0), mapping={"x": "y", "job": "z"})
    elif key == "list":
        await redis.rpush(waiting(0), "x")
    else:
        await redis.set(waiting(0), "x")
    await fall_silent(redis, *await take(redis), deliveries=1)
    assert [priority for *_, priority in await claim_all(redis)] == [BULK, BULK]


async def test_a_bulk_client_that_asks_alone_passes_the_backlog(redis: redis_async.Redis) -> None:
    assert await submit(redis, *range(60), reply=X) == "Q" * 60
    assert await submit(redis, *range(60, 90), reply=X) == "Q" * 30
    assert await in_stream(redis) == await bulk_in(redis) == list(range(90))
    assert not await redis.exists(MODEL.backlog)
    assert await compute(redis) == list(range(90))


async def test_a_bulk_client_yields_to_a_single_prompt(redis: redis_async.Redis) -> None:
    await submit(redis, *range(40), reply=X)
    await take(redis, count=1)
    assert await submit(redis, 60) == "Q"
    assert await in_stream(redis) == [0, 1, 60]
    assert await redis.zcount(MODEL.backlog, BULK_TIME, "+inf") == await redis.zcard(MODEL.backlog) == 38
    await submit(redis, 61)
    assert await in_stream(redis) == [0, 1, 60, 61]


async def test_a_bulk_client_that_has_just_given_way_does_not_count_as_alone(redis: redis_async.Redis) -> None:
    await submit(redis, *range(40), reply=X)
    await submit(redis, 60)
    assert await redis.get(MODEL.sole_client) != X
    await cancel(redis, *range(40), reply=X)
    await compute(redis)
    await redis.set(MODEL.sole_client, b"", px=LIFETIME_MS)  # Now no client counts as alone in the queue.
    await submit(redis, *range(40), reply=X)
    assert await in_stream(redis) == [0, 1]


async def test_a_bulk_client_gives_way_although_other_clients_have_capacity(redis: redis_async.Redis) -> None:
    await register(redis, size=2)
    await submit(redis, *range(2 * OF_BULK + 1), reply=X)
    assert await submit(redis, 60) == "Q"
    assert await in_stream(redis) == [*range(2 * OF_BULK), 60]


async def test_prompts_that_other_clients_joined_do_not_go_back(redis: redis_async.Redis) -> None:
    await register(redis, size=4)
    await submit(redis, *range(4 * OF_BULK), reply=X)
    await submit(redis, 7, reply=Y)
    assert await submit(redis, 7) == "J"
    await submit(redis, *range(10, 40), reply=X)
    await register(redis, size=1)
    assert await submit(redis, 60, reply=B) == "Q"
    assert await in_stream(redis) == [0, 1, 7, 60]
    assert (await compute(redis))[:4] == [0, 1, 7, 60]


async def test_a_bulk_client_with_many_prompts_yields_at_once(redis: redis_async.Redis) -> None:
    for at in range(0, 250, 50):
        await submit(redis, *range(at, at + 50), reply=X, limit=1000)
    assert await submit(redis, 250, limit=1000) == "Q"
    assert await in_stream(redis) == [0, 1, 250]
    assert await compute(redis) == [0, 1, 250, *range(2, 250)]


async def test_a_bulk_client_yields_to_another_bulk_client(redis: redis_async.Redis) -> None:
    await submit(redis, *range(40), reply=X)
    await submit(redis, 60, reply=Y)
    assert (await compute(redis)).index(60) <= OF_BULK + 1


async def test_no_client_gives_way_to_a_bulk_client(redis: redis_async.Redis) -> None:
    await submit(redis, *range(40))
    await submit(redis, 60, reply=X)
    assert await submit(redis, *range(40, 50)) == "Q" * 10
    assert await in_stream(redis) == list(range(50))
    assert await redis.get(MODEL.sole_client) == A
    assert (await compute(redis)).index(60) == 50, "at the end of what was before it in the stream"


async def test_bulk_prompts_do_not_go_back_if_an_interactive_client_must_give_way(redis: redis_async.Redis) -> None:
    await submit(redis, *range(60))
    await submit(redis, 100, reply=X)
    await compute(redis, TURNS)
    assert (await in_stream(redis))[-1] == 100
    await submit(redis, 70, reply=B)
    assert (await in_stream(redis))[-1] == 100
    assert await redis.zcount(MODEL.backlog, BULK_TIME, "+inf") == 0


async def test_only_bulk_prompts_go_back_when_a_bulk_client_gives_way(redis: redis_async.Redis) -> None:
    await submit(redis, 60, 61)
    await submit(redis, *range(40), reply=X)
    await submit(redis, 62, reply=B)
    assert (await in_stream(redis))[:2] == [60, 61]
    assert await compute(redis) == [60, 61, 62, *range(40)]


async def test_a_bulk_prompt_that_moves_to_another_lane_keeps_its_priority(redis: redis_async.Redis) -> None:
    await register(redis, "w2", 1)
    await submit(redis, *range(4), reply=X, homes=["w2"] * 4)
    lane = MODEL.lane("w2")
    moving = await bulk_in(redis, lane)
    assert moving
    while await scripts.CLOSE_LANE(redis, [JOBS], ["w2"]):
        pass
    assert await entries_of(redis, lane) == []
    assert set(moving) <= set(await bulk_in(redis))


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_cancelled_bulk_prompt_leaves_the_backlog_and_its_turn(redis: redis_async.Redis) -> None:
    await submit(redis, *range(20), reply=X)
    assert await cancel(redis, *range(2, 20), reply=X) == 18
    assert not await redis.exists(MODEL.backlog, MODEL.backlog_jobs)
    await submit(redis, *range(100, 110), reply=Y)
    await submit(redis, 50, reply=X)
    assert (await compute(redis)).index(50) <= OF_BULK + 2
    assert not [number for number in range(20) if await redis.exists(waiting(number))]


@pytest.mark.usefixtures("nobody_asks_alone")
@pytest.mark.parametrize("name", [b"bulk", b"owed"])
async def test_an_invalid_virtual_time_starves_no_client(redis: redis_async.Redis, name: bytes) -> None:
    await submit(redis, *range(30))
    await submit(redis, 100, 101, reply=X)
    await redis.zadd(MODEL.virtual_time, {name: float("-inf")})
    order = await compute(redis)
    assert sorted(order) == [*range(30), 100, 101]
    assert order.index(100) <= TURNS + IN_STREAM


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_a_negative_virtual_time_does_not_fill_the_queue(redis: redis_async.Redis) -> None:
    await redis.zadd(MODEL.virtual_time, {b"": -1e300})
    assert await submit(redis, *range(90)) == "Q" * 90
