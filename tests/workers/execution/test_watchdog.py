"""A worker whose backend hangs in a call reports the call, and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lmpool.broker.server import Server
from lmpool.errors import AdapterRefused, DeadlineExceeded, WorkerError
from lmpool.protocol.row import Block
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import BackendJob, Finished
from lmpool.workers.execution.engine_thread import Call, EngineThread
from lmpool.workers.execution.in_flight import EntriesByDigest
from lmpool.workers.execution.watchdogs import watching_calls
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, Prepared, is_held, until_async

V = 64
LIMIT_S = 0.3


class Hanging(SyntheticBackend):
    """A backend that hangs in the given call until the test releases the call."""

    def __init__(self, at: str, *, batch: int = 32) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V, max_batch=batch))
        self._at = at
        self.let_go = threading.Event()

    def _pass(self, here: str) -> None:
        if here == self._at:
            self.let_go.wait()

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        self._pass("submission")
        super().submit(jobs)

    def step(self) -> Finished:
        self._pass("step")
        return super().step()

    def load_adapter(self, name: str, source: str) -> str:
        self._pass("load")
        return super().load_adapter(name, source)

    def close(self) -> None:
        self._pass("close")
        super().close()


class Running:
    """A worker in this process."""

    def __init__(self, pool: Pool, backend: SyntheticBackend, limit_s: float = LIMIT_S) -> None:
        settings = WorkerSettings(pool.prefix, lease_s=600, step_timeout_s=limit_s)
        self.worker = Worker(Server(pool.url), Prepared(backend), settings)
        self._ready = asyncio.Event()
        self.task = asyncio.create_task(self.worker.run(lambda _: self._ready.set()))

    async def ready(self) -> None:
        """Wait until the worker serves."""
        await asyncio.wait_for(self._ready.wait(), DEADLINE_S)

    async def end(self) -> None:
        """Wait until the worker has ended."""
        await asyncio.wait_for(self.task, DEADLINE_S)


@pytest.fixture
def hanging() -> Iterator[dict[str, Hanging]]:
    """Name of the call that hangs -> backend. The fixture ends the threads of all backends after the test."""
    backends = {at: Hanging(at) for at in ("submission", "step", "load", "close")}
    yield backends
    for backend in backends.values():
        backend.let_go.set()


@pytest.mark.parametrize("at", ["submission", "step"])
async def test_a_worker_whose_backend_hangs_over_prompts_ends(pool: Pool, hanging: dict[str, Hanging], at: str) -> None:
    running = Running(pool, hanging[at])
    await running.ready()
    async with pool.producer("syn") as producer:
        asked = asyncio.create_task(producer.logprobs([1]))
        with pytest.raises(
            WorkerError, match=rf"^the backend hangs: it has been in one {at}.* for 0.3 s \(step_timeout_s"
        ):
            await running.end()
        assert running.worker.is_hung
        asked.cancel()


async def test_a_worker_that_drains_is_watched_too(pool: Pool, hanging: dict[str, Hanging]) -> None:
    running = Running(pool, hanging["step"])
    await running.ready()
    async with pool.producer("syn") as producer:
        asked = asyncio.create_task(producer.logprobs([1]))
        await until_async(lambda: is_held(pool), "the worker holds the prompt")
        running.worker.stop()
        with pytest.raises(WorkerError, match="the backend hangs"):
            await running.end()
        asked.cancel()


async def test_a_worker_whose_backend_hangs_over_an_adapter_ends(
    pool: Pool, hanging: dict[str, Hanging], tmp_path: Path
) -> None:
    (tmp_path / "weights").write_text("1")
    running = Running(pool, hanging["load"])
    await running.ready()
    async with pool.producer("syn") as producer:
        adding = asyncio.create_task(producer.add_adapter("poet", str(tmp_path), timeout=4))
        with pytest.raises(WorkerError, match="in one load of the adapter 'poet' for 0.3 s"):
            await running.end()
        with pytest.raises((AdapterRefused, DeadlineExceeded)):
            await adding


async def test_a_backend_that_does_not_close_does_not_keep_its_worker_alive(
    pool: Pool, hanging: dict[str, Hanging]
) -> None:
    running = Running(pool, hanging["close"])
    await running.ready()
    running.worker.stop()
    await running.end()
    assert running.worker.is_hung
    assert not pool.names("worker:*")


async def test_a_slow_backend_does_not_hang(pool: Pool) -> None:
    backend = SyntheticBackend(SyntheticSettings(name="syn", vocab_size=V, step_ms=300, max_batch=1))
    running = Running(pool, backend, limit_s=1.5)
    await running.ready()
    async with pool.producer("syn") as producer:
        # Each step takes less time than the limit of a call; all steps together take much more.
        rows = await asyncio.gather(*(producer.logprobs([token]) for token in range(8)))
        for token, row in enumerate(rows):
            assert np.array_equal(row, synthetic_row([token], vocab_size=V))
    running.worker.stop()
    await running.end()
    assert not running.worker.is_hung


async def test_time_in_which_the_process_was_frozen_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    engine_thread = EngineThread(lambda: Hanging(""), lambda _: None, lambda _: None)
    engine_thread.call = Call("step")
    errors: list[WorkerError] = []
    checks = 0

    async def sleep(seconds: float) -> None:
        nonlocal now, checks
        checks += 1
        # At the third poll, simulate a process that was frozen for an hour.
        now += 3600 if checks == 3 else seconds
        await asyncio.sleep(0)

    monkeypatch.setattr("lmpool.workers.execution.watchdogs.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        "lmpool.workers.execution.watchdogs.asyncio", SimpleNamespace(sleep=sleep, create_task=asyncio.create_task)
    )
    async with watching_calls(engine_thread, 8.0, errors.append):

        async def is_told() -> bool:
            return bool(errors)

        await until_async(is_told, "it hangs")
    # Expect eight polls, one per second: the first poll notices the call, and the frozen hour counts as two seconds.
    assert checks == 8


@pytest.mark.parametrize("vocab_size", [V, 20_000], ids=["small rows", "large rows"])
async def test_results_from_before_the_backend_broke_are_published(pool: Pool, vocab_size: int) -> None:
    class Breaking(SyntheticBackend):
        def step(self) -> Finished:
            if self.stats().steps == 1:
                raise MemoryError("no memory")
            return super().step()

    backend = Breaking(SyntheticSettings(name="syn", vocab_size=vocab_size, max_batch=2))
    running = Running(pool, backend, limit_s=600)
    await running.ready()
    serving = running.worker._serving
    assert serving is not None
    publish = serving.publisher.publish

    async def slow_publish(block: Block, entries: EntriesByDigest, overwrite: Collection[bytes]) -> None:
        async def is_ending() -> bool:
            fetches = any(task.get_name() == "fetch" for task in asyncio.all_tasks())
            return running.worker._lifecycle.broken is not None and not fetches

        await until_async(is_ending, "the worker takes nothing more")
        await publish(block, entries, overwrite)

    serving.publisher.publish = slow_publish  # type: ignore[method-assign]
    async with pool.producer("syn") as producer:
        asked = [asyncio.create_task(producer.logprobs([token])) for token in range(4)]
        with pytest.raises(WorkerError, match="the backend broke: MemoryError: no memory"):
            await running.end()
        for token in range(2):
            row = await asyncio.wait_for(asked[token], DEADLINE_S)
            assert np.array_equal(row, synthetic_row([token], vocab_size=vocab_size))
        assert pool.jobs() == 2
        for request in asked:
            request.cancel()
