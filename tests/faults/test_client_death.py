"""Clients crash, cancel requests and miss deadlines: other clients barely wait for the abandoned prompts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmpool.errors import DeadlineExceeded
from lmpool.producer import Producer
from lmpool.protocol.job import digest_of
from lmpool.synthetic import synthetic_row
from lmpool.workers.queue import jobs
from tests.support.gate import Gate, GatedBackend, gated_worker, until_full
from tests.support.pool import DEADLINE_S, Pool, V, count_waiting, until, until_async
from tests.support.servers.clocks import SetClock

QUEUED = 400
PATIENCE_S = 60.0
AFTER = "+5m"
"""Step of the server's clock after which requests with a timeout of `PATIENCE_S` have expired."""

CLIENT = """
import asyncio, sys
from lmpool.producer import Producer

async def ask(url, prefix, timeout, count):
    async with Producer("syn", redis=url, prefix=prefix, timeout=timeout) as producer:
        await asyncio.gather(*(producer.logprobs([1, i // 500, i % 500]) for i in range(count)))

asyncio.run(ask(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
"""


class ClientProcess:
    """A client process that requests many prompts concurrently; the constructor waits until they are queued.

    Args:
        pool: pool to which the client connects.
        count: number of prompts that the client requests.
    """

    def __init__(self, pool: Pool, count: int = QUEUED) -> None:
        words = [pool.url, pool.prefix, str(PATIENCE_S), str(count)]
        all_of_them = pool.jobs() + count
        self.process = subprocess.Popen([sys.executable, "-c", CLIENT, *words], stderr=subprocess.DEVNULL)
        until(lambda: pool.jobs() == all_of_them, "all of its prompts are queued")

    def kill(self) -> None:
        """Kill the client process."""
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Send SIGINT to the client process, like Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


@pytest.fixture
def clients() -> Iterator[list[ClientProcess]]:
    """List for client processes; the test's end kills the clients in it."""
    started: list[ClientProcess] = []
    yield started
    for client in started:
        client.kill()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A gate at which the steps of a test's workers wait until it opens."""
    return Gate(tmp_path / "gate")


async def is_empty(pool: Pool) -> bool:
    """Whether the model's queue is empty."""
    return pool.jobs() == 0 and not pool.names("*waiting*")


async def is_right(producer: Producer, prompt: list[int]) -> bool:
    """Request a prompt; return whether the row is right."""
    return np.array_equal(await producer.logprobs(prompt), synthetic_row(prompt, vocab_size=V))


async def test_a_killed_client_costs_at_most_the_prompts_that_it_had_queued(
    pool: Pool, clients: list[ClientProcess], gate: Gate
) -> None:
    backend = GatedBackend(gate)
    async with gated_worker(pool, backend), pool.producer() as producer:
        clients.append(await asyncio.to_thread(ClientProcess, pool))
        clients[0].kill()
        gate.open()
        assert await is_right(producer, [7])
        await until_async(lambda: is_empty(pool), "its prompts are done with")
    assert len(backend.computed) == len(set(backend.computed)) <= QUEUED + 1
    for name in pool.names("*reply*"):
        assert 0 < pool.redis.ttl(name) <= 120


async def test_prompts_of_a_killed_client_expire_at_their_deadline(
    clocked: tuple[Pool, SetClock], clients: list[ClientProcess], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, set_clock = clocked
    backend = GatedBackend(gate)
    monkeypatch.setattr(jobs, "STALE_S", -1.0)  # Treat every entry as old: the worker's own clock does not jump.
    async with gated_worker(pool, backend), pool.producer() as producer:
        clients.append(await asyncio.to_thread(ClientProcess, pool))
        await until_full(pool, backend.batch)
        held = pool.held()
        clients[0].kill()
        waiting = list(pool.redis.scan_iter(f"{pool.prefix}:*waiting*", 1000))
        assert len(waiting) == QUEUED
        assert all(0 < pool.redis.pttl(key) <= 1000 * (PATIENCE_S + 10) for key in waiting)
        await asyncio.to_thread(set_clock, AFTER)
        assert not pool.names("*waiting*")
        gate.open()
        await until_async(lambda: is_empty(pool), "its prompts are done with")
        assert await is_right(producer, [7])
    assert len(backend.computed) <= held + 1, "what the worker held, and nothing more"


async def test_requests_are_removed_from_the_queue_at_their_deadline(pool: Pool, gate: Gate) -> None:
    backend = GatedBackend(gate)
    async with gated_worker(pool, backend), pool.producer() as producer:
        asked = [producer.logprobs([i // 500, i % 500], timeout=0.7) for i in range(QUEUED)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}
        await until_async(lambda: is_empty(pool), "nothing is queued")
        gate.open()
        assert await is_right(producer, [7, 7, 7])
    assert len(backend.computed) <= 2 * backend.batch + 1, "what the worker held, and nothing more"


async def test_prompts_of_a_dead_worker_and_closed_clients_are_not_computed(
    clocked: tuple[Pool, SetClock], clients: list[ClientProcess]
) -> None:
    pool, set_clock = clocked
    worker = await asyncio.to_thread(pool.start, "--step-ms", 600_000, "--lease-s", 10)
    clients.append(await asyncio.to_thread(ClientProcess, pool, 20))
    await until_async(lambda: _holds(pool, 20), "the worker holds them all")
    worker.end()
    clients[0].kill()
    await asyncio.to_thread(set_clock, AFTER)
    assert not pool.names("*waiting*"), "what tells that somebody waits has expired"
    assert pool.held() == 20
    await asyncio.to_thread(pool.start, "--lease-s", 1)
    await until_async(lambda: is_empty(pool), "what the dead worker held is dropped")
    assert not pool.names("row:*")


async def _holds(pool: Pool, count: int) -> bool:
    return pool.held() == count


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "gives up"])
async def test_prompts_in_flight_of_a_closed_client_are_not_computed(
    clocked: tuple[Pool, SetClock], clients: list[ClientProcess], gate: Gate, is_killed: bool
) -> None:
    pool, set_clock = clocked
    backend = GatedBackend(gate)
    # These requests have a long timeout, so they do not expire when the clock is set forward.
    async with gated_worker(pool, backend), pool.producer("syn", timeout=3000) as producer:
        asked = [asyncio.ensure_future(producer.logprobs([7]))]
        assert await asyncio.to_thread(backend.is_stepping.wait, DEADLINE_S)
        clients.append(await asyncio.to_thread(ClientProcess, pool, 3))
        # Both clients request the prompt [1, 0, 2].
        prompts = [[7], [1, 0, 2], [8]]
        asked += [asyncio.ensure_future(producer.logprobs(prompt)) for prompt in prompts[1:]]
        await until_async(lambda: _holds(pool, 5), "all are held")
        await until_async(lambda: _are_two(pool, [1, 0, 2]), "both wait for one of them")
        if is_killed:
            clients[0].kill()
            await asyncio.to_thread(set_clock, AFTER)
        else:
            clients[0].interrupt()
        await until_async(lambda: _holds_just(pool, prompts), "what only the other client asked for is let go")
        prompts.append([1, 0, 0])
        asked.append(asyncio.ensure_future(producer.logprobs(prompts[-1])))
        await until_async(lambda: _holds_just(pool, prompts), "one is asked for again")
        gate.open()
        for prompt, row in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))
    assert sorted(backend.computed) == sorted(_ids(prompt) for prompt in prompts)
    assert await is_empty(pool)


def _ids(prompt: list[int]) -> bytes:
    return np.array(prompt, "<u4").tobytes()


async def _are_two(pool: Pool, prompt: list[int]) -> bool:
    """Whether two clients wait for a prompt."""
    return count_waiting(pool.redis, pool.keys.model("syn").waiting + digest_of(_ids(prompt), "")) == 2


async def _holds_just(pool: Pool, prompts: list[list[int]]) -> bool:
    """Whether exactly these prompts have waiting clients and are held by the worker."""
    prefix = pool.keys.model("syn").waiting
    keys = set(pool.redis.scan_iter(match=prefix + b"*", count=1000))
    return pool.held() == len(prompts) and keys == {prefix + digest_of(_ids(prompt), "") for prompt in prompts}


async def test_a_closed_client_leaves_nothing_in_the_queue(pool: Pool, gate: Gate) -> None:
    async with gated_worker(pool, GatedBackend(gate)):
        async with pool.producer() as producer:
            asked = [asyncio.ensure_future(producer.logprobs([i // 500, i % 500])) for i in range(QUEUED)]
            await until_async(lambda: _are_queued(pool, QUEUED), "they are queued")
        assert len(await asyncio.gather(*asked, return_exceptions=True)) == QUEUED
        await until_async(lambda: is_empty(pool), "nothing is queued")
    assert not pool.names("*reply*")


async def _are_queued(pool: Pool, count: int) -> bool:
    return pool.jobs() == count
