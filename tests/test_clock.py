"""The server's clock is set while requests run, as after a pause of its machine: they end in their rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.producer import Producer
from lmpool.synthetic import synthetic_row
from tests.pool import Pool, V, is_held, until, until_async

SetClock = Callable[[str], None]
OPTIONS = ("--lease-s", 2, "--step-ms", 40, "--max-batch", 8)


@pytest.fixture
def clock(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets the clock of the servers that the test starts: "+1d", "-5s". Their monotonic clock stays as it is."""
    library, offset = files("libfaketime") / "vendor/libfaketime/src/libfaketime.so.1", short_dir / "clock"
    offset.write_text("+0")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")

    def set_clock(by: str) -> None:
        written = short_dir / "written"
        written.write_text(by)
        written.rename(offset)

    return set_clock


@pytest.fixture
def clocked(
    clock: SetClock, short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Pool, SetClock]]:
    """A pool on a server whose clock can be set."""
    with EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s") as server:
        monkeypatch.delenv("LD_PRELOAD")  # The clock of everybody else stays.
        pool = Pool(server.url, "clock", tmp_path)

        def set_and_seen(by: str) -> None:
            before = ahead(pool)
            clock(by)
            until(lambda: abs(ahead(pool) - before) > 1, "the server sees its new clock")

        yield pool, set_and_seen
        pool.end()


def ahead(pool: Pool) -> float:
    """Seconds by which the server's clock is ahead of ours."""
    seconds, micros = pool.redis.time()
    return float(seconds + micros / 1e6 - time.time())


async def ask(producer: Producer, start: int) -> None:
    """Ask for 100 prompts and check every value."""
    prompts = [[start, number] for number in range(100)]
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, row in zip(prompts, rows, strict=True):
        assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))


@pytest.mark.parametrize("by", ["+5s", "+1d", "-5s", "-1d"])
async def test_requests_survive_a_clock_that_is_set(clocked: tuple[Pool, SetClock], by: str) -> None:
    pool, set_clock = clocked
    await asyncio.to_thread(pool.start, *OPTIONS)
    async with pool.producer(timeout=60) as producer:
        asked = asyncio.create_task(ask(producer, 1))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        set_clock(by)
        await asked
        await ask(producer, 2)
    assert pool.jobs() == 0


@pytest.mark.parametrize("by", ["+5s", "+1d", "-5s"])
async def test_a_worker_that_is_killed_when_the_clock_is_set_loses_nothing(
    clocked: tuple[Pool, SetClock], by: str
) -> None:
    """What it held is taken over a lease later, and when the clock is set back not before it has caught up."""
    pool, set_clock = clocked
    for _ in range(2):
        pool.start(*OPTIONS, wait=False)
    for worker in pool.workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer(timeout=60) as producer:
        asked = asyncio.create_task(ask(producer, 3))
        await until_async(lambda: is_held(pool), "a worker holds prompts")
        set_clock(by)
        pool.workers[0].end()
        await asked
    assert pool.jobs() == 0
