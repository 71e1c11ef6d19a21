"""Fairness with partitions: a prompt waits for few prompts of a client that has filled all partitions."""

from __future__ import annotations

import asyncio

import pytest

from tests.partitions.test_requests import workers_in
from tests.support.pool import Pool, until_async

PARTITIONS, BATCH, MANY = 2, 4, 1500


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
async def test_a_prompt_waits_for_few_prompts_of_a_client_with_many(pool: Pool, priority: str) -> None:
    """In each partition, the five batches in the streams and one turn of the other client go first."""
    # The steps take much longer than a busy machine may block this process between two counts.
    for _ in range(PARTITIONS):
        pool.start("--partitions", PARTITIONS, "--lease-s", 20, "--step-ms", 60, "--max-batch", BATCH)
    assert await workers_in(pool, *range(PARTITIONS)) == [1] * PARTITIONS
    done = 0

    async with pool.producer(priority=priority) as greedy, pool.producer() as modest:

        async def request(number: int) -> None:
            nonlocal done
            await greedy.logprobs([number % 500, number // 500, 1])
            done += 1

        many = [asyncio.create_task(request(number)) for number in range(MANY)]

        async def are_many_queued() -> bool:
            return done >= 2 * BATCH

        await until_async(are_many_queued, "the first prompts are computed, and all others wait")
        waited = []
        for number in range(12):
            before = done
            await modest.logprobs([2, number])
            waited.append(done - before)
        assert done < MANY - 5 * BATCH, "the other client has still many prompts"
        # The other client meanwhile got rows from all partitions: ten batches of each are above the bound.
        assert sorted(waited)[-1] <= PARTITIONS * 10 * BATCH, waited
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
