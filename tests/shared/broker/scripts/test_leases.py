"""Scripts that renew the leases of held jobs, and claim the jobs of workers that renew no leases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.protocol.job import Job, digest_of
from lmpool.protocol.keys import GROUP
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.queue.jobs import JobReader, Taken
from lmpool.workers.queue.leases import Leases
from tests.shared.broker.scripts.script_calls import (
    JOBS,
    MODEL,
    A,
    claim,
    fall_silent,
    finish,
    pending,
    submit,
    take,
)
from tests.shared.broker.scripts.script_fixtures import script_redis, script_server  # noqa: F401
from tests.workers.test_dispatch import INFO, fetch_loop

# Scripts that claim jobs


async def test_jobs_are_claimed_only_after_their_lease(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    assert await claim(redis) == (0, [])
    await fall_silent(redis, second, deliveries=1)
    assert await claim(redis) == (0, [(second, b"job-2", 1)])
    assert await pending(redis) == {first: (b"w1", 1), second: (b"w2", 2)}


async def test_a_claimed_job_has_a_lease_of_its_own(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    await fall_silent(redis, entry, deliveries=1)
    assert len((await claim(redis))[1]) == 1
    assert await claim(redis, consumer="w3") == (0, [])


async def test_jobs_that_no_worker_holds_are_not_claimed(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    assert await claim(redis) == (0, [])


async def test_a_claim_takes_at_most_the_requested_number_of_jobs(redis: redis_async.Redis) -> None:
    await submit(redis, *range(5))
    entries = await take(redis)
    await fall_silent(redis, *entries, deliveries=1)
    assert [entry for entry, _, _ in (await claim(redis, want=2))[1]] == entries[:2]
    assert [entry for entry, _, _ in (await claim(redis, want=10))[1]] == entries[2:]


async def test_a_worker_does_not_claim_jobs_that_it_computes(redis: redis_async.Redis) -> None:
    """A worker claims jobs that the queue assigned to it in a lost reply, but not jobs that it computes."""
    await submit(redis, 1, 2, 3)
    first, second, third = await take(redis, "w2")
    await fall_silent(redis, first, second, deliveries=2, consumer="w2")
    await fall_silent(redis, third, deliveries=1)
    assert await claim(redis, first, second, third, idle=False) == (0, [(third, b"job-3", 1)])
    assert await claim(redis, first, third, idle=False) == (1, [])
    assert await pending(redis) == {first: (b"w2", 2), second: (b"w2", 2), third: (b"w2", 2)}
    assert await claim(redis, first, third) == (1, [(second, b"job-2", 2)])
    assert await claim(redis, first, consumer="w3") == (1, [(first, b"job-1", 2)])


async def test_each_claim_counts_as_a_delivery(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    seen = []
    for _ in range(4):
        before = (await pending(redis))[entry][1]
        await fall_silent(redis, entry, deliveries=before)
        alone, taken = await claim(redis, most=3)
        seen.append((alone, [deliveries for _, _, deliveries in taken]))
    # (job runs alone, deliveries before the claim): the third delivery is alone and the last; later claims give up.
    assert seen == [(0, [1]), (1, [2]), (0, [3]), (0, [4])]


async def test_for_its_last_delivery_a_job_is_taken_alone(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    first, second, third = await take(redis)
    await fall_silent(redis, first, deliveries=2)
    await fall_silent(redis, second, third, deliveries=1)
    assert await claim(redis) == (1, [(first, b"job-1", 2)])
    assert await claim(redis) == (0, [(second, b"job-2", 1), (third, b"job-3", 1)])


async def test_a_worker_must_hold_no_jobs_to_claim_a_last_delivery(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    await fall_silent(redis, entry, deliveries=2)
    assert await claim(redis, idle=False) == (1, [])
    assert await pending(redis) == {entry: (b"w1", 2)}
    assert await claim(redis, idle=True) == (1, [(entry, b"job-1", 2)])


async def test_a_job_for_its_last_delivery_is_not_claimed_with_other_jobs(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    first, second, third = await take(redis)
    await fall_silent(redis, first, third, deliveries=1)
    await fall_silent(redis, second, deliveries=2)
    assert await claim(redis) == (0, [(first, b"job-1", 1), (third, b"job-3", 1)])
    assert await claim(redis) == (1, [(second, b"job-2", 2)])


async def test_a_busy_worker_claims_the_jobs_behind_one_for_its_last_delivery(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    first, second, third = await take(redis)
    await fall_silent(redis, first, deliveries=2)
    await fall_silent(redis, second, third, deliveries=1)
    assert await claim(redis, idle=False) == (0, [(second, b"job-2", 1), (third, b"job-3", 1)])
    assert await claim(redis, idle=False) == (1, [])
    assert await claim(redis) == (1, [(first, b"job-1", 2)])


async def test_a_job_without_deliveries_left_is_returned_among_other_jobs(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    await fall_silent(redis, first, deliveries=3)
    await fall_silent(redis, second, deliveries=1)
    assert await claim(redis, idle=False) == (0, [(first, b"job-1", 3), (second, b"job-2", 1)])


async def test_with_one_permitted_delivery_a_claimed_job_has_none_left(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (entry,) = await take(redis)
    await fall_silent(redis, entry, deliveries=1)
    assert await claim(redis, most=1) == (0, [(entry, b"job-1", 1)])


async def test_deleted_entries_are_acknowledged_and_not_claimed(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    await fall_silent(redis, first, second, deliveries=1)
    await redis.xdel(JOBS, first)
    assert await claim(redis) == (0, [(second, b"job-2", 1)])
    assert set(await pending(redis)) == {second}


async def test_claims_go_on_behind_jobs_that_no_client_waits_for(redis: redis_async.Redis) -> None:
    """Each claim of this worker takes one job, and clients wait for the last of three jobs only."""
    prompts = [bytes([number, 0, 0, 0]) for number in range(3)]
    for prompt in prompts:
        # The lifetime has passed: without a waiting key, no client waits for the job.
        await redis.xadd(JOBS, {"m": Job(prompt, "", INFO.fingerprint).pack(), "u": "0"})
    entries = await take(redis)
    await redis.set(MODEL.waiting + digest_of(prompts[2]), A + b"\n" + entries[2])
    await fall_silent(redis, *entries, deliveries=1)
    reader, accepted = JobReader(redis, MODEL, INFO, "w2", WorkerCounters()), list[bytes]()
    reader.counters.clock_ahead_s = 60.0  # The jobs count as old enough for the check.

    async def accept(taken: Taken) -> None:
        accepted.extend(prompt.ids for prompt in taken.prompts)

    async def end_read() -> None:
        """Do nothing: no read is in flight."""

    loop = fetch_loop(SimpleNamespace(batch=1, capacity=1, yielding=0), INFO)
    loop.leases, loop.consumer = Leases(reader, 3), cast(Any, SimpleNamespace(end_read=end_read))
    cast(Any, loop.dispatcher).accept = accept
    await loop.claim()
    assert accepted == prompts[2:]
    assert set(await pending(redis)) == {entries[2]}


# The script that renews leases


async def test_renewing_keeps_a_lease_and_counts_no_delivery(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    await fall_silent(redis, first, second, deliveries=1)
    assert await scripts.RENEW(redis, [JOBS], [GROUP, "w1", first]) == []
    assert await claim(redis) == (0, [(second, b"job-2", 1)])
    assert await pending(redis) == {first: (b"w1", 1), second: (b"w2", 2)}


async def test_a_worker_renews_only_its_own_jobs(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, 3)
    mine, others, finished = await take(redis)
    await fall_silent(redis, others, deliveries=1, consumer="w2")
    await finish(redis, (finished, 3, b"", False))
    lost = await scripts.RENEW(redis, [JOBS], [GROUP, "w1", mine, others, finished, b"99-1"])
    assert lost == [others, finished, b"99-1"]
    assert await pending(redis) == {mine: (b"w1", 1), others: (b"w2", 1)}
    assert await claim(redis, consumer="w3") == (0, [(others, b"job-2", 1)])


async def test_a_lost_lane_does_not_prevent_other_renewals(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    (mine,) = await take(redis)
    assert await scripts.RENEW(redis, [JOBS], [GROUP, "w1", b"1-1 w9", mine]) == [b"1-1 w9"]
    assert await redis.exists(MODEL.lane("w9")) == 0
