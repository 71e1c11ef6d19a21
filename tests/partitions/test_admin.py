"""Operators see one queue per model: counts, cleared prompts, dead letters and the demand include all partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from lmpool.admin.queue import DeadLetters, clear_queue, count_queue
from lmpool.broker.server import Server
from lmpool.errors import QueueCleared
from lmpool.producer.client.discovery import Discovery
from lmpool.web.app import read_demand
from tests.partitions.test_requests import MODEL
from tests.support.pool import Pool, until_async


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[Redis]:
    client: Redis = Server(pool.url).client()
    yield client
    await client.aclose()


async def test_the_queue_is_counted_and_cleared_in_all_partitions(pool: Pool, client: Redis) -> None:
    for _ in range(2):
        pool.start("--partitions", 2, "--lease-s", 20, "--step-ms", 1000, "--max-batch", 1)
    partitions = await Discovery(client, pool.keys).partitions(MODEL)
    async with pool.producer() as producer:
        asked = [asyncio.create_task(producer.logprobs([4, i])) for i in range(60)]

        async def are_queued() -> bool:
            parts: list[int] = [(await count_queue(client, [keys]))["queued"] for keys in partitions]
            return min(parts) >= 10 and sum(parts) >= 50

        await until_async(are_queued, "prompts wait in both partitions")
        counted = await count_queue(client, partitions)
        assert counted["queued"] >= 40
        demand = await read_demand(client, pool.keys, MODEL)
        assert demand.workers == 2
        assert demand.queued >= 40
        cleared = await clear_queue(client, partitions, MODEL, lease_s=20)
        assert cleared.removed >= 40
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(end, QueueCleared) for end in ends) == cleared.removed


async def test_dead_letters_of_all_partitions_are_listed_by_time_and_dropped(pool: Pool, client: Redis) -> None:
    pool.start("--partitions", 2)
    partitions = await Discovery(client, pool.keys).partitions(MODEL)
    for number in range(6):
        await client.xadd(partitions[number % 2].dead, {"m": b"job", "e": b"why"}, id=f"{1000 + number}-0")
    letters = DeadLetters(client, *partitions)
    assert [letter.entry for letter in await letters.newest(4)] == ["1005-0", "1004-0", "1003-0", "1002-0"]
    assert len([letter async for letter in letters.oldest_first()]) == await letters.count() == 6
    (letter,) = await letters.find(["1005"])
    await client.xadd(partitions[0].dead, {"m": b"job", "e": b"why"}, id="1005-0")  # The same id in two partitions.
    assert await letters.drop([letter]) == 1
    assert await letters.drop_all() == 6
