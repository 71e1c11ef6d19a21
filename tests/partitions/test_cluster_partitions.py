"""On a cluster, a queue has a partition on each master; masters restart without data, and freeze for a while."""

from __future__ import annotations

import asyncio
import signal

import pytest
import redis

from lmpool.broker.server import Server
from lmpool.protocol.keys import Keys
from lmpool.workers.membership.partitions import grown
from tests.partitions.test_requests import MODEL, ask_all
from tests.support.pool import DEADLINE_S, Pool
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.cluster_fixtures import cluster_pool, local_cluster  # noqa: F401


def queues_on(cluster: LocalCluster, pool: Pool) -> list[int]:
    """The number of job streams of the model on each master."""
    counts = []
    for port in cluster.ports:
        with redis.Redis(port=port) as node:
            counts.append(len(list(node.scan_iter(match=f"{pool.prefix}:{{{MODEL}*:jobs", count=1000))))
    return counts


async def test_each_master_has_a_partition_that_a_worker_serves(cluster: LocalCluster, pool: Pool) -> None:
    for _ in range(3):
        pool.start("--lease-s", 5)
    async with pool.producer() as producer:
        await ask_all(producer, [[i, j] for i in range(15) for j in range(20)])
    assert queues_on(cluster, pool) == [1, 1, 1]


@pytest.mark.parametrize("count", [2, 3, 6, 7])
async def test_partitions_spread_over_the_masters(cluster: LocalCluster, count: int) -> None:
    server, keys = Server(cluster.url), Keys("lmpool")
    numbers = await grown(server, keys, MODEL, (0,), count)
    places = [await server.at(keys.model(MODEL, number).jobs) for number in numbers]
    counts = [places.count(master) for master in await server.masters()]
    assert len(numbers) == count
    assert max(counts) - min(counts) <= 1
    assert await grown(server, keys, MODEL, numbers[:2], count) == numbers, "a partition keeps its number"


async def test_requests_survive_the_loss_of_one_partition(cluster: LocalCluster, pool: Pool) -> None:
    """Each master restarts without its data while prompts wait in all partitions."""
    for _ in range(3):
        pool.start("--step-ms", 100, "--max-batch", 8, "--lease-s", 2)
    async with pool.producer(when_absent="wait") as producer:
        for number in range(len(cluster.ports)):
            asked = asyncio.create_task(ask_all(producer, [[number, i] for i in range(240)]))
            await asyncio.wait([asked], timeout=0.3)
            await asyncio.to_thread(cluster.restart, number)
            await asyncio.wait_for(asked, DEADLINE_S)


async def test_requests_survive_a_master_that_is_frozen_for_longer_than_a_lease(
    cluster: LocalCluster, pool: Pool
) -> None:
    for _ in range(3):
        pool.start("--step-ms", 100, "--max-batch", 8, "--lease-s", 1)
    async with pool.producer(when_absent="wait") as producer:
        for number in range(len(cluster.ports)):
            asked = asyncio.create_task(ask_all(producer, [[10 + number, i] for i in range(240)]))
            await asyncio.wait([asked], timeout=0.3)
            cluster.signal(number, signal.SIGSTOP)
            await asyncio.wait([asked], timeout=3)
            cluster.signal(number, signal.SIGCONT)
            await asyncio.wait_for(asked, DEADLINE_S)
