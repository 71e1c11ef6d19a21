"""A process with many workers, which runs until its standard input ends: `python -m benchmarks.fleet.workers`.

Each worker is a real `Worker` with a synthetic backend: one task of the event loop, and the thread of its backend.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvloop

from benchmarks.harness.line_protocol import serve
from lmpool.broker.server import Server
from lmpool.workers.backends.synthetic import SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker

_WAVE = 16  # Max workers that start concurrently.
_SWITCH_INTERVAL_S = 0.0005  # Seconds between thread switches, as in the process of a single worker.


@dataclass(slots=True)
class Workers:
    """The workers of this process."""

    running: dict[asyncio.Task[None], Worker] = field(default_factory=dict)

    async def start(self, number: int, redis: str, backend: dict[str, Any], settings: dict[str, Any]) -> float:
        """Start workers, a few at a time; return the seconds until all are ready."""
        began, free = time.monotonic(), asyncio.Semaphore(_WAVE)

        async def start_one() -> None:
            async with free:
                worker = Worker(Server(redis), SyntheticSettings(**backend), WorkerSettings(**settings))
                ready = asyncio.Event()
                task = asyncio.create_task(worker.run(partial(_set, ready)))
                self.running[task] = worker
                waiting = asyncio.create_task(ready.wait())
                await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    waiting.cancel()
                    await task

        await asyncio.gather(*[start_one() for _ in range(number)])
        return time.monotonic() - began

    async def stop(self) -> float:
        """Drain all workers; return the seconds until the last worker has ended."""
        began = time.monotonic()
        for worker in self.running.values():
            worker.stop()
        await asyncio.gather(*self.running)
        return time.monotonic() - began


def _set(ready: asyncio.Event, _: object) -> None:
    ready.set()


async def main() -> None:
    """Respond to requests on stdin until stdin ends."""
    logging.basicConfig(level=logging.WARNING)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    workers = Workers()
    await serve({"start": workers.start, "stop": workers.stop})


if __name__ == "__main__":
    uvloop.run(main())
