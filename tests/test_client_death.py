"""Clients die, give up and lose patience: what they had asked for costs others as little as it can."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from lmpool.errors import DeadlineExceeded, LMPoolError
from lmpool.synthetic import synthetic_row
from tests.pool import Pool, V, is_held, until, until_async

QUEUED = 400
SLOW = ("--lease-s", 1, "--step-ms", 100, "--max-batch", 4)
"""40 rows a second."""

CLIENT = """
import asyncio, sys
from lmpool.producer import Producer

async def ask(url, prefix, timeout, count):
    async with Producer("syn", redis=url, prefix=prefix, timeout=timeout) as producer:
        await asyncio.gather(*(producer.logprobs([1, i // 500, i % 500]) for i in range(count)))

asyncio.run(ask(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
"""


class ClientProcess:
    """A client that asks for many prompts at once.

    Args:
        pool: whom it asks.
        timeout_s: its deadline.
    """

    def __init__(self, pool: Pool, timeout_s: float) -> None:
        words = [pool.url, pool.prefix, str(timeout_s), str(QUEUED)]
        self.process = subprocess.Popen([sys.executable, "-c", CLIENT, *words], stderr=subprocess.DEVNULL)
        until(lambda: len(pool.names("*waiting*")) > QUEUED * 0.8, "most of its prompts are queued")

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def clients() -> Iterator[list[ClientProcess]]:
    """Clients that are ended with the test."""
    started: list[ClientProcess] = []
    yield started
    for client in started:
        client.kill()


async def is_empty(pool: Pool) -> bool:
    """Whether nothing is queued."""
    return pool.jobs() == 0 and not pool.names("*waiting*")


async def test_a_killed_client_costs_at_most_what_it_had_queued(pool: Pool, clients: list[ClientProcess]) -> None:
    pool.start("--lease-s", 2, "--step-ms", 10, "--max-batch", 16)
    clients.append(await asyncio.to_thread(ClientProcess, pool, 60))
    clients[0].kill()
    async with pool.producer(timeout=20) as producer:
        assert np.array_equal(await producer.logprobs([7]), synthetic_row([7], vocab_size=V))
        await until_async(lambda: is_empty(pool), "its prompts are done with")
    await until_async(lambda: _computed(pool, 1), "the heartbeat counts")
    assert await pool.rows_computed() <= QUEUED + 1
    for name in pool.names("*reply*"):
        assert 0 < pool.redis.ttl(name) <= 120


async def _computed(pool: Pool, least: int) -> bool:
    return await pool.rows_computed() >= least


async def test_what_a_killed_client_had_queued_expires_with_its_deadline(
    pool: Pool, clients: list[ClientProcess]
) -> None:
    pool.start(*SLOW)
    clients.append(await asyncio.to_thread(ClientProcess, pool, 2))
    clients[0].kill()
    waiting = pool.names("*waiting*")
    raw = list(pool.redis.scan_iter(f"{pool.prefix}:*waiting*", 1000))
    assert waiting
    assert all(pool.redis.pttl(key) <= 10_000 for key in raw)
    await until_async(lambda: is_empty(pool), "its prompts are done with")
    async with pool.producer(timeout=20) as producer:
        assert np.array_equal(await producer.logprobs([7]), synthetic_row([7], vocab_size=V))
        await until_async(lambda: _computed(pool, 1), "the heartbeat counts")
        assert await pool.rows_computed() < QUEUED * 0.9


async def test_requests_whose_deadline_has_passed_are_taken_out_of_the_queue(pool: Pool) -> None:
    pool.start("--step-ms", 500, "--max-batch", 4)
    async with pool.producer(timeout=20) as producer:
        asked = [producer.logprobs([i // 500, i % 500], timeout=0.7) for i in range(QUEUED)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        late = sum(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
        assert QUEUED - 20 <= late <= QUEUED
        # What the worker holds already is at most what it has room for.
        assert np.array_equal(await producer.logprobs([7]), synthetic_row([7], vocab_size=V))
        await until_async(lambda: is_empty(pool), "nothing is queued")
        assert await pool.rows_computed() <= 40


async def test_what_a_dead_worker_held_for_clients_that_have_gone_is_not_computed(pool: Pool) -> None:
    worker = pool.start("--step-ms", 60_000, "--lease-s", 1)
    async with pool.producer(timeout=2) as producer:
        asked = [asyncio.create_task(producer.logprobs([i])) for i in range(20)]
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        assert all(isinstance(one, LMPoolError) for one in await asyncio.gather(*asked, return_exceptions=True))
    worker.signal(signal.SIGKILL)
    worker.wait()
    await until_async(lambda: _queued_at_most(pool, 0), "what tells that somebody waits has expired")
    assert pool.jobs() > 0
    await asyncio.to_thread(pool.start, "--lease-s", 1)
    await until_async(lambda: is_empty(pool), "what the dead worker held is dropped")
    assert not pool.names("row:*")


async def test_a_closed_client_leaves_nothing_in_the_queue(pool: Pool) -> None:
    pool.start("--step-ms", 500, "--max-batch", 4)
    async with pool.producer(timeout=20) as producer:
        asked = [asyncio.ensure_future(producer.logprobs([i // 500, i % 500])) for i in range(QUEUED)]
        await until_async(lambda: _queued(pool, QUEUED // 2), "they are queued")
    assert len(await asyncio.gather(*asked, return_exceptions=True)) == QUEUED
    await until_async(lambda: is_empty(pool), "nothing is queued")
    assert not pool.names("*reply*")


async def _queued_at_most(pool: Pool, most: int) -> bool:
    return len(pool.names("*waiting*")) <= most


async def _queued(pool: Pool, least: int) -> bool:
    return len(pool.names("*waiting*")) >= least
