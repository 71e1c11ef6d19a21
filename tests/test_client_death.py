"""Clients die, give up and lose patience: what they had asked for costs others as little as it can."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from lmpool.errors import DeadlineExceeded, LMPoolError
from lmpool.producer import outbox
from lmpool.prompts import digest_of
from lmpool.rows import RowBlock
from lmpool.server import Server
from lmpool.synthetic import synthetic_row
from lmpool.workers.backend import BackendJob, Finished
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.pool import Pool, Prepared, V, is_held, until, until_async

QUEUED = 400
SLOW = ("--lease-s", 1, "--step-ms", 100, "--max-batch", 4)
"""40 rows a second."""

CLIENT = """
import asyncio, sys
from lmpool.producer import Producer, outbox

outbox._LEAST_PATIENCE_S = float(sys.argv[5])

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
        count: for how many.
        patience_s: for how long after its deadline it is believed to wait.
    """

    def __init__(self, pool: Pool, timeout_s: float, count: int = QUEUED, patience_s: float = 5.0) -> None:
        words = [pool.url, pool.prefix, str(timeout_s), str(count), str(patience_s)]
        self.process = subprocess.Popen([sys.executable, "-c", CLIENT, *words], stderr=subprocess.DEVNULL)
        until(lambda: len(pool.names("*waiting*")) > count * 0.8, "most of its prompts are queued")

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
    clients.append(await asyncio.to_thread(ClientProcess, pool, 2, QUEUED, 1))
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


async def test_what_a_dead_worker_held_for_clients_that_have_gone_is_not_computed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_LEAST_PATIENCE_S", 1.0)
    worker = pool.start("--step-ms", 60_000, "--lease-s", 1)
    async with pool.producer(timeout=2) as producer:
        asked = [asyncio.create_task(producer.logprobs([i])) for i in range(20)]
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        worker.signal(signal.SIGSTOP)  # It would let go of them itself.
        assert all(isinstance(one, LMPoolError) for one in await asyncio.gather(*asked, return_exceptions=True))
    worker.signal(signal.SIGKILL)
    worker.wait()
    await until_async(lambda: _queued_at_most(pool, 0), "what tells that somebody waits has expired")
    assert pool.jobs() > 0
    await asyncio.to_thread(pool.start, "--lease-s", 1)
    await until_async(lambda: is_empty(pool), "what the dead worker held is dropped")
    assert not pool.names("row:*")


class Gated(SyntheticBackend):
    """A backend that ends no step before its gate is open."""

    def __init__(self) -> None:
        super().__init__(SyntheticSettings("syn", vocab_size=V, max_batch=8))
        self.gate = threading.Event()
        self.is_stepping = threading.Event()
        self.computed: list[bytes] = []

    def step(self) -> Finished:
        self.is_stepping.set()
        self.gate.wait()
        return super().step()

    def _draw(self, jobs: dict[bytes, BackendJob]) -> RowBlock:
        self.computed += [job.ids for job in jobs.values()]
        return super()._draw(jobs)


@asynccontextmanager
async def gated_worker(pool: Pool, backend: Gated) -> AsyncIterator[None]:
    """A worker in this process, whose backend's gate is open in the end."""
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(pool.prefix, lease_s=0.5))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    try:
        await asyncio.wait_for(ready.wait(), 10)
        yield
    finally:
        backend.gate.set()
        worker.stop()
        await asyncio.wait_for(running, 20)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "gives up"])
async def test_what_a_worker_holds_for_a_client_that_has_gone_is_not_computed(
    pool: Pool, clients: list[ClientProcess], is_killed: bool
) -> None:
    gated = Gated()
    async with gated_worker(pool, gated), pool.producer("syn", timeout=60) as producer:
        asked = [asyncio.ensure_future(producer.logprobs([7]))]
        assert await asyncio.to_thread(gated.is_stepping.wait, 10)
        clients.append(await asyncio.to_thread(ClientProcess, pool, 1, 3, 1))
        if is_killed:
            clients[0].kill()
        # One of its prompts is another client's too.
        ours = [[7], [1, 0, 2], [8]]
        asked += [asyncio.ensure_future(producer.logprobs(prompt)) for prompt in ours[1:]]
        await until_async(lambda: _holds_just(pool, ours), "what only the other client asked for is let go")
        ours.append([1, 0, 0])
        asked.append(asyncio.ensure_future(producer.logprobs(ours[-1])))
        await until_async(lambda: _holds_just(pool, ours), "one is asked for again")
        gated.gate.set()
        for prompt, row in zip(ours, await asyncio.gather(*asked), strict=True):
            assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))
    assert sorted(gated.computed) == sorted(_ids(prompt) for prompt in ours)
    assert await is_empty(pool)


def _ids(prompt: list[int]) -> bytes:
    return np.array(prompt, "<u4").tobytes()


async def _holds_just(pool: Pool, prompts: list[list[int]]) -> bool:
    """Whether these are waited for and held, and no others."""
    prefix = pool.keys.model("syn").waiting
    found = set(pool.redis.scan_iter(match=prefix + b"*", count=1000))
    return pool.held() == len(prompts) and found == {prefix + digest_of(_ids(prompt), "") for prompt in prompts}


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
