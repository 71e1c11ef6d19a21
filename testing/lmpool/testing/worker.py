"""One worker of an in-memory pool."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from lmpool.protocol.model_info import ModelCard
from lmpool.tasks import end_tasks
from lmpool.testing.gate import Gate
from lmpool.workers.worker import Worker


class MemoryWorker:
    """A worker that runs in the pool's thread. What is called here from another thread returns when it is done.

    Args:
        gate: what the steps of its backend pass through.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def start(self, worker: Worker) -> None:
        """Start in the running event loop; returns when the worker takes prompts.

        Raises:
            As `Worker.run`.
        """
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[ModelCard] = self._loop.create_future()
        self._worker = worker
        self._task = self._loop.create_task(worker.run(ready.set_result), name=f"worker {worker.worker_id}")
        both: list[asyncio.Future[Any]] = [ready, self._task]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.end()
            raise
        if self._task.done():
            self._task.result()
        self._card = ready.result()

    @property
    def card(self) -> ModelCard:
        """What it serves."""
        return self._card

    @property
    def is_running(self) -> bool:
        """Whether it serves, or still finishes what it holds."""
        return not self._task.done()

    def stall(self) -> None:
        """Let no step end any more, as when a model hangs: prompts are taken and held, and not answered."""
        self._gate.shut()

    def resume(self) -> None:
        """Go on after `stall`."""
        self._gate.open()

    def stop(self) -> None:
        """End it as SIGTERM ends a worker: it finishes what it holds, after a stall too, and deregisters.

        Raises:
            LMPoolError: the worker had failed.
        """
        self._gate.open()
        self._wait_for(self._drain())

    def kill(self) -> None:
        """End it as SIGKILL ends a worker: what it holds is not answered, and taken over by others after a lease.

        Raises:
            LMPoolError: the worker had failed.
        """
        self._wait_for(self.end())

    async def end(self) -> None:
        """As `kill`, from the pool's event loop."""
        had_ended = self._task.done()
        self._gate.give_up()
        await end_tasks([self._task])
        if had_ended and not self._task.cancelled():
            self._task.result()

    async def _drain(self) -> None:
        self._worker.stop()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
