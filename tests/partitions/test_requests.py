"""A model's queue in several partitions: rows come back from each, and clients meet in one partition per prompt."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from lmpool.admin.heartbeats import read_heartbeats
from lmpool.broker import scripts
from lmpool.broker.scripts import Load, read_alive, read_loads
from lmpool.broker.server import Server
from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, V, until_async

MODEL = "syn"


async def ask_all(producer: Producer, prompts: list[list[int]]) -> None:
    """Request many prompts at once and check every value."""
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, got in zip(prompts, rows, strict=True):
        assert np.array_equal(got, synthetic_row(prompt, vocab_size=V))


async def workers_in(pool: Pool, *numbers: int) -> list[int]:
    """The number of live workers in each partition."""
    client: Redis = Server(pool.url).client()
    try:
        loads = await read_loads(client, [pool.keys.model(MODEL, number) for number in numbers])
        return [load.workers for load in loads if isinstance(load, Load)]
    finally:
        await client.aclose()


async def until_spread(pool: Pool, *counts: int) -> None:
    """Wait until each partition has this number of live workers: a worker that was blocked for a lease is not live."""

    async def is_spread() -> bool:
        return tuple(await workers_in(pool, *range(len(counts)))) == counts

    await until_async(is_spread, f"the partitions have {counts} workers")


async def rows_of(pool: Pool, *numbers: int) -> list[int]:
    """The number of rows that the workers of each partition have computed, from their heartbeats."""
    client: Redis = Server(pool.url).client()
    try:
        counts = list[int]()
        for number in numbers:
            names = (await read_alive(client, pool.keys.model(MODEL, number), names=True)).names
            beats = await read_heartbeats(client, pool.keys, names)
            counts.append(sum(int(worker.fields["rows"]) for worker in beats))
        return counts
    finally:
        await client.aclose()


async def test_workers_spread_over_the_partitions_and_all_of_them_compute(pool: Pool) -> None:
    for _ in range(3):
        pool.start("--partitions", 3, "--lease-s", 8)  # Clients send no prompts to a worker that missed a lease.
    await until_spread(pool, 1, 1, 1)
    async with pool.producer() as producer:
        await ask_all(producer, [[i, j] for i in range(20) for j in range(20)])

    async def counted() -> bool:
        return sum(await rows_of(pool, 0, 1, 2)) >= 400

    await until_async(counted, "the heartbeats count the rows")
    counts = await rows_of(pool, 0, 1, 2)
    assert all(count >= 60 for count in counts), counts


async def test_clients_that_choose_at_the_same_moment_meet_in_one_partition(pool: Pool) -> None:
    """Twelve clients, each with its own homes, request the same prompts: each prompt is computed once."""
    for _ in range(4):
        pool.start("--partitions", 4, "--lease-s", 20, "--step-ms", 20)
    producers = [pool.producer(cache_bytes=0) for _ in range(12)]
    try:
        # Each client first computes the beginnings of the prompts in an order of its own, and records other homes.
        for number, producer in enumerate(producers):
            await ask_all(producer, [[number, i] for i in range(40)])
        own = sum(await rows_of(pool, 0, 1, 2, 3))
        shared = [[500, i, j] for i in range(8) for j in range(25)]
        homed = [[number, i, 7] for i in range(40) for number in range(12)]
        await asyncio.gather(*(ask_all(producer, shared + homed) for producer in producers))

        async def counted() -> bool:
            return sum(await rows_of(pool, 0, 1, 2, 3)) >= 480 + 200 + 480

        await until_async(counted, "the heartbeats count the rows")
        assert own <= 480
        assert sum(await rows_of(pool, 0, 1, 2, 3)) == 480 + 200 + 480
    finally:
        for producer in producers:
            await producer.close()


async def test_a_reply_to_another_command_is_no_partition(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a faulty proxy has lost a whole reply: the client sends the prompts on a new connection."""
    for _ in range(2):
        pool.start("--partitions", 2)
    await until_spread(pool, 1, 1)
    meet, wrong = scripts.Script.on, list[object]()

    async def on(script: scripts.Script, *args: Any) -> Any:
        reply = await meet(script, *args)
        if script is scripts.MEET:
            wrong.append(reply)
            return [[number] for number in reply]
        return reply

    monkeypatch.setattr(scripts.Script, "on", on)
    async with pool.producer(cache_bytes=0) as producer:
        await ask_all(producer, [[i] for i in range(20)])
        await ask_all(producer, [[i, 7] for i in range(20)])
    assert wrong


async def test_a_worker_with_more_partitions_adds_them_while_clients_and_workers_run(pool: Pool) -> None:
    pool.start("--partitions", 1, "--lease-s", 2)
    async with pool.producer() as producer:
        await ask_all(producer, [[1, i] for i in range(50)])
        pool.start("--partitions", 2, "--lease-s", 2)
        await until_spread(pool, 1, 1)
        numbers = itertools.count()

        async def is_used() -> bool:
            begin = next(numbers)
            await ask_all(producer, [[2, begin % 500, begin // 500, i] for i in range(20)])
            return (await rows_of(pool, 1))[0] > 0

        await until_async(is_used, "the client sends prompts to the new partition")


async def test_an_aborted_request_is_cancelled_in_its_partition(pool: Pool) -> None:
    for _ in range(2):
        pool.start("--partitions", 2, "--lease-s", 5, "--step-ms", 1000, "--max-batch", 1)
    async with pool.producer() as producer:
        asked = [asyncio.create_task(producer.logprobs([3, i])) for i in range(60)]
        keys = [pool.keys.model(MODEL, number) for number in (0, 1)]

        async def queued() -> int:
            client: Redis = Server(pool.url).client()
            try:
                return sum(load.jobs for load in await read_loads(client, keys) if isinstance(load, Load))
            finally:
                await client.aclose()

        async def is_queued() -> bool:
            return await queued() >= 40

        await until_async(is_queued, "the prompts are queued")
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

        async def is_empty() -> bool:
            return await queued() == 0

        await until_async(is_empty, "no job is left in any partition")
