"""An adapter kills or freezes the worker that loads it: no second worker loads this adapter, and the pool serves."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path

import pytest

from lmpool.broker.server import Server
from lmpool.errors import (
    AdapterRefused,
    WorkerError,
)
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.shared.broker.adapters.adapter_changes import V, check, write
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.pool import DEADLINE_S, Pool, Prepared, WorkerProcess

DEADLY = """
import os, signal, sys
from pathlib import Path
from lmpool.broker.server import Server
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.cli.serve import serve
from lmpool.workers.settings import WorkerSettings

class Engine(SyntheticBackend):
    def load_adapter(self, name, source):
        if "deadly" in (Path(source) / "weights").read_text():
            print("loading what is deadly", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load_adapter(name, source)

class Settings(SyntheticSettings):
    def open(self):
        return Engine(self)

url, prefix = sys.argv[1:]
serve(Server(url), Settings(name="syn", vocab_size=64), WorkerSettings(prefix, lease_s=3))
"""


def start_mortal(pool: Pool, *, wait: bool = True) -> WorkerProcess:
    """Start a worker that adapters with the text "deadly" kill."""
    return pool._launch([sys.executable, "-c", DEADLY, pool.url, pool.prefix], None, wait=wait)


async def test_an_adapter_that_kills_the_worker_that_checks_it_kills_no_other(pool: Pool, tmp_path: Path) -> None:
    workers = [start_mortal(pool, wait=False) for _ in range(3)]
    for worker in workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer("syn") as producer:
        for _ in range(2):  # At the second try no worker loads the adapter.
            with pytest.raises(AdapterRefused, match=r"the worker \S+ terminated while it loaded this adapter"):
                await producer.add_adapter("poet", write(tmp_path, "a", "deadly"))
            assert sorted(worker.is_running for worker in workers) == [False, True, True]
        assert await producer.adapters() == {}
        await check(producer, "", "")
        await check(producer, "poet", await producer.add_adapter("poet", write(tmp_path, "a", "mended")))
    (note,) = pool.names("{syn}:adapter_load:*")
    assert 0 < pool.redis.pttl(note) <= 600_000


async def test_an_adapter_in_service_that_kills_a_worker_kills_no_other(pool: Pool, tmp_path: Path) -> None:
    folder = write(tmp_path, "a", "1")
    first = await asyncio.to_thread(start_mortal, pool)
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", folder)
        (folder / "weights").write_text("deadly")
        await check(producer, "poet", revision)  # This worker still has the harmless weights.
        workers = [await asyncio.to_thread(start_mortal, pool) for _ in range(2)]
        first.signal(signal.SIGKILL)
        for token in range(3):
            with pytest.raises(AdapterRefused, match=r"the worker \S+ terminated while it loaded this adapter"):
                await producer.logprobs([9, token], adapter="poet")
        await check(producer, "", "", [7], [8])
        (folder / "weights").write_text("1")
        assert await producer.add_adapter("poet", folder) == revision
        await check(producer, "poet", revision, [9, 3])
    assert sorted(worker.is_running for worker in workers) == [False, True]
    assert sum(worker.text.count("loading what is deadly") for worker in workers) == 1


async def test_a_worker_that_ends_in_good_order_while_it_loads_leaves_no_note(pool: Pool, tmp_path: Path) -> None:
    may_go_on, is_loading = threading.Event(), threading.Event()

    class Slow(SyntheticBackend):
        def load_adapter(self, name: str, source: str) -> str:
            is_loading.set()
            may_go_on.wait()
            return super().load_adapter(name, source)

    backend = Slow(SyntheticSettings(name="syn", vocab_size=V))
    async with serving(pool, backend) as worker, pool.producer("syn") as producer:
        change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "a", "1")))
        assert await asyncio.to_thread(is_loading.wait, DEADLINE_S)
        assert len(pool.names("{syn}:adapter_load:*")) == 1
        worker.stop()
        may_go_on.set()
        await change
    assert pool.names("{syn}:adapter_load:*") == []


async def test_an_adapter_that_freezes_a_worker_is_refused(pool: Pool, tmp_path: Path) -> None:
    may_go_on = threading.Event()

    class Hanging(SyntheticBackend):
        def load_adapter(self, name: str, source: str) -> str:
            may_go_on.wait()
            return super().load_adapter(name, source)

    settings = SyntheticSettings(name="syn", vocab_size=V)
    worker_settings = WorkerSettings(pool.prefix, step_timeout_s=0.3, lease_s=3)
    try:
        hanging = Worker(Server(pool.url), Prepared(Hanging(settings)), worker_settings)
        ready = asyncio.Event()
        running = asyncio.create_task(hanging.run(lambda _: ready.set()))
        await asyncio.wait_for(ready.wait(), DEADLINE_S)
        async with pool.producer("syn", when_absent="wait") as producer:
            change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "a", "1")))
            with pytest.raises(WorkerError, match="the backend hangs"):
                await running
            async with serving(pool, SyntheticBackend(settings)):
                with pytest.raises(AdapterRefused, match=rf"the worker {hanging.worker_id} terminated while it loaded"):
                    await change
                await check(producer, "", "")
    finally:
        may_go_on.set()
