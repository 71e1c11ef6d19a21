"""Lanes, the streams of single workers: the placement of prompts, steals, and the jobs of workers that leave."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import redis.asyncio as redis_async

from lmpool.broker import scripts
from lmpool.broker.scripts import read_queue
from lmpool.protocol.keys import GROUP, WAKE_FIELD
from tests.shared.broker.scripts.script_calls import (
    DEAD,
    FAILURE,
    JOBS,
    LEASE_MS,
    LIFETIME_MS,
    MODEL,
    ROWS,
    A,
    B,
    cancel,
    claim,
    count_queued,
    digest,
    entries_of,
    find_work,
    finish,
    finish_args,
    register,
    registered,
    submit,
    take,
    told,
    waiting,
)
from tests.shared.broker.scripts.script_fixtures import script_redis, script_server  # noqa: F401
from tests.shared.broker.scripts.test_control_plane import commands_of

BATCH = 8
WORKERS = ("w1", "w2", "w3", "w4")


@pytest.fixture
async def lanes(redis: redis_async.Redis) -> redis_async.Redis:
    """A client of a server whose queue has four workers that compute eight prompts at a time."""
    for worker in WORKERS:
        await register(redis, worker, BATCH)
    await redis.set(MODEL.watcher, "another", px=LIFETIME_MS)  # No worker is woken.
    return redis


async def lane(redis: redis_async.Redis, worker: str) -> list[int]:
    """The numbers of the prompts in a worker's lane."""
    return [int(fields[b"m"].removeprefix(b"job-")) for _, fields in await entries_of(redis, MODEL.lane(worker))]


async def lengths(redis: redis_async.Redis) -> dict[str, int]:
    """The registered lengths of lanes: worker -> number of jobs."""
    scores: Any = await redis.zrange(MODEL.lanes, 0, -1, withscores=True)
    return {name.decode(): int(score) for name, score in scores}


async def job_of(redis: redis_async.Redis, number: int) -> Any:
    return (await registered(redis, number)).get(b"job")


async def steal(redis: redis_async.Redis, thief: str, most: int = BATCH, patience_ms: int = 60_000) -> int:
    return (await find_work(redis, thief, most, patience_ms))[1]


async def close_lane(redis: redis_async.Redis, worker: str) -> None:
    while await scripts.CLOSE_LANE(redis, [JOBS], [worker]):
        pass


async def die(redis: redis_async.Redis, worker: str) -> None:
    """Set the deadline of a worker into the past, and let the leases of its jobs expire."""
    await redis.zadd(MODEL.workers, {worker: 1})
    for stream in (JOBS, MODEL.lane(worker)):
        held: Any = (
            await redis.xpending_range(stream, GROUP, "-", "+", 100, worker) if await redis.exists(stream) else []
        )
        for entry in held:
            await redis.xclaim(stream, GROUP, worker, 0, [entry["message_id"]], idle=LEASE_MS + 1, justid=True)


# Placement of prompts in lanes


async def test_a_round_of_prompts_without_homes_spreads_evenly(lanes: redis_async.Redis) -> None:
    await submit(lanes, *range(12))
    assert await lengths(lanes) == {"": 12, **dict.fromkeys(WORKERS, 3)}
    await submit(lanes, *range(20, 26))
    assert sorted([len(await lane(lanes, worker)) for worker in WORKERS]) == [4, 4, 5, 5]
    assert await lanes.xlen(JOBS) == 0


async def test_a_prompt_goes_to_its_home(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, 2, 3, homes=["w3", "", "w3"])
    assert await lane(lanes, "w3") == [1, 3]
    assert (await job_of(lanes, 1) or b"").endswith(b" w3")
    await submit(lanes, 4, homes=["w2"])
    assert 4 in await lane(lanes, "w2")


@pytest.mark.parametrize(
    "home", ["gone", "w2", "w4", "w1 w2", "\xff"], ids=["unknown", "dead", "closed", "odd", "bytes"]
)
async def test_a_prompt_whose_home_is_full_goes_to_the_shortest_lane(lanes: redis_async.Redis, home: str) -> None:
    await lanes.zadd(MODEL.workers, {"w2": 1})
    await close_lane(lanes, "w4")
    await submit(lanes, 1, 2, homes=["w1", home])
    assert (await lane(lanes, "w1"), await lane(lanes, "w3")) == ([1], [2])


async def test_a_home_gets_at_most_a_quarter_more_than_the_mean_and_two(lanes: redis_async.Redis) -> None:
    homes = [worker for worker, count in zip(WORKERS, (22, 6, 6, 6), strict=True) for _ in range(count)]
    await submit(lanes, *range(40), homes=homes)
    found = {worker: len(await lane(lanes, worker)) for worker in WORKERS}
    assert found["w1"] == 1.25 * 40 / 4 + 2 + 0.5, "rounded up"
    assert sorted(found.values())[:3] == [8, 8, 9], "the rest is spread"


async def test_a_worker_that_joins_a_running_program_gets_its_part(lanes: redis_async.Redis) -> None:
    homes = [worker for worker in WORKERS for _ in range(32)]
    await register(lanes, "w5", BATCH)
    for rounds in range(3):
        numbers = range(128 * rounds, 128 * rounds + 128)
        await submit(lanes, *(number % 250 for number in numbers), homes=homes, limit=1000)
        found = {worker: await lane(lanes, worker) for worker in (*WORKERS, "w5")}
        homes = [next(worker for worker in found if number % 250 in found[worker]) for number in numbers]
        counts = Counter(homes)
        for number in numbers:
            await cancel(lanes, number % 250)
    assert min(counts.values()) >= 20
    assert max(counts.values()) <= 27


async def test_prompts_that_continue_the_same_one_leave_their_home_together(lanes: redis_async.Redis) -> None:
    families = [("w1", 3), ("w1", 4), ("w1", 5), ("w1", 6), ("w1", 4), ("w2", 6), ("w3", 6), ("w4", 6)]
    homes = [home for worker, size in families for home in (worker, *["="] * (size - 1))]
    await submit(lanes, *range(40), homes=homes)
    assert set(range(12, 22)) <= set(await lane(lanes, "w1")), "the first go, as many as there are to go"
    assert len({worker for worker in WORKERS for number in await lane(lanes, worker) if number < 3}) == 1
    assert len({worker for worker in WORKERS for number in await lane(lanes, worker) if 3 <= number < 7}) == 1


async def test_few_prompts_stay_at_their_home_although_others_are_idle(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, 2, homes=["w1", "w1"])
    assert await lane(lanes, "w1") == [1, 2]


async def test_the_check_is_made_for_each_prompt(lanes: redis_async.Redis) -> None:
    await submit(lanes, *range(20), homes=["w1"] * 16 + ["w2"] * 4)
    assert await lane(lanes, "w2") == [*(n for n in await lane(lanes, "w2") if n < 16), 16, 17, 18, 19]


async def test_one_worker_alone_and_no_worker_have_no_lanes(redis: redis_async.Redis) -> None:
    await submit(redis, 1, 2, homes=["w1", "w1"])
    await register(redis, "w1", BATCH)
    await submit(redis, 3, 4, homes=["w1", "w1"])
    assert await redis.xlen(JOBS) == 4
    await register(redis, "w2", BATCH)
    await submit(redis, 5, 6, homes=["w1", "w1"])
    assert await lane(redis, "w1") == [5, 6]


async def test_one_prompt_without_a_home_goes_to_one_idle_worker(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, 2, homes=["w1", "w3"])
    await submit(lanes, 3)
    assert await lanes.xlen(JOBS) == 0, "all idle workers would wake up"
    assert [worker for worker in WORKERS if 3 in await lane(lanes, worker)] == ["w2"]


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_placing_prompts_is_the_same_work_with_four_and_with_a_thousand_workers(
    lanes: redis_async.Redis,
) -> None:
    async def ask() -> None:
        await submit(lanes, *range(3), homes=["w1", "w2", ""])
        await cancel(lanes, *range(3))

    await ask()
    few = await commands_of(lanes, ask)
    for number in range(1000):
        await register(lanes, f"other{number}", BATCH)
    many = await commands_of(lanes, ask)
    assert many.keys() == few.keys()
    # The script looks up once whether each of three chosen workers is alive; with few workers it chooses some twice.
    assert sum(many.values()) <= sum(few.values()) + 2 * 3


async def test_prompts_that_move_up_go_to_their_homes(lanes: redis_async.Redis) -> None:
    most = 5 * BATCH * len(WORKERS)
    await submit(lanes, *range(most + BATCH), limit=1000)
    await submit(lanes, 201, 202, reply=B, homes=["w3", "w3"], limit=1000)
    assert await job_of(lanes, 201) == b"later"
    while await job_of(lanes, 202) == b"later":
        for entry in await take(lanes, "w3", BATCH):
            number = int((await entries_at(lanes, entry))[b"m"].removeprefix(b"job-"))
            await finish(lanes, (entry, number, b"", False))
    assert {201, 202} <= set(await lane(lanes, "w3"))


async def entries_at(redis: redis_async.Redis, entry: bytes) -> dict[bytes, bytes]:
    entry_id, _, worker = entry.partition(b" ")
    entries: Any = await redis.xrange(MODEL.lane(worker) if worker else JOBS, entry_id, entry_id)
    return dict(entries[0][1])


# Taking and ending jobs of lanes


async def test_clients_receive_the_worker_that_computed_their_prompt(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, 2, homes=["w1", "w1"])
    first, _ = await take(lanes, "w1")
    await finish(lanes, (first, 1, b"", False))
    assert [fields[b"w"] for fields in await told(lanes, A)] == [b"w1"]
    assert await lengths(lanes) == {"": 1, "w1": 1, "w2": 0, "w3": 0, "w4": 0}


async def test_all_scripts_handle_entries_of_lanes(lanes: redis_async.Redis) -> None:
    await lanes.zadd(MODEL.lanes, {"w2": 10, "w3": 10, "w4": 10, "": 30})  # Other lanes are full: prompts stay at w1.
    await submit(lanes, *range(1, 7), homes=["w1"] * 6)
    for worker in WORKERS:
        await register(lanes, worker, BATCH)
    assert await cancel(lanes, 6) == 1
    entries = await take(lanes, "w1", 4)
    assert [entry.partition(b" ")[2] for entry in entries] == [b"w1"] * 4
    assert await cancel(lanes, 1) == 0, "a worker holds it"
    lost: Any = await scripts.RENEW(lanes, [JOBS], [GROUP, "w1", *entries, b"5-5 w1"])
    assert lost == [b"5-5 w1"]
    args = [entries[0], 1, entries[1], 2**53]
    assert await scripts.DROP_UNWANTED(lanes, [JOBS, waiting(1), waiting(2)], args) == [1]
    await finish(lanes, (entries[2], 3, FAILURE, True))
    ((_, letter),) = await entries_of(lanes, DEAD)
    assert letter[b"m"] == b"job-3"
    # The lane has prompts 2 and 4, which worker w1 holds, and prompt 5.
    keys = [JOBS, MODEL.waiting, *map(waiting, (2, 4, 5))]
    head = [GROUP, FAILURE, 1000, LIFETIME_MS, LEASE_MS]
    left = [entries[1], entries[3], await job_of(lanes, 5) or b""]
    assert await scripts.CLEAR(lanes, keys, [*head, *left]) == [1, 2, []]
    assert await lengths(lanes) == {"": 2, "w1": 2, "w2": 0, "w3": 0, "w4": 0}
    assert (await read_queue(lanes, MODEL)).depth == 2


async def test_a_lost_job_of_a_lane_is_queued_when_its_client_submits_again(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, homes=["w1"])
    assert await submit(lanes, 1, again=True, homes=["w1"]) == "J"
    await lanes.delete(MODEL.lane("w1"))
    assert await submit(lanes, 1, again=True, homes=["w1"]) == "Q"
    assert await lane(lanes, "w1") == [1]


# Stealing jobs from lanes


async def test_an_idle_worker_steals_half_of_the_jobs_behind_a_full_batch(
    lanes: redis_async.Redis,
) -> None:
    await submit(lanes, *range(BATCH), homes=["w1"] * BATCH)
    for worker in WORKERS:
        await take(lanes, worker)
    held = set(await lane(lanes, "w1"))
    await lanes.zadd(MODEL.lanes, {worker: 1000 for worker in WORKERS if worker != "w1"})  # Full lanes get no prompts.
    await submit(lanes, *range(20, 26))
    assert set(await lane(lanes, "w1")) == held | set(range(20, 26))
    await register(lanes, "w1", len(held))
    assert await steal(lanes, "w2") == 3
    assert set(await lane(lanes, "w1")) == held | {20, 21, 22}
    assert (await lane(lanes, "w2"))[-3:] == [23, 24, 25], "from the end, in their order"
    assert (await job_of(lanes, 25) or b"").endswith(b" w2")
    assert await cancel(lanes, 25) == 1
    assert await count_queued(lanes, *WORKERS) == BATCH + 5
    assert await steal(lanes, "w3") == 2, "half of the rest"


async def test_a_job_at_its_home_is_stolen_only_after_a_while(lanes: redis_async.Redis) -> None:
    await register(lanes, "w1", 2)
    await submit(lanes, 1, 2, 3, 4, homes=["w1"] * 4)
    assert await lane(lanes, "w1") == [1, 2, 3, 4]
    await take(lanes, "w1", 2)
    assert await steal(lanes, "w2", 2) == 0
    assert await steal(lanes, "w2", 2, patience_ms=0) == 1
    assert await lane(lanes, "w2") == [4]
    (entry,) = await take(lanes, "w2", 1)
    assert await registered(lanes, 4) == {b"job": entry, A: b""}
    assert 0 < await lanes.pttl(waiting(4)) <= LIFETIME_MS


async def test_nothing_is_stolen_from_a_worker_with_capacity_in_its_batch(lanes: redis_async.Redis) -> None:
    await submit(lanes, *range(8))
    assert await steal(lanes, "w1") == 0, "it is about to take them"
    await submit(lanes, *range(8), again=True)
    assert (await lengths(lanes))[""] == 8


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_jobs_that_their_worker_does_not_read_are_stolen(lanes: redis_async.Redis) -> None:
    """A frozen worker does not read its lane, so another worker steals from this lane before the deadline passes."""
    entry: Any = await lanes.xadd(MODEL.lane("w1"), {"m": "job-1", "u": b"100000 " + digest(1)}, id="1-1")
    await lanes.hset(waiting(1), mapping={"job": entry + b" w1", A: ""})
    await register(lanes, "w1", BATCH)
    assert await find_work(lanes, "w2", BATCH, 60_000) == (0, 0, 0), "another worker watches the lanes"
    await lanes.delete(MODEL.watcher)
    assert await find_work(lanes, "w2", BATCH, 60_000) == (0, 0, 100), "it watches now"
    assert await find_work(lanes, "w3", BATCH, 60_000) == (0, 0, 0)
    assert await find_work(lanes, "w2", BATCH, 60_000) == (0, 1, 0)
    assert await lane(lanes, "w2") == [1]


async def test_the_watcher_checks_once_more_when_its_record_expires(lanes: redis_async.Redis) -> None:
    """While the record exists, a job in the lane of a silent worker wakes no other worker."""
    await lanes.set(MODEL.watcher, "w2", px=LIFETIME_MS)
    moved, stolen, check_ms = await find_work(lanes, "w2", BATCH, 60_000)
    assert (moved, stolen) == (0, 0)
    assert 0 < check_ms <= LIFETIME_MS
    entry: Any = await lanes.xadd(MODEL.lane("w1"), {"m": "job-1", "u": b"100000 " + digest(1)}, id="1-1")
    await lanes.hset(waiting(1), mapping={"job": entry + b" w1", A: ""})
    await register(lanes, "w1", BATCH)
    await lanes.delete(MODEL.watcher)
    assert await find_work(lanes, "w2", BATCH, 60_000) == (0, 0, 100), "it watches again"
    assert await find_work(lanes, "w2", BATCH, 60_000) == (0, 1, 0)
    assert await lane(lanes, "w2") == [1]


async def test_a_worker_that_leaves_steals_nothing(lanes: redis_async.Redis) -> None:
    await submit(lanes, *range(40))
    await close_lane(lanes, "w2")
    assert await steal(lanes, "w2", patience_ms=0) == 0


# Waking idle workers


async def woken(redis: redis_async.Redis) -> dict[str, int]:
    """Worker -> ms after which the entry that wakes it has it check for jobs."""
    found: dict[str, int] = {}
    for worker in WORKERS:
        entries: Any = await redis.xrange(MODEL.lane(worker))
        for _, fields in entries:
            if WAKE_FIELD in fields:
                found[worker] = int(fields[WAKE_FIELD])
    return found


async def test_new_jobs_wake_one_idle_worker_that_looks_for_late_jobs(lanes: redis_async.Redis) -> None:
    await lanes.delete(MODEL.watcher)
    await submit(lanes, 1, 2, homes=["w1", "w2"])
    (watcher,) = await woken(lanes)
    assert watcher in ("w3", "w4")
    assert await lanes.get(MODEL.watcher) == watcher.encode()
    assert 0 < await lanes.pttl(MODEL.watcher) <= 500
    await submit(lanes, 3, homes=["w1"])
    assert await woken(lanes) == {watcher: 100}, "one is enough"
    assert await take(lanes, watcher) == []
    assert await woken(lanes) == {}
    assert await lengths(lanes) == {"": 3, "w1": 2, "w2": 1, "w3": 0, "w4": 0}


async def test_no_worker_is_woken_while_all_have_jobs(lanes: redis_async.Redis) -> None:
    await lanes.delete(MODEL.watcher)
    await submit(lanes, *range(8))
    assert await woken(lanes) == {}


async def test_a_dead_worker_is_not_woken(lanes: redis_async.Redis) -> None:
    await lanes.delete(MODEL.watcher)
    for worker in ("w2", "w3"):
        await lanes.zadd(MODEL.workers, {worker: 1})
    await submit(lanes, 1, homes=["w1"])
    assert await woken(lanes) == {"w4": 100}


async def test_a_worker_that_steals_wakes_the_next_idle_worker(lanes: redis_async.Redis) -> None:
    await lanes.zadd(MODEL.lanes, dict.fromkeys(WORKERS[1:], 1000))  # Full lanes get no prompts.
    await submit(lanes, *range(2 * BATCH))
    for worker in WORKERS:
        await register(lanes, worker, BATCH)
    await take(lanes, "w1", BATCH)
    assert await steal(lanes, "w2") == BATCH // 2
    (worker,) = await woken(lanes)
    assert worker in ("w3", "w4")
    assert await woken(lanes) == {worker: 0}, "it checks at once"


async def test_an_entry_that_wakes_a_worker_is_no_job_for_others(lanes: redis_async.Redis) -> None:
    """A worker that dies before or after it reads the entry leaves no dead letter."""
    for is_read in (False, True):
        await lanes.delete(MODEL.watcher)
        for worker in ("w2", "w3"):
            await lanes.zadd(MODEL.workers, {worker: 1})
        await submit(lanes, 1, homes=["w1"])
        assert await woken(lanes) == {"w4": 100}
        await lanes.xgroup_create(MODEL.lane("w4"), GROUP, id="0")
        if is_read:
            await lanes.xreadgroup(GROUP, "w4", {MODEL.lane("w4"): ">"})
        await die(lanes, "w4")
        assert await claim(lanes, consumer="w1") == (0, [])
        await sweep(lanes)
        assert await entries_of(lanes) == []
        assert not await lanes.exists(MODEL.lane("w4"))
        assert (await lengths(lanes))[""] == 1
        await cancel(lanes, 1)
        await register(lanes, "w4", BATCH)


async def test_a_worker_can_end_its_own_read(lanes: redis_async.Redis) -> None:
    await scripts.WAKE(lanes, [JOBS], ["w1"])
    assert (await lengths(lanes))["w1"] == 1, "until it has seen the entry"
    assert await take(lanes, "w1") == []
    assert await lengths(lanes) == dict.fromkeys(("", *WORKERS), 0)


async def test_the_end_of_a_job_says_how_many_jobs_are_left_in_lanes(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, 2, 3, homes=["w1", "w1", "w2"])
    first, second = await take(lanes, "w1")
    keys = [JOBS, DEAD, waiting(1)]
    assert await scripts.FINISH(lanes, keys, finish_args((first, b"", False))) == b"1 =2"
    keys = [JOBS, DEAD, waiting(2), ROWS + digest(2)]
    await lanes.set(ROWS + digest(2), "row")
    assert await scripts.FINISH(lanes, keys, finish_args((second, b"", False))) == b"1 =1"
    (third,) = await take(lanes, "w2")
    keys = [JOBS, DEAD, waiting(3)]
    assert await scripts.FINISH(lanes, keys, finish_args((third, b"", False))) == b"1"


# Lanes of workers that stop or crash


async def test_a_worker_that_leaves_moves_its_lane_to_the_shared_stream(lanes: redis_async.Redis) -> None:
    await submit(lanes, *range(8), homes=["w1"] * 4 + [""] * 4)
    held = await take(lanes, "w1", 2)
    before = await lane(lanes, "w1")
    await close_lane(lanes, "w1")
    assert await lane(lanes, "w1") == before[:2], "it ends what it holds"
    shared = [int(fields[b"m"].removeprefix(b"job-")) for _, fields in await entries_of(lanes)]
    assert shared == before[2:]
    assert await job_of(lanes, shared[0]) in {entry for entry, _ in await entries_of(lanes)}
    await submit(lanes, *range(20, 30), homes=["w1"] * 10)
    assert await lane(lanes, "w1") == before[:2], "nothing is placed there any more"
    for entry, number in zip(held, before, strict=False):
        await finish(lanes, (entry, number, b"", False))
    assert (await lengths(lanes))["w1"] == 0
    # Heartbeats of a draining worker must not open its lane again.
    await register(lanes, "w1", 0)
    await submit(lanes, 40, homes=["w1"])
    assert await lane(lanes, "w1") == []


async def test_a_job_for_its_last_delivery_does_not_hide_other_lanes(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, 2, homes=["w1", "w2"])
    for worker in ("w1", "w2"):
        await take(lanes, worker, 1)
        await die(lanes, worker)
    ((entry_id, _),) = await entries_of(lanes, MODEL.lane("w1"))
    idle_ms = LEASE_MS + 1
    await lanes.xclaim(MODEL.lane("w1"), GROUP, "w1", 0, [entry_id], idle=idle_ms, retrycount=2, justid=True)
    alone, taken = await claim(lanes, consumer="w3", idle=False)
    assert (alone, [job for _, job, _ in taken]) == (0, [b"job-2"])


async def test_other_workers_get_the_lane_of_a_dead_worker(lanes: redis_async.Redis) -> None:
    await submit(lanes, *range(8), homes=["w1"] * 4 + [""] * 4)
    await take(lanes, "w1", 2)
    numbers = await lane(lanes, "w1")
    assert await claim(lanes, consumer="w2") == (0, []), "it lives"
    await die(lanes, "w1")
    _, taken = await claim(lanes, consumer="w2")
    assert [(job, deliveries) for _, job, deliveries in taken] == [(b"job-%d" % number, 1) for number in numbers[:2]]
    await sweep(lanes)
    shared = [fields[b"m"] for _, fields in await entries_of(lanes)]
    assert shared == [b"job-%d" % number for number in numbers[2:]], (
        "what was never given to a worker counts no delivery"
    )
    entries = [entry for entry, _, _ in taken]
    assert all(entry.endswith(b" w1") for entry in entries)
    assert await scripts.RENEW(lanes, [JOBS], [GROUP, "w2", *entries]) == []
    # Worker w3 claims no job that w2 has claimed. The lane of w1 remains until both jobs have ended.
    assert await claim(lanes, consumer="w3") == (0, [])
    await finish(lanes, (entries[0], numbers[0], b"", False))
    await sweep(lanes)
    assert await lanes.zscore(MODEL.workers, "w1") == 1, "known as long as its lane has something"
    await finish(lanes, (entries[1], numbers[1], b"", False))
    await sweep(lanes)
    assert await lanes.zscore(MODEL.workers, "w1") is None
    assert not await lanes.exists(MODEL.lane("w1"))
    assert "w1" not in await lengths(lanes)


async def sweep(redis: redis_async.Redis, add_up: int = 0) -> None:
    args = [GROUP, 100, LIFETIME_MS, add_up]
    await scripts.REMOVE_GONE(redis, [JOBS, MODEL.workers, MODEL.capacity, MODEL.virtual_time], args)


async def test_a_job_in_a_lane_that_crashed_its_workers_runs_alone_and_is_given_up(
    lanes: redis_async.Redis,
) -> None:
    await submit(lanes, 1, homes=["w1"])
    (entry,) = await take(lanes, "w1")

    async def fall_silent(worker: str) -> None:
        entry_id = entry.partition(b" ")[0]
        await lanes.xclaim(MODEL.lane("w1"), GROUP, worker, 0, [entry_id], idle=LEASE_MS + 1, justid=True)

    await die(lanes, "w1")
    assert await claim(lanes, consumer="w2") == (0, [(entry, b"job-1", 1)])
    await fall_silent("w2")
    assert await claim(lanes, consumer="w3", idle=False) == (1, []), "who holds others is to come back without"
    assert await claim(lanes, consumer="w3") == (1, [(entry, b"job-1", 2)])
    await fall_silent("w3")
    _, ((_, _, deliveries),) = await claim(lanes, consumer="w4")
    assert deliveries == 3, "it is given up"


async def test_a_worker_that_wakes_up_keeps_its_lane_and_loses_claimed_jobs(lanes: redis_async.Redis) -> None:
    await submit(lanes, 1, 2, homes=["w1", "w1"])
    (first, second) = await take(lanes, "w1")
    await die(lanes, "w1")
    await claim(lanes, consumer="w2")
    await register(lanes, "w1", BATCH)
    lost: Any = await scripts.RENEW(lanes, [JOBS], [GROUP, "w1", first, second])
    assert lost == [first, second]
    # Worker w2, which has claimed the jobs, crashes too.
    await lanes.zadd(MODEL.workers, {"w2": 1})
    for entry in (first, second):
        entry_id = entry.partition(b" ")[0]
        await lanes.xclaim(MODEL.lane("w1"), GROUP, "w2", 0, [entry_id], idle=LEASE_MS + 1, justid=True)
    # Each job is claimed alone, because it may have crashed both workers.
    taken = [await claim(lanes, consumer="w1") for _ in range(2)]
    assert taken == [(1, [(first, b"job-1", 2)]), (1, [(second, b"job-2", 2)])]
    await submit(lanes, 3, homes=["w1"])
    assert await lane(lanes, "w1") == [1, 2, 3]


# Foreign values in the keys of lanes


@pytest.mark.parametrize("junk", ["string", "full"])
async def test_a_lane_key_of_another_type_is_skipped(lanes: redis_async.Redis, junk: str) -> None:
    if junk == "string":
        await lanes.set(MODEL.lane("w1"), "junk")
    else:
        await lanes.xadd(MODEL.lane("w1"), {"m": "x"}, id="18446744073709551615-18446744073709551615")
    assert await submit(lanes, 1, 2, homes=["w1", "w1"]) == "QQ"
    assert [fields[b"m"] for _, fields in await entries_of(lanes)] == [b"job-1", b"job-2"]
    assert await steal(lanes, "w2", patience_ms=0) in (0, 1)
    await die(lanes, "w2")
    await claim(lanes, consumer="w3")
    assert (await read_queue(lanes, MODEL)).depth >= 2


@pytest.mark.parametrize("junk", [{"": "inf"}, {"": "-5"}, {"": 3e300, "w1": 1e300}, {"w1": "-inf"}, "string"], ids=str)
async def test_invalid_lengths_of_lanes_are_corrected(lanes: redis_async.Redis, junk: dict[str, Any] | str) -> None:
    if isinstance(junk, str):
        await lanes.set(MODEL.lanes, junk)
    else:
        await lanes.zadd(MODEL.lanes, junk)
    assert await submit(lanes, *range(8), homes=["w1"] * 8) == "Q" * 8
    for worker in WORKERS:
        await register(lanes, worker, BATCH)
    await sweep(lanes, 1)
    found = Counter({worker: len(await lane(lanes, worker)) for worker in WORKERS})
    assert await lengths(lanes) == {"": found.total(), **found}


async def test_the_watcher_checks_seldom_if_a_lane_has_old_wake_ups_only(lanes: redis_async.Redis) -> None:
    """The worker of the lane has crashed after it was woken: the lane has no job to take."""
    await lanes.xadd(MODEL.lane("w1"), {WAKE_FIELD: 100}, id="1-1")
    await register(lanes, "w1", BATCH)
    await lanes.set(MODEL.watcher, "w2", px=LIFETIME_MS)
    assert await find_work(lanes, "w2", BATCH, 1000) == (0, 0, 1000)


async def test_workers_write_lost_lengths_of_lanes_again(lanes: redis_async.Redis) -> None:
    await submit(lanes, *range(8))
    await lanes.delete(MODEL.lanes)
    assert (await read_queue(lanes, MODEL)).depth in (0, 8)
    for worker in WORKERS:
        await register(lanes, worker, BATCH)
    assert await lengths(lanes) == {"": 8, **dict.fromkeys(WORKERS, 2)}
