"""Helpers that send trie requests of all kinds, and read the counters of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from lmpool.admin.heartbeats import read_heartbeats
from lmpool.broker.scripts import read_alive
from lmpool.broker.server import Server
from lmpool.producer import Producer
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.query import Op
from lmpool.protocol.row import Values
from tests.support.pool import Pool, until, until_async
from tests.support.trie_answers import (
    answers_of,
)

V = 2048
LEASE = ("--lease-s", 2)


async def ask(trie: PooledTrie, op: Op, ws: Values | None = None, **options: Any) -> Values:
    """Send one trie request, and return the values."""
    call = {"sum": trie.weight_sum, "max": trie.weight_max, "logsumexp": trie.logsumexp}[op]
    return await call(ws, **options)


async def ask_batch(trie: PooledTrie, op: Op, ws: Values | None = None, **options: Any) -> Values:
    """Send one trie request for a batch of weights, and return the values."""
    calls = {"sum": trie.batch_weight_sum, "max": trie.batch_weight_max, "logsumexp": trie.batch_logsumexp}
    return await calls[op](ws, **options)


def selections(trie: PooledTrie) -> list[tuple[dict[str, Any], Any]]:
    """Options that select nodes of a trie, each with the index of the selected nodes in an array of all values."""
    told = answers_of(trie.structure)
    some = [len(told.node) - 1, 0, 5, 5, 17]
    fan = max(told.node, key=lambda prefix: len(told.children[told.node[prefix]]) * (len(prefix) > 0))
    leaf = next(prefix for prefix, node in told.node.items() if not told.children[node])
    return [
        ({}, slice(None)),
        ({"nodes": some}, some),
        ({"nodes": np.array(some, np.uint8 if max(some) < 256 else np.int64)}, some),
        ({"nodes": []}, []),
        ({"under": b""}, told.children[0]),
        ({"under": fan}, told.children[told.node[fan]]),
        ({"under": leaf}, []),
    ]


async def _only_worker(client: Redis, pool: Pool, model: str) -> Any:
    """The last heartbeat of a model's only worker; waits for the heartbeat of a worker that was frozen for a lease."""

    async def live() -> Any:
        names = (await read_alive(client, pool.keys.model(model), names=True)).names
        return await read_heartbeats(client, pool.keys, names)

    (worker,) = await until_async(live, f"a worker of {model!r} is live")
    return worker


async def counters(pool: Pool, model: str) -> dict[str, int]:
    """Counters of steps, rows and failures of a model's only live worker, from its last heartbeat."""
    client = Server(pool.url).client()
    try:
        worker = await _only_worker(client, pool, model)
        return {name: int(worker.fields[name]) for name in ("steps", "rows", "failures")}
    finally:
        await client.aclose()


async def current(pool: Pool, model: str) -> dict[str, int]:
    """The counters of the worker's second heartbeat from now, which include all work so far.

    The first heartbeat may be on its way already, with counters that were read earlier.
    """
    client = Server(pool.url).client()
    try:
        key = pool.keys.worker((await _only_worker(client, pool, model)).worker_id)
        left = await client.pttl(key)

        async def has_reported() -> bool:
            nonlocal left
            before, left = left, await client.pttl(key)
            return left > before

        for _ in range(2):
            await until_async(has_reported, "a heartbeat")
    finally:
        await client.aclose()
    return await counters(pool, model)


async def keep(producer: Producer, prompt: list[int]) -> None:
    """Have a producer cache a row: it caches a row from shared memory at its second use."""
    for _ in range(2):
        await producer.logprobs(prompt)


@pytest.fixture(name="fused", scope="module")
def fused_fixture(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with one model worker that answers trie queries itself, and no trie worker."""
    pool = Pool(server_url, "fused", tmp_path_factory.mktemp("fused"))
    worker = pool.start(*LEASE, "--vocab-size", V, "--with-trie")
    # Rows of queries are kept in shared memory only.
    until(lambda: "shared memory of" in worker.text, "the worker has shared memory")
    yield pool
    pool.end()
