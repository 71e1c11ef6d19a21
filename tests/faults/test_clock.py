"""The server's clock jumps while requests run, as after its machine was suspended: all requests return rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import Pool, V, is_held, pending, until_async
from tests.support.servers.clocks import SetClock

OPTIONS = ("--lease-s", 2, "--max-batch", 8)


async def ask(producer: Producer, start: int) -> None:
    """Request 100 prompts and check every value."""
    prompts = [[start, number] for number in range(100)]
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, row in zip(prompts, rows, strict=True):
        assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))


@pytest.mark.parametrize("by", ["+5s", "+1d", "-5s", "-1d"])
async def test_requests_succeed_when_the_clock_is_set(clocked: tuple[Pool, SetClock], by: str, tmp_path: Path) -> None:
    (pool, set_clock), gate = clocked, Gate(tmp_path / "gate")
    await asyncio.to_thread(lambda: pool.start(*OPTIONS, command=gate.command))
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask(producer, 1))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        set_clock(by)
        gate.open()
        await asked
        await ask(producer, 2)
    assert pool.jobs() == 0


@pytest.mark.parametrize("by", ["+5s", "+1d", "-5s"])
async def test_a_worker_that_is_killed_when_the_clock_is_set_loses_nothing(
    clocked: tuple[Pool, SetClock], by: str, tmp_path: Path
) -> None:
    """Another worker claims the killed worker's jobs when a lease has passed by the server's clock."""
    (pool, set_clock), gate = clocked, Gate(tmp_path / "gate")
    for _ in range(2):
        pool.start(*OPTIONS, command=gate.command, wait=False)
    for worker in pool.workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask(producer, 3))

        async def both_hold() -> bool:
            return len({job["consumer"] for job in pending(pool)}) == 2

        await until_async(both_hold, "both workers hold prompts")
        set_clock(by)
        pool.workers[0].end()
        gate.open()
        await asked
    # After a day all heartbeats have expired, so clients submit prompts again before a worker claims the jobs of the
    # killed worker: these prompts are computed twice.
    await until_async(lambda: _is_empty(pool), "what was asked twice is gone too")


async def _is_empty(pool: Pool) -> bool:
    return pool.jobs() == 0
