"""Notices when the backend hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lmpool.errors import WorkerError
from lmpool.tasks import end_tasks
from lmpool.workers.stepper import Call, Stepper

_LOOKS = 8
_MOST_BETWEEN_S = 1.0


class Watchdog:
    """Watches the backend's thread while the context is open.

    Everything that the thread has the backend do is watched: steps, taking jobs, loading and dropping adapters. Opening
    the backend is not: a large model may load for long.

    Args:
        stepper: runs the backend.
        limit_s: seconds that one call of the backend may take.
        on_hang: called once, with the error that says what hangs.
    """

    def __init__(self, stepper: Stepper, limit_s: float, on_hang: Callable[[WorkerError], None]) -> None:
        self._stepper = stepper
        self._limit_s = limit_s
        self._on_hang = on_hang

    async def __aenter__(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="watchdog")

    async def __aexit__(self, *error: object) -> None:
        await end_tasks([self._watching])

    async def _watch(self) -> None:
        pause = min(_MOST_BETWEEN_S, self._limit_s / _LOOKS)
        call: Call | None = None
        spent, before = 0.0, time.monotonic()
        while call is None or spent < self._limit_s:
            await asyncio.sleep(pause)
            now = time.monotonic()
            seen, call = call, self._stepper.call
            # A process that was stopped was not there to compute: that is no time that the call took.
            spent = spent + min(now - before, 2 * pause) if call is seen else 0.0
            before = now
        self._on_hang(
            WorkerError(
                f"the backend hangs: it has been in one {call.what} for {self._limit_s:g} s "
                "(step_timeout_s; give the worker a larger --step-timeout-s if its steps may take so long)"
            )
        )
