"""Workers move between the partitions of a model's queue, so that no partition with waiting clients stays empty."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from redis.asyncio import Redis

from lmpool.broker.scripts import REGISTER, Load, read_load
from lmpool.broker.server import Server
from lmpool.protocol.keys import GROUP
from tests.partitions.test_requests import MODEL, ask_all, until_spread, workers_in
from tests.support.gate import Gate
from tests.support.pool import Pool, until_async, until_done


async def jobs_in(pool: Pool, number: int) -> int:
    """The number of jobs in a partition."""
    client: Redis = Server(pool.url).client()
    try:
        return (await read_load(client, pool.keys.model(MODEL, number))).jobs
    finally:
        await client.aclose()


async def test_idle_workers_move_until_every_partition_has_one(pool: Pool) -> None:
    for _ in range(3):
        pool.start("--partitions", 1, "--lease-s", 1)
    pool.start("--partitions", 3, "--lease-s", 1)

    async def is_spread() -> bool:
        counts = await workers_in(pool, 0, 1, 2)
        return min(counts) >= 1 and sum(counts) == 4  # For a moment, a worker that moves counts in no partition.

    await until_async(is_spread, "every partition has a worker, and no worker is lost")
    assert all(worker.is_running for worker in pool.workers)


async def test_jobs_of_a_partition_whose_only_worker_was_killed_are_computed_by_another_worker(
    pool: Pool, tmp_path: Path
) -> None:
    gate, options = Gate(tmp_path / "gate"), ("--partitions", 2, "--lease-s", 1, "--step-ms", 100, "--max-batch", 4)
    workers = [pool.start(*options, command=gate.command) for _ in range(2)]
    await until_spread(pool, 1, 1)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, [[i] for i in range(120)]))

        async def has_jobs() -> bool:
            return await jobs_in(pool, 1) > 8

        await until_async(has_jobs, "prompts wait in the second partition")
        workers[1].signal(signal.SIGKILL)
        gate.open()
        await asked
        # The jobs that the killed worker left are ended too: by its successor, or because no client waits for them.
        await ask_all(producer, [[7, i] for i in range(20)])


async def test_a_worker_moves_to_jobs_in_a_partition_without_workers(pool: Pool) -> None:
    """A client whose view is old has sent prompts to a partition that its last worker has just left."""
    pool.start("--partitions", 2, "--lease-s", 1)
    await until_spread(pool, 1, 0)
    async with pool.producer() as producer:
        await ask_all(producer, [[1]])
        partitions = producer._sessions.session._connections.partitions  # type: ignore[union-attr]
        second = partitions[partitions.current[1].number]
        second.load = second.load._replace(workers=1)
        asked = asyncio.create_task(ask_all(producer, [[2, i] for i in range(40)]))

        async def is_empty() -> bool:
            return asked.done() and await jobs_in(pool, 1) == 0

        await until_async(is_empty, "the worker has moved to the jobs in the second partition")
        await asked
    pool.workers[0].until_says("moved from partition 0 of the queue to partition 1")
    await until_done(pool)


async def test_a_worker_that_drains_does_not_serve_its_partition(pool: Pool) -> None:
    keys, client = pool.keys.model(MODEL), Server(pool.url).client()
    try:
        await client.xgroup_create(keys.jobs, GROUP, mkstream=True)
        registered = [keys.workers, keys.jobs, keys.capacity, keys.lanes, keys.lane("w")]
        for batch, load in ((4, Load(1, 4, 0)), (0, Load(0, 0, 0))):
            await REGISTER(client, registered, ["w", 60_000, 60_000, GROUP, batch])
            assert await read_load(client, keys) == load
    finally:
        await client.aclose()


async def test_a_model_gets_fewer_partitions_when_its_workers_have_stopped(pool: Pool) -> None:
    for _ in range(2):
        pool.start("--partitions", 2)
    for worker in pool.workers:
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(worker.wait)
    pool.start("--partitions", 1)
    async with pool.producer() as producer:
        await ask_all(producer, [[1]])
        assert producer.model.partitions == (0,)
