"""Background work of one session: tasks that end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from lmpool.tasks import end_tasks


class Tasks:
    """Keeps the tasks of one event loop.

    Attributes:
        loop: the event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in the background; the reference that is kept lets it run to its end."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await end_tasks(self._tasks)
