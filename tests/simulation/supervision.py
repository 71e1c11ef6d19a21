"""The package's supervisor (`lmpool up`) with simulated processes for its workers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from lmpool.embedded import User
from lmpool.workers.cli import supervisor
from tests.simulation import threads
from tests.simulation.loop import Process
from tests.simulation.workers import MAX_DELIVERIES, MODEL, URL, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.world import World

_RESTART_S = 3.0  # Seconds until an operator starts `lmpool up` again.


class _Child:
    """In place of `subprocess.Popen`."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker, self.pid, self.stdin = worker, worker.number, self
        self._process = worker.process

    def close(self) -> None:
        """Close the standard input; the worker has ended."""

    def poll(self) -> int | None:
        """The exit code, or None."""
        if not self._process.is_alive:
            return -signal.SIGKILL if self.worker.code is None else self.worker.code
        return self.worker.code


class _Supervised(supervisor.SupervisedWorker):
    """A worker of the supervisor whose process is simulated."""

    simulated: SimulatedWorker

    def start(self) -> None:
        """Start a process."""
        self.worker_id, self.start_at = "", time.monotonic()
        self.simulated.begin()
        self.process, self.ready = _Child(self.simulated), self.number  # type: ignore[assignment]


class System:
    """In place of the module `os` of the supervisor: its pipes and signals.

    Attributes:
        workers: the workers by number, which is also the number of their pipe and of their process.
    """

    workers: Sequence[SimulatedWorker] = ()

    def read(self, number: int, _: int) -> bytes:
        """Read the worker's name; BlockingIOError until it serves."""
        if not (name := System.workers[number].name):
            raise BlockingIOError
        return name.encode()

    def close(self, _: int) -> None:
        """Close a pipe."""

    def kill(self, number: int, sent: signal.Signals) -> None:
        """SIGTERM drains the worker; SIGUSR1 makes it claim jobs of crashed workers."""
        worker = System.workers[number]
        if sent == signal.SIGTERM:
            worker.drain()
        elif worker.worker is not None:
            loop = worker.world.loop
            loop.call_soon(worker.worker.claim_now, context=loop.context_of(worker.process))

    def killpg(self, number: int, _: int) -> None:
        """SIGKILL."""
        worker = System.workers[number]
        worker.world.loop.kill(worker.process)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _Server:
    """In place of the embedded server, which the simulation restarts itself."""

    running, url = True, URL


class Supervision:
    """Runs `lmpool up`, and starts it again when it has ended.

    Attributes:
        process: the present process of the supervisor.
    """

    def __init__(self, world: World) -> None:
        self._world, self.process = world, Process("")
        self._draw = Random(f"supervision {world.plan.seed}")
        self.is_wanted, self._starts = True, 0
        self._supervisor: supervisor.Supervisor | None = None

    async def supervise(self) -> None:
        """Run until it is not wanted any more."""
        System.workers = self._world.workers
        while self.is_wanted:
            self._starts += 1
            self.process = process = Process(f"up.{self._starts}")
            ended = asyncio.Event()
            process.on_kill.append(ended.set)
            context = self._world.loop.context_of(process)
            self._world.loop.call_soon(threads.Thread(target=self._main, args=(ended,)).start, context=context)
            await ended.wait()
            self._world.loop.kill(process)
            for worker in self._world.workers:
                self._world.loop.kill(worker.process)  # Workers end with their supervisor.
            self._world.log(f"{process.name} has ended")
            if self.is_wanted:
                await asyncio.sleep(_RESTART_S * self._draw.random())

    def _main(self, ended: asyncio.Event) -> None:
        workers = []
        for simulated in self._world.workers:
            workers.append(_Supervised(simulated.number, [], {}))
            workers[-1].simulated = simulated
        server: Any = _Server()
        self._supervisor = supervisor.Supervisor(server, User(1, MODEL, "lmpool", ""), list(workers), MAX_DELIVERIES)
        self._supervisor.run()
        ended.set()

    def drain(self) -> None:
        """SIGTERM of `lmpool up`."""
        self.is_wanted = False
        if self._supervisor is not None:
            self._supervisor._stop(0)
