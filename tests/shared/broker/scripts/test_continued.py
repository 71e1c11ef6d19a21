"""Continuations (prompts that generate tokens) in the queue: rows go first, tokens count, and no client starves."""

from __future__ import annotations

import pytest
import redis.asyncio as redis_async

from lmpool.protocol.keys import CONTINUED, CONTINUED_TIME, PRIORITY_FIELD
from tests.shared.broker.scripts.script_calls import (
    JOBS,
    MODEL,
    A,
    B,
    X,
    cancel,
    entries_of,
    finish,
    in_stream,
    register,
    submit,
    take,
)
from tests.shared.broker.scripts.script_fixtures import nobody_asks_alone, script_redis, script_server  # noqa: F401
from tests.shared.broker.scripts.test_bulk_clients import OF_BULK, TURNS, compute

OF_CONTINUED = OF_BULK + 1
"""Max continuations in the stream for a worker that computes one prompt at a time, held continuations included."""


@pytest.fixture(autouse=True)
async def _one_worker(redis: redis_async.Redis) -> None:
    await register(redis)


async def test_few_continuations_are_before_a_row_even_if_their_client_asks_alone(
    redis: redis_async.Redis,
) -> None:
    assert await submit(redis, *range(20), generated=64) == "Q" * 20
    assert await in_stream(redis) == list(range(OF_CONTINUED))
    assert {fields.get(PRIORITY_FIELD) for _, fields in await entries_of(redis)} == {CONTINUED}
    held = await take(redis)
    assert len(held) == OF_CONTINUED
    assert await submit(redis, 60, reply=B) == "Q"
    assert await in_stream(redis) == [*range(OF_CONTINUED), 60], "behind those that the worker holds"
    assert await redis.zcount(MODEL.backlog, CONTINUED_TIME, "+inf") == 20 - OF_CONTINUED
    await finish(redis, (held[0], 0, b"", False))
    assert await in_stream(redis) == [1, 2, 60], "the streams are full: the next one waits for another end"


async def test_continuations_move_up_as_others_end(redis: redis_async.Redis) -> None:
    await submit(redis, *range(10), generated=64)
    assert await compute(redis) == list(range(10))
    assert not await redis.exists(MODEL.backlog, MODEL.backlog_jobs, MODEL.virtual_time)


async def test_bulk_prompts_do_not_block_continuations_of_others(redis: redis_async.Redis) -> None:
    await submit(redis, *range(10), reply=X, generated=64)
    assert await in_stream(redis) == list(range(OF_BULK))
    assert await submit(redis, 50, 51, generated=64) == "QQ"
    assert await in_stream(redis) == [*range(OF_BULK), 50]
    assert (await compute(redis))[OF_BULK : OF_BULK + 2] == [50, 51]


async def test_clients_move_up_by_the_tokens_that_they_may_generate(redis: redis_async.Redis) -> None:
    await submit(redis, *range(OF_CONTINUED), generated=100)
    await submit(redis, *range(10, 14), generated=100)
    await submit(redis, *range(20, 34), reply=B, generated=20)
    order = (await compute(redis))[OF_CONTINUED:]
    # Five prompts of client B have as many tokens as one prompt of client A, so about five precede each prompt of A.
    assert order.index(10) in (4, 5)
    assert order.index(11) in (10, 11)


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_continuations_get_turns_by_their_tokens_next_to_many_rows(redis: redis_async.Redis) -> None:
    await submit(redis, *range(90))
    await submit(redis, 100, 101, reply=B, generated=3)
    order = await compute(redis)
    turns = [at for at, number in enumerate(order) if number >= 100]
    assert [order[at] for at in turns] == [100, 101]
    assert turns[1] - turns[0] == 3 * TURNS
    assert [number for number in order if number < 100] == list(range(90))


@pytest.mark.usefixtures("nobody_asks_alone")
async def test_turns_of_bulk_prompts_do_not_depend_on_the_tokens_of_continuations(redis: redis_async.Redis) -> None:
    await submit(redis, *range(90))
    await submit(redis, 100, reply=B, generated=400)
    await submit(redis, 200, 201, 202, reply=X)
    order = await compute(redis)
    turns = [order.index(number) for number in (200, 201, 202)]
    assert turns[2] - turns[1] <= TURNS + 1
    assert turns[1] - turns[0] <= TURNS + 1


async def test_cancelled_continuations_give_their_turns_back(redis: redis_async.Redis) -> None:
    await submit(redis, *range(10), generated=100)
    await submit(redis, 60, reply=B, generated=100)
    now = CONTINUED_TIME
    assert await redis.zscore(MODEL.virtual_time, A + b":tokens") == now + 100 * (10 - OF_CONTINUED)
    assert await cancel(redis, *range(5, 10)) == 5
    assert await redis.zscore(MODEL.virtual_time, A + b":tokens") == now + 100 * (5 - OF_CONTINUED)


async def test_a_continuation_that_moves_to_another_lane_yields_as_before(redis: redis_async.Redis) -> None:
    await register(redis, "w2")
    await submit(redis, 1, 2, generated=8, homes=["w2", "w2"])
    lanes = [
        fields for stream in (JOBS, MODEL.lane("w1"), MODEL.lane("w2")) for _, fields in await entries_of(redis, stream)
    ]
    assert [fields.get(PRIORITY_FIELD) for fields in lanes] == [CONTINUED, CONTINUED]
