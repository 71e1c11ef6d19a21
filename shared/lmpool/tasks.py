"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

_log = logging.getLogger("lmpool")

_AGAIN_S = 0.1
_MOST_AGAIN_S = 1.0
_TELL_S = 10.0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended; what they raise is dropped.

    A cancellation is repeated until it takes: `asyncio.wait_for` of Python 3.11, which redis-py uses, loses
    one that comes together with the result. Who waits here may be cancelled too, even more than once: that is raised
    when all have ended, for they use what the caller is about to close. Those that take long are told in the log.

    Raises:
        CancelledError: who waits was cancelled.
    """
    pending = {task for task in tasks if not task.done()}
    interrupted: asyncio.CancelledError | None = None
    pause, loop = _AGAIN_S, asyncio.get_running_loop()
    tell_at = loop.time() + _TELL_S
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=pause)
        except asyncio.CancelledError as error:
            interrupted = error
        for task in [task for task in pending if task.done()]:
            pending.remove(task)
            if not task.cancelled():
                task.exception()  # Seen, so that it is not reported as never retrieved.
        pause = min(2 * pause, _MOST_AGAIN_S)
        if pending and loop.time() >= tell_at:
            _log.warning("still waits for what was cancelled to end: %s", ", ".join(map(repr, pending)))
            tell_at += _TELL_S
    if interrupted is not None:
        raise interrupted
