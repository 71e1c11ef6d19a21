"""Whether a worker goes on, and when its parts look again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Duty:
    """What the parts of a worker go by.

    Attributes:
        stopping: set when the worker is to take nothing more and to finish what it holds.
        broken: why the backend is of no use any more, or None.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.broken: BaseException | None = None
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Take nothing more, and finish."""
        self.stopping.set()
        self.look_again()

    def give_up(self, error: BaseException) -> None:
        """The backend is of no use any more; the first reason counts. What is held stays so until it is handed back."""
        self.broken = self.broken or error

    def look_again(self) -> None:
        """Something has changed that somebody may wait for."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something; not any longer once the backend is broken."""
        while self.broken is None and not condition():
            await self.change()

    async def change(self, within_s: float | None = None) -> None:
        """Wait until something changes, or until some seconds have passed."""
        self._changed.clear()
        if within_s is None:
            await self._changed.wait()
            return
        timer = asyncio.get_running_loop().call_later(within_s, self._changed.set)
        await self._changed.wait()
        timer.cancel()
