"""Lanes (workers' own job streams) of crashed, frozen or stopped workers: other workers compute their prompts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lmpool.producer import Producer
from lmpool.protocol.keys import GROUP
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, V, WorkerProcess, pending, until, until_async, until_done

BATCH = 2
"""`--max-batch` of the victim: it holds twice as many prompts, and does not read the rest of its lane."""
ROOMY = 16
"""`--max-batch` of the other worker: it can take more prompts, but is not idle while its gate is shut."""
LEASE_S = 3
"""Lease of workers whose lane is taken over: a busy machine may pause a worker for seconds before its lane is full."""
PROMPTS = [[number, 1] for number in range(20)]


async def ask_all(producer: Producer, prompts: list[list[int]]) -> None:
    """Request prompts and check every value."""
    rows = await producer.batch_logprobs(prompts)
    for prompt, row in zip(prompts, rows, strict=True):
        assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))


class Lane:
    """The lane (own job stream) of a worker process."""

    def __init__(self, pool: Pool, worker: WorkerProcess) -> None:
        names: Any = pool.redis.zrange(pool.keys.model("syn").lanes, 0, -1)
        (self.worker_id,) = [name.decode() for name in names if f"-{worker.process.pid}-".encode() in name]
        self._redis = pool.redis
        self._key = pool.keys.model("syn").lane(self.worker_id)

    @property
    def held(self) -> list[dict[str, Any]]:
        """Pending entries of the lane: workers have read them, and hold the jobs."""
        entries: list[dict[str, Any]] = []
        if self._redis.exists(self._key):
            entries = self._redis.xpending_range(self._key, GROUP, "-", "+", 1000)
        return entries

    @property
    def waiting(self) -> int:
        """The number of the lane's entries that no worker has read."""
        return int(self._redis.xlen(self._key)) - len(self.held)

    @property
    def is_there(self) -> bool:
        """Whether the lane's stream exists."""
        return bool(self._redis.exists(self._key))


class TwoWorkers:
    """A victim with a full lane (own job stream), and another worker whose steps wait at a gate.

    Attributes:
        victim: the worker that a test kills, freezes or stops.
        lane: lane of the victim.
        gate: gate of the victim's steps.
        other: second worker, which takes over the victim's prompts.
        other_gate: gate of the other worker's steps.
        asked: the request for all `PROMPTS`.
    """

    def __init__(self, pool: Pool, folder: Path, lease_s: float, batch: int) -> None:
        self.gate, self.other_gate = Gate(folder / "gate"), Gate(folder / "other-gate")
        lease = ("--lease-s", lease_s)
        self.victim = pool.start(*lease, "--max-batch", BATCH, command=self.gate.command)
        self.other = pool.start(*lease, "--max-batch", batch, command=self.other_gate.command)
        self.lane, self.other_lane = Lane(pool, self.victim), Lane(pool, self.other)
        self.asked: asyncio.Future[None]

    async def is_full(self) -> bool:
        """Whether the victim holds its max number of prompts, and its lane has more."""
        return len(self.lane.held) == 2 * BATCH and self.lane.waiting > 0

    async def is_other_full(self) -> bool:
        """Whether the other worker, if it has the batch of the victim, holds its max number of prompts."""
        return len(self.other_lane.held) == 2 * BATCH

    async def is_left(self) -> bool:
        """Whether workers have read every entry of the victim's lane."""
        return not self.lane.waiting


@asynccontextmanager
async def two_workers(pool: Pool, folder: Path, lease_s: float, batch: int = ROOMY) -> AsyncIterator[TwoWorkers]:
    """Yield two workers that hold their max number of prompts; then wait until all requests and jobs have ended."""
    workers = await asyncio.to_thread(lambda: TwoWorkers(pool, folder, lease_s, batch))
    async with pool.producer() as producer:
        workers.asked = asyncio.create_task(ask_all(producer, PROMPTS))
        await until_async(workers.is_full, "the worker's lane is full")
        yield workers
        await asyncio.wait_for(workers.asked, DEADLINE_S)
    await until_done(pool)
    assert not pool.names("*waiting*")


async def test_unread_jobs_in_the_lane_of_a_killed_worker_move_to_other_workers_after_a_lease(
    pool: Pool, tmp_path: Path
) -> None:
    async with two_workers(pool, tmp_path, lease_s=LEASE_S) as workers:
        workers.victim.end()
        # The other worker is not idle, so it takes over the lane only after the lease.
        await until_async(workers.is_left, "the lane is taken over")

        async def are_claimed() -> bool:
            return [job["times_delivered"] for job in pending(pool)].count(2) == 2 * BATCH

        await until_async(are_claimed, "those that the killed worker held")
        assert {job["times_delivered"] for job in pending(pool)} == {1, 2}, "what it was never given counts as new"
        workers.other_gate.open()
    await asyncio.to_thread(until, lambda: not workers.lane.is_there, "the lane goes")
    assert pool.redis.zscore(pool.keys.model("syn").lanes, workers.lane.worker_id) is None


async def test_an_idle_worker_takes_jobs_of_a_killed_worker_before_its_lease_expires(
    pool: Pool, tmp_path: Path
) -> None:
    async with two_workers(pool, tmp_path, lease_s=60) as workers:
        workers.victim.signal(signal.SIGSTOP)
        workers.other_gate.open()
        await until_async(workers.is_left, "the other steals what lies in the lane")
        held = workers.lane.held
        assert {job["consumer"].decode() for job in held} == {workers.lane.worker_id}
        assert len(held) == 2 * BATCH, "that is not to be stolen"

        async def is_answered() -> bool:
            return pool.jobs() == pool.held() == 2 * BATCH

        await until_async(is_answered, "all others are answered")
        workers.gate.open()
        workers.victim.signal(signal.SIGCONT)


async def test_a_frozen_worker_continues_after_its_lane_was_taken_over(pool: Pool, tmp_path: Path) -> None:
    async with two_workers(pool, tmp_path, lease_s=LEASE_S) as workers:
        workers.victim.signal(signal.SIGSTOP)
        await until_async(workers.is_left, "the lane is taken over")
        workers.other_gate.open()
        await asyncio.wait_for(asyncio.shield(workers.asked), DEADLINE_S)
        await asyncio.to_thread(until, lambda: not workers.lane.is_there, "the lane goes")
        workers.gate.open()
        workers.victim.signal(signal.SIGCONT)
        await asyncio.to_thread(until, lambda: workers.lane.is_there, "the worker has a lane again")
    async with pool.producer() as producer:
        # Clients send some of these prompts to the victim, because it computed their prefixes.
        await ask_all(producer, [[*prompt, 2] for prompt in PROMPTS])
        await ask_all(producer, [[*prompt, 2, 3] for prompt in PROMPTS])
    workers.victim.signal(signal.SIGTERM)
    assert await asyncio.to_thread(workers.victim.wait) == 0
    assert "Traceback" not in workers.victim.text


async def test_a_stopping_worker_releases_its_lane_at_once(pool: Pool, tmp_path: Path) -> None:
    # The lease is long and the other worker too busy to steal: only a closed lane can release its jobs.
    async with two_workers(pool, tmp_path, lease_s=60, batch=BATCH) as workers:
        await until_async(workers.is_other_full, "the other worker can take no more")
        shared = pool.keys.model("syn").jobs
        left = workers.lane.waiting
        workers.victim.signal(signal.SIGTERM)
        await until_async(workers.is_left, "the lane is closed")
        assert pool.redis.xlen(shared) == left
        assert len(workers.lane.held) == 2 * BATCH, "these it finishes"
        workers.other_gate.open()

        async def is_answered() -> bool:
            return pool.jobs() == pool.held() == 2 * BATCH

        await until_async(is_answered, "all others are answered")
        workers.gate.open()
        assert await asyncio.to_thread(workers.victim.wait) == 0
    assert not workers.lane.is_there


async def test_a_removed_lane_does_not_stop_its_new_worker_from_renewing_leases(pool: Pool, tmp_path: Path) -> None:
    async with two_workers(pool, tmp_path, LEASE_S) as workers:
        workers.victim.signal(signal.SIGSTOP)
        await until_async(workers.is_left, "the lane is taken over")
        # The victim continues in time to compute its prompts, which the other worker has claimed.
        workers.gate.open()
        workers.victim.signal(signal.SIGCONT)
        workers.victim.signal(signal.SIGTERM)
        assert await asyncio.to_thread(workers.victim.wait) == 0
        await asyncio.to_thread(until, lambda: not workers.lane.is_there, "the lane goes")
        gone_at = pool.redis.time()[0]

        async def leases_have_passed() -> bool:
            return bool(pool.redis.time()[0] > gone_at + 3 * LEASE_S)

        await until_async(leases_have_passed, "leases have passed")

        async def are_renewed() -> bool:
            held = pending(pool)
            return bool(held) and max(job["time_since_delivered"] for job in held) < 1000 * LEASE_S

        await until_async(are_renewed, "the new worker renews the leases")
        workers.other_gate.open()


async def test_a_server_that_loses_the_lengths_of_the_lanes_loses_no_prompt(pool: Pool, tmp_path: Path) -> None:
    """A server that is short of memory may evict this key; workers must write it again."""
    async with two_workers(pool, tmp_path, lease_s=LEASE_S) as workers:
        lanes, lengths = pool.keys.model("syn").lanes, [workers.lane.worker_id, workers.other_lane.worker_id]
        pool.redis.delete(lanes)

        async def is_counted_again() -> bool:
            counted: Any = pool.redis.zmscore(lanes, [*lengths, ""])
            return None not in counted and counted[0] + counted[1] == counted[2] == len(PROMPTS)

        await until_async(is_counted_again, "heartbeats say how long the lanes are")
        workers.gate.open()
        workers.other_gate.open()
