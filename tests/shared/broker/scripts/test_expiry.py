"""Keys with an expiry never lose the expiry, and the queue of a served model does not expire."""

from __future__ import annotations

import asyncio
import random
import signal

import numpy as np
import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.protocol.keys import GROUP
from lmpool.synthetic import synthetic_row
from tests.shared.broker.scripts.script_calls import (
    FAILURE,
    JOBS,
    LEASE_MS,
    LIFETIME_MS,
    MODEL,
    ROWS,
    A,
    B,
    C,
    cancel,
    claim,
    digest,
    entries_of,
    find_work,
    finish,
    finish_args,
    register,
    registered,
    submit,
    take,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import script_redis, script_server  # noqa: F401
from tests.support.pool import Pool, V, until

HOUR_MS = 3_600_000


@pytest.fixture
async def queue(redis: redis_async.Redis) -> redis_async.Redis:
    """A client of a server with an empty queue and one worker that computes a prompt at a time."""
    await register(redis)
    return redis


async def ever(redis: redis_async.Redis) -> set[bytes]:
    """The keys without an expiry, except those of the queue."""
    names = {key async for key in redis.scan_iter(count=1000)} - set(MODEL.queue)
    return {name for name in names if await redis.pttl(name) == -1 and not name.startswith(MODEL.lane(""))}


async def test_an_evicted_waiting_key_gets_a_lifetime_when_its_prompt_moves_up(queue: redis_async.Redis) -> None:
    await submit(queue, *range(1, 4))
    await submit(queue, 4, reply=B)
    await submit(queue, 5, reply=C)  # Several clients wait now: three prompts are in the stream, two in the backlog.
    assert (await registered(queue, 5)).get(b"job") == b"later"
    await queue.delete(*map(waiting, range(1, 6)))
    for number, entry in enumerate(await take(queue), 1):
        await finish(queue, (entry, number, b"", False))
    assert (await registered(queue, 5)).get(b"job") not in (None, b"later"), "it has moved up"
    assert await ever(queue) == set()


async def test_an_evicted_waiting_key_gets_a_lifetime_when_its_prompt_goes_back(
    queue: redis_async.Redis,
) -> None:
    assert await submit(queue, *range(1, 40)) == "Q" * 39  # A client that is alone may fill more of the stream.
    for number in range(1, 40):
        await queue.delete(waiting(number))
    await submit(queue, 50, reply=B)
    assert (await registered(queue, 39)).get(b"job") == b"later", "it has gone back"
    assert await ever(queue) == set()


@pytest.mark.parametrize("clients", [(A,), (A, B)], ids=["one_client", "two_clients"])
@pytest.mark.parametrize("is_held", [False, True], ids=["waiting", "held"])
async def test_a_prompt_that_was_sent_again_after_its_wait_expired_ends_with_its_first_job(
    queue: redis_async.Redis, clients: tuple[bytes, ...], is_held: bool
) -> None:
    await submit(queue, 1)
    await queue.delete(waiting(1))
    for reply in clients:
        await submit(queue, 1, reply=reply)
    (first,) = await take(queue, count=1)
    second = await take(queue, "w2", count=1) if is_held else []
    await queue.set(ROWS + digest(1), b"row", px=LIFETIME_MS)
    keys = [JOBS, MODEL.dead, waiting(1), ROWS + digest(1)]
    assert await scripts.FINISH(queue, keys, finish_args((first, b"", False))) == b"%d" % len(clients)
    assert [entry for entry, _ in await entries_of(queue)] == second, "a worker that holds the second job ends it"


@pytest.mark.parametrize("seed", range(3))
async def test_all_other_keys_expire_after_any_order_of_calls_and_evictions(
    queue: redis_async.Redis, seed: int
) -> None:
    rnd = random.Random(seed)
    held: dict[bytes, int] = {}
    for _ in range(120):
        reply, numbers = rnd.choice((A, B, C)), rnd.sample(range(1, 40), rnd.choice((1, 2, 20)))
        match rnd.choice(("submit",) * 3 + ("cancel", "take", "take", "finish", "claim", "release", "drop", "keep")):
            case "submit":
                await submit(queue, *numbers, reply=reply, again=rnd.random() < 0.3)
            case "cancel":
                await cancel(queue, *numbers, reply=reply)
            case "take":
                held |= dict.fromkeys(await take(queue, count=3), 0)
                await find_work(queue)
            case "finish":
                for entry in rnd.sample(sorted(held), min(len(held), 3)):
                    job = dict(await entries_of(queue)).get(entry, {b"m": b"job-1"})[b"m"]
                    number = int(job.removeprefix(b"job-"))
                    failure = rnd.choice((b"", b"", FAILURE))
                    if not failure:
                        await queue.set(ROWS + digest(number), b"row", px=LIFETIME_MS)
                    await finish(queue, (entry, number, failure, bool(failure)))
                    del held[entry]
            case "claim":
                await claim(queue, consumer="w1")
            case "release":
                tail = [rnd.choice((1, 9)), "it broke", LIFETIME_MS, 5, ""]
                await scripts.RELEASE(queue, [JOBS, MODEL.reasons], [GROUP, "w1", LEASE_MS + 1, 500, "-", *tail])
            case "drop":  # Simulate evictions by a server that is short of memory.
                await queue.delete(*map(waiting, numbers), MODEL.sole_client)
            case "keep":
                await scripts.KEEP_QUEUE(queue, MODEL.queue, [GROUP, HOUR_MS])
        assert await ever(queue) == set()


async def test_the_queue_of_an_unserved_model_expires_unless_a_worker_returns(pool: Pool) -> None:
    model = pool.keys.model("syn")
    first = await asyncio.to_thread(pool.start)
    pool.redis.xadd(model.dead, {"e": FAILURE, "m": "x"})
    async with pool.producer(when_absent="wait") as producer:
        await producer.logprobs([1])
        assert [pool.redis.ttl(key) for key in (model.jobs, model.dead)] == [-1, -1]
        first.signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait) == 0
        assert all(0 < pool.redis.ttl(key) <= 7 * 24 * 3600 for key in (model.jobs, model.dead))
        asked = asyncio.create_task(producer.logprobs([2]))
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        assert np.array_equal(await asked, synthetic_row([2], vocab_size=V))
    await asyncio.to_thread(until, lambda: pool.redis.ttl(model.jobs) == pool.redis.ttl(model.dead) == -1, "it is kept")
