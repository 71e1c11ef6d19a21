"""Adapters that end or hang workers: each is tried so often and no more, and the others serve on."""

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
from lmpool.protocol.adapter import Offer
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.shared.broker.adapters.adapter_changes import V, check, no_offers, write
from tests.shared.broker.adapters.test_adapters import serving
from tests.support.pool import DEADLINE_S, Pool, Prepared, WorkerProcess, until, until_async

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
    """A worker that some adapters kill."""
    return pool._launch([sys.executable, "-c", DEADLY, pool.url, pool.prefix], None, wait=wait)


async def test_an_offer_that_kills_a_worker_kills_no_other_and_is_refused(pool: Pool, tmp_path: Path) -> None:
    workers = [start_mortal(pool, wait=False) for _ in range(3)]
    for worker in workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer("syn") as producer:
        with pytest.raises(AdapterRefused, match=r"the worker \S+ ended or fell silent while it loaded it"):
            await producer.add_adapter("poet", write(tmp_path, "a", "deadly"))
        assert sorted(worker.is_running for worker in workers) == [False, True, True]
        assert await producer.adapters() == {}
        await check(producer, "", "")
        await check(producer, "poet", await producer.add_adapter("poet", write(tmp_path, "a", "mended")))
    await until_async(no_offers(pool), "the offer is taken back")
    assert pool.names("{syn}:adapter_trials:*") != [], "it is known for a while"


async def test_an_offer_that_killed_a_worker_does_not_kill_it_again_when_it_is_restarted(
    pool: Pool, tmp_path: Path
) -> None:
    first = start_mortal(pool)
    # By nobody who would take it back.
    offer = Offer(str(write(tmp_path, "a", "deadly")), "nonce")
    pool.redis.hset(pool.keys.model("syn").offers, "poet", offer.pack())
    assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
    again = await asyncio.to_thread(start_mortal, pool)
    await asyncio.to_thread(again.until_says, "ended or fell silent while it loaded it, so no other does")
    async with pool.producer("syn") as producer:
        await check(producer, "", "")
    assert again.is_running


async def test_an_adapter_in_service_that_kills_workers_as_they_start_is_tried_so_often_and_no_more(
    pool: Pool, tmp_path: Path
) -> None:
    keeps = start_mortal(pool)  # So that the registry stays.
    folder, adapters = write(tmp_path, "a", "1"), pool.keys.model("syn").adapters
    async with pool.producer("syn") as producer:
        revision = await producer.add_adapter("poet", folder)
        (folder / "weights").write_text("deadly")
        for _ in range(2):
            victim = start_mortal(pool, wait=False)
            assert await asyncio.to_thread(victim.wait) == -signal.SIGKILL

        (key,) = [name for name in pool.names("{syn}:adapter_trials:*") if revision in name]

        def are_overdue() -> bool:
            now = pool.redis.time()[0]
            return all(now - int(began) / 1000 > 6 for began in pool.redis.hvals(key))

        await asyncio.to_thread(until, are_overdue, "both have been silent for long enough")
        spared = start_mortal(pool, wait=False)
        assert await asyncio.to_thread(spared.wait) == 1
        assert "is in service, and the workers" in spared.text
        assert "loading what is deadly" not in spared.text
        (folder / "weights").write_text("1")
        pool.redis.delete(key)  # As time does.
        healthy = await asyncio.to_thread(start_mortal, pool)
        assert healthy.is_running
        assert keeps.is_running
        assert not [name for name in pool.names("{syn}:adapter_trials:*") if revision in name]
        assert pool.redis.hexists(adapters, "poet")


async def test_an_offer_over_which_a_worker_hangs_is_refused(pool: Pool, tmp_path: Path) -> None:
    may_go_on = threading.Event()

    class Hanging(SyntheticBackend):
        def load_adapter(self, name: str, source: str) -> str:
            may_go_on.wait()
            return super().load_adapter(name, source)

    settings = SyntheticSettings(name="syn", vocab_size=V)
    try:
        async with serving(pool, SyntheticBackend(settings)), pool.producer("syn") as producer:
            hanging = Worker(
                Server(pool.url), Prepared(Hanging(settings)), WorkerSettings(pool.prefix, step_timeout_s=0.3)
            )
            ready = asyncio.Event()
            running = asyncio.create_task(hanging.run(lambda _: ready.set()))
            await asyncio.wait_for(ready.wait(), DEADLINE_S)
            change = asyncio.create_task(producer.add_adapter("poet", write(tmp_path, "a", "1")))
            with pytest.raises(WorkerError, match="the backend hangs"):
                await running
            with pytest.raises(AdapterRefused, match=rf"the worker {hanging.worker_id} ended or fell silent"):
                await change
    finally:
        may_go_on.set()
