"""A gate: it blocks a backend's steps while it is shut, so that a test can inspect a state that does not change.

In a test's own process, use `GatedBackend` and `gated_worker`; in another process, use the command

    python -m tests.support.gate FILE worker MODEL --backend synthetic …

which runs `lmpool` with a gate before each step of the synthetic backend: `pool.start(..., command=gate.command)`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from lmpool.broker.server import Server
from lmpool.cli import main
from lmpool.protocol.row import RowBlock
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import BackendJob, Finished
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, Prepared, V, until_async


class Gate:
    """A gate, which is shut at the beginning.

    Args:
        file: file that exists while the gate is open; each file FILE.NUMBER lets one step pass a shut gate.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._steps = 0

    def open(self) -> None:
        """Let steps pass."""
        self._file.touch()

    def shut(self) -> None:
        """Block the steps that begin from now on."""
        self._file.unlink(missing_ok=True)
        for step in self._left():
            step.unlink(missing_ok=True)

    def let(self, steps: int) -> None:
        """Let this many steps pass the shut gate."""
        for _ in range(steps):
            self._steps += 1
            self._file.with_name(f"{self._file.name}.{self._steps}").touch()

    def is_used_up(self) -> bool:
        """Whether all steps that `let` allows have passed."""
        return not self._left()

    def wait(self) -> None:
        """Wait until a step may pass."""
        while not self._file.exists():
            for step in self._left():
                with suppress(FileNotFoundError):
                    step.unlink()
                    return
            time.sleep(0.005)

    def _left(self) -> list[Path]:
        return list(self._file.parent.glob(f"{self._file.name}.*"))

    def command(self) -> list[str]:
        """The command that replaces `lmpool` and whose steps wait at this gate."""
        return [sys.executable, "-m", "tests.support.gate", str(self._file)]


class OneByOne(Gate):
    """A gate in this process that lets one step pass at a time."""

    def __init__(self) -> None:
        self._let = threading.Semaphore(0)

    def let(self, steps: int) -> None:
        """Let this many steps pass."""
        self._let.release(steps)

    def open(self) -> None:
        """Let all steps pass."""
        self._let.release(10_000)

    def wait(self) -> None:
        """Wait until a step may pass."""
        self._let.acquire()


class GatedBackend(SyntheticBackend):
    """A backend whose steps wait at a gate.

    Args:
        gate: gate at which each step waits before it computes anything.
        batch: max prompts in one step.
        settings: more settings of the synthetic backend.

    Attributes:
        gate: gate at which each step waits.
        is_stepping: event that is set when a step reaches the gate.
        computed: the encoded ids of all computed prompts, in order.
    """

    def __init__(self, gate: Gate, batch: int = 8, **settings: Any) -> None:
        super().__init__(SyntheticSettings("syn", max_batch=batch, **{"vocab_size": V, **settings}))
        self.gate = gate
        self.is_stepping = threading.Event()
        self.computed: list[bytes] = []

    def step(self) -> Finished:
        """See `Backend.step`."""
        self.is_stepping.set()
        self.gate.wait()
        return super().step()

    def _draw(self, jobs: list[BackendJob]) -> RowBlock:
        self.computed += [job.ids for job in jobs]
        return super()._draw(jobs)


async def until_full(pool: Pool, batch: int) -> None:
    """Wait until a worker with a shut gate holds two steps' prompts: of the step at the gate, and of the next step.

    The worker takes no more prompts until a step has passed. After a lost reply, the worker may hold more prompts.

    Args:
        pool: pool with this worker only.
        batch: max prompts in one step.
    """

    async def is_full() -> bool:
        return pool.held() >= 2 * batch

    await until_async(is_full, "the worker holds all that it may")


@asynccontextmanager
async def gated_worker(pool: Pool, backend: GatedBackend, lease_s: float = 2.0) -> AsyncIterator[None]:
    """Run a worker in this process; when the context ends, the gate of the worker's backend opens."""
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(pool.prefix, lease_s=lease_s))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    try:
        await asyncio.wait_for(ready.wait(), DEADLINE_S)
        yield
    finally:
        backend.gate.open()
        worker.stop()
        await asyncio.wait_for(running, DEADLINE_S)


def _gate_all_steps(gate: Gate) -> None:
    step = SyntheticBackend.step

    def gated(backend: SyntheticBackend) -> Finished:
        gate.wait()
        return step(backend)

    SyntheticBackend.step = gated  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    _gate_all_steps(Gate(Path(sys.argv.pop(1))))
    main()
