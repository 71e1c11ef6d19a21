"""Adapters that come and go while workers serve: all workers follow, and nothing that was replaced is served again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from lmpool.adapters import MAX_ADAPTERS
from lmpool.errors import AdapterRefused, DeadlineExceeded, NoWorker, SettingsError, UnknownAdapter
from lmpool.producer import Producer, SyncProducer
from lmpool.synthetic import synthetic_row
from tests.pool import Pool, WorkerProcess, until_async

V = 64
QUICK = ("--vocab-size", V, "--lease-s", 2, "--max-batch", 8)


def write(folder: Path, name: str, content: str) -> Path:
    """An adapter of the synthetic backend."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "weights").write_text(content)
    return folder / name


def expected(ids: list[int], revision: str = "") -> np.ndarray:
    return synthetic_row(ids, vocab_size=V, adapter_revision=revision)


async def check(producer: Producer, adapter: str, revision: str, *prompts: list[int]) -> None:
    for ids in prompts or ([1], [2, 3]):
        assert np.array_equal(await producer.logprobs(ids, adapter=adapter), expected(ids, revision)), ids


@asynccontextmanager
async def two_clients(pool: Pool) -> AsyncIterator[tuple[Producer, Producer]]:
    async with pool.producer("syn") as one, pool.producer("syn") as other:
        yield one, other


async def test_an_adapter_that_is_added_reaches_every_worker(pool: Pool, tmp_path: Path) -> None:
    workers = [pool.start(*QUICK) for _ in range(2)]
    async with two_clients(pool) as (one, other):
        assert await one.adapters() == {}
        with pytest.raises(UnknownAdapter, match="no adapter 'poet'; it has: none"):
            await other.logprobs([1], adapter="poet")
        revision = await one.add_adapter("poet", write(tmp_path, "a", "1"))
        assert await other.adapters() == {"poet": revision}
        await check(other, "poet", revision)
        await check(one, "", "")
        # Each of them by itself.
        workers[0].signal(signal.SIGTERM)
        assert workers[0].wait() == 0
        await check(one, "poet", revision, [4], [5])
    assert all("serving the adapter 'poet'" in worker.text for worker in workers)
