"""`Producer(priority="bulk")`: interactive clients go first, and the bulk client still gets a share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.errors import SettingsError
from lmpool.producer import Producer, SyncProducer
from lmpool.protocol.job import decode_ids
from lmpool.protocol.keys import BULK_TIME
from lmpool.synthetic import synthetic_row
from lmpool.workers.execution.contract import BackendJob
from tests.support.gate import GatedBackend, OneByOne, gated_worker
from tests.support.pool import Pool, V, count_waiting, run_lmpool, until_async

BATCH = 2


@pytest.mark.parametrize("make", [Producer, SyncProducer])
@pytest.mark.parametrize("value", ["", "low", "Bulk", None, 1, b"bulk", ["bulk"]])
def test_unknown_priorities_are_refused(make: Any, value: Any) -> None:
    with pytest.raises(SettingsError, match=r"priority: .* is not one of interactive, bulk"):
        make(priority=value)


async def test_interactive_clients_go_before_a_bulk_client(pool: Pool) -> None:
    backend = GatedBackend(OneByOne(), BATCH)
    async with gated_worker(pool, backend), pool.producer() as producer, pool.producer(priority="bulk") as bulk:
        rows = [asyncio.ensure_future(bulk.logprobs([number])) for number in range(100)]
        await until_async(lambda: _are_queued(pool, 100), "what the bulk client asks is queued")
        asked = [asyncio.ensure_future(producer.logprobs([number])) for number in range(200, 205)]
        await until_async(lambda: _are_queued(pool, 105), "what the other asks is, too")
        await until_async(lambda: _is_behind(pool, 50), "the bulk client gives way")
        backend.gate.open()
        for number, row in zip([*range(100), *range(200, 205)], await asyncio.gather(*rows, *asked), strict=True):
            assert np.array_equal(row, synthetic_row([number], vocab_size=V))
    computed = [int(decode_ids(ids)[0]) for ids in backend.computed]
    # Only jobs that the worker had already taken precede the five interactive prompts.
    assert max(computed.index(number) for number in range(200, 205)) < 30


async def test_a_bulk_client_gets_its_share_under_load(pool: Pool) -> None:
    pool.start("--max-batch", BATCH)
    async with pool.producer() as producer, pool.producer(priority="bulk") as bulk:
        numbers, is_done = count(1), False

        async def ask() -> None:
            while not is_done:
                await producer.logprobs([next(numbers) // V, next(numbers) % V])

        others = [asyncio.ensure_future(ask()) for _ in range(20 * BATCH)]
        await until_async(lambda: _are_queued(pool, 5 * BATCH), "others fill the streams")
        await asyncio.gather(*[bulk.logprobs([number]) for number in range(20)])
        assert all(not task.done() for task in others)
        is_done = True
        await asyncio.gather(*others)


async def test_a_prompt_of_both_kinds_of_clients_is_computed_once_and_is_interactive(pool: Pool) -> None:
    backend = GatedBackend(OneByOne(), BATCH)
    async with gated_worker(pool, backend), pool.producer() as producer, pool.producer(priority="bulk") as bulk:
        rows = [asyncio.ensure_future(bulk.logprobs([number])) for number in range(100)]
        await until_async(lambda: _are_queued(pool, 100), "what the bulk client asks is queued")
        asked = [asyncio.ensure_future(producer.logprobs([number])) for number in range(95, 101)]
        await until_async(lambda: _are_queued(pool, 101), "what the other asks is, too")
        await until_async(lambda: _is_behind(pool, 50), "the bulk client gives way")
        backend.gate.open()
        await asyncio.gather(*rows, *asked)
        assert producer.stats().joined == 5
    computed = [int(decode_ids(ids)[0]) for ids in backend.computed]
    assert sorted(computed) == list(range(101))
    assert max(computed.index(number) for number in range(95, 101)) < 30


class Noting(GatedBackend):
    """A backend that records the first token of each job, and whether the job has bulk priority."""

    def __init__(self) -> None:
        super().__init__(OneByOne(), BATCH)
        self.gate.open()
        self.is_bulk: dict[int, bool] = {}

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        """See `Backend.submit`."""
        jobs = list(jobs)
        self.is_bulk |= {int(decode_ids(job.ids)[0]): job.bulk for job in jobs}
        super().submit(jobs)


async def test_bulk_jobs_claimed_from_a_dead_worker_still_yield(
    pool: Pool,
) -> None:
    first = pool.start("--step-ms", 600_000, "--lease-s", 1, "--max-batch", 10)
    async with pool.producer() as producer, pool.producer(priority="bulk") as bulk:
        asked = [asyncio.ensure_future(producer.logprobs([1]))]
        await until_async(lambda: _are_held(pool, 1), "the worker holds it")
        asked += [asyncio.ensure_future(bulk.logprobs([number])) for number in range(2, 7)]
        await until_async(lambda: _are_held(pool, 6), "the worker holds all")
        asked.append(asyncio.ensure_future(producer.logprobs([6])))
        await until_async(lambda: _is_joined(pool), "the other client joins one of the bulk client's")
        first.end()
        backend = Noting()
        async with gated_worker(pool, backend, lease_s=1):
            await asyncio.gather(*asked)
    assert backend.is_bulk == {1: False, 2: True, 3: True, 4: True, 5: True, 6: False}


async def _is_joined(pool: Pool) -> bool:
    return any(count_waiting(pool.redis, key) == 2 for key in pool.redis.scan_iter(match=f"{pool.prefix}:*:waiting:*"))


async def _are_held(pool: Pool, number: int) -> bool:
    return pool.held() == number


def test_the_command_line_can_yield_too(pool: Pool, tmp_path: Path) -> None:
    pool.start()
    where = ("--redis", pool.url, "--prefix", pool.prefix)
    ran = run_lmpool("bench", "--bulk", "--prompts", "50", *where)
    assert ran.returncode == 0, ran.stderr


async def test_the_reply_key_contains_the_priority(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer, pool.producer(priority="bulk") as bulk:
        await asyncio.gather(producer.logprobs([1]), bulk.logprobs([2]))
        replies = pool.names("*:reply:*")
        assert len(replies) == 2
        assert sum(":reply:bulk:" in name for name in replies) == 1


async def _are_queued(pool: Pool, number: int) -> bool:
    return pool.jobs() >= number


async def _is_behind(pool: Pool, number: int) -> bool:
    return int(pool.redis.zcount(pool.keys.model("syn").backlog, BULK_TIME, "+inf")) >= number
