"""Clients on other hosts read rows from row servers of workers, and through Redis if no row server can be reached."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.producer import Producer
from lmpool.rows.shared_memory import Reference, is_reference, unpack_reference
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, WorkerProcess, until_async

V = 2048
SLOT = 12_288
"""Bytes of a slot for one row of V float32 values, rounded up to whole pages."""
PROMPTS = [[i, i + 1, 7] for i in range(40)]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of segments of the workers, which stand for another host."""
    with tempfile.TemporaryDirectory(dir=os.environ["LMPOOL_SHM_DIR"]) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the producers of this process have another folder than the workers, like producers on another host."""
    monkeypatch.setenv("LMPOOL_SHM_DIR", tempfile.mkdtemp(dir=os.environ["LMPOOL_SHM_DIR"]))


def start(pool: Pool, place: Path, *arguments: str | int, size: int = 1000 * SLOT, **settings: Any) -> WorkerProcess:
    """Start a worker, and wait until it has shared memory and a row server."""
    options = ("--vocab-size", V, "--lease-s", 2, "--shm-bytes", size, *arguments)
    worker = pool.start(*options, environment={"LMPOOL_SHM_DIR": str(place)}, **settings)
    worker.until_says("for clients on this machine")
    if "--no-direct" not in arguments:
        worker.until_says("clients on other hosts read rows at")
    return worker


async def ask(producer: Producer, prompts: list[list[int]]) -> None:
    """Request rows and compare every value."""
    for prompt, row in zip(prompts, await asyncio.gather(*map(producer.logprobs, prompts)), strict=True):
        assert row.tobytes() == synthetic_row(prompt, vocab_size=V).tobytes()


def direct(producer: Producer) -> int:
    """The number of rows that a producer has read from row servers."""
    return producer._counters.shared.direct


async def until_direct(producer: Producer) -> None:
    """Request new rows until one comes from a row server."""
    number = iter(range(100_000))

    async def is_direct() -> bool:
        await ask(producer, [[V - 1, next(number) % V, id(producer) % V]])
        return direct(producer) > 0

    await until_async(is_direct, "a row comes from a row server")


def references(pool: Pool) -> list[Reference]:
    """The references to rows in Redis."""
    keys = list(pool.redis.scan_iter(match=f"{pool.prefix}:row:*", count=1000))
    values = [pool.redis.get(key) for key in keys]
    found = [unpack_reference(value) for value in values if isinstance(value, bytes) and is_reference(value)]
    return [reference for reference in found if reference is not None]


async def test_new_and_cached_rows_come_from_the_worker_and_redis_has_references(pool: Pool, place: Path) -> None:
    worker = start(pool, place)
    async with pool.producer(cache_bytes=0) as first, pool.producer(cache_bytes=0) as second:
        await until_direct(first)
        before = direct(first)
        await ask(first, PROMPTS)
        assert direct(first) == before + len(PROMPTS)
        await until_direct(second)
        before = direct(second)
        await ask(second, PROMPTS)
        assert direct(second) == before + len(PROMPTS)
        assert second.stats().cache_hits >= len(PROMPTS)
        batch = await second.batch_logprobs(PROMPTS)
        assert batch.tobytes() == np.stack([synthetic_row(prompt, vocab_size=V) for prompt in PROMPTS]).tobytes()
        targets = await second.logprobs(PROMPTS[0], targets=[3, 5])
        assert targets.tobytes() == synthetic_row(PROMPTS[0], vocab_size=V)[[3, 5]].tobytes()
    found = references(pool)
    assert len(found) >= len(PROMPTS)
    assert all(reference.address.decode() in worker.text for reference in found)
