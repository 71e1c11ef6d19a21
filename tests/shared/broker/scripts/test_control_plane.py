"""Server cost of many workers and long queues: the cost of a poll is constant, and each call is bounded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.broker.scripts import read_alive, read_consumers, read_hash
from lmpool.errors import UnknownModel
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import GROUP, Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.membership.heartbeat import Heartbeat, send_loading
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.jobs import JobReader
from lmpool.workers.settings import WorkerSettings
from tests.shared.broker.scripts.script_calls import (
    DEAD,
    FAILURE,
    JOBS,
    LEASE_MS,
    LIFETIME_MS,
    MODEL,
    A,
    B,
    cancel,
    claim,
    count_queued,
    digest,
    entries_of,
    fall_silent,
    find_work,
    finish_args,
    hash_of,
    register,
    submit,
    take,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import script_redis, script_server  # noqa: F401
from tests.support.pool import until_async

KEYS = Keys("test")
INFO = ModelInfo("m", "synthetic", 512, 1000, "seed-0", "float32")


def heartbeat(redis: redis_async.Redis, name: str = "w1", batch: int = 1) -> Heartbeat:
    return Heartbeat(redis, KEYS, INFO, name, batch)


async def capacity(redis: redis_async.Redis) -> int:
    """The sum of the batch sizes of all workers, as `submit.lua` reads it."""
    return int(await redis.hget(MODEL.capacity, "") or 0)


async def let_pass(redis: redis_async.Redis, *workers: str) -> None:
    """Set the deadlines of workers into the past, as if the workers had been killed a lease ago."""
    await redis.zadd(MODEL.workers, dict.fromkeys(workers, 1))


# The cost of a poll with many workers


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_producers_poll_costs_the_server_the_same_with_many_workers(
    redis: redis_async.Redis,
) -> None:
    await redis.hset(KEYS.models(), INFO.name, INFO.pack())
    for other in range(20):
        await redis.hset(KEYS.models(), f"m{other}", INFO.pack())
    discovery = Discovery(redis, KEYS)

    async def look() -> None:
        # Without this key, each submission wakes an idle worker, however long ago the last one was woken.
        await redis.delete(MODEL.jobs.replace(b":jobs", b":watcher"))
        await discovery.info(INFO.name)
        await discovery.alive(INFO.name)
        await submit(redis, 1, 2)
        await cancel(redis, 1, 2)

    for number in range(20):
        await register(redis, f"w{number}")
    await look()
    commands = await commands_of(redis, look)
    for number in range(300):
        await register(redis, f"w{number}")
    assert (await discovery.alive(INFO.name)).serving == 300
    assert await commands_of(redis, look) == commands


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_workers_heartbeat_and_sweep_cost_the_same_with_many_workers(redis: redis_async.Redis) -> None:
    await redis.set(MODEL.complete_turn, "another")
    worker = heartbeat(redis)
    await worker.join({})

    async def live() -> None:
        await worker.send({}, takes_turns=True)
        await worker.sweep(is_complete=False)

    await live()
    commands = await commands_of(redis, live)
    for number in range(300):
        await register(redis, f"w{number}")
    assert await commands_of(redis, live) == commands


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_measuring_the_queue_in_a_heartbeat_counts_no_workers(redis: redis_async.Redis) -> None:
    await register(redis)
    nothing: Any = None
    consumer = Consumer(JobReader(redis, MODEL, INFO, "w1", counters := WorkerCounters()), nothing)
    measure = partial(consumer.measure, [MODEL])
    await measure()
    commands = await commands_of(redis, measure)
    assert "cmdstat_zcount" not in commands
    assert commands["cmdstat_evalsha"] == 1
    assert counters.queue is not None
    await register(redis, "w2")
    assert (await heartbeat(redis).send({}, takes_turns=False)).workers == 2


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_metrics_describe_the_queue_in_all_partitions(redis: redis_async.Redis) -> None:
    other = KEYS.model(INFO.name, 1)
    await redis.xgroup_create(other.jobs, GROUP, id="0", mkstream=True)
    for keys, jobs in ((MODEL, 2), (other, 3)):
        registered = [keys.workers, keys.jobs, keys.capacity, keys.lanes, keys.lane("w1")]
        await scripts.REGISTER(redis, registered, ["w1", 60_000, 60_000, GROUP, 1])
        for _ in range(jobs):
            await redis.xadd(keys.jobs, {"m": b"job"})
    nothing: Any = None
    consumer = Consumer(JobReader(redis, MODEL, INFO, "w1", counters := WorkerCounters()), nothing)
    await consumer.measure([MODEL, other])
    assert counters.queue is not None
    assert (counters.queue.depth, counters.serving) == (5, 2)


async def load(redis: redis_async.Redis, name: str, model: str) -> None:
    """Register a worker that is loading a model."""
    await redis.hset(KEYS.worker(name), mapping={"model": model, "state": "loading"})
    await redis.hset(KEYS.loading(), name, model)
    await scripts.REGISTER(redis, [KEYS.model(model).loading], [name, LEASE_MS, LIFETIME_MS])


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_waiting_for_a_model_costs_the_server_the_same_with_many_loading_workers(
    redis: redis_async.Redis,
) -> None:
    discovery = Discovery(redis, KEYS)

    async def look() -> None:
        assert await discovery.find("m") is None
        for name, told in [("m", "loading 'm', try again"), ("x", "being loaded: 'm'"), (None, "loading 'm', try")]:
            with pytest.raises(UnknownModel, match=told):
                await discovery.info(name)

    for number in range(8):
        await load(redis, f"w{number}", "m")
    await look()
    few = await commands_of(redis, look)
    for number in range(300):
        await load(redis, f"w{number}", "m")
    assert await commands_of(redis, look) == few
    for number in range(300):
        await load(redis, f"other{number}", f"m{number}")
    with pytest.raises(UnknownModel, match="try again") as caught:
        await discovery.info(None)
    assert str(caught.value).count("'") <= 2 * 8


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_the_heartbeat_of_a_loading_worker_costs_the_same_with_many_loading_workers(
    redis: redis_async.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = 2.0  # This worker does not check for dead workers.
    monkeypatch.setattr("random.random", lambda: drawn)

    async def beat() -> None:
        await send_loading(redis, WorkerSettings("test"), "w0", "m", 0.0)

    await beat()
    commands = await commands_of(redis, beat)
    for number in range(300):
        await load(redis, f"w{number}", "m")
    assert await commands_of(redis, beat) == commands
    for number in range(1, 300):
        await redis.delete(KEYS.worker(f"w{number}"))
    drawn = 0.0
    swept = await commands_of(redis, beat)
    assert 0 < swept["cmdstat_exists"] <= 200
    await beat()
    await beat()
    assert await redis.hkeys(KEYS.loading()) == [b"w0"]


async def commands_of(redis: redis_async.Redis, work: Callable[[], Awaitable[None]]) -> dict[str, int]:
    """Number of calls of each Redis command while `work` runs, including calls in scripts."""

    async def counts() -> dict[str, int]:
        reply: Any = await redis.info("commandstats")
        return {name: int(stats["calls"]) for name, stats in reply.items() if name != "cmdstat_info"}

    before = await counts()
    await work()
    after = await counts()
    return {name: calls - before.get(name, 0) for name, calls in after.items() if calls != before.get(name, 0)}


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_new_prompts_behind_others_are_not_read_one_by_one(redis: redis_async.Redis) -> None:
    await register(redis)
    await submit(redis, *range(50))
    assert await submit(redis, 100, reply=B) == "Q"
    assert await redis.zcard(MODEL.backlog) > 0

    async def come_behind() -> None:
        assert await submit(redis, *range(101, 121), reply=B) == "Q" * 20

    assert "cmdstat_strlen" not in await commands_of(redis, come_behind)
    assert await submit(redis, 121, 1, reply=B) == "QJ"


async def test_workers_are_alive_until_their_deadlines_have_passed(redis: redis_async.Redis) -> None:
    for name in ("w1", "w2", "w3"):
        await register(redis, name)
    await scripts.REGISTER(redis, [MODEL.loading], ["w9", LEASE_MS, LIFETIME_MS])
    alive = await read_alive(redis, MODEL, names=True)
    assert (alive.serving, alive.loading, alive.names) == (3, 1, ("w1", "w2", "w3"))
    await let_pass(redis, "w2")
    assert (await read_alive(redis, MODEL, names=True)).names == ("w1", "w3")


async def test_a_deadline_that_no_lease_can_have_is_that_of_a_clock_that_was_set_back(redis: redis_async.Redis) -> None:
    await register(redis)
    await redis.zadd(MODEL.workers, {"w2": 10**14})
    assert (await read_alive(redis, MODEL, names=True)).names == ("w1",)


async def test_a_heartbeat_that_writes_lost_deadlines_again_gives_them_a_lifetime(redis: redis_async.Redis) -> None:
    """Without memory, the server may refuse the registration that follows."""
    worker = heartbeat(redis, "w1")
    await worker.join({})
    await redis.delete(MODEL.workers)
    keys = [MODEL.workers, MODEL.turn, MODEL.complete_turn, JOBS, MODEL.capacity]
    await scripts.KEEP_ALIVE(redis, keys, ["w1", LEASE_MS, GROUP, 0, 0])
    assert 0 < await redis.pttl(MODEL.workers) <= LEASE_MS


@pytest.mark.parametrize("key", [MODEL.workers, MODEL.capacity])
async def test_a_foreign_value_of_the_list_of_workers_is_replaced_by_the_next_heartbeat(
    redis: redis_async.Redis, key: bytes
) -> None:
    await redis.set(key, "x")
    assert (await read_alive(redis, MODEL)).serving == 0
    await register(redis, size=7)
    assert (await read_alive(redis, MODEL)).serving == 1
    assert await capacity(redis) == 7


async def test_batch_sizes_add_up_when_workers_join_change_and_leave(redis: redis_async.Redis) -> None:
    for number in range(10):
        await register(redis, f"w{number}", 4)
    await register(redis, "w0", 10)
    assert await capacity(redis) == 46
    await heartbeat(redis, "w1", 4).leave(for_good=False)
    assert await capacity(redis) == 42
    await let_pass(redis, "w2", "w3")
    await heartbeat(redis, "w0", 10).sweep(is_complete=False)
    assert await capacity(redis) == 34
    await redis.delete(MODEL.capacity)  # Simulate an eviction by a server that is short of memory.
    for number in (0, 4, 5):
        await register(redis, f"w{number}", 4)
    assert await capacity(redis) == 12
    await redis.hset(MODEL.capacity, "", "many")
    await register(redis, "w5", 5)
    assert await capacity(redis) == 5


async def test_silent_consumers_without_a_deadline_on_the_server_are_swept(
    redis: redis_async.Redis,
) -> None:
    for name in ("w1", "w2"):
        await register(redis, name)
    await redis.delete(MODEL.workers)
    worker = heartbeat(redis)
    await worker.join({})
    await worker.sweep(is_complete=True)
    assert set(await redis.zrange(MODEL.workers, 0, -1)) == {b"w1", b"w2"}, "it may be alive"
    await register(redis, "w3", lease_ms=10 * LEASE_MS)
    deadline = await redis.zscore(MODEL.workers, "w3")
    await redis.xgroup_createconsumer(JOBS, GROUP, "w4")
    await worker.sweep(is_complete=True)
    assert await redis.zscore(MODEL.workers, "w3") == deadline, "it has another lease"
    await let_pass(redis, "w2", "w3", "w4")
    await worker.sweep(is_complete=True)
    assert await read_consumers(redis, MODEL) == [b"w1"]


async def test_a_lane_reveals_a_worker_that_the_stream_and_the_server_have_lost(
    redis: redis_async.Redis,
) -> None:
    for name in ("w1", "w2"):
        await register(redis, name, 4)
    await submit(redis, 1, 2, homes=("w2", "w2"))
    await redis.delete(MODEL.workers, JOBS)
    await redis.xgroup_create(JOBS, GROUP, id="0", mkstream=True)
    worker = heartbeat(redis, batch=4)
    await worker.join({})
    await worker.sweep(is_complete=True)
    assert set(await redis.zrange(MODEL.workers, 0, -1)) == {b"w1", b"w2"}, "it may be alive"
    await let_pass(redis, "w2")
    await worker.sweep(is_complete=True)
    assert [fields[b"m"] for _, fields in await entries_of(redis)] == [b"job-1", b"job-2"]
    assert set(await redis.zrange(MODEL.lanes, 0, -1)) == {b"", b"w1"}


async def test_a_removed_worker_stays_a_consumer_while_it_holds_jobs(redis: redis_async.Redis) -> None:
    await register(redis, "w2", 4)
    await submit(redis, 1)
    (entry,) = await take(redis, "w2")
    worker = heartbeat(redis)
    await worker.join({})
    await let_pass(redis, "w2")
    await worker.sweep(is_complete=True)
    assert set(await read_consumers(redis, MODEL)) == {b"w1", b"w2"}
    assert await capacity(redis) == 1
    await fall_silent(redis, entry, deliveries=1, consumer="w2")
    assert [job[0] for job in (await claim(redis, consumer="w1"))[1]] == [entry]
    await worker.sweep(is_complete=True)
    assert await read_consumers(redis, MODEL) == [b"w1"]


async def test_infos_of_unserved_models_are_removed_by_workers_of_other_models(redis: redis_async.Redis) -> None:
    worker = heartbeat(redis)
    await worker.join({})
    await redis.hset(KEYS.models(), "gone", ModelInfo("gone", "synthetic", 512, 1000, "seed-0", "float32").pack())

    async def is_removed() -> bool:
        await worker.sweep(is_complete=True)
        return not await redis.hexists(KEYS.models(), "gone")

    await until_async(is_removed, "the info is removed")
    assert await redis.hexists(KEYS.models(), "m")


async def test_info_and_adapters_stay_while_a_worker_loads_another_version(redis: redis_async.Redis) -> None:
    worker, models = heartbeat(redis), ("m", "other")
    await worker.join({})
    for name in models:
        await redis.hset(KEYS.models(), name, replace(INFO, name=name).pack())
        await redis.hset(KEYS.model(name).adapters, "poet", b"an adapter")
        await send_loading(redis, WorkerSettings(prefix="test"), f"w-{name}", f"{name}@1", 0.0)
    for are_kept in (True, False):
        await worker.sweep(is_complete=True)  # No worker serves the model "other".
        await worker.leave()  # No other worker serves the model "m".
        assert await redis.hlen(KEYS.models()) == 2 * are_kept
        assert await redis.exists(*(KEYS.model(name).adapters for name in models)) == 2 * are_kept
        await redis.delete(KEYS.loading())


# Each call of a script does a bounded part of the work, and later calls continue


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_single_client_yields_in_one_call(redis: redis_async.Redis) -> None:
    await register(redis)
    await submit_many(redis, 1000)
    assert await redis.xlen(JOBS) == 1000
    assert await submit(redis, 1, reply=B, limit=10_000) == "Q"
    assert await redis.xlen(JOBS) == 3
    assert await redis.get(MODEL.sole_client) == b""
    order = await take_all(redis)
    assert order.index(digest(1)) <= 4
    assert [other for other in order if other != digest(1)] == many(1000), "in the order in which they were asked"


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_large_jobs_beyond_the_capacity_after_a_worker_left_go_back_a_few_in_each_call(
    redis: redis_async.Redis,
) -> None:
    await register(redis, "w1", 64)
    await register(redis, "w2", 64)
    digests, size = many(384), 50_000
    for at in range(0, len(digests), 8):
        part = digests[at : at + 8]
        keys = [JOBS, A, *(MODEL.waiting + digest for digest in part)]
        jobs = [b"x" * size + digest for digest in part]
        await scripts.SUBMIT(redis, keys, [10_000, LIFETIME_MS, "", 0, len(part), *jobs])
    assert [await redis.xlen(MODEL.lane(worker)) for worker in ("w1", "w2")] == [192, 192]
    await heartbeat(redis, "w2", 64).leave(for_good=False)

    async def ask() -> None:
        assert (await submit(redis, 1, reply=B, limit=10_000))[0] == "Q"
        await cancel(redis, 1, reply=B)

    calls = 0
    while looks := (await commands_of(redis, ask)).get("cmdstat_xrevrange", 0):
        assert looks <= 2 * 12, "a few at a time, up to the limit of bytes"
        calls += 1
        assert calls < 20
    assert calls > 1
    assert await count_queued(redis, "w1", "w2") == 64 * (3 + 2)
    assert await redis.zcard(MODEL.backlog) == 64


async def test_if_two_workers_remove_a_model_its_queue_expires(redis: redis_async.Redis) -> None:
    await submit(redis, 1)
    seen = INFO.pack()
    await redis.hset(KEYS.models(), INFO.name, seen)
    for worker in ("w1", "w2"):
        await heartbeat(redis, worker)._forget(INFO.name, seen)
        assert await redis.pttl(JOBS) > 0


async def test_large_prompts_of_a_single_client_wait_in_the_backlog(redis: redis_async.Redis) -> None:
    await register(redis)
    digests = many(20)
    keys = [JOBS, A, *(MODEL.waiting + digest for digest in digests)]
    jobs = [b"x" * 9000 + digest for digest in digests]
    assert await scripts.SUBMIT(redis, keys, [1000, LIFETIME_MS, "", 0, len(jobs), *jobs]) == b"Q" * 20
    assert await redis.xlen(JOBS) == 3
    assert await redis.zcard(MODEL.backlog) == 17


async def test_one_call_moves_up_no_more_bytes_than_it_can_soon_move(redis: redis_async.Redis) -> None:
    await register(redis)
    digests = many(40)
    keys = [JOBS, A, *(MODEL.waiting + digest for digest in digests)]
    jobs = [b"x" * 100_000 + digest for digest in digests]
    await scripts.SUBMIT(redis, keys, [1000, LIFETIME_MS, "", 0, len(jobs), *jobs])
    await register(redis, "w2", 100)
    assert (await find_work(redis))[0] > 0
    assert 3 < await count_queued(redis, "w1", "w2") <= 3 + 6
    while (await find_work(redis))[0]:
        pass
    queued = [await entries_of(redis, key) for key in (JOBS, MODEL.lane("w1"), MODEL.lane("w2"))]
    assert sorted(fields[b"m"][-16:] for entries in queued for _, fields in entries) == sorted(digests)


async def test_one_call_removes_some_of_the_clients_without_prompts_in_the_backlog(redis: redis_async.Redis) -> None:
    await redis.zadd(MODEL.virtual_time, {"": 5000.0, **{MODEL.reply(f"{i:016x}"): float(i) for i in range(1000)}})
    await redis.zadd(MODEL.virtual_time, {A: 6000.0})
    args = [GROUP, 200, LIFETIME_MS, 0]
    await scripts.REMOVE_GONE(redis, [JOBS, MODEL.workers, MODEL.capacity, MODEL.virtual_time], args)
    assert 700 < await redis.zcard(MODEL.virtual_time) < 1002
    for _ in range(6):
        await scripts.REMOVE_GONE(redis, [JOBS, MODEL.workers, MODEL.capacity, MODEL.virtual_time], args)
    assert await redis.zrange(MODEL.virtual_time, 0, -1) == [b"", A], "the clock, and who is in the backlog"


@pytest.mark.parametrize("failure", [b"", FAILURE], ids=["row", "failure"])
@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_each_call_notifies_some_of_many_clients_of_one_prompt(redis: redis_async.Redis, failure: bytes) -> None:
    await submit(redis, 1, 2)
    first, second = await take(redis)
    await submit(redis, 1, reply=B)
    clients = [MODEL.reply(f"{i:04x}") for i in range(9990)]
    await redis.hset(waiting(1), mapping=dict.fromkeys(clients, ""))
    keys, calls, told = [JOBS, DEAD, waiting(1), waiting(2)], 0, 0
    endings = [(first, failure, False), (second, failure, False)]
    while endings:
        args = finish_args(*endings)
        clients_told, *numbers = (await scripts.FINISH(redis, keys, args)).split()
        assert int(clients_told) <= 1000
        told, calls = told + int(clients_told), calls + 1
        assert all(number.startswith(b"+") for number in numbers)
        left = [int(number[1:]) - 1 for number in numbers]
        endings, keys = [endings[at] for at in left], [JOBS, DEAD, *(keys[2 + at] for at in left)]
    assert calls > 3
    assert told >= len(clients) + 1
    async with redis.pipeline(transaction=False) as pipe:
        for client in (*clients, A):
            pipe.xlen(client)
        assert min(await pipe.execute()) >= 1
    assert not await redis.xlen(JOBS)
    assert not await redis.exists(waiting(1), waiting(2))


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_one_scan_for_silent_jobs_covers_some_held_jobs_and_the_next_continues(
    redis: redis_async.Redis,
) -> None:
    await register(redis)
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(5000):
            pipe.xadd(JOBS, {"m": b"job-%d" % number})
        await pipe.execute()
    entries = await take(redis, count=5000)
    await fall_silent(redis, entries[-1], deliveries=1)
    args = [GROUP, "w2", LEASE_MS, 3, 10, 1, 2**24, 2**19, LIFETIME_MS]
    claimed: list[bytes] = []
    calls = share = 0
    while not claimed:
        _, taken, further = await scripts.CLAIM_EXPIRED(redis, [JOBS, MODEL.claim_cursor], args)
        claimed, calls, share = [job[0] for job in taken], calls + 1, max(share, further)
    assert claimed == entries[-1:]
    assert calls >= 5
    assert share >= calls - 1, "one worker alone looks at everything"


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_one_worker_at_a_time_has_the_turn_to_look_for_lost_jobs(redis: redis_async.Redis) -> None:
    workers = [heartbeat(redis, f"w{number}") for number in range(4)]
    for worker in workers:
        await worker.join({})
    assert (await workers[0].send({}, takes_turns=True)).is_complete
    await redis.delete(MODEL.turn)
    assert not (await workers[0].send({}, takes_turns=True)).has_turn, "there are no held jobs"
    await redis.delete(MODEL.turn)
    await redis.xadd(JOBS, {"m": b"job"})
    await take(redis)
    await workers[3].send({}, takes_turns=False)
    assert not await redis.exists(MODEL.turn), "it drains"
    turns = [await worker.send({}, takes_turns=True) for worker in workers]
    assert [beat.has_turn for beat in turns] == [True, False, False, False]
    await redis.delete(MODEL.turn)
    assert (await workers[2].send({}, takes_turns=True)).has_turn


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_scan_for_silent_jobs_continues_behind_an_entry_with_the_largest_id(
    redis: redis_async.Redis,
) -> None:
    await submit_many(redis, 499)
    await redis.xadd(JOBS, {"m": b"x"}, id=f"{2**64 - 1}-{2**64 - 1}")
    entries = await take(redis, count=1000)
    assert (await claim(redis))[1] == []
    await fall_silent(redis, entries[0], deliveries=1)
    assert [job[0] for job in (await claim(redis))[1]] == entries[:1]


async def test_the_next_scan_for_silent_jobs_covers_the_rest(redis: redis_async.Redis) -> None:
    await submit_many(redis, 90)
    entries = await take(redis, count=100)
    await fall_silent(redis, *entries, deliveries=1)
    claimed = []
    for number in range(9):
        claimed += [job[0] for job in (await claim(redis, consumer=f"w{number}", want=10))[1]]
    assert sorted(claimed) == sorted(entries)
    assert (await claim(redis, consumer="w9"))[1] == []


def many(count: int) -> list[bytes]:
    return [b"many" + number.to_bytes(12, "big") for number in range(count)]


async def submit_many(redis: redis_async.Redis, count: int) -> None:
    for at in range(0, count, scripts.MAX_AT_ONCE):
        digests = many(count)[at : at + scripts.MAX_AT_ONCE]
        keys = [JOBS, A, *(MODEL.waiting + digest for digest in digests)]
        await scripts.SUBMIT(redis, keys, [10_000, LIFETIME_MS, "", 0, len(digests), *digests])


async def take_all(redis: redis_async.Redis) -> list[bytes]:
    """Compute all prompts one after the other; return the digests of the prompts in order."""
    order = []
    while entries := await take(redis, count=1):
        job = (await entries_of(redis))[0][1][b"m"]
        prompt_digest = job if job.startswith(b"many") else digest(1)
        order.append(prompt_digest)
        args = finish_args((entries[0], b"", False))
        await scripts.FINISH(redis, [JOBS, DEAD, MODEL.waiting + prompt_digest], args)
    assert await hash_of(redis, MODEL.backlog_jobs) == {}
    return order


@pytest.mark.parametrize("size", [10, 3000])
async def test_a_hash_of_many_fields_is_read_in_parts(redis: redis_async.Redis, size: int) -> None:
    infos = {b"model %d" % number: b"x" * size for number in range(2500)}
    for at in range(0, len(infos), 500):
        await redis.hset(KEYS.models(), mapping=dict(list(infos.items())[at : at + 500]))
    begin, (first,) = await scripts.FIELDS(redis, [KEYS.models()], [4096, 4000, 0])
    assert 0 < begin == len(first) / 2 <= 1000
    assert await read_hash(redis, KEYS.models(), most_bytes=4000) == infos


async def test_a_worker_with_many_jobs_renews_all_of_them_and_no_others(redis: redis_async.Redis) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(600):
            pipe.xadd(JOBS, {"m": b"job-%d" % number})
        await pipe.execute()
    entries = await take(redis, "w1", count=1000)
    await fall_silent(redis, *entries, deliveries=1)
    await fall_silent(redis, *entries[550:], deliveries=1, consumer="w2")
    assert await scripts.RENEW(redis, [JOBS], [GROUP, "w1", *entries[400:]]) == entries[550:]
    held: Any = await redis.xpending_range(JOBS, GROUP, "-", "+", 1000)
    silent = [entry["message_id"] for entry in held if entry["time_since_delivered"] >= LEASE_MS]
    assert silent == entries[:400] + entries[550:]
