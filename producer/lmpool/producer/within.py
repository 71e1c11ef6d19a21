"""A deadline that several steps of a request share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lmpool.errors import DeadlineExceeded


class Within:
    """A deadline.

    Args:
        seconds: from now on.

    Attributes:
        seconds: as above.
        end: the event loop's time when they have passed.
    """

    __slots__ = ("_time", "end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._time = asyncio.get_running_loop().time
        self.end = self._time() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline.

        Raises:
            DeadlineExceeded: it has passed.
        """
        left = self.end - self._time()
        if left <= 0:
            raise self._late()
        return left

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within {self.seconds:g} s: allow more time (timeout=)")

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End what is awaited inside when the deadline passes.

        Raises:
            DeadlineExceeded: it has passed already.
            TimeoutError: it passed inside.
        """
        if self._time() >= self.end:
            raise self._late()
        timer = asyncio.timeout_at(self.end)
        try:
            async with timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise  # A connection that timed out by itself.
            raise TimeoutError(f"no answer within {self.seconds:g} s") from error
